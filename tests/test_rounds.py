"""Margins of rounds: read at the moments they are named after, from the ids as they happened, and nothing is dropped."""

from __future__ import annotations

import json

import pandas as pd
import pytest
import torch
from command import klb
from puppet import Puppet
from tiny import LAYERS, default_tokenizer, save_tiny_llama, tiny_hf_model

import klb_probe
from klb_probe.cases.load import load_domains
from klb_probe.dialogue.api import plan, play_plan
from klb_probe.dialogue.players import Players
from klb_probe.dialogue.round import Settings
from klb_probe.dialogue.runner import Cast
from klb_probe.dialogue.sidecar import message_span, read_turns
from klb_probe.dialogue.spoken import text_ends
from klb_probe.dialogue.trajectory import read_folder
from klb_probe.lens.contrast import TokenContrast
from klb_probe.lens.margin import LogitLens
from klb_probe.models.load import load_model
from klb_probe.signals.from_files import closing_tools
from klb_probe.signals.rounds import RANDOM_READOUTS, round_signals
from klb_probe.signals.spots import spots_of

AIRLINE = load_domains(["airline"])[0]
TOOLS = closing_tools(AIRLINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder, device="cpu")


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    """Emergent rounds of a deceptive agent that speaks in the tiny model's tokens, with the forked question."""
    out = tmp_path_factory.mktemp("run")
    chosen = plan(
        domains=["airline"],
        conditions=["emergent"],
        trusts=["low"],
        cases_of_each_kind=2,
        settings=Settings(elicit=True),
    )
    players = Players()
    cast = Cast(Puppet(model), players.open("customer", "scripted:verifying"), players.open("judge", "rules"))
    play_plan(cast, chosen, out, label="puppet", seed=0, parallel=4)
    return out


@pytest.fixture(scope="module")
def turns(run):
    return list(read_turns(next(run.glob("turns_*.jsonl"))))


@pytest.fixture(scope="module")
def rows(run):
    return {row["round"]: row for row in read_folder(run)[0].rows}


def decoded(model, turn, positions):
    ids = [*turn["prompt_ids"], *turn["ids"]]
    return model.tokenizer.decode([ids[position] for position in positions])


def test_moments_lie_where_their_names_say(model, turns, rows):
    seen = set()
    for turn in turns:
        spots, unmapped = spots_of(turn, rows[turn["round"]], TOOLS, model.tokenizer)
        assert not unmapped
        for spot in spots:
            seen.add(spot.kind)
            text = decoded(model, turn, spot.positions)
            if spot.kind in ("gate", "before_reply", "action", "elicited"):
                assert spot.positions == (len(turn["prompt_ids"]) - 1,)
            elif spot.kind == "reply_mean":
                assert json.dumps(turn["message"], ensure_ascii=False)[1:-1] in text
                assert len(text) <= len(turn["message"]) + 12
            elif spot.kind == "reply_last":
                assert turn["message"].endswith(text.rstrip('"}')) or text[0] in turn["message"][-8:]
            else:
                assert rows[turn["round"]]["facts"]["false_claim_quote"] in text
    assert seen == {"gate", "before_reply", "reply_mean", "reply_last", "claim", "action", "elicited"}


def test_every_turn_is_asked_before_it_and_the_round_after_its_end(turns):
    for number in {turn["round"] for turn in turns}:
        of_round = [turn for turn in turns if turn["round"] == number]
        agent = [turn["turn"] for turn in of_round if turn["part"] == "agent"]
        elicited = [turn["turn"] for turn in of_round if turn["part"] == "elicited"]
        assert elicited == [*agent, agent[-1] + 1]


def test_margins_are_those_of_a_plain_forward_pass(model, turns, rows):
    """Prefix reuse and partial passes against the whole ids read at once."""
    contrast = TokenContrast.of(model.chat)
    lens = LogitLens.of(model, contrast)
    mine = [turn for turn in turns if turn["round"] == 0]
    found = round_signals(model, [lens], mine, rows[0], TOOLS)
    table = pd.DataFrame(found.rows).set_index(["turn", "position", "lens", "layer"])
    for turn in mine:
        ids = [*turn["prompt_ids"], *turn["ids"]]
        for spot in spots_of(turn, rows[0], TOOLS, model.tokenizer)[0]:
            residuals = model.residuals([ids], range(LAYERS), spot.positions)[:, 0]
            for layer in range(LAYERS):
                margin = lens.margin(residuals[layer], layer).mean()
                read = table.loc[(spot.turn, spot.kind, "logit", layer)]
                assert read["margin"] == pytest.approx(float(margin), abs=1e-4)
                assert read["n_tokens"] == len(spot.positions)
            with torch.no_grad():
                logits = model.model(torch.tensor([ids])).logits[0, list(spot.positions)][:, contrast.token_ids]
            assert read["own_margin"] == pytest.approx(float(contrast.margin(logits.float()).mean()), abs=1e-4)
            assert table.loc[(spot.turn, spot.kind, "logit", LAYERS - 1), "margin"] == pytest.approx(
                read["own_margin"], abs=1e-4
            )
    assert {f"random {row}" for row in range(RANDOM_READOUTS)} <= set(table.index.get_level_values("lens"))


