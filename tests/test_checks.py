"""The project's own checks: types, hooks, and what CONTRIBUTING.md points at."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys

import pytest
import yaml
from project import ROOT, pyproject

CODE = re.compile(r"`([^`\n]+)`")
BLOCK = re.compile(r"^```\n(.*?)^```", re.MULTILINE | re.DOTALL)
DOTTED = re.compile(r"klb_probe(\.\w+)+")
PATH = re.compile(r"\.?[\w.-]+(/[\w.-]+)*/?")
SUFFIXES = (".py", ".yaml", ".md", ".toml", ".txt", ".cff", ".csv", "/", "Makefile")


def test_types_are_right(tmp_path):
    """mypy from nothing, as ``make types`` does it."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path)], cwd=ROOT, capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_type_checks_are_not_switched_off_wholesale():
    settings = pyproject()["tool"]["mypy"]
    assert settings["disallow_untyped_defs"] is True
    assert not {"ignore_errors", "ignore_missing_imports", "disable_error_code"} & settings.keys()
    for override in settings["overrides"]:
        assert not {"ignore_errors", "disable_error_code"} & override.keys()
        assert not any(module.startswith("klb_probe") for module in override["module"])
    unnamed = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in (ROOT / "klb_probe").rglob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"#\s*type:\s*ignore(?!\[)", line)
    ]
    assert not unnamed


def test_hooks_call_targets_of_the_makefile():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert [repo["repo"] for repo in hooks] == ["local"]  # nothing is fetched
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    entries = [hook["entry"] for repo in hooks for hook in repo["hooks"]]
    assert entries
    assert all(entry.removeprefix("make ") in targets for entry in entries)
    validate = pytest.importorskip("pre_commit.clientlib")
    validate.load_config(str(ROOT / ".pre-commit-config.yaml"))


def mentioned() -> list[str]:
    """What stands in code spans of CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return CODE.findall(BLOCK.sub("", text))


def test_contributing_names_files_that_are_there():
    paths = [one for one in mentioned() if PATH.fullmatch(one) and one.endswith(SUFFIXES)]
    assert len(paths) > 30
    absent = [one for one in paths if not (ROOT / one).exists() and not (ROOT / "klb_probe" / one).exists()]
    assert not absent


def test_contributing_names_code_that_is_there():
    names = [one for one in mentioned() if DOTTED.fullmatch(one)]
    assert len(names) > 10
    assert not [one for one in names if not found(one)]


def found(dotted: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    try:
        importlib.import_module(dotted)
    except ModuleNotFoundError:
        module, _, name = dotted.rpartition(".")
        return hasattr(importlib.import_module(module), name)
    return True


def test_contributing_names_targets_and_commands_that_are_there():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    commands = [*mentioned(), *(line for block in BLOCK.findall(text) for line in block.splitlines())]
    asked = {word for line in commands if line.startswith("make ") for word in line.partition("#")[0].split()[1:]}
    assert asked >= {"test", "lint", "types", "coverage", "release-check"}
    assert asked <= targets
