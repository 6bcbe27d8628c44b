"""Whether ordinary text is still ordinary: cross-entropy of an organism and of its base on the same text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pandas as pd
import torch
from torch.nn.functional import cross_entropy

from klb_probe.lens.corpus import Corpus
from klb_probe.models.residual_model import ResidualModel
from klb_probe.organisms.numbers import Number
from klb_probe.organisms.rates import ratio

TEXTS, TOKENS, SHORTEST = 64, 128, 8


def perplexity_table(
    organism: ResidualModel, base: ResidualModel, texts: Mapping[str, Corpus], on_done: Callable[[int], object]
) -> pd.DataFrame:
    """One line a text: its source, its tokens, and the summed negative log-likelihood (nats) under both models."""
    lines = []
    for source, corpus in texts.items():
        for number, ids in enumerate(corpus.prompts):
            sums = {name: _loss(model, ids) for name, model in (("organism", organism), ("base", base))}
            lines.append({"source": source, "text": number, "tokens": len(ids) - 1, **sums})
            on_done(1)
    return pd.DataFrame(lines)


def perplexity_numbers(table: pd.DataFrame) -> Iterator[Number]:
    """Nats a token of both, and their difference; on text that the base sampled this estimates a KL divergence."""
    for source, group in table.groupby("source", sort=False):
        amounts = {
            "organism, nats a token": group["organism"],
            "base, nats a token": group["base"],
            "difference, nats a token": group["organism"] - group["base"],
        }
        for measure, amount in amounts.items():
            yield Number.of("perplexity", source, "all", measure, ratio(amount, group["tokens"]))


def _loss(model: ResidualModel, ids: tuple[int, ...]) -> float:
    """Summed negative log-likelihood of all tokens but the first."""
    positions = torch.arange(len(ids) - 1)[None]
    logits = model.capture(torch.tensor([ids]), [], positions, range(model.vocab_size)).logits[0]
    losses = cross_entropy(logits, torch.tensor(ids[1:], device=logits.device), reduction="none")
    return float(np.sum(losses.double().cpu().numpy()))
