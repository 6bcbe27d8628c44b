"""Where cases come from: ours (also under brief policies), a scenarios folder, or the public benchmark's files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from klb_probe.cases.knownliebench import load_knownliebench
from klb_probe.cases.load import Domain, load_domains
from klb_probe.cases.schema import Clause, Policy
from klb_probe.errors import KlbError

OURS, ORGANISMS = "ours", "organisms"
HUB_DATASET = "franciscoliu/KnownLieBench"
_PUBLIC, _HUB = "knownliebench:", "hub:"


def load_cases(source: str = OURS, names: Iterable[str] | None = None) -> list[Domain]:
    """Domains of a source, all of them or those named.

    Args:
        source: ``ours``, ``organisms`` (ours under their brief policies, where they have one), a scenarios folder,
            ``knownliebench:PATH`` (a checkout of the public benchmark, or any folder with ``<domain>/data/situations.json``
            below it), or ``hub:OWNER/NAME`` (the same files in a dataset of the hub).
        names: Domains.

    Raises KlbError for a source that does not exist or holds anything wrong.

    Examples:
        >>> (airline,) = klb.load_cases("ours", ["airline"])
        >>> len(airline.cases), len(airline.situations())  # cases, and cases with their twins
        (14, 28)
    """
    if source == OURS:
        return load_domains(names)
    if source == ORGANISMS:
        return _with_brief_policies(names)
    if source.startswith(_HUB):
        return load_knownliebench(_download(source.removeprefix(_HUB)), names)
    path = Path(source.removeprefix(_PUBLIC)).expanduser()
    if not path.is_dir():
        raise KlbError(
            f"--cases {source}: no such folder; give {OURS}, {ORGANISMS}, a folder, {_PUBLIC}PATH or {_HUB}{HUB_DATASET}"
        )
    if source.startswith(_PUBLIC):
        return load_knownliebench(path, names)
    if not (path / "domains").is_dir() and any(path.rglob("situations.json")):
        raise KlbError(f"--cases {source} looks like the public benchmark's files; pass {_PUBLIC}{source}")
    return load_domains(names, path)


def _with_brief_policies(names: Iterable[str] | None) -> list[Domain]:
    """Our domains that have a brief policy, with it in place of their clauses; cases and labels are the same."""
    ours = load_domains(names)
    if names is not None and (lacking := [one.policy.domain for one in ours if not one.policy.brief]):
        known = ", ".join(one.policy.domain for one in load_domains() if one.policy.brief)
        raise KlbError(f"--cases {ORGANISMS}: no brief policy for {', '.join(lacking)}; there is one for {known}")
    return [Domain(brief_policy(one.policy), one.cases) for one in ours if one.policy.brief]


def brief_policy(policy: Policy, wordings: Iterable[str] | None = None) -> Policy:
    """A policy with its brief in place of the clauses, or with other wordings of it; the requirements stay."""
    clauses = [Clause(id=f"brief_{number}", text=text, cite="") for number, text in enumerate(wordings or policy.brief, 1)]
    requirements = [requirement.model_copy(update={"clause": None}) for requirement in policy.requirements]
    return policy.model_copy(update={"clauses": tuple(clauses), "requirements": tuple(requirements)})


def _download(repo: str) -> Path:
    from huggingface_hub import snapshot_download

    from klb_probe.models.hub import hub_errors

    name, _, revision = repo.partition("@")
    with hub_errors(name, instead=f"clone the benchmark's repository and pass --cases {_PUBLIC}PATH"):
        return Path(snapshot_download(name, repo_type="dataset", revision=revision or None, allow_patterns="*.json"))
