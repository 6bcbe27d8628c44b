"""Files appear whole or not at all; a folder with results is never overwritten unasked."""

from __future__ import annotations

import hashlib
import json
import stat

import pytest
import safetensors.torch
import torch

from klb_probe.errors import KlbError
from klb_probe.files import file_sha256, replacing, write_json, write_safetensors, write_text
from klb_probe.jlens import FILES
from klb_probe.outputs import check_folder, clear, default_folder

ASKED = {"neither": (False, False), "overwrite": (True, False), "resume": (False, True)}
asked = pytest.mark.parametrize(("overwrite", "resume"), ASKED.values(), ids=ASKED)


def tree(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@asked
@pytest.mark.parametrize("exists", [True, False], ids=["empty", "absent"])
def test_an_absent_or_empty_folder_may_be_used(tmp_path, exists, overwrite, resume):
    folder = tmp_path / "out"
    if exists:
        folder.mkdir()
    check_folder(folder, overwrite=overwrite, resume=resume)
    assert folder.exists() is exists, "checking creates nothing"


@pytest.mark.parametrize("name", ["run.json", "somebody-elses.txt", ".hidden", "sub/file"])
def test_a_folder_that_holds_anything_is_refused_unless_told(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("kept")
    before = tree(tmp_path)
    with pytest.raises(KlbError) as caught:
        check_folder(tmp_path, overwrite=False, resume=False)
    assert all(part in str(caught.value) for part in (str(tmp_path), "--overwrite", "--resume"))
    with pytest.raises(KlbError, match="--overwrite") as caught:
        check_folder(tmp_path, overwrite=False)
    assert "--resume" not in str(caught.value), "the command has no such option"
    check_folder(tmp_path, overwrite=True, resume=False)
    check_folder(tmp_path, overwrite=False, resume=True)
    assert tree(tmp_path) == before, "checking removes nothing"


@asked
def test_a_file_is_no_folder_whatever_was_asked(tmp_path, overwrite, resume):
    path = tmp_path / "out"
    path.write_text("kept")
    with pytest.raises(KlbError, match="is a file, not a folder"):
        check_folder(path, overwrite=overwrite, resume=resume)
    assert path.read_text() == "kept"


def test_overwrite_and_resume_exclude_each_other(tmp_path):
    with pytest.raises(KlbError, match="not both"):
        check_folder(tmp_path, overwrite=True, resume=True)


def test_clearing_removes_our_files_and_nothing_else(tmp_path):
    others = {"notes.md", "margins.csv.bak", "sub/margins.csv", ".margins.csv"}
    for name in {*others, *FILES[:-2]}:  # some of ours may be missing
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    clear(tmp_path, FILES)
    assert {str(path) for path in tree(tmp_path)} == others


def test_clearing_a_folder_that_is_not_there_does_nothing(tmp_path):
    clear(tmp_path / "nowhere", FILES)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("model", ["smollm2-135m", "Qwen/Qwen3-0.6B", "/models/my model", "../up", "C:\\x.gguf"])
def test_a_default_folder_is_one_new_folder_under_outputs(model):
    folder = default_folder("jlens", model)
    assert folder.parts[0] == "outputs"
    assert len(folder.parts) == 2
    assert folder.name.startswith("jlens-")


# --- Writing whole. ---

TENSORS = {"a": torch.arange(6.0).reshape(2, 3).T, "b": torch.tensor([True, False])}
WRITERS = {
    "text": lambda path: write_text(path, "é\n是\n"),
    "json": lambda path: write_json(path, {"b": [1, None], "a": "是"}),
    "safetensors": lambda path: write_safetensors(path, TENSORS, {"key": "value"}),
}
every_writer = pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)


def test_what_is_written_is_read_back(tmp_path):
    for name, write in WRITERS.items():
        write(tmp_path / name)
    assert (tmp_path / "text").read_bytes() == "é\n是\n".encode()
    assert json.loads((tmp_path / "json").read_text(encoding="utf-8")) == {"b": [1, None], "a": "是"}
    assert "是" in (tmp_path / "json").read_text(encoding="utf-8")
    read = safetensors.torch.load_file(tmp_path / "safetensors")
    assert read.keys() == TENSORS.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())
    with safetensors.safe_open(tmp_path / "safetensors", "pt") as file:
        assert file.metadata() == {"key": "value"}


@every_writer
def test_folders_are_made_and_an_old_file_is_replaced_by_one_that_all_may_read(tmp_path, write):
    path = tmp_path / "new" / "folder" / "file"
    write(path)
    first = path.read_bytes()
    path.write_bytes(b"old")
    write(path)
    assert path.read_bytes() == first
    assert list(path.parent.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("old", [b"old", None], ids=["over an old file", "anew"])
def test_a_failure_leaves_what_was_there(tmp_path, old, error):
    path = tmp_path / "file.csv"
    if old is not None:
        path.write_bytes(old)

    def interrupted():
        with replacing(path) as partial:
            partial.write_bytes(b"half of the new")
            raise error

    with pytest.raises(type(error)):
        interrupted()
    assert tree(tmp_path) == ({} if old is None else {path.relative_to(tmp_path): old})


def test_a_value_json_cannot_hold_leaves_the_old_file(tmp_path):
    path = tmp_path / "run.json"
    write_json(path, {"complete": True})
    with pytest.raises(TypeError):
        write_json(path, {"complete": object()})
    assert json.loads(path.read_text()) == {"complete": True}
    assert list(tmp_path.iterdir()) == [path]


def test_the_old_file_stands_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "figure.png"
    path.write_bytes(b"old")
    with replacing(path) as partial:
        partial.write_bytes(b"new")
        assert path.read_bytes() == b"old"
        assert partial.parent == path.parent, "a rename across file systems would not be atomic"
        assert partial.suffix == path.suffix, "savefig goes by the suffix"
    assert tree(tmp_path) == {path.relative_to(tmp_path): b"new"}


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1])
def test_the_hash_of_a_file_is_the_hash_of_its_bytes(tmp_path, size):
    content = bytes(range(256)) * (size // 256 + 1)
    (tmp_path / "file").write_bytes(content[:size])
    assert file_sha256(tmp_path / "file") == hashlib.sha256(content[:size]).hexdigest()
