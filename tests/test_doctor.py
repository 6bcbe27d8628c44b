"""The doctor: what it finds, what it says of what is missing, what it never says, and that it stays quick."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command import klb
from project import pyproject

from klb_probe import doctor
from klb_probe.models import registry as registry_module
from klb_probe.models.gguf_cache import cached_folder
from klb_probe.models.registry import DEFAULT_MODEL, registry, resolve

SECRET = "hf_secretvaluethatnobodysees"


def report(capsys, *options: str) -> tuple[int, str]:
    code = klb("doctor", *options)
    return code, capsys.readouterr().out


def problems(capsys) -> dict[str, bool]:
    """Each problem in one line, and whether it stops the default model."""
    found = json.loads(report(capsys, "--json")[1])["problems"]
    return {f"{one['says']}: {one['do']}": one["stops"] for one in found}


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch, tmp_path):
    """In a folder of its own, with an empty hub cache."""
    from huggingface_hub import constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def test_a_working_machine_is_told_so_and_every_part_is_there(capsys):
    code, text = report(capsys)
    assert code == 0
    assert text.splitlines()[-1].startswith(f"The default model, {DEFAULT_MODEL}, can run")
    for part in ("versions", "extras", "devices", "folders", "models", "lenses", "offline", "variables"):
        assert any(line.startswith(part) for line in text.splitlines()), part
    assert str(resolve(DEFAULT_MODEL).gguf.parent) in text
    assert not any(line.startswith("problem") for line in text.splitlines())


def test_json_has_what_the_lines_have(capsys):
    code, text = report(capsys, "--json")
    found = json.loads(text)
    assert code == 0
    assert found["default_model_runs"] is True
    assert set(found["models"]) == set(registry())
    assert found["models"][DEFAULT_MODEL]["here"] is True
    assert found["versions"]["torch"]
    assert found["devices"][0]["total"] > found["devices"][0]["free"] > 0
    assert {folder["what"] for folder in found["folders"]} == {"cache", "hub cache", "outputs"}
    assert "smollm2-135m.margin.safetensors" in found["lenses"]


def test_no_value_of_a_variable_is_told(capsys, monkeypatch):
    for name in doctor.VARIABLES:
        if name not in ("KLB_PROBE_CACHE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):
            monkeypatch.setenv(name, SECRET)
    texts = report(capsys)[1] + report(capsys, "--json")[1]
    assert SECRET not in texts
    assert json.loads(report(capsys, "--json")[1])["variables"]["HF_TOKEN"] is True


def test_absent_weights_stop_it_with_the_command_that_brings_them(capsys, monkeypatch):
    monkeypatch.setattr(registry_module, "_file_in_distribution", lambda distribution: None)
    code, text = report(capsys)
    assert code == 2
    line = next(line for line in text.splitlines() if line.startswith("problem"))
    assert line.endswith(registry()[DEFAULT_MODEL].pip_gguf.install)
    assert "cannot run" in text.splitlines()[-1]


def test_a_hub_cache_with_the_weights_will_do(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(registry_module, "_file_in_distribution", lambda distribution: None)
    repository = tmp_path / "hub" / ("models--" + registry()[DEFAULT_MODEL].hub.replace("/", "--"))
    snapshot = repository / "snapshots" / ("0" * 40)
    (repository / "blobs").mkdir(parents=True)
    (repository / "blobs" / "abc").write_bytes(b"12345")
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(repository / "blobs" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40, encoding="utf-8")
    code, text = report(capsys, "--json")
    found = json.loads(text)
    assert code == 0
    assert found["models"][DEFAULT_MODEL]["here"] is True
    assert found["hub_cache_repositories"] == [registry()[DEFAULT_MODEL].hub]
    hub = next(folder for folder in found["folders"] if folder["what"] == "hub cache")
    assert 5 <= hub["bytes"] < 100  # the file behind the link, once


@pytest.mark.parametrize(
    ("part", "change", "stops", "words"),
    [
        ("versions", {"einops": None}, True, "einops is not installed: pip install"),
        ("versions", {"einops": "0.1 (needs >=0.8)"}, True, "einops 0.1 (needs >=0.8) is out of range: pip install"),
        ("torch_error", "OSError: libtorch.so: no such file", True, "torch does not import (OSError: libtorch.so"),
        ("offline", ["HF_HUB_OFFLINE"], False, "HF_HUB_OFFLINE set: models of the hub come from its cache alone: unset"),
        ("threads", 0, False, "torch uses 0 of"),
    ],
)
def test_what_is_wrong_is_one_line_with_what_to_do(part, change, stops, words):
    found = doctor.examine()
    found[part] = found[part] | change if isinstance(change, dict) else change
    told = {str(problem): problem.stops for problem in doctor.find_problems(found)}
    line = next(line for line in told if line.startswith(words))
    assert told[line] is stops
    assert "\n" not in line


def test_little_memory_disk_and_a_closed_cache_are_seen(monkeypatch, tmp_path):
    monkeypatch.setenv("KLB_PROBE_CACHE", str(tmp_path / "cache"))  # nothing is dequantised there
    found = doctor.examine()
    assert found["default_model_runs"]
    assert "not dequantised yet" in found["models"][DEFAULT_MODEL]["where"]
    found["devices"][0]["free"] = doctor.DEMO_MEMORY - 1
    cache = next(folder for folder in found["folders"] if folder["what"] == "cache")
    cache["free"] = doctor.DEQUANTISED - 1
    told = [str(problem) for problem in doctor.find_problems(found) if problem.stops]
    assert [line.partition(":")[0].split(" free")[0].split()[-1] for line in told] == ["GB", "memory"]
    cache["writable"] = False
    assert any("set KLB_PROBE_CACHE" in str(problem) for problem in doctor.find_problems(found) if problem.stops)


def test_a_folder_that_takes_no_outputs_is_a_note(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "check_writable", _refuse)
    assert {line: stops for line, stops in problems(capsys).items() if "pass --out" in line} == {
        f"{Path('outputs').absolute()} cannot be written: go to another folder, or pass --out": False
    }


def _refuse(path: Path) -> None:
    raise doctor.KlbError(f"{path} cannot be written")


def test_weights_are_looked_for_where_loading_puts_them(smollm):
    folder = cached_folder(resolve(DEFAULT_MODEL).sha256)
    assert (folder / "config.json").is_file()


def test_every_extra_says_what_it_is_for():
    extras = set(pyproject()["project"]["optional-dependencies"])
    assert extras - doctor._FOR_DEVELOPERS <= set(doctor.EXTRAS)


def test_it_neither_imports_transformers_nor_takes_long():
    code = (
        "import sys, time; from klb_probe.doctor import examine; examine(); "
        "print('transformers' in sys.modules, time.process_time())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ, timeout=300)
    imported, seconds = done.stdout.split()
    assert imported == "False"
    assert float(seconds) < 6  # of the processor, on a busy machine; about 2.5 on a quiet one
