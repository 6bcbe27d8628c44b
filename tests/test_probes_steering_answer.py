"""A change at the last prompt token only: one-token passes give what whole passes of the changed model give."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import LAYERS, WIDTH, tiny_model

from klb_probe.errors import KlbError
from klb_probe.lens.contrast import TokenContrast
from klb_probe.models.huggingface import HuggingFaceModel
from klb_probe.probes.steering import PROBE, interventions, random_directions, steered_replies, steering_effects
from klb_probe.probes.steering_figure import dose_response
from klb_probe.probes.steering_passes import AT_ALL, AT_ANSWER, at_last_position, each_row
from klb_probe.probes.steering_summary import does_not_show, steering_summary, what_it_shows

LAST = LAYERS - 1
SHARED = 40


@pytest.fixture(scope="module", params=["llama", "gpt2", "gemma2", "qwen3_5"])  # qwen3_5: its cache cannot be stacked
def model(request):
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def prompts():
    """Two families with a long shared prefix each, of several lengths; one prompt starts another, and one comes twice."""
    rng = np.random.default_rng(0)
    shared = [rng.integers(10, 40_000, SHARED).tolist() for _ in range(2)]
    prompts = [[*shared[i % 2], *rng.integers(10, 40_000, 3 + i).tolist()] for i in range(5)]
    return [*prompts, prompts[3][:-2], prompts[0]]


def some_changes(n_random=3, scales=(0, 0.5)):
    # Not a vector of ones: a LayerNorm takes it out again.
    probe = torch.randn(WIDTH, generator=torch.Generator().manual_seed(1))
    vectors = {PROBE: probe, **random_directions(WIDTH, n_random, 0)}
    return interventions(vectors, torch.linspace(-1, 1, WIDTH), 4.0, modes=["add", "ablate"], scales=scales)


def effects_of(model, prompts, layer, planned, **options):
    return steering_effects(model, TokenContrast.of(model.chat), prompts, layer, planned, at=AT_ANSWER, **options)


def whole_pass(model, layer, ids, change):
    """Last logits of the model itself, read whole, by a hook of the test's own that changes the last position only."""

    def hook(_module, _inputs, output):
        hidden = output if torch.is_tensor(output) else output[0]
        hidden = hidden.clone()
        hidden[:, -1] = change(hidden[:, -1])
        return hidden if torch.is_tensor(output) else (hidden, *output[1:])

    handle = model.layout.blocks[layer].register_forward_hook(hook)
    try:
        with torch.no_grad():
            return model.model(torch.tensor([ids]), use_cache=False, logits_to_keep=1).logits[0, -1].float()
    finally:
        handle.remove()


@pytest.mark.parametrize("layer", [0, 2])
def test_margins_are_those_of_a_whole_pass_changed_at_the_last_position(model, prompts, layer):
    contrast, planned = TokenContrast.of(model.chat), some_changes(n_random=1)
    before = [whole_pass(model, layer, ids, lambda residual: residual) for ids in prompts]
    effects = effects_of(model, prompts, layer, planned, batch_size=4)
    assert len(effects) == len(planned) * len(prompts)
    for number, one in enumerate(planned):
        rows = effects[number * len(prompts) : (number + 1) * len(prompts)]
        assert rows["prompt"].tolist() == list(range(len(prompts)))
        for row, ids, unchanged in zip(rows.itertuples(), prompts, before, strict=True):
            after = whole_pass(model, layer, ids, one.change)
            assert row.baseline == pytest.approx(float(contrast.margin(unchanged[contrast.token_ids])), abs=1e-5)
            assert row.baseline_other == (int(unchanged.argmax()) not in contrast.token_ids)
            assert row.margin == pytest.approx(float(contrast.margin(after[contrast.token_ids])), abs=1e-5)
            assert row.other == (int(after.argmax()) not in contrast.token_ids)
    changed = effects[effects["dose"] != 0]
    assert (changed["margin"] - changed["baseline"]).abs().median() > 1e-2  # or nothing was tested


def test_dose_0_is_the_baseline(model, prompts):
    effects = effects_of(model, prompts, 1, some_changes(n_random=1))
    none = effects[effects["dose"] == 0]
    assert len(none) == 2 * len(prompts)
    np.testing.assert_allclose(none["margin"], none["baseline"], atol=1e-5)
    assert (none["other"] == none["baseline_other"]).all()


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_neither_batches_nor_the_order_of_prompts_and_changes_matter(llama, prompts, batch_size):
    model, planned, order = llama, some_changes(n_random=2), [4, 0, 6, 2, 5, 1, 3]
    expected = effects_of(model, prompts, 1, planned, batch_size=5)
    found = effects_of(model, [prompts[i] for i in order], 1, planned[::-1], batch_size=batch_size)
    found["prompt"] = np.array(order)[found["prompt"]]
    keys = ["prompt", "direction", "mode", "dose"]
    expected, found = (table.sort_values(keys, ignore_index=True) for table in (expected, found))
    assert not expected.duplicated(keys).any()
    np.testing.assert_allclose(found["margin"], expected["margin"], atol=1e-5)
    np.testing.assert_allclose(found["baseline"], expected["baseline"], atol=1e-5)


