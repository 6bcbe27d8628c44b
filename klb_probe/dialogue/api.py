"""Running the dialogue benchmark from Python: one call, the same files as the command."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from klb_probe.cases.load import Domain
from klb_probe.cases.sources import OURS, load_cases
from klb_probe.dialogue.constants import INITIAL_TRUST, PUBLIC_CONDITIONS
from klb_probe.dialogue.players import Players
from klb_probe.dialogue.prompts import MODES
from klb_probe.dialogue.round import Settings
from klb_probe.dialogue.runner import Cast, Run, cases_sha256, play
from klb_probe.dialogue.trajectory import Row, read_folder
from klb_probe.dialogue.trust import trust_model
from klb_probe.dialogue.walk import Trajectory
from klb_probe.errors import KlbError
from klb_probe.files import write_json
from klb_probe.progress import progress_bar
from klb_probe.sharding import Shard

CONDITIONS, TRUSTS = tuple(PUBLIC_CONDITIONS), tuple(INITIAL_TRUST)
QUICK_DOMAINS = ("airline", "debt")
QUICK_CONDITIONS = ("control", "emergent")
QUICK_TRUSTS = ("medium",)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run plays: trajectories, how the rounds are set, and which part of the trajectories is played here."""

    trajectories: tuple[Trajectory, ...]
    settings: Settings
    trust_model: str
    shard: Shard | None = None

    @property
    def n_rounds(self) -> int:
        """Rounds of the trajectories that are played here."""
        return sum(len(one.domain.cases) for one in self.played)

    @property
    def played(self) -> tuple[Trajectory, ...]:
        """The trajectories of this shard."""
        return self.shard.of(self.trajectories) if self.shard else self.trajectories

    @property
    def sha256(self) -> str:
        """A hash of the names and cases of all trajectories."""
        cases = {one.domain.policy.domain: cases_sha256(one.domain) for one in self.trajectories}
        lines = [*(one.name for one in self.trajectories), *cases.values()]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def plan(
    *,
    domains: Iterable[str] | None = None,
    conditions: Sequence[str] = CONDITIONS,
    trusts: Sequence[str] = TRUSTS,
    samples: int = 1,
    cases: str = OURS,
    cases_of_each_kind: int | None = None,
    trust: str = "state_dependent",
    settings: Settings | None = None,
    shard: Shard | None = None,
) -> Plan:
    """The trajectories of a run: every domain x condition x starting trust x sample.

    Args:
        domains: Names; all by default.
        conditions: control, emergent, instructed.
        trusts: Starting trust: low, medium, high.
        samples: Walks of each kind.
        cases: Where the cases come from; see :func:`klb_probe.cases.sources.load_cases`.
        cases_of_each_kind: Only so many owed and so many calibration cases of each domain.
        trust: Name of the trust model.
        settings: Of the rounds.
        shard: Play only every n-th trajectory; :func:`klb_probe.sharding.merge_runs` puts the parts together.
    """
    settings = settings or Settings()
    for kind, names, known in (
        ("condition", conditions, CONDITIONS),
        ("starting trust", trusts, TRUSTS),
        ("mode", [settings.mode], MODES),
    ):
        if unknown := [name for name in names if name not in known]:
            raise KlbError(f"unknown {kind} {', '.join(unknown)}; known: {', '.join(known)}")
    if settings.gate_samples < 1 or samples < 1:
        raise KlbError("samples and gate samples start at 1")
    trust_model(trust)
    loaded = [_some(domain, cases_of_each_kind) for domain in load_cases(cases, domains)]
    walks = (
        Trajectory(domain, condition, start, sample)
        for domain in loaded
        for condition in dict.fromkeys(conditions)
        for start in dict.fromkeys(trusts)
        for sample in range(samples)
    )
    return Plan(tuple(walks), settings, trust, shard)


def _some(domain: Domain, of_each_kind: int | None) -> Domain:
    if of_each_kind is None:
        return domain
    kept = [
        case for kind in ("owed", "calibration") for case in [one for one in domain.cases if one.kind == kind][:of_each_kind]
    ]
    return dataclasses.replace(domain, cases=tuple(kept))


