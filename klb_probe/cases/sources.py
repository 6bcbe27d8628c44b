"""Where cases come from: ours, a scenarios folder, or the public benchmark's files (a folder, or the hub's dataset)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from klb_probe.cases.knownliebench import load_knownliebench
from klb_probe.cases.load import Domain, load_domains
from klb_probe.errors import KlbError

OURS = "ours"
HUB_DATASET = "franciscoliu/KnownLieBench"
_PUBLIC, _HUB = "knownliebench:", "hub:"


def load_cases(source: str = OURS, names: Iterable[str] | None = None) -> list[Domain]:
    """Domains of a source, all of them or those named.

    Args:
        source: ``ours``, a scenarios folder, ``knownliebench:PATH`` (a checkout of the public benchmark, or any folder with
            ``<domain>/data/situations.json`` below it), or ``hub:OWNER/NAME`` (the same files in a dataset of the hub).
        names: Domains.

    Raises KlbError for a source that does not exist or holds anything wrong.
    """
    if source == OURS:
        return load_domains(names)
    if source.startswith(_HUB):
        return load_knownliebench(_download(source.removeprefix(_HUB)), names)
    path = Path(source.removeprefix(_PUBLIC)).expanduser()
    if not path.is_dir():
        raise KlbError(f"--cases {source}: no such folder; give {OURS}, a folder, {_PUBLIC}PATH or {_HUB}{HUB_DATASET}")
    if source.startswith(_PUBLIC):
        return load_knownliebench(path, names)
    if not (path / "domains").is_dir() and any(path.rglob("situations.json")):
        raise KlbError(f"--cases {source} looks like the public benchmark's files; pass {_PUBLIC}{source}")
    return load_domains(names, path)


def _download(repo: str) -> Path:
    from huggingface_hub import snapshot_download

    from klb_probe.models.hub import hub_errors

    name, _, revision = repo.partition("@")
    with hub_errors(name, instead=f"clone the benchmark's repository and pass --cases {_PUBLIC}PATH"):
        return Path(snapshot_download(name, repo_type="dataset", revision=revision or None, allow_patterns="*.json"))