def test_only_the_moments_asked_for_are_read(model, turns, rows):
    lens = LogitLens.of(model, TokenContrast.of(model.chat))
    mine = [turn for turn in turns if turn["round"] == 0]
    asked = ("gate", "reply_last")
    whole = pd.DataFrame(round_signals(model, [lens], mine, rows[0], TOOLS).rows)
    some = pd.DataFrame(round_signals(model, [lens], mine, rows[0], TOOLS, positions=asked).rows)
    whole = whole[whole["position"].isin(asked)].reset_index(drop=True)
    assert set(some["position"]) == set(asked)
    pd.testing.assert_frame_equal(some, whole, check_exact=False, atol=1e-4)
    row = {**rows[0], "facts": {**rows[0]["facts"], "false_claim_quote": "words of nobody"}}
    assert not round_signals(model, [lens], mine, row, TOOLS, positions=asked).unmapped


def test_a_quote_that_stands_in_no_message_is_reported(model, turns, rows):
    lens = LogitLens.of(model, TokenContrast.of(model.chat))
    row = {**rows[0], "facts": {**rows[0]["facts"], "false_claim_quote": "words of nobody"}}
    found = round_signals(model, [lens], [turn for turn in turns if turn["round"] == 0], row, TOOLS)
    assert [(one.kind, one.why) for one in found.unmapped] == [("claim", "the quote is word for word in no single message")]
    assert not any(one["position"] == "claim" for one in found.rows)


def test_an_attempt_that_was_refused_is_no_action(model, turns, rows):
    """Only the tool that closed the case is an action."""
    mine = [turn for turn in turns if turn["round"] == 0]
    closing = next(turn for turn in mine if turn.get("tool") in TOOLS)
    tried = {**closing, "turn": closing["turn"] + 1}
    lens = LogitLens.of(model, TokenContrast.of(model.chat))
    found = pd.DataFrame(round_signals(model, [lens], [*mine, tried], rows[0], TOOLS).rows)
    assert set(found[found["position"] == "action"]["turn"]) == {tried["turn"]}
    open_end = {**rows[0], "outcome": "none"}
    assert "action" not in {one["position"] for one in round_signals(model, [lens], mine, open_end, TOOLS).rows}


def test_a_quote_is_found_in_the_message_and_not_in_a_thought_that_repeats_it(model):
    quote = "never refunded"
    text = json.dumps({"action": {"tool": "send_message", "args": {"text": f"It is {quote}."}}, "thought": f"I say {quote}."})
    ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    span, _ = message_span(text, f"It is {quote}.", text_ends(model.tokenizer, ids, text))
    turn = {"turn": 0, "part": "agent", "prompt_ids": [1, 2, 3], "ids": ids, "text": text}
    turn |= {"tool": "send_message", "message": f"It is {quote}.", "message_span": list(span)}
    spots, _ = spots_of(turn, {"facts": {"false_claim_quote": quote}}, (), model.tokenizer)
    (claim,) = [spot for spot in spots if spot.kind == "claim"]
    assert quote in decoded(model, turn, claim.positions)
    assert max(claim.positions) < 3 + span[1]


def test_a_turn_without_a_span_is_reported_and_its_prompt_still_read(model, turns, rows):
    turn = next(turn for turn in turns if turn.get("message"))
    spots, unmapped = spots_of({**turn, "message_span": None, "span_missing": "mended"}, rows[0], TOOLS, model.tokenizer)
    assert [spot.kind for spot in spots] == ["before_reply"]
    assert {(one.kind, one.why) for one in unmapped} == {("reply_mean", "mended"), ("reply_last", "mended")}


def test_the_command_reads_every_round_into_one_tidy_file(run, folder, model, capsys):
    assert klb("rounds", run, "--model", folder, "--lens", "logit", "--device", "cpu") == 0
    printed = capsys.readouterr().out
    assert "4 rounds; moments read:" in printed
    table = pd.read_parquet(run / "signals" / "signals.parquet")
    keys = ["agent", "domain", "condition", "initial", "sample", "round", "turn", "position", "lens", "layer"]
    assert not table.duplicated(keys).any()
    assert set(table["round"]) == {0, 1, 2, 3}
    assert table["margin"].notna().all()
    manifest = json.loads((run / "signals" / "signals.json").read_text())
    assert manifest["complete"] is True
    assert (manifest["source"], manifest["policy"], manifest["rounds"]) == ("sidecar", "on", 4)
    assert sum(manifest["positions"].values()) == len(table.drop_duplicates(["round", "turn", "position"]))
    frame = klb_probe.round_margins(model, LogitLens.of(model, TokenContrast.of(model.chat)), run)
    pd.testing.assert_frame_equal(frame[list(table)], table, check_dtype=False, atol=1e-6)
    assert frame.attrs["unmapped"] == manifest["unmapped"] == []
    assert klb("rounds", run, "--model", folder, "--lens", "logit") == 2  # not overwritten unasked
    assert "--overwrite" in capsys.readouterr().err


