"""A model in this process as a player: what it writes depends on the conversation, never on company, caches or order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import default_tokenizer, tiny_model

from klb_probe.cases.load import load_domains
from klb_probe.dialogue.local import LocalPlayer
from klb_probe.dialogue.player import Message, Request, Scene
from klb_probe.errors import KlbError

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
