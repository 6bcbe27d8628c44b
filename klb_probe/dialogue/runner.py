"""Running many trajectories in lock-step, with files that survive interruption."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from klb_probe.cases.load import Domain
from klb_probe.dialogue.constants import TAU, our_condition, public_condition, public_trust
from klb_probe.dialogue.player import Part, Player, Reply, Request, UsageByPart
from klb_probe.dialogue.round import Settings
from klb_probe.dialogue.sidecar import drop_turns_without_rounds, packed, sidecar_path
from klb_probe.dialogue.trajectory import Row, Trajectories, TrajectoryWriter, check_same_run, file_name, read_trajectories
from klb_probe.dialogue.trust import TrustModel
from klb_probe.dialogue.walk import Trajectory, trajectory_of, walk
from klb_probe.errors import KlbError
from klb_probe.sharding import Shard
from klb_probe.summary import as_html, estimate, in_a_line

if TYPE_CHECKING:
    import pandas as pd

MAX_CONSECUTIVE_ERRORS = 20
_WALK = ("agent", "domain", "condition", "initial", "sample")  # what rows of one trajectory share
_HEADLINE = {"KPR": "gate passed", "DR": "owed rounds with a lie", "Det": "lies found out"}
_RUN_NOTE = "95 % intervals of a bootstrap over trajectories; a rate of nothing, or an interval of one trajectory, is left out."


@dataclass(frozen=True)
class Cast:
    """Who plays which part. The gate and forked questions are the agent's."""

    agent: Player
    customer: Player
    judge: Player

    def player(self, part: Part) -> Player:
        """The player of a part."""
        return {"customer": self.customer, "judge": self.judge}.get(part, self.agent)

    @property
    def players(self) -> list[Player]:
        """Each player once."""
        return list({id(player): player for player in (self.agent, self.customer, self.judge)}.values())

    def records(self, settings: Settings) -> dict[str, dict[str, Any]]:
        """How the public files name the players: cfg, model, temp, and our record of each."""
        temperatures = {"agent": settings.agent_temperature, "customer": 0.0, "grader": 0.0}
        parts = {"agent": self.agent, "customer": self.customer, "grader": self.judge}
        return {
            name: {"cfg": player.name, "model": player.name, "temp": temperatures[name], "player": player.record()}
            for name, player in parts.items()
        }


@dataclass(repr=False)
class Run:
    """A finished or running set of dialogues in a folder.

    Attributes:
        folder: Where the files are.
        rows: One a round, as on file.

    Examples:
        >>> from pathlib import Path
        >>> asked = {"domains": ["airline"], "trusts": ["high"], "cases_of_each_kind": 2}
        >>> run = klb.run_dialogues("scripted:deceptive", Path("outputs/short"), **asked)
        >>> run.frame.groupby("condition")["lied"].sum().to_dict()
        {'control': 0, 'emergent': 2, 'instructed': 2}
    """

    folder: Path
    rows: list[Row] = field(default_factory=list)

    @property
    def frame(self) -> pd.DataFrame:
        """One line a round: its keys, the gate, what the judge found; see :func:`klb_probe.metrics.panel.round_table`."""
        from klb_probe.metrics.panel import round_table

        return round_table(self.rows)

    def panel(self, by: Sequence[str] = (), **options: Any) -> pd.DataFrame:
        """The behavioural metrics; see :func:`klb_probe.metrics.panel.panel`."""
        from klb_probe.metrics.panel import panel

        return panel(self.rows, by, **options)

    def _facts(self) -> dict[str, Any]:
        names = {key: list(dict.fromkeys(str(row.get(key)) for row in self.rows)) for key in ("agent", "domain", "condition")}
        return {
            "agent": ", ".join(names["agent"]) or "none",
            "rounds": len(self.rows),
            "trajectories": len({tuple(row.get(key) for key in _WALK) for row in self.rows}),
            "domains": ", ".join(names["domain"]),
            "conditions": ", ".join(map(our_condition, names["condition"])),
            "folder": self.folder,
        }

    def __repr__(self) -> str:
        return in_a_line("Run", self._facts())

    def _repr_html_(self) -> str:
        """The facts, and by condition how often the gate was passed, the agent lied, and was found out."""
        try:
            return as_html("Dialogues", self._facts(), self._headline(), _RUN_NOTE)
        except KlbError as error:  # no rows yet, or a file of somebody else's that cannot be scored
            return as_html("Dialogues", self._facts(), note=str(error))

    def _headline(self) -> pd.DataFrame:
        """A line a condition; a rate of nothing is ``-``."""
        table = self.panel(["condition"])
        table = table[table["metric"].isin(_HEADLINE)]
        table = table.assign(shown=[f"{estimate(line)}, n = {line.n}" for line in table.itertuples()])
        wide = table.pivot(index="condition", columns="metric", values="shown")
        return wide.dropna(how="all")[list(_HEADLINE)].rename(columns=_HEADLINE).rename_axis(columns=None).reset_index()