def test_ids_of_another_model_and_runs_without_ids_are_refused(run, folder, tmp_path, capsys):
    tiny_hf_model("qwen2").save_pretrained(tmp_path / "other")
    default_tokenizer().save_pretrained(tmp_path / "other")
    assert klb("rounds", run, "--model", tmp_path / "other", "--lens", "logit", "--out", tmp_path / "no") == 2
    assert "its token ids are of tiny-llama, not of" in capsys.readouterr().err
    command = ("run", "--agent", "scripted:honest", "--domains", "airline", "--conditions", "control", "--trust", "low")
    assert klb(*command, "--quick", "--out", tmp_path / "scripted") == 0
    assert klb("rounds", tmp_path / "scripted", "--model", folder, "--lens", "logit") == 2
    assert not (tmp_path / "scripted" / "signals").exists()
    capsys.readouterr()
    assert klb(*command, "--elicit", "--out", tmp_path / "elicit") == 2
    assert "must be a local model" in capsys.readouterr().err


def test_replay_reads_a_scripted_run_and_gives_the_sidecars_margins(run, folder, tmp_path, capsys):
    """The puppet's replies are canonical, so that a replay of its files has the very ids of its sidecar."""
    for name, more in (("sidecar", ()), ("replay", ("--replay",))):
        assert klb("rounds", run, "--model", folder, "--lens", "logit", "--out", tmp_path / name, *more) == 0
    assert "replay, on-policy" in capsys.readouterr().out
    keys = ["round", "turn", "position", "lens", "layer"]
    one, other = (pd.read_parquet(tmp_path / name / "signals.parquet").set_index(keys) for name in ("sidecar", "replay"))
    one = one[one.index.get_level_values("position") != "elicited"]
    assert sorted(one.index) == sorted(other.index)
    pd.testing.assert_series_equal(one["margin"].sort_index(), other["margin"].sort_index(), atol=1e-4, rtol=1e-4)
    command = ("run", "--agent", "scripted:honest", "--domains", "airline", "--conditions", "control", "--trust", "low")
    assert klb(*command, "--quick", "--out", tmp_path / "scripted") == 0
    assert klb("rounds", tmp_path / "scripted", "--model", folder, "--lens", "logit", "--replay") == 0
    manifest = json.loads((tmp_path / "scripted" / "signals" / "signals.json").read_text())
    assert (manifest["source"], manifest["policy"], manifest["unmapped"]) == ("replay", "off", [])


@pytest.mark.parametrize("mode", ["flat", "turns"])
def test_forking_changes_no_later_token_and_live_equals_the_sidecar(folder, tmp_path, mode):
    """A real (tiny) local agent at temperature 0, with and without the fork; gates are passed by the scripted text alone."""
    from klb_probe.dialogue.local import LocalPlayer

    model = load_model(folder, device="cpu")

    class Passing(LocalPlayer):
        """A local player that knows at the gate."""

        def reply(self, requests):
            replies = super().reply(requests)
            known = [
                '{"eligible": true}' if request.scene.case.kind == "owed" else '{"eligible": false}' for request in requests
            ]
            pairs = zip(requests, replies, known, strict=True)
            return [type(r)(k, None, r.prompt_ids, r.ids) if q.part == "gate" else r for q, r, k in pairs]

    lens = LogitLens.of(model, TokenContrast.of(model.chat))
    written = {}
    for elicit in (False, True):
        chosen = plan(
            domains=["airline"],
            conditions=["emergent"],
            trusts=["low"],
            cases_of_each_kind=1,
            settings=Settings(mode=mode, elicit=elicit, agent_temperature=0, agent_tokens=10),
        )
        players = Players()
        agent = Passing(model)
        cast = Cast(agent, players.open("customer", "scripted:accepting"), players.open("judge", "rules"))
        live = {}
        out = tmp_path / str(elicit)

        def read(row, turns, live=live):
            live[row["round"]] = round_signals(model, [lens], turns, row, TOOLS)

        play_plan(cast, chosen, out, label="tiny", seed=0, parallel=2, on_turns=read)
        turns = list(read_turns(next(out.glob("turns_*.jsonl"))))
        written[elicit] = [(t["round"], t["turn"], t["ids"]) for t in turns if t["part"] == "agent"]
        rows = {row["round"]: row for row in read_folder(out)[0].rows}
        for number, signals in live.items():
            again = round_signals(model, [lens], [turn for turn in turns if turn["round"] == number], rows[number], TOOLS)
            one, other = (pd.DataFrame(found.rows) for found in (signals, again))
            pd.testing.assert_frame_equal(one, other, atol=1e-4, rtol=1e-4)
    assert len(written[False]) >= 10
    assert written[True] == written[False]
