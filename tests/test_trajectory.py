"""Trajectory files: what is written is read back, what was cut off is ignored aloud, what is broken is named by line."""

from __future__ import annotations

import json

import pytest

from klb_probe.dialogue.trajectory import TrajectoryWriter, file_name, read_folder, read_trajectories
from klb_probe.errors import KlbError

META = {
    "agent": {"cfg": "llama", "model": "meta-llama/Llama-3.1-8B-Instruct", "temp": 0.7},
    "domain": "airline",
    "tau": 0.6,
    "delta_set": "default_soft",
}
USAGE = {"agent": {"calls": 6}}


def row(number, **keys):
    return {"agent": "llama", "domain": "airline", "delta_set": "default_soft", "sample": 1, "round": number} | {
        "order_id": f"airline/{number}",
        "condition": "none",
        "initial": "low",
        "gate_passed": True,
        "transcript": [["user", "Hé — “no”\u2028"], ["agent", "half an emoji \ud83d"]],
        **keys,
    }


def written(path, *lines, end="\n"):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + end)
    return path


def test_names_of_files():
    assert file_name("llama-3.1-8b", "airline", "harsh") == "trajectories_llama-3.1-8b_airline_harsh.jsonl"
    assert file_name("org/my model", "debt", "flat") == "trajectories_org-my-model_debt_flat.jsonl"


def test_what_is_written_is_read_back_line_by_line(tmp_path):
    path = tmp_path / "deep" / file_name("llama", "airline", "default_soft")
    rows = [row(number) for number in range(3)]
    with TrajectoryWriter(path, META) as writer:
        for count, one in enumerate(rows, 1):
            writer.append(one)
            unfinished = read_trajectories(path)
            assert (unfinished.rows, unfinished.complete, unfinished.torn) == (rows[:count], False, "")
        writer.finish(USAGE)
    read = read_trajectories(path)
    assert (read.run_meta, read.rows, read.usage_summary, read.complete) == (META, rows, USAGE, True)
    lines = [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]
    assert lines == [{"run_meta": META}, *rows, {"usage_summary": USAGE}]


def test_a_run_that_died_at_any_byte_continues_with_its_whole_rounds(tmp_path):
    path = tmp_path / "trajectories_a.jsonl"
    rows = [row(number) for number in range(3)]
    with TrajectoryWriter(path, META) as writer:
        for one in rows:
            writer.append(one)
        writer.finish(USAGE)
    whole = path.read_bytes()
    ends = [position for position, byte in enumerate(whole) if byte == ord("\n")]
    for cut in [*range(0, len(whole) - 1, 7), *ends[:-1], *(end + 1 for end in ends[:-1])]:
        path.write_bytes(whole[:cut])
        kept = max(0, sum(end <= cut for end in ends) - 1)  # a line without its newline yet is whole all the same
        with TrajectoryWriter(path, META) as writer:
            assert writer.rows == rows[:kept]
            for one in rows[kept:]:
                writer.append(one)
            assert writer.rows == rows
            writer.finish(USAGE)
        assert path.read_bytes() == whole


def test_a_torn_line_is_reported_by_number_and_ignored(tmp_path, caplog):
    path = written(tmp_path / "trajectories_a.jsonl", {"run_meta": META}, row(0), json.dumps(row(1))[:40], end="")
    read = read_trajectories(path)
    assert read.rows == [row(0)]
    assert not read.complete
    assert f"{path}:3" in read.torn
    read_folder(tmp_path)
    assert f"{path}:3" in caplog.text
    cut_usage = written(tmp_path / "b.jsonl", {"run_meta": META}, row(0), '{"usage_summary": {"ag', end="")
    assert not read_trajectories(cut_usage).complete
    resumed = written(tmp_path / "c.jsonl", {"run_meta": META}, {"usage_summary": {}}, '{"ag', end="")
    assert not read_trajectories(resumed).complete


def test_a_torn_character_is_torn_too(tmp_path):
    path = tmp_path / "trajectories_a.jsonl"
    path.write_bytes(json.dumps({"run_meta": META}).encode() + b'\n{"a": "\xe2\x80')
    assert read_trajectories(path).torn


