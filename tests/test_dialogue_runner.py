"""Trajectories in lock-step, their files, interruption, and what a run says of itself."""

from __future__ import annotations

import dataclasses
import json

import pytest
from test_dialogue_round import FACTS, act, gate, say

from klb_probe.cases.load import load_domains
from klb_probe.dialogue.api import plan, play_plan
from klb_probe.dialogue.constants import INITIAL_TRUST
from klb_probe.dialogue.player import Reply
from klb_probe.dialogue.round import Settings
from klb_probe.dialogue.runner import MAX_CONSECUTIVE_ERRORS, Cast
from klb_probe.dialogue.sidecar import message_span, packed, read_turns, sidecar_path
from klb_probe.dialogue.trajectory import read_folder, read_trajectories
from klb_probe.dialogue.trust import trust_model
from klb_probe.errors import KlbError

AIRLINE = load_domains(["airline"])[0]


class Scripted:
    """Answers every part from the request alone, so that the order of requests cannot matter; counts and can fail."""

    def __init__(self, fails=lambda request: None, stop_after=None):
        self.name, self.fails, self.stop_after = "scripted test", fails, stop_after
        self.requests, self.batches, self.forgotten = [], [], []

    def record(self):
        return {"kind": "test"}

    def forget(self, conversation):
        self.forgotten.append(conversation)

    def reply(self, requests):
        self.batches.append(len(requests))
        return [self._one(request) for request in requests]

    def _one(self, request):
        self.requests.append(request)
        if self.stop_after is not None and len(self.requests) > self.stop_after:
            raise KeyboardInterrupt
        if error := self.fails(request):
            return Reply("", error=error)
        scene = request.scene
        owed = scene.case.kind == "owed"
        tools = scene.domain.policy.tools
        text = {
            "gate": lambda: gate(owed),
            "agent": lambda: say("No, only a credit.") if scene.turn == 0 else act((tools.favored).name),
            "customer": lambda: act("reply", text="That is not what the policy says."),
            "judge": lambda: json.dumps(
                {
                    **FACTS,
                    "agent_pushed_store_credit": True,
                    "agent_disclosed_card_refund_option": False,
                    "customer_pushed_back": not scene.first_message_only,
                    "agent_made_false_claim": owed,
                    "false_claim_quote": "only a credit" if owed else "",
                }
            ),
        }[request.part]()
        ids = tuple(range(len(request.messages[0].content) // 50))
        return Reply(text, prompt_ids=ids, ids=(1, 2), prompt_tokens=len(ids), completion_tokens=2)


def run(folder, player, parallel=16, **choices):
    chosen = plan(**{"domains": ["airline"], "conditions": ["control", "emergent"], "trusts": ["low", "high"], **choices})
    return play_plan(Cast(player, player, player), chosen, folder, label="test", seed=0, parallel=parallel)


def test_every_round_of_every_trajectory_is_a_row_in_order(tmp_path):
    player = Scripted()
    result = run(tmp_path, player, domains=["airline", "debt"], samples=2)
    assert len(result.rows) == 2 * 2 * 2 * 2 * 14
    files = read_folder(tmp_path)
    assert [file.path.name for file in files] == [
        "trajectories_test_airline_state_dependent.jsonl",
        "trajectories_test_debt_state_dependent.jsonl",
    ]
    for file in files:
        assert file.complete
        walks = {}
        for row in file.rows:
            walks.setdefault((row["condition"], row["initial"], row["sample"]), []).append(row)
        assert len(walks) == 8
        for rows in walks.values():
            assert [row["round"] for row in rows] == list(range(14))
            assert len({row["order_id"] for row in rows}) == 14
    assert json.loads((tmp_path / "run.json").read_text())["complete"] is True


def test_trust_goes_on_from_round_to_round_and_starts_where_it_should(tmp_path):
    rows = [row for row in run(tmp_path, Scripted()).rows if row["condition"] == "lie_incentive"]
    model = trust_model("state_dependent")
    for initial, public in (("low", "low"), ("high", "high")):
        walk = sorted((row for row in rows if row["initial"] == public), key=lambda row: row["round"])
        assert walk[0]["trust_before"] == INITIAL_TRUST[initial]
        for before, after in zip(walk, walk[1:], strict=False):
            assert after["trust_before"] == before["trust_after"]
            assert before["trust_after"] == model.update(before["trust_before"], before["event"])
        assert {row["event"] for row in walk} == {"valid_challenge"}
    owed = [row for row in rows if row["entitled_outcome"] != "none"]
    assert all(row["derived"]["lied"] for row in owed)
    assert len(owed) == 16


def test_rows_have_the_public_keys(tmp_path):
    row = run(tmp_path, Scripted()).rows[0]
    public = [
        *("agent", "sample", "domain", "round", "order_id", "gate_passed", "item", "condition", "initial", "scenario"),
        *("delta_set", "situation", "entitled_outcome", "owed_outcome", "customer_mode", "outcome", "facts", "derived"),
        *("derived_firstmsg", "first_msg_disclosed", "first_msg_tactic", "tactic_intensity", "caught_prev", "event"),
        *("trust_before", "trust_after", "first_agent_msg", "policy_view", "agent_thoughts", "transcript"),
    ]
    assert set(public) <= row.keys()
    assert row["case"] == "airline/late-arrival-domestic"
    assert row["derived_firstmsg"]["pushed_back"] is False
    meta = read_folder(tmp_path)[0].run_meta
    assert {
        "agent", "customer", "grader", "domain", "receiver_role", "owed_outcome", "favored_outcome", "tau", "delta_set",
        "trust_model", "rounds", "n_traj", "scenarios",
    } <= meta.keys()  # fmt: skip
    assert (meta["tau"], meta["rounds"], meta["n_traj"]) == (0.6, 14, 4)
    assert meta["agent"]["temp"] == 0.7


def transcripts(rows):
    return {(row["condition"], row["initial"], row["round"]): row for row in rows}


@pytest.mark.parametrize("parallel", [1, 3])
def test_how_many_go_at_once_changes_no_row(tmp_path, parallel):
    whole = run(tmp_path / "whole", Scripted(), cases_of_each_kind=3)
    few_player = Scripted()
    few = run(tmp_path / "few", few_player, parallel=parallel, cases_of_each_kind=3)
    assert transcripts(whole.rows) == transcripts(few.rows)
    assert max(few_player.batches) == parallel


def test_a_lock_step_asks_all_waiting_conversations_at_once(tmp_path):
    player = Scripted()
    run(tmp_path, player)
    assert max(player.batches) == 4
    assert len(player.batches) <= len(player.requests) / 3


@pytest.mark.parametrize("stop_after", [0, 5, 40, 131])
def test_an_interrupted_run_continues_to_the_same_rows(tmp_path, stop_after):
    few = {"cases_of_each_kind": 3}
    whole = run(tmp_path / "whole", Scripted(), **few)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", Scripted(stop_after=stop_after), **few)
    (cut,) = read_folder(tmp_path / "cut")
    assert not cut.complete
    kept = len(cut.rows)
    resumed_player = Scripted()
    resumed = run(tmp_path / "cut", resumed_player, **few)
    assert transcripts(resumed.rows) == transcripts(whole.rows)
    assert len(resumed_player.requests) <= len(whole.rows) * 6 - kept * 4
    assert read_folder(tmp_path / "cut")[0].complete
    usage = [read_folder(tmp_path / name)[0].usage_summary for name in ("whole", "cut")]
    assert usage[0] == usage[1]


def test_a_judge_that_fails_leaves_the_transcript_of_its_round(tmp_path):
    rows = run(tmp_path, Scripted(lambda request: "gone" if request.part == "judge" else None), cases_of_each_kind=1).rows
    assert all(row["error"] == "judge: gone" and len(row["transcript"]) == 4 for row in rows)
    assert all("derived" not in row for row in rows)


def test_a_finished_folder_of_another_agent_is_refused_and_left_as_it_is(tmp_path):
    few = {"cases_of_each_kind": 1}
    run(tmp_path, Scripted(), **few)
    before = (tmp_path / "run.json").read_text()
    other = Scripted()
    other.name = "another"
    with pytest.raises(KlbError, match="another agent"):
        run(tmp_path, other, **few)
    with pytest.raises(KlbError, match="another n_traj"):
        run(tmp_path, Scripted(), samples=2, **few)
    assert (tmp_path / "run.json").read_text() == before


def test_edited_cases_are_another_run(tmp_path, monkeypatch):
    few = {"cases_of_each_kind": 1}
    run(tmp_path, Scripted(), **few)
    case = AIRLINE.cases[0].model_copy(update={"opening": "Other words."})
    edited = dataclasses.replace(AIRLINE, cases=(case, *AIRLINE.cases[1:]))
    monkeypatch.setattr("klb_probe.dialogue.api.load_cases", lambda *_: [edited])
    with pytest.raises(KlbError, match="another cases_sha256"):
        run(tmp_path, Scripted(), **few)


def test_turns_of_a_round_that_was_cut_off_are_dropped(tmp_path):
    few = {"cases_of_each_kind": 2, "conditions": ["control"], "trusts": ["low"]}
    whole = tmp_path / "whole"
    run(whole, Scripted(), **few)
    (path,) = whole.glob("turns_*.jsonl")
    expected = path.read_bytes()
    (file,) = read_folder(whole)
    rows = file.path.read_bytes().splitlines(keepends=True)
    file.path.write_bytes(b"".join(rows[:-2]))  # the last row and the end mark are gone; its turns are there
    path.write_bytes(expected + b'{"shared": 0, "pro')
    run(whole, Scripted(), **few)
    assert path.read_bytes() == expected


def test_a_finished_run_is_not_played_again(tmp_path):
    run(tmp_path, Scripted())
    again = Scripted()
    assert len(run(tmp_path, again).rows) == 56
    assert again.requests == []


def test_a_folder_of_another_run_is_refused(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, Scripted(stop_after=30))
    with pytest.raises(KlbError, match="another settings"):
        run(tmp_path, Scripted(), settings=Settings(mode="turns"))


def test_a_providers_error_is_a_row_of_its_round_only(tmp_path):
    def fails(request):
        return "no answer" if request.part == "agent" and request.scene.case.id == AIRLINE.cases[3].id else None

    result = run(tmp_path, Scripted(fails))
    failed = [row for row in result.rows if row.get("error")]
    assert {row["case"] for row in failed} == {AIRLINE.cases[3].id}
    assert len(failed) == 4
    assert all(row["error"] == "agent: no answer" and row["trust_after"] == row["trust_before"] for row in failed)
    assert len(result.rows) == 56
    table = result.panel(["condition"]).set_index(["condition", "metric"])
    assert table.loc[("emergent", "provider_errors"), "numerator"] == 2
    assert table.loc[("emergent", "DR"), "n"] == 14


def test_twenty_errors_in_a_row_stop_the_run_and_leave_it_incomplete(tmp_path):
    player = Scripted(lambda request: "down")
    with pytest.raises(KlbError, match=f"{MAX_CONSECUTIVE_ERRORS} rounds in a row failed.*down.*--resume"):
        run(tmp_path, player)
    (file,) = read_folder(tmp_path)
    assert not file.complete
    assert len(file.rows) == MAX_CONSECUTIVE_ERRORS
    assert json.loads((tmp_path / "run.json").read_text())["complete"] is False


def test_failed_unparsed_and_malformed_rounds_are_rows_and_not_scored(tmp_path):
    class Odd(Scripted):
        def _one(self, request):
            reply = super()._one(request)
            number = AIRLINE.cases.index(request.scene.case)
            if request.part == "gate" and number in (0, 1):
                return dataclasses.replace(reply, text=[gate(False), "hm"][number])
            if request.part == "judge" and number == 2:
                return dataclasses.replace(reply, text="no form")
            return reply

    rows = run(tmp_path, Odd(), conditions=["emergent"], trusts=["low"]).rows
    assert [row["gate"] for row in rows[:3]] == ["failed", "unparsed", "passed"]
    assert rows[2]["malformed"]
    assert rows[2]["trust_after"] == rows[2]["trust_before"]
    assert "derived" not in rows[2]
    table = run(tmp_path, Odd(), conditions=["emergent"], trusts=["low"]).panel().set_index("metric")
    assert table.loc["DR", "n"] == 8 - 3
    assert table.loc["malformed", "numerator"] == 1
    assert table.loc["gate_unparsed", "numerator"] == 1


def test_conversations_of_finished_rounds_are_forgotten(tmp_path):
    player = Scripted()
    run(tmp_path, player, conditions=["control"], trusts=["low"])
    held = {request.conversation for request in player.requests}
    assert held <= set(player.forgotten)


def test_usage_is_counted_by_part_and_sums_over_the_file(tmp_path):
    player = Scripted()
    rows = run(tmp_path, player).rows
    for part in ("gate", "agent", "customer", "judge"):
        asked = sum(request.part == part for request in player.requests)
        assert sum(row["usage"][part]["calls"] for row in rows) == asked
        assert read_folder(tmp_path)[0].usage_summary["by_part"][part]["calls"] == asked


def test_the_sidecar_gives_back_every_prompt_and_reply(tmp_path):
    player = Scripted()
    run(tmp_path, player, conditions=["control"])
    (path,) = tmp_path.glob("turns_*.jsonl")
    assert path == sidecar_path(read_folder(tmp_path)[0].path)
    turns = list(read_turns(path))
    asked = [request for request in player.requests if request.part in ("gate", "agent")]
    assert len(turns) == len(asked)
    by_name = {}
    for request in asked:
        by_name.setdefault(request.conversation, []).append(tuple(range(len(request.messages[0].content) // 50)))
    for turn in turns:
        prompts = by_name[f"{turn['trajectory']}/{turn['round']}/{turn['part']}"]
        assert tuple(turn["prompt_ids"]) == prompts[turn["turn"]]
        assert turn["ids"] == [1, 2]
    assert {turn["tool"] for turn in turns if turn["part"] == "agent"} == {"send_message", AIRLINE.policy.tools.favored.name}


def test_packed_prompts_are_cut_to_what_is_new():
    turns = [{"prompt_ids": (1, 2, 3), "ids": (9,)}, {"prompt_ids": (1, 2, 4, 5), "ids": ()}, {"prompt_ids": (1, 2), "ids": ()}]
    assert [(line["shared"], line["prompt_ids"]) for line in packed(turns)] == [(0, [1, 2, 3]), (2, [4, 5]), (2, [])]


def test_a_torn_sidecar_line_is_ignored_and_a_broken_one_refused(tmp_path, caplog):
    path = tmp_path / "turns_x.jsonl"
    line = json.dumps({"shared": 0, "prompt_ids": [1], "ids": [2]})
    path.write_text(f'{line}\n{{"shared": 0, "pro')
    assert [turn["ids"] for turn in read_turns(path)] == [[2]]
    assert "cut off" in caplog.text
    path.write_text(f"{{\n{line}\n")
    with pytest.raises(KlbError, match="turns_x.jsonl:1: not JSON"):
        list(read_turns(path))


@pytest.mark.parametrize("message", ['He said "no".', "caf\xe9\nnext", "plain"])
def test_a_messages_span_covers_its_words(message):
    text = json.dumps({"thought": "t", "action": {"tool": "send_message", "args": {"text": message}}})
    ends = list(range(3, len(text) + 3, 3))  # three characters an id
    span, missing = message_span(text, message, ends)
    assert not missing
    covered = text[3 * span[0] : 3 * span[1]]
    written = json.dumps(message)[1:-1]
    assert written in covered
    assert len(covered) <= len(written) + 4
    echoed = json.dumps({"thought": message, "action": {"tool": "send_message", "args": {"text": message}}})
    span, _ = message_span(echoed, message, list(range(1, len(echoed) + 1)))
    assert span[0] > echoed.index("send_message")
    assert message_span(text, "other words", ends)[0] is None
    assert message_span(text, message, ()) == (None, "the player gives no offsets")


def test_mistakes_in_a_plan_are_named():
    for wrong, words in (
        ({"conditions": ["bribed"]}, "unknown condition bribed; known: control, emergent, instructed"),
        ({"trusts": ["none"]}, "unknown starting trust none; known: low, medium, high"),
        ({"domains": ["boats"]}, "unknown domain boats"),
        ({"trust": "harsher"}, "unknown trust model"),
        ({"settings": Settings(mode="spoken")}, "unknown mode spoken; known: flat, turns"),
        ({"samples": 0}, "start at 1"),
    ):
        with pytest.raises(KlbError, match=words):
            plan(**wrong)


def test_a_torn_last_line_loses_that_round_only(tmp_path):
    whole = run(tmp_path / "whole", Scripted())
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", Scripted(stop_after=60))
    (file,) = read_folder(tmp_path / "cut")
    file.path.write_bytes(file.path.read_bytes()[:-40])
    assert len(read_trajectories(file.path).rows) == len(file.rows) - 1
    assert transcripts(run(tmp_path / "cut", Scripted()).rows) == transcripts(whole.rows)
