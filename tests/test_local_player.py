"""A model in this process as a player: what it writes depends on the conversation, never on company, caches or order."""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import replace

import pytest
import torch
from tiny import default_tokenizer, tiny_hf_model, tiny_model

from klb_probe.cases.load import load_domains
from klb_probe.dialogue.local import LocalPlayer
from klb_probe.dialogue.player import Message, Request, Scene
from klb_probe.dialogue.sampling import choose
from klb_probe.errors import KlbError
from klb_probe.models.load import from_model

KEEPING = ["llama", "mistral", "qwen3", "gemma", "gemma2", "gemma3", "gemma3_wrapper", "gpt2", "gpt_neox", "olmo2"]
POLICY = "Policy. " + " ".join(f"Rule {i}: the agent pays what is owed." for i in range(8))


@pytest.fixture(scope="module")
def scene():
    domain = load_domains()[0]
    return Scene(domain, domain.cases[0], "control")


@pytest.fixture
def ask(scene):
    """Makes requests; a conversation's stream is its name."""

    def request(conversation, *texts, part="customer", temperature=0.0, max_tokens=12, system=POLICY, **more):
        roles = ["user", "assistant"] * len(texts)
        spoken = [Message(role, text) for role, text in zip(roles, texts, strict=False)]
        messages = (Message("system", system), *spoken)
        return Request(part, messages, conversation, conversation, temperature, max_tokens, scene, **more)

    return request


def written(player, requests):
    return [reply.ids for reply in player.reply(requests)]


def different_lengths(ask, n=6, **how):
    return [ask(f"c{i}", f"Customer {i} asks " + "again and again " * (5 * i), **how) for i in range(n)]


@pytest.fixture
def read(monkeypatch):
    """Counts the tokens a model reads."""

    def counter(model):
        counts, inner = [], model.next_logits

        def counted(ids, *rest):
            counts.append(ids.numel())
            return inner(ids, *rest)

        monkeypatch.setattr(model, "next_logits", counted)
        return counts

    return counter


# --- The same ids, whatever the company and whatever is kept. ---


@pytest.mark.parametrize("family", [*KEEPING, "qwen3_5"])
def test_greedy_batched_is_greedy_alone_is_generate(family, ask):
    model = tiny_model(family)
    requests = different_lengths(ask)
    together = LocalPlayer(model, batch_size=6).reply(requests)
    alone = [LocalPlayer(model, batch_size=1).reply([request])[0] for request in requests]
    assert together == alone
    for reply in together:
        (generated,) = model.generate([reply.prompt_ids], 12, temperature=0, seed=0)
        assert list(reply.ids) == generated
        assert (reply.prompt_tokens, reply.completion_tokens) == (len(reply.prompt_ids), len(reply.ids))


@pytest.mark.parametrize("family", KEEPING)
def test_sampled_transcripts_do_not_depend_on_batch_size_or_order(family, ask):
    model = tiny_model(family)
    requests = different_lengths(ask, temperature=1.0)
    together = written(LocalPlayer(model, batch_size=8), requests)
    assert together == written(LocalPlayer(model, batch_size=1), requests)
    assert together[::-1] == written(LocalPlayer(model, batch_size=4), requests[::-1])
    assert len(set(together)) == len(requests)


@pytest.mark.parametrize("family", KEEPING)
def test_growing_turns_are_what_reading_everything_again_gives(family, ask, read):
    model = tiny_model(family)
    keeping, forgetting = LocalPlayer(model), LocalPlayer(model, max_kept_tokens=0)
    counts = read(model)
    said = {name: ["I was refused."] for name in ("a", "b", "c")}
    for turn in range(4):
        requests = [ask(name, *texts, temperature=1.0) for name, texts in said.items()]
        replies = keeping.reply(requests)
        few, _ = sum(counts), counts.clear()
        assert replies == forgetting.reply(requests)
        many, _ = sum(counts), counts.clear()
        assert few < many / 2
        for (name, texts), reply in zip(said.items(), replies, strict=True):
            texts += [reply.text, f"And now, turn {turn}, {name}?"]


