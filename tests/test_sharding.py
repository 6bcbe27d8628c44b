"""Work in parts: merged, the parts are what one process would have written, whoever played them and whatever died meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from command import klb
from safetensors.torch import load_file
from tiny import save_tiny_llama

import klb_probe
from klb_probe.dialogue.sidecar import read_turns
from klb_probe.dialogue.trajectory import TrajectoryWriter, read_folder
from klb_probe.errors import KlbError
from klb_probe.ray_workers import _workers, in_shards
from klb_probe.run_command import run_dialogues_command
from klb_probe.sharding import Shard, merge_runs

SCRIPTED = ("run", "--agent", "scripted:deceptive", "--domains", "airline,debt", "--conditions", "control,emergent")
QUICK = ("--trust", "low", "--quick")  # 4 trajectories of 2 rounds


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    assert klb(*SCRIPTED, *QUICK, "--out", out) == 0
    return out


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    return [shard(folder / f"{i}-of-3", f"{i}/3") for i in (1, 2, 3)]


def shard(out, part, *extra):
    assert klb(*SCRIPTED, *QUICK, "--shard", part, "--out", out, *extra) == 0
    return out


def lines(rows):
    return Counter(json.dumps(row, sort_keys=True) for row in rows)


def assert_same_run(one, other):
    """The same files, rows, token ids and record, in whatever order."""
    files, others = read_folder(one), read_folder(other)
    assert [file.path.name for file in files] == [file.path.name for file in others]
    for a, b in zip(files, others, strict=True):
        assert a.complete
        assert b.complete
        assert a.run_meta == b.run_meta
        assert a.usage_summary == b.usage_summary
        assert lines(a.rows) == lines(b.rows)
    turns, other_turns = ([path.name for path in sorted(folder.glob("turns_*.jsonl"))] for folder in (one, other))
    assert turns == other_turns
    for name in turns:
        assert lines(read_turns(one / name)) == lines(read_turns(other / name))
    a, b = (json.loads((folder / "run.json").read_text()) for folder in (one, other))
    for record in (a, b):
        record["arguments"].pop("out")
    assert a == b


def signals(folder):
    keys = ["agent", "domain", "condition", "initial", "sample", "round", "turn", "position", "lens", "layer"]
    table = pd.read_parquet(folder / "signals.parquet").sort_values(keys, ignore_index=True)
    manifest = json.loads((folder / "signals.json").read_text())
    manifest["unmapped"] = sorted(map(str, manifest["unmapped"]))
    return table, manifest


def assert_same_signals(one, other):
    (table, manifest), (other_table, other_manifest) = signals(one), signals(other)
    assert len(table)
    pd.testing.assert_frame_equal(table, other_table, atol=1e-6, rtol=1e-5)
    assert manifest == other_manifest


def test_merged_shards_of_a_run_are_the_run(whole, shards, tmp_path, capsys):
    assert [len(read_folder(path)) for path in shards] == [2, 1, 1]
    played = [lines(row for file in read_folder(path) for row in file.rows) for path in shards]
    assert sum(map(len, played)) == 8
    assert klb("merge", *reversed(shards), "--out", tmp_path / "merged") == 0
    assert "merged 3 shards: 8 rounds" in capsys.readouterr().out
    assert_same_run(tmp_path / "merged", whole)
    assert klb("merge", *shards, "--out", tmp_path / "merged") == 2  # not overwritten unasked
    shard(tmp_path / "all", "1/1")
    assert klb("merge", tmp_path / "all", "--out", tmp_path / "one") == 0
    assert_same_run(tmp_path / "one", whole)


def test_a_sampled_reply_is_the_same_in_any_shard(model, tmp_path):
    """A local model at temperature 0.7, its token ids, and margins read meanwhile; one of five shards has nothing to do."""
    command = (
        "run", "--agent", model, "--domains", "airline", "--conditions", "control,emergent", "--trust", "low,high", "--quick",
        "--max-tokens", 6, "--past-gate", "--device", "cpu", "--seed", 3,
    )  # fmt: skip
    assert klb(*command, "--out", tmp_path / "whole") == 0
    parts = [tmp_path / f"part{i}" for i in range(1, 6)]
    for i, path in enumerate(parts, 1):
        assert klb(*command, "--shard", f"{i}/5", "--out", path) == 0
    assert not list(parts[4].glob("trajectories_*"))
    assert klb("merge", *parts, "--out", tmp_path / "merged") == 0
    assert_same_run(tmp_path / "merged", tmp_path / "whole")
    replies = [turn["ids"] for path in (tmp_path / "merged").glob("turns_*") for turn in read_turns(path)]
    assert len({tuple(ids) for ids in replies}) > 4
    reading = ("rounds", tmp_path / "merged", "--model", model, "--lens", "logit", "--device", "cpu")
    assert klb(*reading) == 0
    for i in (1, 2):
        assert klb(*reading, "--shard", f"{i}/2") == 0
    read = [tmp_path / "merged" / "signals.shards" / f"{i}-of-2" for i in (1, 2)]
    assert [signals(path)[1]["rounds"] for path in read] == [4, 4]
    assert klb("merge", *read, "--out", tmp_path / "signals") == 0
    assert_same_signals(tmp_path / "signals", tmp_path / "merged" / "signals")


def test_merged_shards_of_a_replay_are_the_replay(whole, model, tmp_path, capsys):
    reading = ("rounds", whole, "--model", model, "--lens", "logit", "--replay", "--device", "cpu")
    assert klb(*reading, "--out", tmp_path / "whole") == 0
    parts = [tmp_path / name for name in ("one", "two", "three")]
    for i, path in enumerate(parts, 1):
        assert klb(*reading, "--shard", f"{i}/3", "--out", path) == 0
    assert klb("merge", *parts, "--out", tmp_path / "merged") == 0
    assert_same_signals(tmp_path / "merged", tmp_path / "whole")
    assert klb(*reading, "--contrast", "True/False", "--shard", "3/3", "--out", tmp_path / "other") == 0
    capsys.readouterr()
    for given, words in (
        ([*parts[:2], tmp_path / "other"], "not of the same work as"),
        (parts[1:], "shard 1/3 is missing; make it with `klb-probe rounds --shard`"),
        ([tmp_path / "whole", *parts], "is not a shard"),
    ):
        assert klb("merge", *given, "--out", tmp_path / "no") == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1
    assert not (tmp_path / "no").exists()


def heard(out, part):
    """A copy of a shard, with live signals."""
    shutil.copytree(part, out)
    (out / "signals").mkdir()
    (out / "signals" / "signals.json").write_text("{}")
    return out


def test_what_does_not_belong_together_is_refused(whole, shards, tmp_path, capsys):
    one, two, three = shards
    seed = shard(tmp_path / "seed", "3/3", "--seed", 1)
    agent = shard(tmp_path / "agent", "3/3", "--agent", "scripted:honest", "--label", "scripted:deceptive")
    plan = shard(tmp_path / "plan", "3/3", "--samples", 2)
    quarter = shard(tmp_path / "quarter", "3/4")
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    record = json.loads((three / "run.json").read_text())
    (unfinished / "run.json").write_text(json.dumps({**record, "complete": False}))
    (tmp_path / "empty").mkdir()
    emptied = tmp_path / "emptied"
    emptied.mkdir()
    (emptied / "run.json").write_text(json.dumps(record))
    capsys.readouterr()
    for given, words in (
        ([one, three], "shard 2/3 is missing; make it with `klb-probe run --shard`"),
        ([two], "shard 1/3, 3/3 is missing"),
        ([one, two, two, three], "are both shard 2/3"),
        ([one, two, seed], "seed"),
        ([one, two, agent], "another players"),
        ([one, two, plan], "another plan_sha256"),
        ([one, two, quarter], "another shard"),
        ([one, two, unfinished], "did not come to its end"),
        ([one, two, emptied], "holds 0 of its 2 rounds"),
        ([one, two, whole], "is not a shard"),
        ([one, two, tmp_path / "empty"], "shards are folders"),
        ([one, two, tmp_path / "absent"], "no such folder"),
        ([one, two, heard(tmp_path / "heard", three)], "has no signals, and other shards have"),
    ):
        assert klb("merge", *given, "--out", tmp_path / "no") == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1, error
    assert not (tmp_path / "no").exists()


def test_a_whole_does_not_hold_its_shards_nor_lie_in_one(shards, tmp_path, capsys):
    """Rounds of both would be counted, as folders are searched with all that is in them."""
    for i, part in enumerate(shards, 1):
        shutil.copytree(part, tmp_path / "run" / f"{i}-of-3")
    parts = [tmp_path / "run" / f"{i}-of-3" for i in (1, 2, 3)]
    for out in (tmp_path / "run", parts[0], parts[1] / "merged"):
        assert klb("merge", *parts, "--out", out, "--overwrite") == 2
        assert "rounds would count twice" in capsys.readouterr().err


def test_a_merge_over_another_run_leaves_nothing_of_it(shards, whole, tmp_path):
    out = tmp_path / "out"
    assert klb("run", "--agent", "scripted:honest", "--domains", "recall", *QUICK, "--out", out) == 0
    (out / "notes.txt").write_text("mine")
    assert klb("merge", *shards, "--out", out, "--overwrite") == 0
    assert_same_run(out, whole)
    assert (out / "notes.txt").read_text() == "mine"
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    other = shutil.copytree(shards[2], tmp_path / "other")
    for path in other.glob("trajectories_*"):
        path.write_text(path.read_text().replace('"label": "', '"label": "not-', 1))
    assert klb("merge", *shards[:2], other, "--out", out, "--overwrite") == 2
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_shards_may_be_made_on_several_gpus_of_one_machine(shards, whole, tmp_path):
    parts = []
    for i, part in enumerate(shards):
        shutil.copytree(part, tmp_path / str(i))
        for path in (tmp_path / str(i)).glob("*.json*"):
            path.write_text(path.read_text().replace('"kind": "scripted"', f'"device": "cuda:{i}", "kind": "scripted"'))
        parts.append(tmp_path / str(i))
    assert f'"cuda:{i}"' in (parts[-1] / "run.json").read_text()
    assert klb("merge", *parts, "--out", tmp_path / "merged") == 0
    assert len(read_folder(tmp_path / "merged")) == len(read_folder(whole))


def test_a_readout_does_not_replace_another_shard(whole, model, tmp_path, capsys):
    reading = ("rounds", whole, "--model", model, "--lens", "logit", "--replay", "--device", "cpu", "--out", tmp_path / "out")
    assert klb(*reading, "--shard", "1/4") == 0
    assert klb(*reading, "--shard", "2/4", "--overwrite") == 2
    assert "holds 1/4; give shard 2/4 a folder of its own" in capsys.readouterr().err
    assert klb(*reading, "--shard", "1/4", "--overwrite") == 0


def test_shards_of_another_call_are_not_gone_on_with(tmp_path, monkeypatch):
    monkeypatch.setattr("klb_probe.ray_workers._ray", lambda: None)
    folder = tmp_path / "out.shards"
    (folder / "1-of-2").mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps({"n": 4}))
    with pytest.raises(KlbError, match="holds shards of another call"):
        in_shards(print, {}, tmp_path / "out", print, asked={"n": 5}, resume=True)
    assert (folder / "1-of-2").is_dir()


def test_a_shard_goes_on_from_where_it_was_stopped_and_only_as_that_shard(shards, tmp_path, capsys):
    stopped = tmp_path / "stopped"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrajectoryWriter, "append", after_one(TrajectoryWriter.append, KeyboardInterrupt))
        assert klb(*SCRIPTED, *QUICK, "--shard", "1/3", "--out", stopped) == 130
    assert sum(len(file.rows) for file in read_folder(stopped)) == 1
    capsys.readouterr()
    assert klb(*SCRIPTED, *QUICK, "--shard", "1/2", "--out", stopped, "--resume") == 2
    assert "another shard" in capsys.readouterr().err
    shard(stopped, "1/3", "--resume")
    merge_runs([stopped, *shards[1:]], tmp_path / "merged")
    merge_runs(shards, tmp_path / "other")
    assert_same_run(tmp_path / "merged", tmp_path / "other")


def after_one(append, stop):
    """An append that ends the run after its first row."""

    def stopping(self, row):
        append(self, row)
        raise stop

    return stopping


def test_the_same_from_python(shards, tmp_path):
    choices = {"domains": ["airline", "debt"], "conditions": ["control", "emergent"], "trusts": ["low"]}
    run = klb_probe.run_dialogues(
        "scripted:deceptive", tmp_path / "part", **choices, cases_of_each_kind=1, shard=Shard.parse("1/3")
    )
    assert lines(run.rows) == lines(row for file in read_folder(shards[0]) for row in file.rows)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (("--shard", "0/3"), "--shard wants i/n"),
        (("--shard", "1/2", "--ray"), "not both"),
        (("--workers", 2), "pass --ray too"),
        (("--ray", "--workers", 2), 'pip install "klb-probe[ray]"'),
        (("--ray", "--device", "cpu"), "--device cpu takes none; pass --workers N"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_written(whole, model, extra, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    for command in (
        (*SCRIPTED, "--out", tmp_path / "no"),
        ("rounds", whole, "--replay", "--model", model, "--out", tmp_path / "no"),
        ("fit", "--model", model, "--out", tmp_path / "no.margin.safetensors"),
    ):
        assert klb(*command, *extra) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("gpus", "asked", "expected"),
    [
        (4, (None, None, "auto"), (4, {"num_gpus": 1})),
        (4, (8, None, "cuda"), (8, {"num_gpus": 1})),
        (4, (None, 3, "auto"), (3, {"num_gpus": 1})),
        (4, (2, 3, "cpu"), (2, {"num_cpus": 8})),
        (0, (9, 3, "auto"), (3, {"num_cpus": 5})),
        (0, (40, None, "auto"), (40, {"num_cpus": 1})),
    ],
)
def test_there_are_no_more_workers_than_parts_and_each_has_its_share(gpus, asked, expected):
    """A cluster of two machines with 8 CPUs each, of which ray itself is not needed here."""
    nodes = [{"Alive": True, "Resources": {"CPU": 8.0}}] * 2
    total = {"CPU": 16.0} | ({"GPU": float(gpus)} if gpus else {})
    assert _workers(SimpleNamespace(cluster_resources=lambda: total, nodes=lambda: nodes), *asked) == expected


def test_workers_on_cpus_have_to_be_counted_by_hand():
    cluster = SimpleNamespace(cluster_resources=lambda: {"CPU": 4.0})
    with pytest.raises(KlbError, match="has no GPU to count workers by; pass --workers N"):
        _workers(cluster, None, 3, "auto")


# --- On a Ray cluster of two workers. ---


@pytest.fixture(scope="module")
def ray():
    """A local cluster, for all of the tests below: where ray is not installed, they are skipped and say so."""
    ray = pytest.importorskip("ray", reason='ray is not installed: pip install "klb-probe[ray]"')
    paths = os.pathsep.join([str(Path(klb_probe.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    ray.init(address="local", num_cpus=2, num_gpus=0, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": paths}})
    yield ray
    ray.shutdown()


def test_ray_plays_reads_and_fits_as_one_process_does(ray, whole, model, tmp_path, capsys):
    workers = ("--ray", "--workers", 2)
    assert klb(*SCRIPTED, *QUICK, "--out", tmp_path / "run", *workers) == 0
    assert "8 rounds: gate 8 passed" in capsys.readouterr().out
    assert_same_run(tmp_path / "run", whole)
    reading = ("rounds", whole, "--model", model, "--lens", "logit", "--replay", "--device", "cpu")
    assert klb(*reading, "--out", tmp_path / "one") == 0
    assert klb(*reading, "--out", tmp_path / "two", *workers) == 0
    assert_same_signals(tmp_path / "two", tmp_path / "one")
    text = tmp_path / "text.txt"
    text.write_text(
        "\n\n".join(f"Paragraph {i} of a text that is long enough for a short prompt of a fit." * 2 for i in range(4))
    )
    fit = ("fit", "--model", model, "--corpus", text, "--n", 4, "--max-len", 24, "--skip-first", 2, "--device", "cpu")
    assert klb(*fit, "--out", tmp_path / "one.margin.safetensors") == 0
    assert klb(*fit, "--out", tmp_path / "two.margin.safetensors", "--ray", "--workers", 5) == 0  # of which one has no prompt
    one, two = (load_file(tmp_path / f"{name}.margin.safetensors") for name in ("one", "two"))
    for name in one:
        assert (one[name] - two[name]).abs().max() <= 1e-6 * one[name].abs().max()
    assert not list(tmp_path.glob("*.shards"))


def test_a_killed_worker_has_its_shard_gone_on_with(ray, whole, tmp_path):
    """The worker of shard 2 dies after its first round is on disk, once."""

    def dying(**arguments):
        append, mark = TrajectoryWriter.append, tmp_path / "died"

        def last_words(self, row):
            append(self, row)
            if arguments["shard"] == "2/2" and not mark.exists():
                mark.write_text(str(len(self.rows)))
                os.kill(os.getpid(), signal.SIGKILL)

        TrajectoryWriter.append = last_words
        try:
            run_dialogues_command(**arguments)
        finally:
            TrajectoryWriter.append = append

    in_shards(dying, arguments(), tmp_path / "run", merge_runs, workers=2, asked={})
    assert (tmp_path / "died").read_text() == "1"
    assert_same_run(tmp_path / "run", whole)


def arguments():
    """Those of the scripted run, as its command hands them to workers."""
    given = {"agent": "scripted:deceptive", "domains": "airline,debt", "conditions": "control,emergent", "trust": "low"}
    return {**given, "quick": True, "resume": True}


def plan_of(*command):
    """What a command with --ray asks of its workers."""
    seen = []

    def asked_of(*_, asked, **__):
        seen.append(asked)
        raise KlbError("as far as this goes")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("klb_probe.ray_workers.in_shards", asked_of)
        assert klb(*command, "--workers", 2) == 2
    return seen[0]


def test_a_workers_mistake_is_the_callers_and_what_is_done_is_kept(ray, whole, tmp_path, capsys):
    out = tmp_path / "run"
    assert klb(*SCRIPTED, "--conditions", "bribed", "--out", out, "--ray", "--workers", 2) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("error: unknown condition bribed")

    command = (*SCRIPTED, *QUICK, "--out", out, "--ray")

    def never(**arguments):
        if arguments["shard"] == "2/2":
            os.kill(os.getpid(), signal.SIGKILL)
        run_dialogues_command(**arguments)

    with pytest.raises(KlbError, match="shard 2/2: its worker died 4 times"):
        in_shards(never, arguments(), out, merge_runs, workers=2, asked=plan_of(*command))
    assert sorted(path.name for path in (tmp_path / "run.shards").iterdir()) == ["1-of-2", "plan.json"]
    assert klb(*command, "--workers", 2) == 2
    assert "--overwrite to drop them" in capsys.readouterr().err
    assert klb(*command, "--workers", 3, "--resume") == 2
    assert "pass --workers 2" in capsys.readouterr().err
    assert klb(*command, "--workers", 2, "--resume", "--seed", 5) == 2
    assert "holds shards of another call" in capsys.readouterr().err
    assert klb(*command, "--workers", 2, "--resume") == 0
    assert_same_run(out, whole)
    assert klb(*command, "--workers", 2, "--resume") == 2
    assert "no shards to go on with" in capsys.readouterr().err