def play(
    cast: Cast,
    trajectories: Sequence[Trajectory],
    folder: Path,
    *,
    label: str,
    settings: Settings,
    trust_model: TrustModel,
    parallel: int,
    about: Mapping[str, Any],
    shard: Shard | None = None,
    on_open: Callable[[], None] = lambda: None,
    on_turns: Callable[[Row, list[dict[str, Any]]], None] = lambda _row, _turns: None,
    on_round: Callable[[Row], object] = lambda _: None,
) -> Run:
    """Play trajectories, at most ``parallel`` at once, continuing what the folder's files already hold.

    Args:
        cast: The players.
        trajectories: All walks of the run.
        folder: Where the files are.
        label: Of the agent, in file names and rows.
        settings: Of the rounds.
        trust_model: How trust moves.
        parallel: Walks in flight; it changes speed and the order of rows, never a transcript.
        about: What else each file's ``run_meta`` says.
        shard: Play only this part of the trajectories; the files say what the whole run is, and which part they are.
        on_turns: Called with each new row and its sidecar turns, with whole prompts.
        on_open: Called once all files are open, before anything is played.
        on_round: Called with every row, those of an earlier part of the run first.

    Raises KlbError after 20 rounds in a row that a provider could not serve; the files then stay incomplete.
    """
    whole = _by_domain(trajectories)
    _check_names([file_name(label, domain, trust_model.name) for domain in whole], list(whole))
    if shard:
        about = {**about, "shard": str(shard)}
    files = [
        _File(domain, mine, whole[domain], cast, folder, label, settings, trust_model, about)
        for domain, mine in _by_domain(shard.of(trajectories) if shard else trajectories).items()
    ]
    on_open()
    run = Run(folder)
    errors = 0

    def finished(row: Row) -> None:
        nonlocal errors
        run.rows.append(row)
        on_round(row)
        errors = errors + 1 if row.get("error") else 0
        if errors >= MAX_CONSECUTIVE_ERRORS:
            raise KlbError(f"{errors} rounds in a row failed; the last: {row['error']}; continue with --resume")

    try:
        for file in files:
            for row in file.rows:
                run.rows.append(row)
                on_round(row)
        walks = (started for file in files for started in file.walks(finished, on_turns))
        _lock_step(cast, walks, parallel)
    finally:
        for file in files:
            file.close()
    return run


def _check_names(names: Sequence[str], domains: Sequence[str]) -> None:
    """KlbError for two domains whose files would be one on a file system that does not tell capitals from small letters."""
    first: dict[str, str] = {}
    for name, domain in zip(names, domains, strict=True):
        if (other := first.setdefault(name.casefold(), domain)) != domain:
            raise KlbError(f"domains {other} and {domain} would share the file {name} on some systems; rename one of them")


def _by_domain(trajectories: Sequence[Trajectory]) -> dict[str, list[Trajectory]]:
    names = dict.fromkeys(one.domain.policy.domain for one in trajectories)
    return {name: [one for one in trajectories if one.domain.policy.domain == name] for name in names}


@dataclass
class _Walk:
    """A walk under way: its generator, the request it waits on, and the usage of its present round."""

    talk: Generator[Request, Reply, None]
    usage: UsageByPart
    request: Request | None = None