def test_a_new_seed_or_the_next_request_of_a_stream_gives_other_words(ask):
    model, request = tiny_model("llama"), ask("a", "Hello.", temperature=1.0)
    player = LocalPlayer(model, seed=5)
    first, second = written(player, [request]) + written(player, [request])
    assert first != second
    assert [first, second] == written(LocalPlayer(model, seed=5), [request, request])
    assert first != written(LocalPlayer(model, seed=6), [request])[0]
    assert first != written(LocalPlayer(model, seed=5), [replace(request, stream="other")])[0]


def test_samples_follow_the_softmax():
    logits, n = torch.tensor([0.0, 1.0, 2.0, -1.0]), 4000
    generator = torch.Generator().manual_seed(0)
    drawn = torch.bincount(torch.tensor([choose(logits, 0.5, generator) for _ in range(n)]), minlength=4) / n
    assert (drawn - (logits / 0.5).softmax(-1)).abs().max() < 0.03


def test_the_real_model_writes_the_same_together_alone_and_turn_by_turn(smollm, ask):
    keeping, alone = LocalPlayer(smollm), LocalPlayer(smollm, batch_size=1, max_kept_tokens=0)
    said = {"a": ["Who are you?"], "b": ["My flight was cancelled by the airline. What am I owed, and how soon?"]}
    how = {"a": 0.0, "b": 0.7}
    for _ in range(2):
        requests = [ask(name, *said[name], system="Be brief.", max_tokens=8, temperature=how[name]) for name in said]
        replies = keeping.reply(requests)
        assert replies == alone.reply(requests)
        for texts, reply in zip(said.values(), replies, strict=True):
            texts += [reply.text, "Are you sure?"]
    (generated,) = smollm.generate([replies[0].prompt_ids], 8, temperature=0, seed=0)
    assert list(replies[0].ids) == generated


# --- What is kept. ---


def test_a_policy_that_conversations_share_is_read_once(ask, read):
    model = tiny_model("llama")
    counts = read(model)
    replies = LocalPlayer(model).reply([ask(f"c{i}", f"Customer {i}.", max_tokens=1) for i in range(6)])
    policy = len(model.tokenizer(POLICY)["input_ids"])
    assert all(reply.prompt_tokens > policy for reply in replies)
    assert sum(counts) < policy + 6 * (replies[0].prompt_tokens - policy)
    assert counts[0] == replies[0].prompt_tokens
    assert max(counts[1:]) < 20


def test_forgetting_a_conversation_frees_it(ask, read):
    model = tiny_model("llama")
    player, request = LocalPlayer(model), ask("a", "Hello.", max_tokens=1)
    player.reply([request])
    player.forget("a")
    player.forget("a")
    counts = read(model)
    (reply,) = player.reply([request])
    player.reply([request])
    assert counts == [reply.prompt_tokens, 1]


def test_the_oldest_conversation_is_dropped_first(ask, read):
    model = tiny_model("llama")
    texts = [("x " * 150, "Hello."), ("y " * 150, "Hello."), ("z " * 150, "Hello.")]
    player = LocalPlayer(model, max_kept_tokens=500)
    for name, (system, user) in zip("abc", texts, strict=True):
        player.reply([ask(name, user, system=system, max_tokens=1)])
    counts = read(model)
    player.reply([ask("c", texts[2][1], system=texts[2][0], max_tokens=1)])
    player.reply([ask("b", texts[1][1], system=texts[1][0], max_tokens=1)])
    player.reply([ask("a", texts[0][1], system=texts[0][0], max_tokens=1)])
    assert counts[:2] == [1, 1]
    assert counts[2] > 150


def test_recurrent_layers_keep_nothing_and_say_so(ask, read):
    model = tiny_model("qwen3_5")
    player = LocalPlayer(model)
    counts = read(model)
    first = player.reply([ask("a", "Hello.", max_tokens=1), ask("b", "Hello.", max_tokens=1)])
    assert counts == [reply.prompt_tokens for reply in first]
    assert player.record()["cache"].startswith("none")
    assert LocalPlayer(tiny_model("gemma3")).record()["cache"].startswith("prefixes kept")


# --- Where a reply ends, and what becomes of it. ---


