"""One scenario at every layer and token: the numbers, the files and the figure."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch
import transformers as hf
from command import klb
from tiny import LAYERS, VOCAB, WIDTH, config, default_tokenizer, save_tiny_llama, tiny_model

from klb_probe.heat_map import SHOWN_TOKENS, heat_map
from klb_probe.lens.contrast import TokenContrast
from klb_probe.lens.jacobian import JacobianLens
from klb_probe.lens.library import load_lens
from klb_probe.lens.margin import LogitLens
from klb_probe.models.load import from_model
from klb_probe.signals.whole_view import logit_lens_logits, top_tokens, view_prompt
from klb_probe.view import NO_VOCABULARY


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    return save_tiny_llama(path)


@pytest.fixture(scope="module")
def run(folder):
    """The command on a tiny model, with top tokens."""
    out = folder.parent / "view"
    command = ("jlens", "--model", folder, "--lens", "logit", "--domains", "deposit", "--positions", "all")
    assert klb(*command, "--top-k", 5, "--top-layers", "0,2", "--out", out) == 0
    return out


def full_lens(seed: int = 0) -> JacobianLens:
    torch.manual_seed(seed)
    return JacobianLens({layer: torch.eye(WIDTH) + 0.3 * torch.randn(WIDTH, WIDTH) for layer in range(LAYERS - 1)}, n_prompts=2)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_every_position_equals_the_prompt_cut_there_and_read_alone(family):
    """Across the boundary between forward passes too (64 tokens)."""
    model = tiny_model(family)
    contrast, lens = TokenContrast.of(model.chat), full_lens()
    logit = LogitLens.of(model, contrast)
    ids = torch.randint(3, VOCAB, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    readers = {"jacobian": lambda h, layer: lens.margin(model, contrast, h, layer), "logit": logit.margin}
    view = view_prompt(model, ids, contrast, readers)
    assert view.margins.shape == (2, LAYERS, 150)
    for position in (0, 5, 63, 64, 65, 127, 128, 149):
        residuals = model.residuals([ids[: position + 1]], range(LAYERS), [-1])[:, 0, 0]
        for number, read in enumerate(readers.values()):
            alone = torch.stack([read(residuals[layer], layer) for layer in range(LAYERS)])
            torch.testing.assert_close(view.margins[number, :, position], alone, atol=1e-4, rtol=1e-4)


def test_on_the_default_model_with_its_shipped_lens(smollm, yes_no):
    lens = load_lens(smollm, yes_no)
    ids = smollm.chat.encode("You are a clerk.", "Is the refund due? Answer Yes or No.")
    view = view_prompt(smollm, ids, yes_no, {"margin": lens.margin})
    residuals = smollm.residuals([ids], range(smollm.n_layers), [0, 7, -1])[:, 0]
    for place, position in enumerate((0, 7, len(ids) - 1)):
        alone = torch.stack([lens.margin(residuals[layer, place], layer) for layer in range(smollm.n_layers)])
        torch.testing.assert_close(view.margins[0, :, position], alone, atol=1e-3, rtol=1e-3)
    assert "".join(view.texts) == smollm.tokenizer.decode(ids)


def test_a_lens_that_misreads_the_last_block_is_refused():
    model = tiny_model("llama")
    contrast = TokenContrast.of(model.chat)
    logit = LogitLens.of(model, contrast)
    with pytest.raises(Exception, match="does not fit this model"):
        view_prompt(model, [5, 6, 7], contrast, {"wrong": lambda h, layer: logit.margin(h, layer) + 0.1})


def test_the_files_are_tidy_and_say_what_was_read(run):
    tokens, record = pd.read_csv(run / "tokens.csv", keep_default_na=False), json.loads((run / "run.json").read_text())
    assert list(tokens) == ["position", "token_id", "token", "lens", "layer", "margin"]
    n = len(record["token_ids"])
    assert len(tokens) == n * LAYERS
    assert not tokens.duplicated(["position", "lens", "layer"]).any()
    assert tokens.drop_duplicates("position")["token_id"].tolist() == record["token_ids"]
    assert record["complete"] is True
    assert record["scenario"].startswith("deposit/")
    assert (record["framing"], record["paraphrase"], record["position"]) == ("honest", 1, "all")
    assert record["last_block_max_error"] < 1e-3
    assert (run / "heat_map.png").read_bytes().startswith(b"\x89PNG")


def test_the_heat_map_shows_the_last_tokens_of_the_table_as_they_are(run):
    frame = pd.read_csv(run / "tokens.csv", keep_default_na=False)
    figure = heat_map(pd.concat([frame, frame.assign(lens="margin", margin=-2 * frame["margin"])]), "a title with $ and $")
    images = [axis for axis in figure.axes if axis.images]
    first = frame["position"].max() + 1 - SHOWN_TOKENS
    grid = frame[frame["position"] >= first].pivot(index="layer", columns="position", values="margin")
    for axis, factor in zip(images, (1, -2), strict=True):
        (image,) = axis.images
        np.testing.assert_allclose(image.get_array(), factor * grid)
        low, high = image.get_clim()
        assert low == -high == -np.abs(factor * grid.to_numpy()).max()
        assert len(axis.get_xticklabels()) == SHOWN_TOKENS
        assert "layer" in axis.get_ylabel()
    assert any("logits" in axis.get_ylabel() for axis in figure.axes)
    figure.savefig(run / "again.png")


def test_tokens_that_look_like_mathematics_are_drawn(run):
    frame = pd.read_csv(run / "tokens.csv", keep_default_na=False)
    heat_map(frame.assign(token=r"$\frac$"), "t").savefig(run / "maths.png")


def test_top_tokens_are_norm_head_and_the_largest(run, folder):
    from klb_probe.models.load import load_model

    model = load_model(str(folder), device="cpu")
    record = json.loads((run / "run.json").read_text())
    table = pd.read_csv(run / "top_tokens.csv", keep_default_na=False)
    assert list(table) == ["lens", "layer", "position", "rank", "token_id", "token", "logit"]
    residuals = model.residuals([record["token_ids"]], [0, 2], [-1])[:, 0, 0]
    assert set(table["position"]) == {len(record["token_ids"]) - 1}
    for residual, (_, rows) in zip(residuals, table.groupby("layer"), strict=True):
        with torch.no_grad():
            logits = model.model.lm_head(model.model.model.norm(residual))
        values, ids = logits.topk(5)
        assert rows["token_id"].tolist() == ids.tolist()
        assert rows["rank"].tolist() == [1, 2, 3, 4, 5]
        np.testing.assert_allclose(rows["logit"], values, rtol=1e-4)


def test_a_full_lens_has_its_own_top_tokens(folder, tmp_path, capsys):
    from klb_probe.cases.load import load_domains
    from klb_probe.cases.scenarios import eligibility_scenarios
    from klb_probe.models.load import load_model
    from klb_probe.view import choose_scenario, write_view

    model, lens = load_model(str(folder), device="cpu"), full_lens()
    contrast = TokenContrast.of(model.chat)
    scenario = choose_scenario(eligibility_scenarios(load_domains(["deposit"]), ["honest"]), None)
    lines = write_view(model, lens, contrast, scenario, tmp_path, top_k=3, layers=[1], record={})
    assert not any(NO_VOCABULARY in line for line in lines)
    table = pd.read_csv(tmp_path / "top_tokens.csv", keep_default_na=False)
    assert list(dict.fromkeys(table["lens"])) == ["jacobian", "logit"]
    ids = json.loads((tmp_path / "run.json").read_text())["token_ids"]
    residual = model.residuals([ids], [1], [-1])[0, 0, 0]
    expected = model.unembed(model.final_norm(lens.matrix(1) @ residual)).topk(3)
    chosen = table[table["lens"] == "jacobian"]
    assert chosen["token_id"].tolist() == expected.indices.tolist()
    assert set(pd.read_csv(tmp_path / "tokens.csv")["lens"]) == {"jacobian", "logit"}
    # The margin lens cut from it reads the same sign at every place, and says it has no vocabulary.
    margin = lens.to_margin_lens(model, contrast)
    lines = write_view(model, margin, contrast, scenario, tmp_path / "margin", top_k=3, layers=[1], record={})
    assert sum(NO_VOCABULARY in line for line in lines) == 1
    tables = [pd.read_csv(where / "tokens.csv") for where in (tmp_path, tmp_path / "margin")]
    full, cut = (t[t["lens"] != "logit"]["margin"].to_numpy() for t in tables)
    assert (np.sign(full) == np.sign(cut)).all()


def test_a_lens_of_some_layers_shows_those(folder, tmp_path):
    from klb_probe.cases.load import load_domains
    from klb_probe.cases.scenarios import eligibility_scenarios
    from klb_probe.models.load import load_model
    from klb_probe.view import choose_scenario, write_view

    model, some = load_model(str(folder), device="cpu"), full_lens().subset([0, 2])
    contrast = TokenContrast.of(model.chat)
    scenario = choose_scenario(eligibility_scenarios(load_domains(["deposit"]), ["honest"]), None)
    whole = view_prompt(
        model,
        model.chat.encode(scenario.system, scenario.user),
        contrast,
        {"jacobian": lambda h, layer: full_lens().margin(model, contrast, h, layer)},
    ).frame
    for number, lens in enumerate((some, some.to_margin_lens(model, contrast))):
        out = tmp_path / str(number)
        write_view(model, lens, contrast, scenario, out, top_k=1, layers=None, record={})
        tokens = pd.read_csv(out / "tokens.csv", keep_default_na=False)
        assert sorted(set(tokens["layer"])) == [0, 2, 3]
        assert set(pd.read_csv(out / "top_tokens.csv")["layer"]) == {0, 2, 3}
        mine = tokens[tokens["lens"] != "logit"]
        same = whole[whole["layer"].isin([0, 2, 3])]
        assert (np.sign(mine["margin"].to_numpy()) == np.sign(same["margin"].to_numpy())).all()
    heat_map(tokens, "some layers").savefig(tmp_path / "some.png")


def test_padded_head_rows_are_never_read():
    settings = config("llama")
    settings.vocab_size = VOCAB + 64
    torch.manual_seed(0)
    padded = hf.AutoModelForCausalLM.from_config(settings).eval()
    with torch.no_grad():
        padded.lm_head.weight[VOCAB:] = 100 * torch.randn(64, WIDTH)  # would win at every layer
    model = from_model(padded, default_tokenizer(), name="padded")
    contrast = TokenContrast.of(model.chat)
    view = view_prompt(model, [5, 6, 7], contrast, {"logit": LogitLens.of(model, contrast).margin})
    readers = {"logit": logit_lens_logits(model), "jacobian": lambda h, layer: full_lens().logits(model, h, layer)}
    table = top_tokens(model, view, readers, range(LAYERS), 50)
    assert table["token_id"].max() < len(default_tokenizer())
    assert len(table) == 2 * LAYERS * 50


def test_a_scenario_is_chosen_by_id(folder, tmp_path, capsys):
    command = ("jlens", "--model", folder, "--lens", "logit", "--domains", "deposit", "--positions", "all", "--out", tmp_path)
    assert klb(*command, "--scenario", "deposit/nothing") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    wanted = error.strip().split("for example ")[1].split(", ")[0] + "~twin"
    assert klb(*command, "--framings", "deny", "--scenario", wanted.replace("~twin~twin", "~twin")) == 0
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["scenario"].endswith("~twin")
    assert record["framing"] == "deny"
    assert not (tmp_path / "top_tokens.csv").exists()
    assert klb(*command) == 2  # the folder holds a run
    assert klb(*command, "--overwrite") == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--positions", "some"], "one of answer, all"),
        (["--top-k", 5], "--positions all"),
        (["--scenario", "airline/x"], "--positions all"),
        (["--positions", "all", "--top-layers", "1"], "--top-k"),
        (["--positions", "all", "--top-k", 2, "--top-layers", "1,b"], "--top-layers"),
        (["--positions", "all", "--top-k", 2, "--top-layers", "99"], "has layers 0-3"),
        (["--positions", "all", "--resume"], "--overwrite"),
    ],
)
def test_a_mistake_is_one_line_exit_2_and_nothing_written(folder, tmp_path, capsys, arguments, words):
    out = tmp_path / "out"
    assert klb("jlens", "--model", folder, "--lens", "logit", "--out", out, *arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words in error
    assert not out.exists()
