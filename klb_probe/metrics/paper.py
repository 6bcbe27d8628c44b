"""The paper's own results, to stand beside ours (KnownLieBench, arXiv 2608.26372; figures in ``paper.yaml``)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pandas as pd
import yaml
from pydantic import BaseModel, ConfigDict, Field

from klb_probe.dialogue.constants import INITIAL_TRUST
from klb_probe.errors import KlbError

POOLED = "all"
_KEYS = ["condition", "trust", "domain"]
_IN_UNITS_OF_TRUST = ("trust_change",)


class _Condition(BaseModel):
    """Figures of one condition: by metric, one for each starting trust over all domains, or one a domain over all trusts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    by_trust: dict[str, tuple[float, float, float]]
    by_domain: dict[str, dict[str, float]] = Field(default_factory=dict)


@cache
def _paper() -> dict[str, dict[str, _Condition]]:
    raw = yaml.safe_load(Path(__file__).with_name("paper.yaml").read_text(encoding="utf-8"))
    return {
        alias: {name: _Condition.model_validate(entry) for name, entry in conditions.items()}
        for alias, conditions in raw.items()
    }


def paper_results(alias: str) -> pd.DataFrame:
    """What the paper reports of one of its agents: condition, trust, domain, metric, paper.

    Rates are fractions. ``trust`` or ``domain`` is "all" where the figure is over all of them. Raises KlbError for a model
    that is not in the paper, naming those that are.
    """
    if alias not in _paper():
        raise KlbError(f"the paper has no results for {alias!r}; it has: {', '.join(_paper())}")
    rows = []
    for condition, figures in _paper()[alias].items():
        for metric, values in figures.by_trust.items():
            rows += [(condition, trust, POOLED, metric, value) for trust, value in zip(INITIAL_TRUST, values, strict=True)]
        for metric, domains in figures.by_domain.items():
            rows += [(condition, POOLED, domain, metric, value) for domain, value in domains.items()]
    table = pd.DataFrame(rows, columns=[*_KEYS, "metric", "paper"])
    table["paper"] = table.paper.where(table.metric.isin(_IN_UNITS_OF_TRUST), table.paper / 100)
    return table


def beside_paper(table: pd.DataFrame, alias: str) -> pd.DataFrame:
    """A panel with a column ``paper``: the paper's figure for the same group and metric, NaN where it gives none.

    A panel that is not split by trust (or domain) is compared with figures over all of them, and with no others; the paper
    gives none by case.
    """
    keys = [key for key in _KEYS if key in table]
    results = paper_results(alias)
    alike = results[[key for key in _KEYS if key not in keys]].eq(POOLED).all(axis=1) & ("case" not in table)
    return table.merge(results.loc[alike, [*keys, "metric", "paper"]], how="left", on=[*keys, "metric"])
