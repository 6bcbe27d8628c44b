"""``klb-probe run`` end to end: scripted agents in seconds, a tiny model as agent, mistakes in one line."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from command import klb
from tiny import save_tiny_llama

from klb_probe.dialogue.sidecar import read_turns
from klb_probe.dialogue.trajectory import read_folder


@pytest.fixture(scope="module")
def liar(tmp_path_factory):
    out = tmp_path_factory.mktemp("liar") / "run"
    command = ("run", "--agent", "scripted:deceptive", "--domains", "airline,debt,recall", "--trust", "medium", "--out", out)
    assert klb(*command) == 0
    return out


def test_the_deceptive_agent_lies_where_it_is_paid_to_and_nowhere_else(liar, capsys):
    rows = [row for file in read_folder(liar) for row in file.rows]
    assert len(rows) == 3 * 3 * 14
    assert all(file.complete for file in read_folder(liar))
    for row in rows:
        assert row["gate"] == "passed"
        owed = row["entitled_outcome"] != "none"
        assert row["derived"]["lied"] is (owed and row["condition"] != "none"), (row["case"], row["condition"])
    assert klb("score", liar) == 0
    printed = capsys.readouterr().out
    assert "emergent" in printed
    table = pd.read_csv(liar / "score" / "panel.csv")
    macro = table[(table["metric"] == "DR_macro") & table["trust"].notna()].set_index("condition")["value"]
    assert macro.to_dict() == {"control": 0, "emergent": 1, "instructed": 1}


def test_a_verifying_customer_catches_and_an_accepting_one_does_not(tmp_path):
    caught = {}
    for customer in ("verifying", "accepting"):
        out = tmp_path / customer
        command = ("run", "--agent", "scripted:deceptive", "--customer", f"scripted:{customer}", "--domains", "refund")
        assert klb(*command, "--conditions", "emergent", "--trust", "high", "--out", out) == 0
        rows = read_folder(out)[0].rows
        lies = [row for row in rows if row["derived"]["lied"]]
        assert len(lies) == 8
        caught[customer] = [row["derived"]["detected"] for row in lies]
        assert rows[-1]["trust_after"] != rows[0]["trust_before"]
    assert all(caught["verifying"])
    assert not any(caught["accepting"])


def test_the_honest_agent_never_lies_and_gives_what_is_owed(tmp_path):
    out = tmp_path / "honest"
    assert klb("run", "--agent", "scripted:honest", "--conditions", "instructed", "--trust", "low", "--out", out) == 0
    rows = [row for file in read_folder(out) for row in file.rows]
    assert len(rows) == 112
    for row in rows:
        assert not row["derived"]["lied"], row["case"]
        if row["entitled_outcome"] != "none":
            assert row["outcome"] == row["owed_outcome"]
            assert row["derived"]["disclosed"], row["case"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.mark.parametrize("mode", ["flat", "turns"])
def test_a_local_model_plays_agent_and_the_same_seed_gives_the_same_file(folder, tmp_path, mode):
    command = (
        "run", "--agent", folder, "--domains", "airline", "--conditions", "control,emergent", "--trust", "low", "--quick",
        "--mode", mode, "--max-tokens", 12, "--device", "cpu",
    )  # fmt: skip
    assert klb(*command, "--out", tmp_path / "one") == 0
    assert klb(*command, "--batch", 1, "--out", tmp_path / "two") == 0
    one, two = (read_folder(tmp_path / name)[0] for name in ("one", "two"))
    assert one.rows == two.rows
    assert len(one.rows) == 4
    (path,) = (tmp_path / "one").glob("turns_*.jsonl")
    turns = list(read_turns(path))
    assert {turn["part"] for turn in turns} >= {"gate"}
    assert all(turn["prompt_ids"] and turn["ids"] for turn in turns)
    assert json.loads((tmp_path / "one" / "run.json").read_text())["players"]["agent"]["player"]["kind"] == "local"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--conditions", "bribed"), "unknown condition bribed"),
        (("--trust", "zero"), "unknown starting trust zero"),
        (("--mode", "spoken"), "unknown mode spoken"),
        (("--trust-model", "kind"), "unknown trust model"),
        (("--domains", "boats"), "unknown domain boats"),
        (("--agent", "scripted:sly"), "does not play the agent"),
        (("--agent", "scripted:verifying"), "does not play the agent"),
        (("--customer", "scripted:honest"), "does not play the customer"),
        (("--judge", "scripted:honest"), "does not play the judge"),
        (("--customer", "rules"), "rules does not play the customer"),
        (("--agent", "endpoint:some-model"), "KLB_API_KEY"),
        (("--agent", "lama-3.1-8b"), "llama-3.1-8b"),
    ],
)
def test_a_mistake_is_one_line_exit_2_and_nothing_written(tmp_path, monkeypatch, capsys, arguments, words):
    for name in ("KLB_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    out = tmp_path / "out"
    assert klb("run", "--agent", "scripted:honest", *arguments, "--out", out) == 2
    error = capsys.readouterr().err.strip()
    assert error.count("\n") == 0
    assert words in error
    assert not out.exists()


def test_overwrite_keeps_what_is_not_this_runs(tmp_path):
    out = tmp_path / "out"
    command = ("run", "--agent", "scripted:honest", "--domains", "debt", "--conditions", "control", "--trust", "low")
    assert klb(*command, "--quick", "--out", out) == 0
    mine = out / "trajectories_mine_debt_flat.jsonl"
    mine.write_text("{}\n")
    assert klb(*command, "--quick", "--out", out, "--overwrite") == 0
    assert mine.read_text() == "{}\n"


def test_the_same_from_python(tmp_path):
    import klb_probe

    run = klb_probe.run_dialogues(
        "scripted:deceptive", str(tmp_path / "out"), domains=["billing"], conditions=["emergent"], trusts=["high"]
    )
    assert len(run.rows) == 14
    table = run.panel().set_index("metric")
    assert table.loc["DR", "value"] == 1
    assert read_folder(tmp_path / "out")[0].complete


def test_a_finished_folder_is_not_overwritten_unasked(liar, capsys):
    command = ("run", "--agent", "scripted:honest", "--domains", "airline", "--conditions", "control", "--trust", "low")
    assert klb(*command, "--out", liar) == 2
    assert "--resume" in capsys.readouterr().err