def test_at_the_last_block_a_change_of_the_last_token_is_all_there_is(llama, prompts):
    planned = some_changes()
    contrast = TokenContrast.of(llama.chat)
    here, everywhere = (steering_effects(llama, contrast, prompts, LAST, planned, at=at) for at in (AT_ANSWER, AT_ALL))
    np.testing.assert_allclose(here["margin"], everywhere["margin"], atol=1e-5)
    lower_here, lower_everywhere = (steering_effects(llama, contrast, prompts, 0, planned, at=at) for at in (AT_ANSWER, AT_ALL))
    assert (lower_here["margin"] - lower_everywhere["margin"]).abs().max() > 1e-2


def test_a_shared_start_is_read_once_and_a_change_costs_one_token(llama, prompts, monkeypatch):
    read, capture = [], HuggingFaceModel.capture

    def counted(self, ids, *arguments):
        read.append(tuple(ids.shape))
        return capture(self, ids, *arguments)

    monkeypatch.setattr(HuggingFaceModel, "capture", counted)
    planned, counts = some_changes(), []
    effects_of(llama, prompts, 1, planned, batch_size=6, on_batch=counts.append)
    n_rows = 1 + len(planned)
    prefixes = [length for rows, length in read if length > 1 or rows == 1]
    assert sum(prefixes) < 2 * SHARED + sum(len(ids) - SHARED for ids in prompts)
    rows = [rows for rows, length in read if length == 1 and rows > 1]
    assert sum(rows) == n_rows * len(prompts)
    assert max(rows) <= 6
    assert sum(counts) == n_rows * len(prompts)


def test_each_row_has_a_change_of_its_own_and_only_the_last_position_is_changed():
    residual = torch.randn(3, 4, WIDTH, generator=torch.Generator().manual_seed(0))
    changes = [lambda r: r, lambda r: r + 1, lambda r: 2 * r]
    changed = each_row(changes)(residual)
    torch.testing.assert_close(changed, torch.stack([residual[0], residual[1] + 1, 2 * residual[2]]))
    last = at_last_position(lambda r: r + 1)(residual)
    torch.testing.assert_close(last[:, :-1], residual[:, :-1])
    torch.testing.assert_close(last[:, -1], residual[:, -1] + 1)


def test_a_margin_that_is_no_number_names_its_intervention(llama, prompts):
    vectors = {PROBE: torch.ones(WIDTH)}
    fine = interventions(vectors, torch.zeros(WIDTH), 1.0, modes=["add"], scales=[1])
    broken = interventions(vectors, torch.zeros(WIDTH), float("inf"), modes=["add"], scales=[7])
    with pytest.raises(KlbError, match=r"probe, add -7: margins are not finite.*--scales"):
        effects_of(llama, prompts, 1, [*fine, *broken])
    assert sum(len(block._forward_hooks) for block in llama.layout.blocks) == 0


@pytest.mark.parametrize("configured", [True, False])
def test_replies_are_changed_at_the_last_prompt_token_and_every_later_one(llama, prompts, monkeypatch, configured):
    monkeypatch.setattr(llama.model.generation_config, "use_cache", configured)
    layer, n_tokens = 1, 4
    planned = interventions({PROBE: torch.ones(WIDTH)}, torch.zeros(WIDTH), 12.0, modes=["add"], scales=[1])
    replies = steered_replies(llama, prompts[:2], layer, planned, n_tokens, at=AT_ANSWER)
    for row in replies.itertuples():
        prompt = list(prompts[row.prompt])
        ids, shift = list(prompt), 0.0 if row.direction == "none" else row.dose * 12.0
        for _ in range(n_tokens):  # greedy, by hand, read whole: every position from the last of the prompt on is changed

            def change(output):
                output = output.clone()
                output[:, len(prompt) - 1 :] += shift * torch.ones(WIDTH) / WIDTH**0.5  # noqa: B023 (used at once)
                return output

            with torch.no_grad(), llama.intervening(layer, change):
                ids.append(int(llama.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        assert row.text == llama.tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True)
    everywhere = steered_replies(llama, prompts[:2], layer, planned, n_tokens, at=AT_ALL)
    assert (everywhere["text"] != replies["text"]).any()


def test_words_and_figure_say_where(llama, prompts):
    effects = effects_of(llama, prompts, 1, some_changes())
    effects["pair"] = [f"p{i // 2}" for i in effects["prompt"]]
    effects["framing"], effects["question"] = "deny", "plain"
    summary = steering_summary(effects)
    for at, words in ((AT_ANSWER, "at the last prompt token"), (AT_ALL, "at every token")):
        assert words in what_it_shows(summary, at)
        assert words in dose_response(summary, "m", at).axes[-1].get_xlabel()
    assert "Only the last prompt token" in does_not_show(AT_ANSWER)
    assert "Only the last prompt token" not in does_not_show(AT_ALL)
