"""``klb-probe doctor``: does everything here work, and what to do where it does not."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

DOCTOR_EXAMPLE = "Example: klb-probe doctor"


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False) -> None:
    """Versions, devices, caches, models found, offline state and disk; every problem with what to do.

    Nothing is downloaded or loaded. Exit code 0 where the default model can run, 2 where it cannot.
    """
    from klb_probe.doctor import examine

    found = examine()
    typer.echo(json.dumps(found, indent=2, ensure_ascii=False) if as_json else "\n".join(lines(found)))
    if not found["default_model_runs"]:
        raise typer.Exit(2)


def lines(found: dict[str, Any]) -> list[str]:
    """What is printed of :func:`klb_probe.doctor.examine`'s facts: a line a fact, problems last."""
    from klb_probe.doctor import gigabytes
    from klb_probe.models.registry import DEFAULT_MODEL

    versions = [f"{name} {version or '(absent)'}" for name, version in found["versions"].items()]
    printed = _part("versions", [", ".join(versions)])
    extras = []
    for name, extra in found["extras"].items():
        own = ", ".join(f"{package} {version or '(absent)'}" for package, version in extra["packages"].items())
        here = "present" if all(extra["packages"].values()) else f'absent, pip install "klb-probe[{name}]"'
        extras.append(f"{name}: {here}; {own}; for {extra['for']}")
    printed += _part("extras", extras)
    devices = []
    for device in found["devices"]:
        threads = f", {found['threads']} threads" if device["name"] == "cpu" and found["threads"] else ""
        bfloat16 = f", bfloat16 {device['bfloat16']}" if device["bfloat16"] else ""
        memory = f"{gigabytes(device['free'])} of {gigabytes(device['total'])} free"
        devices.append(f"{device['name']}: {device['about']}{threads}, {memory}{bfloat16}")
    printed += _part("devices", devices)
    folders = []
    for folder in found["folders"]:
        held = "" if folder["bytes"] is None else f"{gigabytes(folder['bytes'])} held, "
        writable = "writable" if folder["writable"] else "not writable"
        folders.append(f"{folder['what']}: {folder['path']}, {held}{gigabytes(folder['free'])} free, {writable}")
    printed += _part("folders", folders)
    models = [f"{alias}: {model['where']}" for alias, model in found["models"].items()]
    printed += _part("models", [*models, f"other models in the hub cache: {_others(found) or 'none'}"])
    printed += _part("lenses", [", ".join(found["lenses"]) or "none"])
    printed += _part("offline", [", ".join(found["offline"]) or "no: the hub may be asked"])
    set_, unset = ([name for name, here in found["variables"].items() if here is wanted] for wanted in (True, False))
    printed += _part("variables", [f"set: {', '.join(set_) or 'none'}", f"not set: {', '.join(unset) or 'none'}"])
    for problem in found["problems"]:
        printed.append(f"{'problem' if problem['stops'] else 'note':<11}{problem['says']}: {problem['do']}")
    runs = (
        "can run: try klb-probe jlens --quick" if found["default_model_runs"] else "cannot run, until the problems are solved"
    )
    return [*printed, f"The default model, {DEFAULT_MODEL}, {runs}."]


def _part(title: str, rows: list[str]) -> list[str]:
    return [f"{'' if number else title:<11}{row}" for number, row in enumerate(rows)]


def _others(found: dict[str, Any]) -> str:
    from klb_probe.models.registry import registry

    ours = {entry.hub for entry in registry().values()}
    return ", ".join(name for name in found["hub_cache_repositories"] if name not in ours)
