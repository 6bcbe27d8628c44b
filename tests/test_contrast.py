"""Yes and No are paired single tokens, spelled as they stand where the answer starts."""

from __future__ import annotations

import pytest
import torch
from test_chat import CHATML, ENDS_IN_BRACKET, ENDS_IN_SPECIAL, REASONING, byte_level, metaspace

from klb_probe.errors import KlbError
from klb_probe.lens.contrast import TokenContrast, parse_pairs
from klb_probe.models.chat import probe_chat_format

BYTE_WORDS = ["Yes", "No", "ĠYes", "ĠNo"]
META_WORDS = ["Yes", "No", "▁Yes", "▁No"]


def contrast_of(tokenizer, *words):
    return TokenContrast.of(probe_chat_format(tokenizer), words or [("Yes", "No")])


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize(
    ("template", "mark"),
    [(CHATML, ""), (REASONING, ""), (ENDS_IN_SPECIAL, ""), (ENDS_IN_BRACKET, "Ġ"), (None, "Ġ")],
    ids=["newline", "think block", "special token", "bracket", "plain text"],
)
def test_byte_level_tokens_are_spaced_as_the_prompt_ends(template, mark, add_bos):
    tokenizer = byte_level(BYTE_WORDS, template=template, add_bos=add_bos)
    contrast = contrast_of(tokenizer)
    assert tokenizer.convert_ids_to_tokens(contrast.token_ids) == [f"{mark}Yes", f"{mark}No"]
    assert [side[0] for side in contrast.pairs[0]] == [tokenizer.decode(token) for token in contrast.token_ids]


@pytest.mark.parametrize(
    ("template", "mark"),
    [(CHATML, ""), (ENDS_IN_SPECIAL, ""), (ENDS_IN_BRACKET, "▁"), (None, "▁")],
    ids=["newline", "special token", "bracket", "plain text"],
)
def test_metaspace_tokens_are_spaced_as_the_prompt_ends(template, mark):
    tokenizer = metaspace(META_WORDS, template=template)
    assert tokenizer.convert_ids_to_tokens(contrast_of(tokenizer).token_ids) == [f"{mark}Yes", f"{mark}No"]


def test_a_tokenizer_that_spaces_every_stretch_gives_the_spaced_token_after_a_special_one():
    """Llama 2 style: text after a special token is given a space of its own."""
    tokenizer = metaspace(META_WORDS, template=ENDS_IN_SPECIAL, prepend="always")
    assert tokenizer.convert_ids_to_tokens(contrast_of(tokenizer).token_ids) == ["▁Yes", "▁No"]


@pytest.mark.parametrize(
    "tokenizer",
    [
        byte_level(BYTE_WORDS, template=CHATML),
        byte_level(BYTE_WORDS, add_bos=True),
        metaspace(META_WORDS),
        metaspace(META_WORDS, template=CHATML),
    ],
)
def test_a_token_of_the_contrast_continues_the_prompt(tokenizer):
    """Prompt ids plus the token are the ids of the answered text: what the model would have read next."""
    chat = probe_chat_format(tokenizer)
    prompt = chat.encode("Be true.", "Is it?")
    for yes, no in TokenContrast.of(chat).pairs:
        for text, token in (yes, no):
            answered = tokenizer.decode([*prompt, token])
            assert answered == tokenizer.decode(prompt) + text


@pytest.mark.parametrize("words", [["No", "ĠNo"], ["No"], []], ids=["several-token Yes", "no Yes at all", "bytes only"])
def test_a_word_of_several_tokens_is_refused_by_name(words):
    with pytest.raises(KlbError) as caught:
        contrast_of(byte_level(words, template=CHATML))
    assert "Yes/No" in str(caught.value)
    assert "single token" in str(caught.value)
    assert "--contrast" in str(caught.value)


def test_a_word_that_is_single_only_with_a_space_is_refused_where_no_space_comes():
    with pytest.raises(KlbError, match="single token"):
        contrast_of(metaspace(["▁Yes", "▁No"], template=CHATML))


def test_a_word_against_itself_is_refused():
    with pytest.raises(KlbError, match="Yes/Yes"):
        contrast_of(byte_level(BYTE_WORDS, template=CHATML), ("Yes", "Yes"))


@pytest.mark.parametrize(
    ("missing", "kept", "dropped"),
    [
        ({"YES"}, ["Yes", "No", "yes", "no"], [("YES", "NO")]),
        ({"NO"}, ["Yes", "No", "yes", "no"], [("YES", "NO")]),
        ({"YES", "no"}, ["Yes", "No"], [("yes", "no"), ("YES", "NO")]),
        (set(), ["Yes", "No", "yes", "no", "YES", "NO"], []),
    ],
    ids=["YES", "NO", "YES and no", "nothing"],
)
def test_pairs_are_dropped_whole_and_reported(missing, kept, dropped):
    forms = {"Yes", "No", "yes", "no", "YES", "NO"} - missing
    tokenizer = byte_level(sorted(forms), template=CHATML)
    contrast = contrast_of(tokenizer, ("Yes", "No"), ("yes", "no"), ("YES", "NO"))
    assert tokenizer.convert_ids_to_tokens(contrast.token_ids) == kept
    assert list(contrast.dropped) == dropped
    assert sum(yes[1] != no[1] for yes, no in contrast.pairs) == len(contrast.pairs) == len(kept) / 2


def test_a_pair_given_twice_counts_once():
    contrast = contrast_of(byte_level(BYTE_WORDS, template=CHATML), ("Yes", "No"), ("Yes", "No"))
    assert len(contrast.pairs) == 1


def random_contrast(n_pairs):
    sides = [((f"y{i}", 2 * i), (f"n{i}", 2 * i + 1)) for i in range(n_pairs)]
    return TokenContrast(tuple(sides))


