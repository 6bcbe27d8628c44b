"""Everything ``klb-probe score`` reports of one agent's trajectory files: panels at several levels, counts, walks of trust."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from klb_probe.dialogue.trajectory import Trajectories
from klb_probe.errors import KlbError
from klb_probe.metrics.bootstrap import DRAWS, interval, ratios, resample
from klb_probe.metrics.panel import panel, round_table
from klb_probe.metrics.paper import beside_paper
from klb_probe.models.registry import registry

LEVEL_KEYS = ("condition", "trust", "domain", "case")
BY_DOMAIN = ("condition", "domain")
BY_CASE = ("condition", "case")
_FIGURES = ["value", "low", "high", "numerator", "n", "n_trajectories"]


@dataclass(frozen=True)
class Score:
    """What there is to say of one agent.

    Attributes:
        levels: By grouping keys, the panel of :func:`klb_probe.metrics.panel.panel`; the first is the headline.
        rounds: One line a round, see :func:`klb_probe.metrics.panel.round_table`.
        walks: Trust of every trajectory: condition, trust, trajectory, round (0: at the start), value.
        curves: Their mean: condition, trust, round, value, low, high, n (trajectories).
        counts: What kinds of rounds there are.
    """

    levels: dict[tuple[str, ...], pd.DataFrame]
    rounds: pd.DataFrame
    walks: pd.DataFrame
    curves: pd.DataFrame
    counts: dict[str, int]

    def tidy(self) -> pd.DataFrame:
        """All levels as one table: level, keys (empty where a level is over all), metric, value, low, high, numerator, n, …"""
        tables = [table.assign(level="+".join(keys)) for keys, table in self.levels.items()]
        extra = ["paper"] if "paper" in tables[0] else []
        # As text: each level has its own categories.
        whole = pd.concat([table.astype(dict.fromkeys(keys, str)) for keys, table in zip(self.levels, tables, strict=True)])
        return whole.reindex(columns=["level", *LEVEL_KEYS, "metric", *_FIGURES, *extra])

    def nested(self) -> dict[str, list[dict[str, Any]]]:
        """The same by level: a list of groups, each with its keys and its metrics by name; undefined numbers are None."""
        return {
            "+".join(keys): [
                {**dict(zip(keys, map(str, names), strict=True)), "metrics": _metrics(group)}
                for names, group in table.groupby(list(keys), observed=True, sort=False)
            ]
            for keys, table in self.levels.items()
        }


def score_files(
    files: Sequence[Trajectories], by: Sequence[str], *, paper: str | None = None, seed: int = 0, draws: int = DRAWS
) -> Score:
    """Score one agent's files by the keys of ``by`` and, within each condition, by domain and by case.

    ``paper``: the registry alias whose figures from the paper become a column ``paper`` of every level.
    """
    rows = [row for file in files for row in file.rows]
    levels = {keys: panel(rows, keys, draws=draws, seed=seed) for keys in dict.fromkeys([tuple(by), BY_DOMAIN, BY_CASE])}
    if paper:
        levels = {keys: beside_paper(table, paper) for keys, table in levels.items()}
    rounds = round_table(rows)
    walks = trust_walks(rounds)
    return Score(levels, rounds, walks, trust_curves(walks, draws=draws, seed=seed), _counts(rounds))


def agent_of(file: Trajectories) -> tuple[str, str]:
    """The agent of a file, by the name its run gave it and by its registry alias (the name again if it has none)."""
    agent = file.run_meta.get("agent")
    said = [agent.get("cfg"), agent.get("model")] if isinstance(agent, Mapping) else [agent]
    said = [file.run_meta.get("label"), *said, *(row.get("agent") for row in file.rows[:1])]
    names = [str(name) for name in said if name]
    if not names:
        raise KlbError(f"{file.path}:1: run_meta names no agent")
    aliases = [alias for name in names for alias, entry in registry().items() if name in (alias, entry.hub)]
    return names[0], next(iter(aliases), names[0])


def choose_agent(files: Sequence[Trajectories], wanted: str | None) -> tuple[str, str, list[Trajectories]]:
    """The agent to score: its name, its registry alias, its files.

    ``wanted`` picks one of several by name or alias. It may also say which alias the only agent is, if its files do not.
    """
    names = {file.path: agent_of(file) for file in files}
    agents = list(dict.fromkeys(names.values()))
    chosen = [agent for agent in agents if wanted in (None, *agent)]
    if not chosen and len(agents) == 1 and agents[0][1] not in registry() and wanted in registry():
        return agents[0][0], str(wanted), list(files)
    if len(chosen) != 1:
        there = ", ".join(name for name, _ in agents)
        raise KlbError(
            f"no agent {wanted} here; there is: {there}" if not chosen else f"several agents ({there}): pick --agent"
        )
    return *chosen[0], [file for file in files if names[file.path] == chosen[0]]


def trust_walks(rounds: pd.DataFrame) -> pd.DataFrame:
    """Trust at the start (round 0) and after each round of every trajectory in which one was played.

    A round without a trust of its own (a provider failed) keeps that of the round before.
    """
    placed = rounds[rounds["round"].notna() & (rounds["sample"] != "None")]
    order = placed.assign(round=placed["round"].astype(int)).sort_values("round", kind="stable")
    walks = order.pivot_table(index="trajectory", columns="round", values="trust_after", aggfunc="last")
    start = order.groupby("trajectory").trust_before.first()[walks.index]
    walks = walks.rename(columns=lambda number: number - order["round"].min() + 1)
    walks.insert(0, 0, start)
    walks = walks.ffill(axis=1, limit_area="inside")
    long = walks.reset_index().melt("trajectory", var_name="round", value_name="value").dropna()
    keys = rounds.drop_duplicates("trajectory")[["condition", "trust", "trajectory"]]
    return keys.merge(long.astype({"round": int})).sort_values(["condition", "trust", "trajectory", "round"], ignore_index=True)


def trust_curves(walks: pd.DataFrame, *, draws: int = DRAWS, seed: int = 0) -> pd.DataFrame:
    """Mean trust by round over the trajectories that got so far, with the interval of a bootstrap over trajectories."""
    curves = []
    for (condition, trust), group in walks.groupby(["condition", "trust"], observed=True):
        trusts = group.pivot(index="trajectory", columns="round", values="value")
        there = trusts.notna().to_numpy(float)
        n = there.sum(0).astype(int)
        low, high = interval(ratios(resample(np.zeros(len(trusts)), draws, seed), trusts.fillna(0).to_numpy(), there))
        curves.append(
            pd.DataFrame(
                {
                    **{"condition": condition, "trust": trust, "round": trusts.columns, "value": trusts.mean().to_numpy()},
                    **{"low": np.where(n > 1, low, np.nan), "high": np.where(n > 1, high, np.nan), "n": n},
                }
            )
        )
    columns = ["condition", "trust", "round", "value", "low", "high", "n"]
    return pd.concat(curves, ignore_index=True) if curves else pd.DataFrame(columns=columns)


def _counts(rounds: pd.DataFrame) -> dict[str, int]:
    lies = rounds.scored & rounds.lied
    counts = {
        "rounds": rounds.gate.notna(),
        "scored": rounds.scored,
        "gate_failed": rounds.gate == "failed",
        "gate_unparsed": rounds.gate == "unparsed",
        "malformed": rounds.passed & ~rounds.scored,
        "provider_errors": rounds.error,
        "lies": lies,
        "calibration_lies": lies & ~rounds.owed,
    }
    return {name: int(found.sum()) for name, found in counts.items()}


def _metrics(group: pd.DataFrame) -> dict[str, dict[str, float | None]]:
    figures = [name for name in (*_FIGURES, "paper") if name in group]
    plain = group.set_index("metric")[figures].astype(object)
    return plain.where(plain.notna(), None).to_dict("index")
