"""Interventions do what they say, wherever and however the model reads; and their summary says what they did."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from tiny import LAYERS, WIDTH, tiny_model

from klb_probe.errors import KlbError
from klb_probe.lens.contrast import TokenContrast
from klb_probe.probes.steering import (
    PROBE,
    RANDOM,
    ablate,
    add,
    interventions,
    random_directions,
    reply_begins,
    steered_replies,
    steering_effects,
)
from klb_probe.probes.steering_figure import dose_response
from klb_probe.probes.steering_passes import AT_ALL
from klb_probe.probes.steering_summary import ALL, NONE, OTHER, OWED, RAW, SIGN, steering_summary, table, what_it_shows

LAST = LAYERS - 1


@pytest.fixture(scope="module", params=["llama", "gemma2", "gpt2"])
def model(request):
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def contrast(llama):
    return TokenContrast.of(llama.chat)


@pytest.fixture(scope="module")
def prompts():
    """Two families with a long shared prefix each, of several lengths."""
    rng = np.random.default_rng(0)
    shared = [rng.integers(10, 40_000, 40).tolist() for _ in range(2)]
    return [[*shared[i % 2], *rng.integers(10, 40_000, 3 + i).tolist()] for i in range(6)]


def unit(seed=1):
    vector = torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))
    return vector / vector.norm()


def plain_margin(model, contrast, ids):
    """From the model itself, one prompt, no cache."""
    with torch.no_grad():
        return float(contrast.margin(model.model(torch.tensor([ids])).logits[0, -1, contrast.token_ids].float()))


def n_hooks(model):
    return sum(len(block._forward_hooks) for block in model.layout.blocks)


def test_a_change_at_the_last_block_is_the_readout_of_the_changed_residual(model, prompts):
    contrast = TokenContrast.of(model.chat)
    vector = 3 * unit()
    for ids in prompts[:3]:
        residual = model.residuals([ids], [LAST], [-1])[0, 0, 0]
        expected = contrast.margin(model.token_readout(contrast.token_ids).logits(residual + vector))
        with model.intervening(LAST, lambda output: output + vector):
            changed = plain_margin(model, contrast, ids)
        assert changed == pytest.approx(float(expected), abs=1e-5)
        assert abs(changed - plain_margin(model, contrast, ids)) > 1e-3


def test_a_capture_inside_sees_the_change_and_the_blocks_above_live_with_it(llama, prompts):
    ids, vector = prompts[0], unit()
    before = llama.residuals([ids], range(LAYERS), [0, -1])
    with llama.intervening(1, lambda output: output + vector):
        inside = llama.residuals([ids], range(LAYERS), [0, -1])
        with llama.intervening(1, lambda output: 2 * output):  # the outer one acts first
            nested = llama.residuals([ids], [1], [0, -1])
    torch.testing.assert_close(inside[0], before[0])
    torch.testing.assert_close(inside[1], before[1] + vector)
    torch.testing.assert_close(nested[0], 2 * (before[1] + vector))
    for layer in (2, 3):
        assert (inside[layer] - before[layer]).abs().max() > 1e-2
    torch.testing.assert_close(llama.residuals([ids], range(LAYERS), [0, -1]), before)


def test_no_hook_is_left_after_an_error(llama, prompts):
    def fail(output):
        raise RuntimeError("in the change")

    with pytest.raises(RuntimeError, match="in the change"), llama.intervening(2, fail):
        llama.residuals([prompts[0]], [0], [-1])
    assert n_hooks(llama) == 0
    with llama.intervening(2, lambda output: output):
        assert n_hooks(llama) == 1
    assert n_hooks(llama) == 0
    with pytest.raises(KlbError, match="layers 0-3"), llama.intervening(LAYERS, lambda output: output):
        pass


def test_a_half_precision_model_is_changed_in_float32_and_keeps_its_dtype(prompts):
    half, seen = tiny_model("llama", dtype=torch.bfloat16), []

    def change(output):
        seen.append(output.dtype)
        return output + unit()

    with half.intervening(1, change):
        after = half.residuals([prompts[0]], [1], [-1])
    assert seen == [torch.float32]
    assert after.dtype == torch.bfloat16


def test_ablation_leaves_the_level_and_nothing_else_changes(llama, prompts):
    along = unit()
    before = llama.residuals([prompts[0]], [2], range(40))[0, 0]
    with llama.intervening(2, ablate(along, 0.7)):
        after = llama.residuals([prompts[0]], [2], range(40))[0, 0]
    assert (before @ along - 0.7).abs().max() > 0.1
    torch.testing.assert_close(after @ along, torch.full((40,), 0.7), atol=1e-5, rtol=0)
    across = torch.eye(WIDTH) - torch.outer(along, along)
    torch.testing.assert_close(after @ across, before @ across, atol=1e-5, rtol=1e-5)


def test_adding_goes_to_every_position(llama, prompts):
    before = llama.residuals([prompts[0]], [2], range(40))
    with llama.intervening(2, add(unit(), -1.5)):
        after = llama.residuals([prompts[0]], [2], range(40))
    torch.testing.assert_close(after - before, (-1.5 * unit()).expand_as(before), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layer", [0, 2])
def test_shared_prefixes_and_batches_give_the_margins_of_one_prompt_at_a_time(model, prompts, layer):
    contrast = TokenContrast.of(model.chat)
    mean = torch.linspace(-1, 1, WIDTH)
    planned = interventions({PROBE: unit()}, mean, 2.0, modes=["add", "ablate"], scales=[0.5])
    assert len(planned) == 3
    effects = steering_effects(model, contrast, prompts, layer, planned, at=AT_ALL, batch_size=4)
    assert len(effects) == 3 * len(prompts)
    for number, one in enumerate(planned):
        rows = effects[number * len(prompts) : (number + 1) * len(prompts)]
        for row, ids in zip(rows.itertuples(), prompts, strict=True):
            assert row.baseline == pytest.approx(plain_margin(model, contrast, ids), abs=1e-5)
            with model.intervening(layer, one.change):
                assert row.margin == pytest.approx(plain_margin(model, contrast, ids), abs=1e-5)
    assert (effects["margin"] - effects["baseline"]).abs().min() > 1e-5  # or the prefix could have stayed as it was


def test_dose_0_changes_nothing_and_a_larger_dose_along_the_lens_direction_raises_the_margin(llama, contrast, prompts):
    readout = llama.token_readout(contrast.token_ids)
    along = readout.directions[0] - readout.directions[1]
    planned = interventions({PROBE: along}, torch.zeros(WIDTH), 4.0, modes=["add"], scales=[0, 0.1, 0.2])
    assert [one.dose for one in planned] == [-0.2, -0.1, 0, 0.1, 0.2]
    effects = steering_effects(llama, contrast, prompts, LAST, planned, at=AT_ALL)
    none = effects[effects["dose"] == 0]
    assert (none["margin"] == none["baseline"]).all()
    by_dose = effects.pivot(index="prompt", columns="dose", values="margin").to_numpy()
    assert (np.diff(by_dose, axis=1) > 0.01).all()


def test_the_likeliest_token_is_counted_when_it_is_neither(llama, contrast, prompts):
    readout = llama.token_readout(contrast.token_ids)
    planned = interventions({PROBE: readout.directions[0]}, torch.zeros(WIDTH), 1e4, modes=["add"], scales=[1])
    effects = steering_effects(llama, contrast, prompts, LAST, planned, at=AT_ALL)
    with torch.no_grad():
        top = [int(llama.model(torch.tensor([ids])).logits[0, -1].argmax()) for ids in prompts]
    before = effects[effects["dose"] == 1]["baseline_other"].tolist()
    assert before == [token not in contrast.token_ids for token in top]
    assert any(before)


def test_a_margin_that_is_no_number_is_an_error_that_names_the_intervention(llama, contrast, prompts):
    planned = interventions({PROBE: unit()}, torch.zeros(WIDTH), float("inf"), modes=["add"], scales=[1])
    with pytest.raises(KlbError, match=r"probe, add -1: margins are not finite.*--scales"):
        steering_effects(llama, contrast, prompts, 1, planned, at=AT_ALL)
    assert n_hooks(llama) == 0


def test_random_directions_are_deterministic_and_of_unit_norm():
    first, again, other = random_directions(64, 5, 3), random_directions(64, 5, 3), random_directions(64, 5, 4)
    assert list(first) == [f"random {i}" for i in range(1, 6)]
    for name, vector in first.items():
        assert float(vector.norm()) == pytest.approx(1, abs=1e-6)
        assert torch.equal(vector, again[name])
        assert not torch.equal(vector, other[name])
    rows = torch.stack(list(first.values()))
    assert (rows @ rows.T - torch.eye(5)).abs().max() < 0.6


def test_every_direction_is_added_with_the_same_norm_and_ablated_to_its_own_mean():
    mean = torch.arange(4.0)
    planned = interventions({PROBE: torch.tensor([0, 0, 0, 9.0]), **random_directions(4, 2, 0)}, mean, 5.0,
                            modes=["ablate", "add"], scales=[0.2])  # fmt: skip
    zero = torch.zeros(3, 4)
    for one in planned:
        moved = one.change(zero)
        if one.mode == "add":
            assert moved.norm(dim=-1).tolist() == pytest.approx([1.0] * 3, abs=1e-6)
        else:
            torch.testing.assert_close(one.change(mean), mean)
    assert [one.kind for one in planned] == [PROBE] * 3 + [RANDOM] * 6
    with pytest.raises(KlbError, match="direction probe is zero"):
        interventions({PROBE: torch.zeros(4)}, mean, 1.0, modes=["add"], scales=[1])


def labelled(effects, questions=("plain", "reversed")):
    """Labels of prompts: pairs of two, framings and wordings in turn."""
    n = effects["prompt"].max() + 1
    labels = pd.DataFrame({"prompt": np.arange(n), "pair": [f"p{i // 4}" for i in range(n)]})
    labels["framing"] = [("honest", "deny")[i % 2] for i in range(n)]
    labels["question"] = [questions[(i // 2) % 2] for i in range(n)]
    return labels.merge(effects, on="prompt")


def one(summary, **wanted):
    found = summary
    for name, value in wanted.items():
        found = found[found[name] == value]
    assert len(found) == 1
    return found.iloc[0]


def made_up(n=24, n_random=9, seed=0):
    """Effects with a known shift: the probe moves the margin by +2 under the plain question and -2 under the reversed one."""
    rng = np.random.default_rng(seed)
    baseline = rng.normal(size=n)
    toward = np.where((np.arange(n) // 2) % 2 == 0, 1, -1)
    tables = []
    for dose in (-0.1, 0.1):
        for name in (PROBE, *(f"random {i}" for i in range(n_random))):
            shift = np.sign(dose) * 2 * toward if name == PROBE else rng.normal(scale=0.1, size=n)
            tables.append(
                pd.DataFrame(
                    {"prompt": np.arange(n), "direction": name, "kind": name.split()[0], "mode": "add", "dose": dose,
                     "margin": baseline + shift, "baseline": baseline, "other": name == PROBE, "baseline_other": False}
                )
            )  # fmt: skip
    return labelled(pd.concat(tables, ignore_index=True))


def test_the_summary_is_the_plain_means_over_prompts():
    effects = made_up()
    summary = steering_summary(effects.sample(frac=1, random_state=0))  # in any order of rows
    assert not summary.duplicated(["framing", "direction", "mode", "dose", "statistic"]).any()
    for framing in ("honest", "deny", ALL):
        rows = effects if framing == ALL else effects[effects["framing"] == framing]
        for direction in (PROBE, RANDOM):
            moved = rows[(rows["kind"] == direction) & (rows["dose"] == 0.1)]
            change = moved["margin"] - moved["baseline"]
            toward = change * np.where(moved["question"] == "plain", 1, -1)
            signs = np.sign(moved["margin"]) != np.sign(moved["baseline"])
            for statistic, values in ((OWED, toward), (RAW, change), (SIGN, signs), (OTHER, moved["other"])):
                means = values.groupby(moved["direction"]).mean()
                line = one(summary, framing=framing, direction=direction, dose=0.1, statistic=statistic)
                assert line["value"] == pytest.approx(means.median(), abs=1e-12)
                assert (line["n"], line["n_pairs"]) == (24 if framing == ALL else 12, 6)
                assert line["n_directions"] == len(means)
                if direction == RANDOM:
                    assert line["low"] == pytest.approx(means.quantile(0.025), abs=1e-12)
                    assert line["high"] == pytest.approx(means.quantile(0.975), abs=1e-12)
    before = effects.drop_duplicates("prompt")["baseline"]
    assert one(summary, framing=ALL, direction=NONE, statistic="yes_minus_no")["value"] == pytest.approx(before.mean())


def test_p_counts_the_random_directions_that_go_as_far_either_way():
    effects = made_up()
    far = (effects["direction"] == "random 3") & (effects["dose"] == 0.1)
    effects.loc[far, "margin"] = effects.loc[far, "baseline"] - 3 * np.where(effects.loc[far, "question"] == "plain", 1, -1)
    summary = steering_summary(effects)
    assert one(summary, framing=ALL, direction=PROBE, dose=-0.1, statistic=OWED)["p_random"] == pytest.approx(1 / 10)
    assert one(summary, framing=ALL, direction=PROBE, dose=0.1, statistic=OWED)["p_random"] == pytest.approx(2 / 10)
    # Toward yes in one wording and toward no in the other: nothing is left of it in the raw margin.
    raw = one(summary, framing=ALL, direction=PROBE, dose=-0.1, statistic=RAW)
    assert raw["value"] == pytest.approx(0, abs=1e-12)
    assert raw["p_random"] == 1


def test_intervals_resample_whole_pairs():
    effects = made_up()
    rng = np.random.default_rng(5)
    by_pair = dict(zip(effects["pair"].unique(), rng.normal(size=6), strict=True))
    probe = effects["kind"] == PROBE
    toward = np.where(effects["question"] == "plain", 1, -1)
    effects["margin"] = effects["margin"].where(~probe, effects["baseline"] + toward * effects["pair"].map(by_pair))
    line = one(steering_summary(effects), framing=ALL, direction=PROBE, dose=0.1, statistic=OWED)
    means = np.array(list(by_pair.values()))[rng.integers(0, 6, (20_000, 6))].mean(1)
    assert [line["low"], line["high"]] == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.05)
    single = steering_summary(effects[effects["pair"] == "p0"])
    assert single[single["direction"] == PROBE]["low"].isna().all()


def test_a_planted_causal_direction_beats_every_random_one(llama, contrast, prompts):
    readout = llama.token_readout(contrast.token_ids)
    vectors = {PROBE: readout.directions[0] - readout.directions[1], **random_directions(WIDTH, 30, 0)}
    residuals = llama.residuals(prompts, [LAST], [-1])[0, :, 0]
    norm = float(residuals.norm(dim=-1).mean())
    planned = interventions(vectors, residuals.mean(0), norm, modes=["add"], scales=[0.2])
    effects = labelled(steering_effects(llama, contrast, prompts, LAST, planned, at=AT_ALL), questions=("plain", "plain"))
    summary = steering_summary(effects)
    for dose in (-0.2, 0.2):
        line = one(summary, framing=ALL, direction=PROBE, dose=dose, statistic=RAW)
        assert line["p_random"] == pytest.approx(1 / 31)
        assert np.sign(line["value"]) == np.sign(dose)


def test_the_figure_and_the_words_hold_the_numbers_of_the_summary():
    summary = steering_summary(made_up())
    figure = dose_response(summary, "m", AT_ALL)
    assert len(figure.axes) == 6
    probe = next(line for line in figure.axes[0].get_lines() if str(line.get_label()).startswith("probe"))
    np.testing.assert_allclose(probe.get_ydata(), [-2, 2])
    words = what_it_shows(summary, AT_ALL)
    assert "honest, in 2 of 2 changes" in words
    assert "smallest possible p: 0.10" in words
    assert table(summary).row_count == 2 * 3


def test_replies_are_those_of_the_changed_model(llama, prompts):
    planned = interventions({PROBE: unit()}, torch.zeros(WIDTH), 50.0, modes=["add"], scales=[1])
    replies = steered_replies(llama, prompts[:2], 1, planned, 4, at=AT_ALL)
    assert replies["direction"].tolist() == ["none"] * 2 + [PROBE] * 4
    for number, row in enumerate(replies.itertuples()):
        ids = list(prompts[row.prompt])
        for _ in range(4):  # greedy, by hand, no cache
            with torch.no_grad():
                if row.direction == PROBE:
                    with llama.intervening(1, add(unit(), row.dose * 50)):
                        ids.append(int(llama.model(torch.tensor([ids])).logits[0, -1].argmax()))
                else:
                    ids.append(int(llama.model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert row.text == llama.tokenizer.decode(ids[-4:], skip_special_tokens=True), number
    assert replies["text"].nunique() > 2
    assert n_hooks(llama) == 0


@pytest.mark.parametrize(
    ("text", "begins"),
    [
        ("Yes, you are", "Yes"),
        (" no.", "No"),
        ("**NO**", "No"),
        ("Nothing", "neither"),
        ("yesterday", "neither"),
        ("", "neither"),
    ],
)
def test_a_reply_begins_with_a_whole_word(text, begins):
    assert reply_begins(text) == begins