@pytest.mark.parametrize("broken", ['{"a": 1', "[1]", "null", "nonsense", '{"a": 1} {"b": 2}'])
def test_a_broken_line_is_named_by_file_and_number(tmp_path, broken):
    path = written(tmp_path / "t.jsonl", {"run_meta": META}, row(0), "", broken, row(1))
    with pytest.raises(KlbError, match=r"t\.jsonl:4: "):
        read_trajectories(path)


@pytest.mark.parametrize("first", [[], [row(0)], [{"run_meta": None}]])
def test_a_file_begins_with_its_run_meta(tmp_path, first):
    with pytest.raises(KlbError, match=r"t\.jsonl:1: .*run_meta"):
        read_trajectories(written(tmp_path / "t.jsonl", *first))


def test_public_rows_may_lack_keys_and_have_others(tmp_path):
    """A failed gate has no agent, domain, delta set or sample of its own; unknown keys and CR LF pass through."""
    failed = {"gate_passed": False, "round": 1, "condition": "none", "initial": "low", "gate_raw": "?", "new_key": 1}
    error = {"gate_passed": False, "round": 2, "condition": "none", "initial": "high", "error": "429"}
    path = written(tmp_path / "t.jsonl", {"run_meta": META}, row(0), failed, error, {"usage_summary": USAGE}, end="\r\n\r\n")
    read = read_trajectories(path)
    shared = {"agent": "llama", "domain": "airline", "delta_set": "default_soft"}
    assert read.rows == [row(0), {**failed, **shared, "sample": 1}, {**error, **shared}]
    assert read.complete
    alone = read_trajectories(written(tmp_path / "u.jsonl", {"run_meta": META}, failed))
    assert alone.rows == [{**failed, **shared}]
    other = {**row(1), "agent": "other"}
    assert read_trajectories(written(tmp_path / "w.jsonl", {"run_meta": META}, row(0), other)).rows == [row(0), other]
    several = read_trajectories(written(tmp_path / "v.jsonl", {"run_meta": META}, row(0), row(0, sample=2), failed))
    assert "sample" not in several.rows[-1]


def test_only_a_last_line_of_usage_completes_a_file(tmp_path):
    path = written(tmp_path / "t.jsonl", {"run_meta": META}, row(0), {"usage_summary": {}}, {"run_meta": META}, row(1))
    read = read_trajectories(path)
    assert (read.rows, read.complete) == ([row(0), row(1)], False)


def test_a_folder_is_all_its_trajectory_files_and_nothing_else(tmp_path):
    for name in (
        "trajectories_b.jsonl",
        "sub/trajectories_c.jsonl",
        "trajectories_a.jsonl",
        "other.jsonl",
        "trajectories_a.csv",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        written(tmp_path / name, {"run_meta": META}, row(0), *([{"usage_summary": {}}] if "_b" in name else []))
    files = read_folder(tmp_path)
    assert [str(file.path.relative_to(tmp_path)) for file in files] == [
        "sub/trajectories_c.jsonl",
        "trajectories_a.jsonl",
        "trajectories_b.jsonl",
    ]
    assert [file.complete for file in files] == [False, False, True]
    assert [file.path.name for file in read_folder(tmp_path / "other.jsonl")] == ["other.jsonl"]
    with pytest.raises(KlbError, match="no such file or folder"):
        read_folder(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(KlbError, match=r"empty holds no trajectories_\*\.jsonl"):
        read_folder(tmp_path / "empty")


def test_another_run_is_never_continued(tmp_path):
    path = tmp_path / "t.jsonl"
    TrajectoryWriter(path, META).close()
    before = path.read_bytes()
    with pytest.raises(KlbError, match=r"t\.jsonl belongs to a run with another delta_set, seed"):
        TrajectoryWriter(path, {**META, "delta_set": "harsh", "seed": 1})
    assert path.read_bytes() == before
    with TrajectoryWriter(path, META) as writer:
        writer.finish(USAGE)
    with pytest.raises(KlbError, match="is complete"):
        TrajectoryWriter(path, META)
