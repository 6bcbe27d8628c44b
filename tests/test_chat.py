"""Text becomes ids in one place: one BOS, no second system prompt, and an answer position right before the answer."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from klb_probe.errors import KlbError
from klb_probe.models.chat import automatic_prefix, encode_text, probe_chat_format

SPECIAL = ["<s>", "</s>", "<|turn|>"]
FOLDED = "chat template, system message folded into the user turn"

CHATML = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
OWN_BOS = "{{ bos_token }}" + CHATML
REJECTS_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + OWN_BOS
DROPS_SYSTEM = (
    "{{ bos_token }}{% for m in messages if m.role != 'system' %}<|turn|>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
MOVES_SYSTEM = (  # as Gemma 3 does
    "{{ bos_token }}{% set first = '' %}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
    "{% set messages = messages[1:] %}{% endif %}<|turn|>user\n{{ first }}{{ messages[0].content }}</s>\n<|turn|>assistant\n"
)
REASONING = CHATML + "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
DEFAULT_SYSTEM = "{% if messages[0].role != 'system' %}<|turn|>system\nI am a default.</s>\n{% endif %}" + CHATML
ENDS_IN_SPECIAL = CHATML.replace("<|turn|>assistant\n", "<|turn|>")
ENDS_IN_BRACKET = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"


def byte_level(words=(), *, add_bos=False, template=None, bos=True):
    """A GPT-2-like byte-level BPE tokenizer in which exactly the given words (``Ġ`` for a space before) are single tokens."""
    vocab = {token: i for i, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    merges = []
    for word in sorted(words, key=lambda word: word.startswith("Ġ")):
        body = word.removeprefix("Ġ")
        steps = [(body[:i], body[i]) for i in range(1, len(body))]
        for pair in [*steps, *([("Ġ", body)] if word.startswith("Ġ") else [])]:
            if pair not in merges:
                merges.append(pair)
                vocab.setdefault("".join(pair), len(vocab))
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return wrapped(core, add_bos=add_bos, template=template, bos=bos)


def metaspace(pieces=(), *, add_bos=True, template=None, prepend="first"):
    """A SentencePiece-like tokenizer: ``▁`` for a space, the given pieces, single characters for the rest."""
    characters = [chr(code) for code in range(33, 127)]
    vocab = [(piece, 0.0) for piece in ["<unk>", *SPECIAL]]
    vocab += [(piece, -1.0) for piece in pieces] + [(piece, -8.0) for piece in ["▁", "\n", *characters] if piece not in pieces]
    core = Tokenizer(models.Unigram(vocab, unk_id=0))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    core.decoder = decoders.Metaspace(prepend_scheme=prepend)
    return wrapped(core, add_bos=add_bos, template=template)


def wrapped(core, *, add_bos, template, bos=True):
    core.add_special_tokens(SPECIAL)
    if add_bos:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", core.token_to_id("<s>"))]
        )
    names = {"bos_token": "<s>"} if bos else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="</s>", additional_special_tokens=["<|turn|>"], chat_template=template, **names
    )


tokenizers_that = pytest.mark.parametrize("make", [byte_level, metaspace], ids=["byte level", "metaspace"])


@tokenizers_that
@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize(
    "template", [OWN_BOS, REJECTS_SYSTEM, DROPS_SYSTEM, MOVES_SYSTEM], ids=["own", "rejects", "drops", "moves"]
)
def test_a_template_with_its_own_bos_gives_exactly_one(make, add_bos, template):
    tokenizer = make(add_bos=add_bos, template=template)
    ids = probe_chat_format(tokenizer).encode("Be true.", "Is it?")
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1


def test_the_naive_way_gives_two_bos():
    """The trap itself, so that the law above is known to be able to fail."""
    tokenizer = byte_level(add_bos=True, template=OWN_BOS)
    text = probe_chat_format(tokenizer).render("Be true.", "Is it?")
    assert tokenizer(text)["input_ids"].count(tokenizer.bos_token_id) == 2


def test_a_template_without_bos_gets_none_from_the_tokenizer():
    tokenizer = byte_level(add_bos=True, template=CHATML)
    assert tokenizer.bos_token_id not in probe_chat_format(tokenizer).encode("Be true.", "Is it?")


def test_two_bos_from_a_template_are_refused():
    chat = probe_chat_format(byte_level(template="{{ bos_token }}" + OWN_BOS))
    with pytest.raises(KlbError, match="BOS"):
        chat.encode("Be true.", "Is it?")


def test_ids_are_those_of_the_rendered_text():
    for tokenizer in (byte_level(template=OWN_BOS), byte_level(template=REJECTS_SYSTEM), byte_level(template=REASONING)):
        chat = probe_chat_format(tokenizer)
        assert tokenizer.decode(chat.encode("Be true.", "Is it?")) == chat.render("Be true.", "Is it?")


def test_a_system_message_is_sent_where_the_template_takes_one():
    chat = probe_chat_format(byte_level(template=CHATML))
    assert chat.style == "chat template"
    assert chat.render("Be true.", "Is it?") == "<|turn|>system\nBe true.</s>\n<|turn|>user\nIs it?</s>\n<|turn|>assistant\n"


@pytest.mark.parametrize("template", [REJECTS_SYSTEM, DROPS_SYSTEM], ids=["rejected", "silently dropped"])
def test_a_system_message_the_template_will_not_carry_goes_into_the_user_turn(template):
    chat = probe_chat_format(byte_level(template=template))
    assert chat.style == FOLDED
    assert chat.render("Be true.", "Is it?") == "<s><|turn|>user\nBe true.\n\nIs it?</s>\n<|turn|>assistant\n"


def test_a_template_that_moves_the_system_message_itself_is_left_to_do_so():
    chat = probe_chat_format(byte_level(template=MOVES_SYSTEM))
    assert chat.style == "chat template"
    assert chat.render("Be true.", "Is it?").count("Be true.") == 1


@pytest.mark.parametrize("template", [CHATML, REJECTS_SYSTEM, DROPS_SYSTEM, MOVES_SYSTEM, REASONING, None])
def test_both_messages_reach_the_prompt_once_and_in_order(template):
    text = probe_chat_format(byte_level(template=template)).render("SYSTEM {words}", "USER {{ words }}")
    assert text.count("SYSTEM {words}") == 1
    assert text.count("USER {{ words }}") == 1
    assert text.index("SYSTEM") < text.index("USER")


@tokenizers_that
@pytest.mark.parametrize("add_bos", [True, False])
def test_without_a_template_the_prompt_is_plain_text(make, add_bos):
    tokenizer = make(add_bos=add_bos)
    chat = probe_chat_format(tokenizer)
    assert chat.style == "plain text"
    text = chat.render("Be true.", "Is it?")
    assert text.startswith("Be true.\n\nIs it?")
    assert text.endswith("\n\nAnswer:")
    ids = chat.encode("Be true.", "Is it?")
    assert ids == tokenizer(text)["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == (ids[0] == tokenizer.bos_token_id) == add_bos
    assert tokenizer.decode(ids[-1:]).endswith(":")


def test_a_default_system_prompt_of_the_template_never_shows():
    tokenizer = byte_level(template=DEFAULT_SYSTEM)
    assert "I am a default." in tokenizer.apply_chat_template([{"role": "user", "content": "u"}], tokenize=False)
    assert "I am a default." not in probe_chat_format(tokenizer).render("Be true.", "Is it?")


def test_smollm_injects_a_system_prompt_that_never_reaches_ours(smollm):
    bare = smollm.tokenizer.apply_chat_template([{"role": "user", "content": "u"}], tokenize=False)
    assert "named SmolLM" in bare
    text = smollm.tokenizer.decode(smollm.chat.encode("Be true.", "Is it?"))
    assert "SmolLM" not in text
    assert text.count("system") == 1
    assert smollm.chat.style == "chat template"


def test_a_reasoning_template_is_answered_after_an_empty_think_block():
    tokenizer = byte_level(["Yes"], template=REASONING)
    chat = probe_chat_format(tokenizer)
    ids = chat.encode("Be true.", "Is it?")
    assert tokenizer.decode(ids).endswith("<|turn|>assistant\n<think>\n\n</think>\n\n")
    assert tokenizer.decode(ids[-2:]) == "\n\n"
    assert chat.answer_prefix == ""
    assert chat.next_id("Yes") == tokenizer.convert_tokens_to_ids("Yes")


@pytest.mark.parametrize(
    ("template", "prefix"),
    [(CHATML, ""), (REASONING, ""), (ENDS_IN_SPECIAL, ""), (ENDS_IN_BRACKET, " "), (None, " ")],
    ids=["newline", "think block", "special token", "bracket", "plain text"],
)
def test_an_answer_starts_with_a_space_unless_the_prompt_ends_in_white_space_or_a_special_token(template, prefix):
    assert probe_chat_format(byte_level(template=template)).answer_prefix == prefix


# --- The BOS policy of plain text. ---


@tokenizers_that
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("text", ["Some text.", "", " led by a space", "Yes"])
def test_the_bos_policy_decides_over_the_tokenizer(make, adds, text):
    tokenizer = make(add_bos=adds)
    bos = tokenizer.bos_token_id
    bare = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert encode_text(tokenizer, text, "never") == bare
    assert encode_text(tokenizer, text, "always") == [bos, *bare]
    assert encode_text(tokenizer, text, "auto") == tokenizer(text)["input_ids"] == [bos] * adds + bare
    assert automatic_prefix(tokenizer) == [bos] * adds


def test_a_bos_that_does_not_exist_cannot_be_forced():
    tokenizer = byte_level(bos=False)
    assert encode_text(tokenizer, "text", "auto") == encode_text(tokenizer, "text", "never")
    with pytest.raises(KlbError, match="no BOS token"):
        encode_text(tokenizer, "text", "always")


def test_an_end_token_the_tokenizer_appends_is_left_out():
    tokenizer = byte_level(add_bos=True)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    assert tokenizer("text")["input_ids"][-1] == tokenizer.eos_token_id
    assert encode_text(tokenizer, "text", "auto") == [0, *encode_text(tokenizer, "text", "never")]


def test_smollm_adds_no_bos_to_plain_text(smollm):
    assert automatic_prefix(smollm.tokenizer) == []
    assert encode_text(smollm.tokenizer, "text", "always") == [1, *encode_text(smollm.tokenizer, "text", "auto")]


# --- Whole conversations. ---

TALK = [("system", "Be true."), ("user", "Is it?"), ("assistant", "No."), ("user", "Sure?")]
ALTERNATES = (  # as Gemma 2 does
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
) + OWN_BOS


@tokenizers_that
@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("template", [OWN_BOS, REJECTS_SYSTEM, DROPS_SYSTEM, ALTERNATES, CHATML, REASONING, None])
def test_a_conversation_of_two_messages_is_what_encode_gives(make, add_bos, template):
    chat = probe_chat_format(make(add_bos=add_bos, template=template))
    assert chat.encode_chat(TALK[:2]) == chat.encode("Be true.", "Is it?")


@pytest.mark.parametrize("template", [OWN_BOS, REJECTS_SYSTEM, DROPS_SYSTEM, ALTERNATES])
def test_a_conversation_has_one_bos_and_every_turn_once_and_in_order(template):
    tokenizer = byte_level(add_bos=True, template=template)
    chat = probe_chat_format(tokenizer)
    ids = chat.encode_chat(TALK)
    assert ids.count(tokenizer.bos_token_id) == 1
    text = tokenizer.decode(ids)
    places = [text.index(content) for _, content in TALK]
    assert places == sorted(places)
    assert text.endswith("<|turn|>assistant\n")


def test_a_template_without_system_role_gets_it_in_the_first_user_turn_only():
    chat = probe_chat_format(byte_level(template=ALTERNATES))
    assert chat.style == FOLDED
    first, second = "<|turn|>user\nBe true.\n\nIs it?</s>\n", "<|turn|>assistant\nNo.</s>\n<|turn|>user\nSure?</s>\n"
    assert chat.render_chat(TALK) == f"<s>{first}{second}<|turn|>assistant\n"


@pytest.mark.parametrize("template", [CHATML, ALTERNATES])
def test_turns_of_one_role_in_a_row_become_one(template):
    chat = probe_chat_format(byte_level(template=template))
    talk = [("system", "S."), ("user", "A."), ("user", "B."), ("assistant", "C."), ("assistant", "D."), ("user", "E.")]
    text = chat.render_chat(talk)
    assert "A.\n\nB.</s>" in text
    assert "<|turn|>assistant\nC.\n\nD.</s>" in text
    assert text.count("<|turn|>user") == 2


def test_a_reasoning_template_ends_in_an_empty_thought_whatever_was_said_before():
    text = probe_chat_format(byte_level(template=REASONING)).render_chat(TALK)
    assert text.count("<think>") == 1
    assert text.endswith("<think>\n\n</think>\n\n")


def test_a_conversation_in_plain_text():
    text = probe_chat_format(byte_level()).render_chat(TALK)
    assert text == "Be true.\n\nIs it?\n\nAnswer: No.\n\nSure?\n\nAnswer:"


@pytest.mark.parametrize(
    "talk",
    [[], TALK[:1], TALK[:3], [*TALK[1:], TALK[0], TALK[3]], [("tool", "x"), ("user", "u")], [TALK[0], *TALK]],
    ids=["empty", "no user", "assistant last", "late system", "unknown role", "two systems"],
)
@pytest.mark.parametrize("template", [CHATML, None])
def test_what_is_no_conversation_is_refused(talk, template):
    with pytest.raises(KlbError, match="user last"):
        probe_chat_format(byte_level(template=template)).encode_chat(talk)


def test_a_template_that_refuses_a_conversation_says_why():
    with pytest.raises(KlbError, match="roles must alternate"):
        probe_chat_format(byte_level(template=ALTERNATES)).encode_chat([("assistant", "Hello."), ("user", "Hi.")])