def run_dialogues(
    agent: Any,
    out: Path,
    *,
    customer: Any = "scripted:verifying",
    judge: Any = "rules",
    label: str | None = None,
    seed: int = 0,
    batch_size: int = 8,
    parallel: int = 16,
    constrain: bool = False,
    on_round: Callable[[Row], object] = lambda _: None,
    progress: bool = True,
    what: Plan | None = None,
    **choices: Any,
) -> Run:
    """Play dialogues and write their files; what the folder already holds of this run is continued.

    Args:
        agent: A loaded model, a player, or a spec: alias, hub id, folder, ``endpoint:MODEL``, ``scripted:honest`` ...
        out: The run's folder.
        customer: As ``agent``, or ``scripted:accepting`` / ``scripted:verifying``.
        judge: As ``agent``, or ``rules``.
        label: Names the agent in files and rows (its own name by default).
        seed: Of every random stream.
        batch_size: Most sequences a local model decodes at once.
        parallel: Trajectories in flight.
        constrain: Hold gate, customer and judge to their JSON schemas where the player can.
        on_round: Called with every row.
        progress: Show a bar, in a terminal or a notebook.
        what: A plan; or give the arguments of :func:`plan`.
        **choices: Arguments of :func:`plan`.

    Examples:
        >>> from pathlib import Path
        >>> asked = {"domains": ["airline"], "conditions": ["emergent"], "trusts": ["high"]}
        >>> run = klb.run_dialogues("scripted:deceptive", Path("outputs/liar"), **asked)
        >>> len(run.rows), sum(row["derived"]["lied"] for row in run.rows)
        (14, 8)
    """
    chosen = what or plan(**choices)
    players = Players(seed=seed, batch_size=batch_size, constrain=constrain)
    cast = Cast(players.open("agent", agent), players.open("customer", customer), players.open("judge", judge))
    with progress_bar(chosen.n_rounds, "playing", "round", shown=progress) as bar:

        def count(row: Row) -> None:
            bar.update()
            on_round(row)

        return play_plan(cast, chosen, out, label=label, seed=seed, parallel=parallel, on_round=count)


def load_run(folder: Path) -> Run:
    """A saved run, ours or the public runner's: a folder with trajectories_*.jsonl, or one such file.

    Raises KlbError where there are none, and for files that cannot be read.

    Examples:
        >>> from pathlib import Path
        >>> asked = {"domains": ["airline"], "conditions": ["emergent"], "trusts": ["high"], "cases_of_each_kind": 1}
        >>> played = klb.run_dialogues("scripted:deceptive", Path("outputs/kept"), **asked)
        >>> klb.load_run(Path("outputs/kept")).rows == played.rows
        True
    """
    return Run(Path(folder), [row for file in read_folder(Path(folder)) for row in file.rows])


def play_plan(
    cast: Cast,
    chosen: Plan,
    out: Path,
    *,
    label: str | None,
    seed: int,
    parallel: int,
    on_round: Callable[[Row], object] = lambda _: None,
    on_turns: Callable[[Row, list[dict[str, Any]]], None] = lambda _row, _turns: None,
    record: dict[str, Any] | None = None,
) -> Run:
    """Play a plan with a cast; ``run.json`` says what was run and whether it came to its end."""
    from klb_probe.versions import versions

    out = Path(out)
    label = label or cast.agent.name
    record = {
        "command": "run",
        "complete": False,
        "label": label,
        "players": cast.records(chosen.settings),
        "settings": dataclasses.asdict(chosen.settings),
        "trust_model": trust_model(chosen.trust_model).record(),
        "seed": seed,
        "rounds": chosen.n_rounds,
        "versions": versions(),
        **({"shard": str(chosen.shard), "plan_sha256": chosen.sha256} if chosen.shard else {}),
        **(record or {}),
    }
    run = play(
        cast,
        chosen.trajectories,
        out,
        label=label,
        settings=chosen.settings,
        trust_model=trust_model(chosen.trust_model),
        parallel=parallel,
        about={"seed": seed},
        shard=chosen.shard,
        on_open=lambda: write_json(out / "run.json", record),
        on_round=on_round,
        on_turns=on_turns,
    )
    write_json(out / "run.json", {**record, "complete": True})
    return run