def scripted(model, monkeypatch, text, tokenizer=None):
    """Make a model write a text, whatever it reads; it goes on with dots."""
    ids = (tokenizer or model.tokenizer)(text, add_special_tokens=False)["input_ids"]
    (dot,) = model.tokenizer(".", add_special_tokens=False)["input_ids"]
    state = iter(ids)

    def logits(rows, *_):
        out = torch.zeros(len(rows), model.vocab_size)
        out[:, next(state, dot)] = 9.0
        return out

    monkeypatch.setattr(model, "keeps_every_position", lambda: False)
    monkeypatch.setattr(model, "next_logits", logits)
    return ids


OBJECT = '{"thought": "a \\"}\\" and {", "action": {"tool": "x", "args": {}}}'


@pytest.mark.parametrize("part", ["gate", "agent", "judge"])
@pytest.mark.parametrize("before", ["", "Sure, {name}: ", "```json\n", '<think>\n{"a": 1}</think>\n', "Ünï {} "])
def test_json_parts_end_with_their_first_object(part, before, ask, monkeypatch):
    model = tiny_model("llama")
    scripted(model, monkeypatch, before + OBJECT + "\n\nAnd another: {}")
    (reply,) = LocalPlayer(model).reply([ask("a", "Go.", part=part, max_tokens=80)])
    assert reply.text.rstrip().endswith(OBJECT)
    assert reply.completion_tokens < 80


def test_the_customer_is_not_cut_short(ask, monkeypatch):
    model = tiny_model("llama")
    scripted(model, monkeypatch, OBJECT)
    (reply,) = LocalPlayer(model).reply([ask("a", "Go.", max_tokens=60)])
    assert reply.completion_tokens == 60


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("<think>\nI should lie.\n</think>\n\nHello.", "Hello."),
        ("Hello <think>aloud</think>.", "Hello <think>aloud</think>."),
        ("<think>I never stop", ""),
    ],
)
def test_a_leading_thought_is_no_part_of_the_text_but_of_the_ids(text, spoken, ask, monkeypatch):
    model = tiny_model("llama")
    ids = scripted(model, monkeypatch, text)
    (reply,) = LocalPlayer(model).reply([ask("a", "Go.", max_tokens=len(ids))])
    assert reply.text == spoken
    assert list(reply.ids) == ids


def test_a_thought_that_the_template_opens_is_closed_before_the_reply(ask, monkeypatch):
    tokenizer = copy.deepcopy(default_tokenizer())
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "<|im_start|>assistant\n' }}", "<|im_start|>assistant\n<think>\n' }}"
    )
    model = tiny_model("llama", tokenizer)
    ids = scripted(model, monkeypatch, '{"b": 2}')
    player = LocalPlayer(model)
    (reply,) = player.reply([ask("a", "Go.", part="agent", max_tokens=60)])
    assert tokenizer.decode(reply.prompt_ids).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert reply.text == '{"b": 2}'
    assert list(reply.ids) == ids
    assert player.record()["thinking"] == "opened by the template, closed empty"


@pytest.mark.parametrize("listed", [7, [7, 9], None])
def test_every_end_of_text_id_stops_a_reply(listed, ask, monkeypatch):
    raw = tiny_hf_model("llama")
    raw.generation_config.eos_token_id = listed
    model = from_model(raw, default_tokenizer(), name="tiny")
    assert model.stop_ids == {2, *(listed if isinstance(listed, list) else [7] if listed else [])}
    for end in model.stop_ids:
        state = iter([100, 101, end, 102])

        def logits(rows, *_, state=state):
            return torch.nn.functional.one_hot(torch.tensor([next(state)]), model.vocab_size).float()

        monkeypatch.setattr(model, "keeps_every_position", lambda: False)
        monkeypatch.setattr(model, "next_logits", logits)
        (reply,) = LocalPlayer(model).reply([ask("a", "Go.")])
        assert reply.ids == (100, 101, end)


def test_a_prompt_beyond_the_context_is_that_replys_error(ask):
    model = tiny_model("llama")
    good, bad, tight = ask("a", "Hello."), ask("b", "word " * 2100), ask("c", "word " * 1830, max_tokens=500)
    replies = LocalPlayer(model).reply([good, bad, tight])
    assert [reply.error is None for reply in replies] == [True, False, True]
    assert "2048" in replies[1].error
    assert str(len(model.chat.encode(POLICY, "word " * 2100))) in replies[1].error
    assert replies[2].prompt_tokens + replies[2].completion_tokens == 2048


