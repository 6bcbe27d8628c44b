"""Sampling with a random stream for each reply, so that nobody's draws depend on who else is talking."""

from __future__ import annotations

import hashlib
from collections import Counter

import torch
from torch import Tensor


class Streams:
    """Seeds of named random streams: the n-th draw from a stream has a seed of its own.

    Args:
        seed: Seed of all streams.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._drawn: Counter[str] = Counter()

    def next_seed(self, stream: str) -> int:
        """Seed of the stream's next reply (64 bits)."""
        n = self._drawn[stream]
        self._drawn[stream] += 1
        digest = hashlib.sha256(repr((self.seed, stream, n)).encode()).digest()
        return int.from_bytes(digest[:8], "big")


def choose(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    """The next id from one row of ``logits [vocab]``: the largest at temperature 0, else a sample by the Gumbel-max trick.

    ``generator`` lives on the CPU, so that the draws are those of any device.
    """
    logits = logits.float()
    if not temperature:
        return int(logits.argmax())
    uniform = torch.rand(len(logits), generator=generator).to(logits.device)
    return int((logits / temperature - torch.log(-torch.log(uniform))).argmax())