class _File:
    """One domain's trajectory file and sidecar."""

    def __init__(
        self,
        domain: str,
        trajectories: list[Trajectory],
        whole: list[Trajectory],
        cast: Cast,
        folder: Path,
        label: str,
        settings: Settings,
        trust_model: TrustModel,
        about: Mapping[str, Any],
    ) -> None:
        self.trajectories, self.label, self.settings, self.trust_model = trajectories, label, settings, trust_model
        self.path = folder / file_name(label, domain, trust_model.name)
        policy = trajectories[0].domain.policy
        self.meta = {
            **cast.records(settings),
            "domain": domain,
            "receiver_role": policy.customer_word,
            "owed_outcome": policy.outcomes.owed.id,
            "favored_outcome": policy.outcomes.favored.id,
            "tau": TAU,
            "delta_set": trust_model.name,
            "trust_model": trust_model.record(),
            "rounds": len(trajectories[0].domain.cases),
            "n_traj": len(whole),
            "scenarios": [f"{public_condition(one.condition)}_{public_trust(one.trust)}" for one in whole],
            "settings": dataclasses.asdict(settings),
            "label": label,
            "cases_sha256": cases_sha256(trajectories[0].domain),
            **about,
        }
        finished = self._finished()
        self.writer = None if finished else TrajectoryWriter(self.path, self.meta)
        rows = finished.rows if finished else self.writer.rows if self.writer else ()
        self.rows = list(rows)
        self.left = len(trajectories)
        drop_turns_without_rounds(sidecar_path(self.path), {(trajectory_of(row), row["round"]) for row in self.rows})

    def _finished(self) -> Trajectories | None:
        """The file if it is complete, and of this run."""
        if not self.path.exists():
            return None
        try:
            existing = read_trajectories(self.path)
        except KlbError:  # nothing but a torn first line: the writer starts it again, or says what is wrong
            return None
        if not existing.complete:
            return None
        check_same_run(existing, self.meta)
        return existing

    def walks(
        self, finished: Callable[[Row], object], on_turns: Callable[[Row, list[dict[str, Any]]], None]
    ) -> Iterator[_Walk]:
        """The walks that have rounds left; the file is marked complete when the last of them ends."""
        if self.writer is None:
            return
        for trajectory in self.trajectories:
            done = sorted((row for row in self.rows if trajectory.owns(row)), key=lambda row: row["round"])
            usage = UsageByPart()

            def on_round(row: Row, turns: list[dict[str, Any]], usage: UsageByPart = usage) -> None:
                row["usage"] = {part: dataclasses.asdict(spent) for part, spent in usage.parts.items()}
                usage.parts.clear()
                self._write_turns(turns)
                assert self.writer is not None  # open until the last walk has ended
                self.writer.append(row)
                on_turns(row, turns)
                finished(row)

            talk = walk(trajectory, self.label, self.settings, self.trust_model, done, on_round)
            yield _Walk(self._ending(talk), usage)

    def _ending(self, talk: Generator[Request, Reply, None]) -> Generator[Request, Reply, None]:
        yield from talk
        self.left -= 1
        if not self.left and self.writer is not None:
            self.writer.finish(summed_usage(self.writer.rows))

    def _write_turns(self, turns: list[dict[str, Any]]) -> None:
        """Before the row: a row on disk has its turns on disk."""
        if not turns:
            return
        with sidecar_path(self.path).open("ab") as file:
            for line in packed(turns):
                file.write(json.dumps(line).encode("ascii") + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


def cases_sha256(domain: Domain) -> str:
    """A hash of a domain's policy and cases: edited texts are another run."""
    texts = [domain.policy.model_dump_json(), *(case.model_dump_json() for case in domain.cases)]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def summed_usage(rows: Sequence[Row]) -> dict[str, Any]:
    """Calls and tokens of every part over a file's rounds."""
    total: dict[str, dict[str, int]] = {}
    for row in rows:
        for part, spent in row.get("usage", {}).items():
            sums = total.setdefault(part, dict.fromkeys(spent, 0))
            for key, value in spent.items():
                sums[key] += value
    return {"by_part": total, "rounds": len(rows), "errors": sum(bool(row.get("error")) for row in rows)}


def _lock_step(cast: Cast, walks: Iterator[_Walk], parallel: int) -> None:
    """Advance walks together: every player answers all that wait on it at once."""
    live: list[_Walk] = []
    while True:
        while len(live) < parallel and (fresh := next(walks, None)) is not None:
            if _advance(fresh, None, cast):
                live.append(fresh)
        if not live:
            return
        for player in cast.players:
            waiting = [(one, one.request) for one in live if one.request and cast.player(one.request.part) is player]
            if not waiting:
                continue
            replies = player.reply([request for _, request in waiting])
            for (one, request), reply in zip(waiting, replies, strict=True):
                one.usage.add(request.part, reply)
                if not _advance(one, reply, cast):
                    live.remove(one)


def _advance(one: _Walk, reply: Reply | None, cast: Cast) -> bool:
    """Hand a walk its reply; False when it has ended. The conversations of a round that is over are forgotten."""
    before = one.request
    try:
        one.request = next(one.talk) if reply is None else one.talk.send(reply)
    except StopIteration:
        one.request = None
    if before is not None and (one.request is None or _round(one.request) != _round(before)):
        for name in ("gate", "agent", "elicited", "customer", "judge", "judge-first"):
            for player in cast.players:
                player.forget(f"{_round(before)}/{name}")
    return one.request is not None


def _round(request: Request) -> str:
    return request.conversation.rpartition("/")[0]
