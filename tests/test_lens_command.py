"""``klb-probe lens``: is a lens right for a model, and does it read known intermediates?"""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch
from command import klb
from safetensors import safe_open
from tiny import LAYERS, WIDTH, save_tiny_llama, tiny_model

from klb_probe.errors import KlbError
from klb_probe.files import write_safetensors
from klb_probe.lens.checks import RISING, check_lens, exact_identity_share, sketch_identity_share
from klb_probe.lens.contrast import TokenContrast, gaussian_rows
from klb_probe.lens.evaluation import (
    LENSES,
    Item,
    TokenItem,
    _rank,
    evaluate_lens,
    load_items,
    random_rotations,
    rank_area,
    usable_items,
)
from klb_probe.lens.jacobian import JacobianLens
from klb_probe.lens.store import save_lens
from klb_probe.paths import data_dir

SHIPPED = data_dir("lenses") / "smollm2-135m.margin.safetensors"


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    return save_tiny_llama(path)


def rising_lens(**more) -> JacobianLens:
    """Shares near 0.3, 0.6, 0.9 of the identity, and noise."""
    torch.manual_seed(0)
    matrices = {layer: 0.3 * (layer + 1) * torch.eye(WIDTH) + 0.01 * torch.randn(WIDTH, WIDTH) for layer in range(LAYERS - 1)}
    return JacobianLens(matrices, n_prompts=3, **more)


@pytest.fixture(scope="module")
def margin_file(model, tmp_path_factory):
    """A margin lens of the tiny model that has nothing wrong."""
    lens = rising_lens().to_margin_lens(model, TokenContrast.of(model.chat))
    whole = {"model": model.identity | {"name": model.name}, "fingerprint": model.fingerprint, "bos": "auto"}
    lens.metadata = lens.metadata.model_copy(update=whole)
    path = tmp_path_factory.mktemp("lenses") / "tiny.margin.safetensors"
    save_lens(lens, path)
    return path


def changed(path, where, *, tensors=None, **metadata):
    """A copy of a margin lens file with something changed."""
    with safe_open(path, "pt") as file:
        header, held = file.metadata(), {name: file.get_tensor(name) for name in ("rows", "sketch")}
    header["metadata"] = json.dumps(json.loads(header["metadata"]) | metadata)
    write_safetensors(where, tensors(held) if tensors else held, header)
    return where


def verdicts(checks, verdict):
    return {check.name for check in checks if check.verdict == verdict}


# --- Identity share. ---


def test_the_sketched_identity_share_is_the_trace_within_its_error():
    torch.manual_seed(1)
    matrices = torch.eye(WIDTH) * torch.linspace(0.2, 1, 5)[:, None, None] + 0.2 * torch.randn(5, WIDTH, WIDTH)
    exact = exact_identity_share(JacobianLens(dict(enumerate(matrices)), n_prompts=1))
    np.testing.assert_allclose(exact.share, torch.einsum("l d d -> l", matrices) / WIDTH, rtol=1e-5)
    rows = gaussian_rows(4000, WIDTH, 0)
    estimate = sketch_identity_share(rows @ matrices, rows, range(5))
    assert (np.abs(estimate.share - exact.share) < 4 * estimate.error).all()
    assert (estimate.error < 0.02).all()
    # At k = 32 the stated errors are the right size: over many seeds, deviations in their units have spread about 1.
    deviations = []
    for seed in range(200):
        rows = gaussian_rows(32, WIDTH, seed)
        one = sketch_identity_share(rows @ matrices, rows, range(5))
        deviations.append((one.share - exact.share) / one.error)
    assert 0.85 < np.std(deviations) < 1.2
    assert abs(np.mean(deviations)) < 0.2


def test_the_shipped_lens_passes_every_check_on_the_default_model(smollm):
    checks = check_lens(SHIPPED, smollm)
    assert verdicts(checks, "pass") == {check.name for check in checks}
    assert {check.name for check in checks} == {
        "readable", "width", "layers", "model", "BOS", "site", "target layer", "contrast tokens", "values",
        "identity share", "decode parity",
    }  # fmt: skip


def test_the_shipped_lenss_identity_share_rises_to_one():
    with safe_open(SHIPPED, "pt") as file:
        sketch = file.get_tensor("sketch")
    share = sketch_identity_share(sketch, gaussian_rows(32, 576, 0), range(29))
    assert share.rise > 0.9
    assert share.share[-1] == pytest.approx(1, abs=0.1)
    assert share.share[0] < 0.5


# --- Check. ---


def test_a_lens_with_nothing_wrong_passes(model, margin_file):
    assert verdicts(check_lens(margin_file, model), "pass") == {check.name for check in check_lens(margin_file, model)}


def falling(held):
    return {"rows": held["rows"], "sketch": held["sketch"].flip(0)}


def with_nan(held):
    held["sketch"][1, 3, 2] = torch.nan
    return held