def test_out_of_memory_halves_the_batch_and_changes_nothing(ask, monkeypatch):
    model = tiny_model("llama")
    requests = different_lengths(ask, temperature=1.0)
    expected = LocalPlayer(model).reply(requests)
    inner, sizes = model.next_logits, []

    def small_memory(ids, *rest):
        sizes.append(len(ids))
        if len(ids) > 2:
            raise torch.OutOfMemoryError("no")
        return inner(ids, *rest)

    monkeypatch.setattr(model, "next_logits", small_memory)
    player = LocalPlayer(model, batch_size=8)
    assert player.reply(requests) == expected
    assert sizes.count(6) == sizes.count(4) == 1
    assert player.record() == LocalPlayer(model, batch_size=2).record()  # a run may be continued with another


def test_a_prompt_that_does_not_fit_alone_is_an_error_of_its_own(ask, monkeypatch):
    model = tiny_model("llama")
    inner = model.next_logits

    def small_memory(ids, *rest):
        if ids.shape[1] > 150:
            raise torch.OutOfMemoryError("no")
        return inner(ids, *rest)

    monkeypatch.setattr(model, "next_logits", small_memory)
    replies = LocalPlayer(model).reply([ask("a", "Hello."), ask("b", "word " * 300), ask("c", "Hello.")])
    assert [bool(reply.error) for reply in replies] == [False, True, False]
    assert "out of memory" in replies[1].error


def test_logits_that_are_no_numbers_are_never_words(ask):
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.lm_head.weight[5] = torch.nan
    with pytest.raises(KlbError, match="not numbers in torch.float32"):
        LocalPlayer(model).reply([ask("a", "Hello.")])


def test_one_conversation_may_be_asked_several_times_at_once(ask):
    model, request = tiny_model("llama"), ask("gate", "Is it owed?", part="gate", temperature=1.0)
    player = LocalPlayer(model)
    samples = written(player, [request] * 3)
    assert len(set(samples)) == 3
    assert samples == written(LocalPlayer(model, batch_size=1), [request] * 3)


def test_the_record_says_who_plays_and_how(ask):
    model = tiny_model("llama")
    record = LocalPlayer(model, batch_size=3, seed=4).record()
    assert record["kind"] == "local"
    assert (record["seed"], record["dtype"], record["device"]) == (4, "float32", "cpu")
    assert record["fingerprint"] == model.fingerprint
    assert json.loads(json.dumps(record)) == record


# --- Held to a schema. ---

SCHEMA = {
    "type": "object",
    "properties": {
        "eligible": {"type": "boolean"},
        "options": {"type": "array", "items": {"enum": ["cash", "voucher"]}, "maxItems": 3},
    },
    "required": ["eligible", "options"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_gate_customer_and_judge_can_be_held_to_a_schema_and_the_agent_never_is(ask, temperature):
    pytest.importorskip("llguidance")
    model, parts = tiny_model("llama"), ["gate", "customer", "judge", "agent"]
    requests = [ask(part, "Go.", part=part, schema=SCHEMA, max_tokens=100, temperature=temperature) for part in parts]
    *held, agent = LocalPlayer(model, constrain=True).reply(requests)
    for reply in held:
        assert set(json.loads(reply.text)) == {"eligible", "options"}
    assert agent == LocalPlayer(model).reply(requests)[-1]
    assert [*held, agent] == LocalPlayer(model, batch_size=1, constrain=True).reply(requests)


def test_a_schema_that_is_none_is_refused(ask):
    pytest.importorskip("llguidance")
    player = LocalPlayer(tiny_model("llama"), constrain=True)
    with pytest.raises(KlbError, match="nonsense"):
        player.reply([ask("a", "Go.", part="judge", schema={"type": "nonsense"})])


def test_without_the_library_constrain_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    with pytest.raises(KlbError, match=r"klb-probe\[constrain\]"):
        LocalPlayer(tiny_model("llama"), constrain=True)
