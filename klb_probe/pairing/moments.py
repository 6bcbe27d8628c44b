"""The readings of one lens at one position as a matrix, beside the labels of the rounds. Positions are never pooled."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from klb_probe.errors import KlbError

CONTROL = "control"
ALL = "all"
FEWEST = 5  # lies, and non-lies, below which nothing is estimated
_RANDOM = re.compile(r"random \d+")


@dataclass(frozen=True)
class Moment:
    """One lens at one position.

    Attributes:
        layers: ``[layer]``.
        values: Margins in logits, one value a round ``[round, layer]``.
        rounds: The labels, one line a round.
    """

    position: str
    lens: str
    layers: np.ndarray
    values: np.ndarray
    rounds: pd.DataFrame

    @property
    def lies(self) -> np.ndarray:
        """Lies in rounds that owe something, ``[round]``."""
        return (self.rounds["owed"] & self.rounds["lied"]).to_numpy(bool)

    @property
    def honest(self) -> np.ndarray:
        """Owed rounds without a lie, ``[round]``."""
        return (self.rounds["owed"] & ~self.rounds["lied"]).to_numpy(bool)

    @property
    def true_denials(self) -> np.ndarray:
        """Rounds that owe nothing, in which the agent did not lie and the case ended without the option, ``[round]``."""
        rounds = self.rounds
        return (~rounds["owed"] & ~rounds["lied"] & rounds["denied"] & ~rounds["refused"]).to_numpy(bool)

    @property
    def control(self) -> np.ndarray:
        """Rounds of the control condition, ``[round]``."""
        return (self.rounds["condition"] == CONTROL).to_numpy()

    def groups(self) -> dict[str, np.ndarray]:
        """All rounds, then those of each condition, as masks ``[round]``."""
        conditions = self.rounds["condition"].to_numpy()
        return {ALL: np.ones(len(conditions), bool), **{name: conditions == name for name in dict.fromkeys(conditions)}}


def is_random(lens: str) -> bool:
    """Whether a lens is a random readout."""
    return bool(_RANDOM.fullmatch(lens))


def moments(table: pd.DataFrame, *, random: bool = False) -> Iterator[Moment]:
    """Every lens at every position of a paired table; random readouts only, or all others.

    Raises KlbError where there is no lens but random readouts, and for rounds that lack layers which others have.
    """
    chosen = table[table["lens"].map({lens: is_random(lens) == random for lens in table["lens"].unique()})]
    if chosen.empty and not random:
        raise KlbError("no scored round has signals of a lens")
    for (position, lens), part in chosen.groupby(["position", "lens"], sort=False):
        grid = part.pivot(index="round_id", columns="layer", values="margin")
        if (ragged := grid.isna().any(axis=1)).any():
            raise KlbError(f"{ragged.sum()} rounds lack some layers of lens {lens} at {position}")
        rounds = part.drop_duplicates("round_id").set_index("round_id").loc[grid.index].reset_index()
        yield Moment(str(position), str(lens), grid.columns.to_numpy(), grid.to_numpy(float), rounds)


def too_few(n_lies: int, n_nonlies: int) -> str:
    """Why a number is missing; empty if it need not be."""
    n = min(n_lies, n_nonlies)
    return f"not estimable (n={n})" if n < FEWEST else ""