def zeroed(held):
    held["rows"][1] = 0
    return held


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        ({"tensors": falling}, {"identity share"}),
        ({"tensors": with_nan}, {"values", "identity share"}),
        ({"tensors": zeroed}, {"values"}),
        ({"site": "attention_output"}, {"site"}),
        ({"bos": "always"}, {"BOS"}),
        ({"fingerprint": "0" * 64}, {"model"}),
        ({"n_layers": 40, "target_layer": 39}, {"layers"}),
        ({"target_layer": 1, "source_layers": [0, 1, 2]}, {"target layer"}),
        ({"contrast": [[["Yes", 5230], ["No", 10539]]]}, {"contrast tokens"}),
    ],
)
def test_what_is_wrong_fails_by_name(model, margin_file, tmp_path, change, failed):
    assert verdicts(check_lens(changed(margin_file, tmp_path / "x.safetensors", **change), model), "fail") == failed


def test_what_a_file_does_not_say_is_unknown_and_no_failure(model, margin_file, tmp_path):
    nothing = dict.fromkeys(("name", "hub", "revision"))
    path = changed(margin_file, tmp_path / "x.safetensors", bos=None, fingerprint=None, model=nothing)
    checks = check_lens(path, model)
    assert verdicts(checks, "unknown") == {"BOS", "model"}
    assert not verdicts(checks, "fail")


