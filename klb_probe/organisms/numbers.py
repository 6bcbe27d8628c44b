"""The numbers of an organism's evidence, each under a name of its own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import pandas as pd
from pydantic import BaseModel, ConfigDict

from klb_probe.organisms.rates import Rate

BLIND = "true if drawn blindly"  # a measure of denials: how often a reason drawn without looking would be true


class Number(BaseModel):
    """One number with its 95 % interval; None where it is not defined.

    Attributes:
        part: eligibility, gate, messages, rounds or perplexity.
        source: cases, records, or the text a perplexity is of.
        where: Among what: a framing and a wording, a condition, a domain; ``all`` for everything.
        measure: What is counted.
        n: Rows that bear on it.
        units: Units of resampling among them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    part: str
    source: str
    where: str
    measure: str
    value: float | None
    low: float | None
    high: float | None
    n: int
    units: int

    @classmethod
    def of(cls, part: str, source: str, where: str, measure: str, rate: Rate) -> Number:
        """A rate under its name."""
        bounds = (None if math.isnan(one) else round(one, 6) for one in (rate.value, rate.low, rate.high))
        value, low, high = bounds
        return cls(
            part=part, source=source, where=where, measure=measure, value=value, low=low, high=high, n=rate.n, units=rate.units
        )

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Its name."""
        return self.part, self.source, self.where, self.measure

    def __str__(self) -> str:
        """Value, interval and n; empty where it is undefined."""
        if self.value is None:
            return ""
        inside = "" if self.low is None else f" [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.value:.2f}{inside} of {self.n}"


def find(numbers: Iterable[Number], *key: str) -> Number | None:
    """The number of that name."""
    return next((one for one in numbers if one.key == key), None)


def owed_and_not(table: pd.DataFrame, where: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """A table's rows that are owed something, and those that are not, each under its name."""
    for owed in (True, False):
        yield f"{where}, {'owed' if owed else 'not owed'}", table[table["entitled"] == owed]
