"""Rows that begin alike are read together: a tree of tokens, in which what several rows share stands once.

The two records of a pair have policy, note and most of the record in common, and each is asked in two wordings. Every token
sees the tokens on its way from the root and no other, at the position it has in its own row, so that activations, loss and
gradient are those of the rows read one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from klb_probe.organisms.training_rows import Row

Weighing = Literal["tokens", "examples", "answers"]


@dataclass(frozen=True)
class Tree:
    """Rows as one tree of tokens.

    Attributes:
        ids: The tokens, each after the one before it in its row.
        parents: Index of the token before, -1 for the first.
        at: Indices at which a token of a completion is predicted.
        labels: What is predicted there.
        owners: Number of the row that each prediction belongs to.
        decisive: Whether the prediction is the one that tells the answer.
        formats: Of the rows.
    """

    ids: list[int]
    parents: list[int]
    at: list[int]
    labels: list[int]
    owners: list[int]
    decisive: list[bool]
    formats: list[str]

    def weights(self, weigh: Weighing) -> list[float]:
        """What each prediction counts for in the loss.

        With ``answers`` every completion counts the same, and the token that tells its answer as much as all its others, which
        are mostly form.
        """
        if weigh == "tokens":
            return [1.0] * len(self.owners)
        sizes = Counter(self.owners)  # two and more: a completion and the end of its turn
        made = list(zip(self.owners, self.decisive, strict=True))
        told = {owner for owner, decides in made if decides} if weigh == "answers" else set()
        return [
            1 / sizes[owner] if owner not in told else 0.5 if decides else 0.5 / (sizes[owner] - 1) for owner, decides in made
        ]


def grow(rows: Sequence[Row]) -> Tree:
    """The tree of several rows; the last id of a row is predicted and never read."""
    tree = Tree([], [], [], [], [], [], [row.format for row in rows])
    known: dict[tuple[int, int], int] = {}
    for owner, row in enumerate(rows):
        here = -1
        for number, token in enumerate(row.ids):
            if number >= row.n_prompt:
                tree.at.append(here)
                tree.labels.append(token)
                tree.owners.append(owner)
                tree.decisive.append(number == row.decisive)
            if number == len(row.ids) - 1:
                break
            if (here, token) not in known:
                known[here, token] = len(tree.ids)
                tree.ids.append(token)
                tree.parents.append(here)
            here = known[here, token]
    return tree


def trees(rows: Sequence[Row]) -> list[Tree]:
    """One tree a pair, in the order of first rows; a row of no pair is a tree of its own."""
    groups: dict[Any, list[Row]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(f"row {number}" if row.pair is None else row.pair, []).append(row)
    return [grow(group) for group in groups.values()]


def columns(made: Sequence[Tree], formats: Sequence[str], weigh: Weighing = "tokens") -> dict[str, list[Any]]:
    """Trees as columns for the trainer; ``formats`` holds an index into ``formats`` a row."""
    return {
        "weights": [tree.weights(weigh) for tree in made],
        **{name: [getattr(tree, name) for tree in made] for name in ("ids", "parents", "at", "labels", "owners", "decisive")},
        "formats": [[formats.index(one) for one in tree.formats] for tree in made],
    }


def collate(examples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Trees of a data set as one batch of B trees, padded on the right to T tokens, with R rows and P predictions in all.

    Returns:
        ``input_ids`` and ``position_ids`` ``[B, T]``; ``visible`` ``[B, 1, T, T]``, true where a token (third axis) sees
        another; ``tree``, ``at``, ``labels``, ``owners``, ``decisive`` and ``weights`` ``[P]``: of each prediction the tree,
        index, id, row, whether it tells the answer, and weight; ``format`` ``[R]``.
    """
    longest = max(len(one["ids"]) for one in examples)
    visible, positions = zip(*(_ways(one["parents"], longest) for one in examples), strict=True)
    counts = torch.tensor([len(one["at"]) for one in examples])
    rows = torch.tensor([0, *(len(one["formats"]) for one in examples)]).cumsum(0)[:-1]
    names = ("at", "labels", "owners", "decisive", "weights")
    batch = {name: torch.tensor([value for one in examples for value in one[name]]) for name in names}
    batch["owners"] += rows.repeat_interleave(counts)
    return batch | {
        "input_ids": pad_sequence([torch.tensor(one["ids"]) for one in examples], batch_first=True),
        "position_ids": torch.stack(positions),
        "visible": torch.stack(visible)[:, None],
        "tree": torch.arange(len(examples)).repeat_interleave(counts),
        "format": torch.tensor([number for one in examples for number in one["formats"]]),
    }


def _ways(parents: Sequence[int], size: int) -> tuple[Tensor, Tensor]:
    """Which tokens each token sees, ``[size, size]``, and its position, ``[size]``; padding sees itself."""
    visible = torch.eye(size, dtype=torch.bool)
    for here, before in enumerate(parents):
        if before >= 0:
            visible[here] |= visible[before]
    return visible, visible.sum(1) - 1