def test_the_command_says_so_with_its_exit_code(folder, margin_file, tmp_path, capsys):
    assert klb("lens", "check", margin_file, "--model", folder) == 0
    assert "nothing speaks against" in capsys.readouterr().out
    bad = changed(margin_file, tmp_path / "bad.safetensors", tensors=falling)
    assert klb("lens", "check", bad, "--model", folder) == 1
    assert "is not right for tiny-llama: identity share" in capsys.readouterr().out
    assert klb("lens", "check", SHIPPED, "--model", folder, "--json") == 1
    checks = {row["check"]: row["verdict"] for row in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["width"] == checks["layers"] == checks["model"] == "fail"
    assert checks["decode parity"] == "unknown"
    (tmp_path / "cut.safetensors").write_bytes(SHIPPED.read_bytes()[:10_000])
    (tmp_path / "text.pt").write_text("not a lens")
    for name in ("cut.safetensors", "text.pt"):
        assert klb("lens", "check", tmp_path / name, "--model", folder) == 1
        assert "readable" in capsys.readouterr().out
    assert klb("lens", "check", tmp_path / "absent.pt", "--model", folder) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_full_lens_file_is_checked_too(model, tmp_path):
    rising_lens().save(tmp_path / "public.pt")
    checks = check_lens(tmp_path / "public.pt", model)
    assert verdicts(checks, "unknown") == {"model", "BOS", "site", "target layer"}  # four keys say nothing of them
    assert not verdicts(checks, "fail")
    identities = {layer: (LAYERS - layer) * torch.eye(WIDTH) for layer in range(LAYERS)}  # falls; one layer too many
    JacobianLens(identities, n_prompts=1).save(tmp_path / "other.pt")
    assert verdicts(check_lens(tmp_path / "other.pt", model), "fail") == {"layers", "identity share"}
    wide = {layer: (layer + 1) * torch.eye(WIDTH + 1) for layer in range(LAYERS - 1)}
    JacobianLens(wide, n_prompts=1).save(tmp_path / "wide.pt")
    assert verdicts(check_lens(tmp_path / "wide.pt", model), "fail") == {"width"}


# --- Evaluation. ---


def planted(model, layer: int, n: int = 12) -> tuple[JacobianLens, list[TokenItem]]:
    """Items whose intermediate one layer's J brings out exactly: J maps each prompt's residual to a direction of its token."""
    generator = torch.Generator().manual_seed(4)
    prompts = torch.randint(3, 40_000, (n, 9), generator=generator).tolist()
    hidden = model.residuals(prompts, [layer], [-1])[0, :, 0]
    wanted = torch.randn(n, WIDTH, generator=generator)
    tokens = model.unembed(model.final_norm(wanted)).argmax(-1).tolist()
    solution = torch.linalg.lstsq(hidden.double(), wanted.double()).solution.float()  # hidden @ solution = wanted
    matrices = {one: torch.eye(WIDTH) for one in range(LAYERS - 1)} | {layer: solution.T}
    item = {"kind": "toy", "prompt": "p", "intermediates": ("w",), "answer": "a"}
    items = [
        TokenItem(Item(id=f"i{i}", **item), tuple(ids), (token,))
        for i, (ids, token) in enumerate(zip(prompts, tokens, strict=True))
    ]
    return JacobianLens(matrices, n_prompts=1), items


@pytest.mark.parametrize("layer", [0, 2])
def test_a_planted_intermediate_is_found_and_the_nulls_are_near_chance(model, layer):
    lens, items = planted(model, layer)
    result = evaluate_lens(model, lens, items)
    assert (result.ranks[0, layer] == 1).all()
    scores = result.scores()
    own = scores[scores["at"] == "own best layer"].set_index(["lens", "metric"])
    for metric in ("pass@1", "pass@5", "pass@10", "pass@50", "AUC"):
        assert own.loc[("jacobian", metric), ["value", "low", "high"]].tolist() == [1, 1, 1]
        for null in ("logit", "random transport"):
            assert own.loc[(null, metric), "value"] <= 0.1
            assert own.loc[(null, metric), "minus_high"] < 0
    assert own.loc[("jacobian", "AUC"), "layers"] == str(layer)
    at = scores[(scores["at"] != "own best layer") & (scores["lens"] == "logit")]
    assert set(at["layers"]) == {str(layer)}
    assert result.kl.shape == (len(LENSES), LAYERS - 1)
    assert (result.kl >= 0).all()


def test_the_layer_is_chosen_without_the_item_it_scores(model):
    lens, items = planted(model, 0)
    result = evaluate_lens(model, lens, items)
    assert result.half.sum() == 6
    rigged = result.ranks.copy()
    rigged[0] = 1000
    rigged[0, 1, result.half], rigged[0, 2, ~result.half] = 1, 1  # each half has a layer that reads only it
    cheat = type(result)(result.items, result.layers, rigged, result.kl, result.half, result.vocabulary)
    assert cheat.scores().query("lens == 'jacobian' and metric == 'AUC'")["value"].item() == 0


def test_random_transport_keeps_singular_values_and_is_orthogonal():
    left, right = random_rotations(WIDTH, 3)
    matrix = torch.randn(WIDTH, WIDTH)
    torch.testing.assert_close(left @ left.T, torch.eye(WIDTH), atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.linalg.svdvals(left @ matrix @ right), torch.linalg.svdvals(matrix), atol=1e-4, rtol=1e-4)
    assert (left - right).abs().max() > 0.1


def test_areas_and_ranks():
    np.testing.assert_allclose(rank_area(np.array([1, 50, 900])), [1, 0, 0])
    # The area under a step that rises at rank r, over log k from 1 to 50.
    k = np.exp(np.linspace(0, np.log(50), 200_001))
    for rank in (2, 7, 31):
        assert rank_area(np.array(rank)) == pytest.approx((k >= rank).mean(), abs=1e-4)
    row = torch.tensor([3.0, 5.0, 5.0, 1.0])
    assert [_rank(row, [t]) for t in range(4)] == [3, 2, 2, 4]
    assert _rank(row, [0, 3]) == 3
    assert _rank(row, [1, 2]) == 1


def test_our_items_are_many_of_each_kind_and_do_not_give_the_intermediate_away(smollm):
    items = load_items()
    usable, skipped = usable_items(smollm, items)
    assert len(usable) + sum(skipped.values()) == len(items)
    kinds = pd.Series([one.item.kind for one in usable]).value_counts()
    assert set(kinds.index) == {"multi_hop", "arithmetic", "translation"}
    assert (kinds >= 12).all()
    for one in usable:
        assert not set(one.intermediates) & set(one.ids), one.item.id
        assert one.item.answer.lower() not in [word.lower() for word in one.item.intermediates]


def test_items_whose_intermediate_is_no_single_token_are_counted(model):
    items = load_items()[:5]
    odd = [Item(id="odd", kind="multi_hop", prompt="p", intermediates=("zxqvzxqv",), answer="a")]
    usable, skipped = usable_items(model, [*items, *odd])
    assert (len(usable), skipped) == (5, {"multi_hop": 1})
    with pytest.raises(KlbError, match="too few"):
        usable_items(model, odd)


def test_the_eval_command_from_end_to_end(folder, tmp_path, capsys):
    rising_lens().save(tmp_path / "tiny.pt")
    command = ("lens", "eval", tmp_path / "tiny.pt", "--model", folder, "--out", tmp_path / "out")
    assert klb(*command) == 0
    printed = capsys.readouterr().out
    for words in ("pass@10", "AUC", "random transport", "95 % bootstrap over items", "items skipped"):
        assert words in printed
    scores, ranks = pd.read_csv(tmp_path / "out" / "scores.csv"), pd.read_csv(tmp_path / "out" / "ranks.csv")
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert len(scores) == 5 * 5
    assert (scores["n"] == record["counts"]["items"]).all()
    assert len(ranks) == record["counts"]["items"] * 3 * (LAYERS - 1)
    assert klb(*command) == 2
    assert klb(*command, "--overwrite") == 0


def test_eval_refuses_in_one_line(folder, margin_file, tmp_path, capsys):
    wide = {layer: (layer + 1) * torch.eye(WIDTH + 1) for layer in range(LAYERS - 1)}
    JacobianLens(wide, n_prompts=1).save(tmp_path / "wide.pt")
    rising_lens().save(tmp_path / "fine.pt")
    (tmp_path / "items.yaml").write_text("- {id: a, kind: b}")
    for arguments, words in (
        ([margin_file], "no vocabulary"),
        ([tmp_path / "absent.pt"], "no such lens file"),
        ([tmp_path / "wide.pt"], "width"),
        ([tmp_path / "fine.pt", "--items", tmp_path / "items.yaml"], "prompt"),
    ):
        assert klb("lens", "eval", *arguments, "--model", folder, "--out", tmp_path / "out") == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert words in error
        assert not (tmp_path / "out").exists()


def test_the_threshold_is_the_one_the_table_names(model, margin_file):
    (share,) = (check for check in check_lens(margin_file, model) if check.name == "identity share")
    assert f"> {RISING}" in share.why
