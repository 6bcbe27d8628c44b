"""Saved directions: what is written comes back, and what does not belong is refused."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from klb_probe.errors import KlbError
from klb_probe.probes.directions import FORMAT, DirectionsMetadata, ProbeSet, load_directions, load_probe, save_directions
from klb_probe.probes.linear import LinearFit
from klb_probe.probes.linear_probe import LinearProbe

WIDTH, LAYERS = 12, (0, 2, 3)
SETS = (("lie", "logistic", "answer"), ("lie", "lat", "answer"), ("framing", "logistic", "reply_mean"))
MODEL = SimpleNamespace(name="tiny", fingerprint="f" * 64, n_layers=4, d_model=WIDTH)


def metadata(**changes) -> DirectionsMetadata:
    values = {
        "model": {"name": "tiny"},
        "fingerprint": MODEL.fingerprint,
        "n_layers": 4,
        "d_model": WIDTH,
        "layers": LAYERS,
        "sets": [ProbeSet(question=q, estimator=e, position=p, label="owed", layer=2, n_rows=30) for q, e, p in SETS],
        "seed": 0,
        "command": "klb-probe probe",
        "versions": {},
    }
    return DirectionsMetadata(**(values | changes))


def residuals(position: str, layer: int) -> np.ndarray:
    rng = np.random.default_rng([layer, len(position)])
    return (rng.standard_normal((30, WIDTH)) * 5 + 20).astype(np.float32)


@pytest.fixture
def probes() -> list[LinearProbe]:
    rng = np.random.default_rng(0)
    return [
        LinearProbe.of(
            LinearFit(rng.standard_normal(WIDTH), float(rng.standard_normal())),
            residuals(position, layer),
            question=question,
            estimator=estimator,
            position=position,
            layer=layer,
        )
        for question, estimator, position in SETS
        for layer in LAYERS
    ]


@pytest.fixture
def path(tmp_path, probes):
    file = tmp_path / "directions.safetensors"
    save_directions(file, reversed(probes), metadata())
    return file


def test_what_is_saved_comes_back(path, probes):
    directions = load_directions(path)
    assert directions.metadata == metadata()
    assert len(probes) == 9
    for saved in probes:
        found = directions.probe(saved.question, saved.estimator, saved.position, saved.layer)
        assert np.array_equal(found.direction, saved.direction)
        assert np.array_equal(found.mean, saved.mean)
        for name in ("bias", "norm", "spread"):
            assert getattr(found, name) == pytest.approx(getattr(saved, name), rel=1e-6)
        assert (found.question, found.estimator, found.position, found.layer) == (
            saved.question,
            saved.estimator,
            saved.position,
            saved.layer,
        )


def test_a_probe_knows_the_residuals_it_was_trained_on():
    rows = residuals("answer", 1)
    fit = LinearFit(3.0 * np.eye(WIDTH)[4], -2.0)
    probe = LinearProbe.of(fit, rows, question="lie", estimator="lat", position="answer", layer=1)
    np.testing.assert_allclose(probe.mean, rows.mean(axis=0), rtol=1e-6)
    assert probe.norm == pytest.approx(np.linalg.norm(rows, axis=1).mean(), rel=1e-6)
    assert probe.spread == pytest.approx(rows[:, 4].std(), rel=1e-5)
    np.testing.assert_array_equal(probe.unit, np.eye(WIDTH)[4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_scores_are_float32_whatever_comes_in(probes, dtype):
    tensor = torch.from_numpy(residuals("answer", 0)).reshape(5, 6, WIDTH).to(dtype)
    expected = tensor.double().numpy() @ probes[0].direction.astype(float) + probes[0].bias
    scores = probes[0].score(tensor)
    assert scores.dtype == torch.float32
    assert scores.shape == (5, 6)
    np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-4, atol=1e-4)
    if dtype != torch.bfloat16:
        array = probes[0].score(tensor.numpy())
        assert isinstance(array, np.ndarray)
        assert array.dtype == np.float32
        np.testing.assert_allclose(array, expected, rtol=1e-4, atol=1e-4)
    assert probes[0].score(tensor[0, 0]).shape == ()


def test_what_has_one_choice_need_not_be_said(path):
    directions = load_directions(path)
    probe = directions.probe("framing")
    assert (probe.estimator, probe.position, probe.layer) == ("logistic", "reply_mean", 2)
    assert directions.probe(estimator="lat").question == "lie"
    with pytest.raises(KlbError, match="several such probes, say which: lie/logistic/answer, lie/lat/answer$"):
        directions.probe("lie")
    with pytest.raises(KlbError, match="no such probe: lie/logistic/answer, lie/lat/answer, framing/logistic/reply_mean$"):
        directions.probe("incentive")
    with pytest.raises(KlbError, match="no layer 1: 0, 2, 3$"):
        directions.probe("framing", layer=1)


def test_residuals_of_another_width_are_refused(probes):
    width = len(probes[0].direction)
    for bad in (np.zeros((3, width + 1)), torch.zeros(width + 1), np.float32(0)):
        with pytest.raises(KlbError, match=f"this probe reads \\[..., {width}\\]$"):
            probes[0].score(bad)


def test_many_choices_are_named_briefly(path, monkeypatch):
    monkeypatch.setattr("klb_probe.probes.directions._LISTED", 2)
    brief = "say which: question lie, framing; estimator logistic, lat; position answer, reply_mean$"
    with pytest.raises(KlbError, match=brief):
        load_directions(path).probe()


def test_a_folder_is_no_file_of_directions(path):
    with pytest.raises(KlbError, match=f"is a folder; name the file of directions, {path}$"):
        load_directions(path.parent)


def test_directions_of_another_model_are_refused_by_name(path):
    assert load_probe(path, MODEL, question="framing").layer == 2
    for change, text in (
        ({"d_model": 16}, "width 12, trained on tiny; other has width 16"),
        ({"n_layers": 6}, "trained on tiny with 4 layers; other has 6"),
        ({"fingerprint": "0" * 64}, "trained on tiny, whose weights are not those of other"),
    ):
        other = SimpleNamespace(**(vars(MODEL) | {"name": "other"} | change))
        with pytest.raises(KlbError, match=text):
            load_probe(path, other, question="framing")


def test_probes_and_metadata_have_to_agree(tmp_path, probes):
    with pytest.raises(KlbError, match="no probe for"):
        save_directions(tmp_path / "a.safetensors", probes[1:], metadata())
    with pytest.raises(KlbError, match="do not mention"):
        save_directions(tmp_path / "a.safetensors", probes, metadata(layers=LAYERS[:2]))
    assert not list(tmp_path.iterdir())


def test_foreign_and_damaged_files_are_one_line(path, tmp_path):
    tensors, broken = load_file(path), tmp_path / "broken.safetensors"
    record = metadata().model_dump_json()

    def refused(text: str, values=tensors, **header: str) -> None:
        save_file(values, broken, metadata=header)
        with pytest.raises(KlbError, match=text) as raised:
            load_directions(broken)
        assert "\n" not in str(raised.value)

    refused("no directions .format klb_probe.margin_lens/1", format="klb_probe.margin_lens/1")
    refused("no directions .format unknown")
    refused("metadata cannot be read", format=FORMAT)
    refused("metadata cannot be read", format=FORMAT, metadata="{")
    refused("metadata cannot be read", format=FORMAT, metadata=json.dumps(json.loads(record) | {"seed": "many"}))
    key = "direction/lie/lat/answer"
    refused(f"{key} is missing", {k: v for k, v in tensors.items() if k != key}, format=FORMAT, metadata=record)
    refused(f"{key} is missing or does not fit", tensors | {key: torch.ones(3, 5)}, format=FORMAT, metadata=record)
    refused("not finite", tensors | {key: tensors[key] * torch.nan}, format=FORMAT, metadata=record)
    broken.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(KlbError, match="not a readable safetensors file"):
        load_directions(broken)
    with pytest.raises(KlbError, match="no such file"):
        load_directions(tmp_path / "absent.safetensors")
