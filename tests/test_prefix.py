"""Prefix sharing changes what is computed, never what is read."""

from __future__ import annotations

import pytest
import torch
from tiny import LAYERS, tiny_model

from klb_probe.models.prefix import prefill


def prompts_with_shared_prefixes() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)

    def fresh(n: int) -> list[int]:
        return torch.randint(3, 49_000, (n,), generator=generator).tolist()

    root = fresh(12)
    branch_a, branch_b = root + fresh(7), root + fresh(9)
    prompts = [branch_a + fresh(n) for n in (3, 8, 1)] + [branch_b + fresh(n) for n in (5, 2)]
    # A prompt that is another's prefix, a duplicate, a stranger, and a single token.
    return [*prompts, branch_a, prompts[0], fresh(10), fresh(1)]


def read_all(model, prompts, **options):
    residuals, logits = [None] * len(prompts), [None] * len(prompts)
    for indices, capture in prefill(model, prompts, range(LAYERS), [5, 6], **options):
        for row, index in enumerate(indices):
            assert residuals[index] is None, "a prompt was read twice"
            residuals[index], logits[index] = capture.residuals[:, row, 0], capture.logits[row, 0]
    return torch.stack(residuals), torch.stack(logits)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma2", "gemma3", "gpt2", "gpt_neox", "qwen3_5"])
@pytest.mark.parametrize("min_shared", [1, 4, 1000])
def test_shared_reads_equal_plain_reads(family, min_shared):
    model, prompts = tiny_model(family), prompts_with_shared_prefixes()
    residuals, logits = read_all(model, prompts, min_shared=min_shared, batch_size=3)
    for index, prompt in enumerate(prompts):
        plain = model.residuals([prompt], range(LAYERS), [-1])[:, 0, 0]
        torch.testing.assert_close(residuals[index], plain, atol=2e-5, rtol=1e-4)
        with torch.no_grad():
            own = model.model(torch.tensor([prompt])).logits[0, -1, [5, 6]]
        torch.testing.assert_close(logits[index], own, atol=2e-5, rtol=1e-4)


def tokens_computed(model, prompts, **options) -> int:
    seen = []
    handle = model.layout.blocks[0].register_forward_hook(lambda _m, _i, out: seen.append(out.shape[0] * out.shape[1]))
    try:
        read_all(model, prompts, **options)
    finally:
        handle.remove()
    return sum(seen)


def test_shared_tokens_are_computed_once():
    model, prompts = tiny_model("llama"), prompts_with_shared_prefixes()
    assert tokens_computed(model, prompts, min_shared=1000, batch_size=1) == sum(map(len, prompts))
    distinct = len({tuple(prompt[: i + 1]) for prompt in prompts for i in range(len(prompt))})
    # Every prompt keeps its last token for itself, so that it can be read; short shared ends are not worth a cache.
    shared = tokens_computed(model, prompts, min_shared=4, batch_size=1)
    assert distinct <= shared <= distinct + 4 * len(prompts)


def test_branches_share_even_where_the_root_is_too_short_to_be_worth_it():
    """A chat header common to all prompts must not hide the long prefixes behind it."""
    generator = torch.Generator().manual_seed(3)
    fresh = [torch.randint(3, 49_000, (n,), generator=generator).tolist() for n in (2, 3, 3, 40, 40, 40, 40)]
    root, first, second, *policies = fresh
    stems = [root + middle + policy for middle, policy in zip((first, first, second, second), policies, strict=True)]
    prompts = [[*stem, i, i + 1] for stem in stems for i in range(10, 16)]
    computed = tokens_computed(tiny_model("llama"), prompts, min_shared=16, batch_size=8)
    assert computed == sum(map(len, stems)) + 2 * len(prompts)


def test_every_prompt_is_read_once_whatever_the_batch_size():
    model, prompts = tiny_model("llama"), prompts_with_shared_prefixes()
    one, many = (read_all(model, prompts, min_shared=4, batch_size=size)[0] for size in (1, 100))
    torch.testing.assert_close(one, many, atol=2e-5, rtol=1e-4)


def spans(prompts, seed=1) -> list[list[int]]:
    """Positions of different numbers, some of them early."""
    generator = torch.Generator().manual_seed(seed)
    chosen = []
    for prompt in prompts:
        n = int(torch.randint(1, min(6, len(prompt)) + 1, (1,), generator=generator))
        late = range(len(prompt) // 2, len(prompt))
        chosen.append(sorted({late[int(i)] for i in torch.randint(0, len(late), (n,), generator=generator)}))
    chosen[0] = [0, len(prompts[0]) - 1]
    return chosen


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2", "qwen3_5"])
@pytest.mark.parametrize("token_ids", [[5, 6], []])
def test_positions_of_their_own_are_read_as_in_plain_reads(family, token_ids):
    model, prompts = tiny_model(family), prompts_with_shared_prefixes()
    wanted = spans(prompts)
    assert len({len(places) for places in wanted}) > 2
    seen = []
    for indices, capture in prefill(model, prompts, range(LAYERS), token_ids, positions=wanted, min_shared=2, batch_size=3):
        assert capture.residuals.shape[2] == max(len(wanted[index]) for index in indices)
        assert capture.logits.shape == (len(indices), capture.residuals.shape[2], len(token_ids))
        for row, index in enumerate(indices):
            n = len(wanted[index])
            plain = model.residuals([prompts[index]], range(LAYERS), wanted[index])[:, 0]
            torch.testing.assert_close(capture.residuals[:, row, :n], plain, atol=1e-5, rtol=1e-4)
            last = capture.residuals[:, row, n - 1 : n].expand(-1, capture.residuals.shape[2] - n, -1)
            torch.testing.assert_close(capture.residuals[:, row, n:], last, atol=0, rtol=0)
            with torch.no_grad():
                own = model.model(torch.tensor([prompts[index]])).logits[0, wanted[index]][:, token_ids]
            torch.testing.assert_close(capture.logits[row, :n], own, atol=2e-5, rtol=1e-4)
        seen += indices
    assert sorted(seen) == list(range(len(prompts)))


def test_prompts_share_what_comes_before_the_first_position_and_one_that_is_read_early_spoils_nothing():
    generator = torch.Generator().manual_seed(3)
    stem = torch.randint(3, 49_000, (50,), generator=generator).tolist()
    prompts = [[*stem, i, i + 1, i + 2] for i in range(10, 16)]
    late = [[50, 52]] * len(prompts)
    model = tiny_model("llama")

    def computed(positions):
        seen = []
        handle = model.layout.blocks[0].register_forward_hook(lambda _m, _i, out: seen.append(out.shape[0] * out.shape[1]))
        try:
            list(prefill(model, prompts, range(LAYERS), [], positions=positions, min_shared=16))
        finally:
            handle.remove()
        return sum(seen)

    assert computed(late) == len(stem) + 3 * len(prompts)
    assert computed([[3, 52], *late[1:]]) == len(prompts[0]) + len(stem) + 3 * (len(prompts) - 1)
    assert computed([[40, 52]] * len(prompts)) == 40 + 13 * len(prompts)