@pytest.mark.parametrize("n_pairs", [1, 2, 3])
def test_the_margin_is_the_mean_over_pairs_of_yes_minus_no(n_pairs):
    contrast, vocabulary = random_contrast(n_pairs), torch.randn(4, 5, 100, dtype=torch.float64)
    by_hand = sum(vocabulary[..., yes[1]] - vocabulary[..., no[1]] for yes, no in contrast.pairs) / n_pairs
    torch.testing.assert_close(contrast.margin(vocabulary[..., contrast.token_ids]), by_hand)


@pytest.mark.parametrize("n_pairs", [1, 2, 3])
def test_swapping_yes_and_no_negates_the_margin(n_pairs):
    contrast, vocabulary = random_contrast(n_pairs), torch.randn(7, 100)
    swapped = TokenContrast(tuple((no, yes) for yes, no in contrast.pairs))
    torch.testing.assert_close(
        swapped.margin(vocabulary[..., swapped.token_ids]), -contrast.margin(vocabulary[..., contrast.token_ids])
    )


def test_flat_logits_have_no_margin_whatever_was_dropped():
    """Unequal sets of yes and no tokens would shift a flat margin by the log of their ratio."""
    tokenizer = byte_level(["Yes", "No", "yes", "no", "NO"], template=CHATML)
    contrast = contrast_of(tokenizer, ("Yes", "No"), ("yes", "no"), ("YES", "NO"))
    assert contrast.margin(torch.full((3, len(contrast.token_ids)), 1.7)).tolist() == [0, 0, 0]


def test_a_shift_of_all_logits_moves_no_margin():
    contrast, logits = random_contrast(2), torch.randn(6, 4, dtype=torch.float64)
    torch.testing.assert_close(contrast.margin(logits + torch.randn(6, 1, dtype=torch.float64)), contrast.margin(logits))


def test_on_the_default_model_capital_yes_and_no_are_known_tokens(smollm):
    contrast = TokenContrast.of(smollm.chat)
    assert contrast.token_ids == [10539, 5230]
    assert [smollm.tokenizer.decode(token) for token in contrast.token_ids] == ["Yes", "No"]


def test_on_the_default_model_all_capitals_are_dropped_though_no_is_a_token(smollm):
    assert smollm.chat.next_id("NO") is not None
    contrast = TokenContrast.of(smollm.chat, [("Yes", "No"), ("yes", "no"), ("YES", "NO")])
    assert contrast.dropped == (("YES", "NO"),)
    assert len(contrast.token_ids) == 4
    with pytest.raises(KlbError, match="YES/NO"):
        TokenContrast.of(smollm.chat, [("YES", "NO")])


def test_the_words_and_ids_used_are_printed(smollm):
    assert str(TokenContrast.of(smollm.chat)) == "'Yes' (10539) minus 'No' (5230)"


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("Yes/No", [("Yes", "No")]),
        (" Yes/No , yes/no", [("Yes", "No"), ("yes", "no")]),
        ("Ja/Nein", [("Ja", "Nein")]),
        ("是/否", [("是", "否")]),
    ],
)
def test_pairs_are_read_as_typed(text, pairs):
    assert list(parse_pairs(text)) == pairs


@pytest.mark.parametrize("text", ["", "Yes", "Yes/", "/No", "/", "Yes/No/Maybe", "Yes/No,", "Yes/No,yes", "Yes|No", ",Yes/No"])
def test_what_is_not_yes_slash_no_is_refused(text):
    with pytest.raises(KlbError, match="YES/NO"):
        parse_pairs(text)


PAIRS = ((("a", 1), ("b", 2)), (("c", 3), ("d", 4)), (("e", 5), ("f", 6)))


@pytest.mark.parametrize(
    ("reduction", "side"),
    [
        ("mean", lambda x: x.mean(-1)),
        ("first", lambda x: x[..., 0]),
        ("max", lambda x: x.amax(-1)),
        ("logsumexp", lambda x: x.exp().sum(-1).log()),
    ],
)
def test_each_side_is_reduced_by_itself(reduction, side):
    logits = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
    margin = TokenContrast(PAIRS, reduction=reduction).margin(logits)
    torch.testing.assert_close(margin, side(logits[:, 0::2]) - side(logits[:, 1::2]))


@pytest.mark.parametrize("reduction", ["mean", "first", "max", "logsumexp"])
def test_equal_logits_give_no_margin_whatever_the_reduction(reduction):
    """Unequal sides would show here: logsumexp over four against six shifts a flat margin by 0.41."""
    assert TokenContrast(PAIRS, reduction=reduction).margin(torch.full((6,), 3.0)).abs() < 1e-6


def test_both_spacings_come_in_pairs_on_the_default_model(smollm):
    contrast = TokenContrast.of(smollm.chat, (("Yes", "No"), ("yes", "no"), ("YES", "NO")), spaces="both", reduction="max")
    assert [(yes[0], no[0]) for yes, no in contrast.pairs] == [("Yes", "No"), ("yes", "no"), (" Yes", " No"), (" yes", " no")]
    assert contrast.dropped == (("YES", "NO"), (" YES", " NO"))
    assert len(set(contrast.token_ids)) == 8
    assert [smollm.tokenizer.decode([token]) for token in contrast.token_ids[:2]] == ["Yes", "No"]
    assert smollm.tokenizer.decode([contrast.token_ids[4]]) == " Yes"
    assert str(contrast).startswith("max of 'Yes'")


def test_an_unknown_reduction_or_spacing_is_refused(smollm):
    with pytest.raises(KlbError, match="median"):
        TokenContrast.of(smollm.chat, reduction="median")
    with pytest.raises(KlbError, match="none"):
        TokenContrast.of(smollm.chat, spaces="none")
