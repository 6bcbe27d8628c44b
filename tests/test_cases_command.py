"""``klb-probe cases``: what a person sees, and what comes out of a file."""

from __future__ import annotations

import json
import shutil

import pandas as pd
import pytest
from typer.testing import CliRunner

from klb_probe.cases.load import load_domains
from klb_probe.cli import app
from klb_probe.errors import KlbError
from klb_probe.paths import data_dir


def command(*arguments):
    return CliRunner().invoke(app, ["cases", *map(str, arguments)])


@pytest.fixture
def scenarios(tmp_path):
    others = [domain.policy.domain for domain in load_domains() if domain.policy.domain not in ("airline", "deposit")]
    return shutil.copytree(data_dir("scenarios"), tmp_path / "scenarios", ignore=shutil.ignore_patterns(*others))


def test_check_is_green_on_ours():
    result = command("check")
    assert result.exit_code == 0
    assert "8 domains, 112 cases (64 owed, 48 calibration), 112 twins" in result.output


def test_check_shows_every_problem_at_once_with_file_line_case_and_field(scenarios):
    cases = scenarios / "domains" / "airline" / "cases.yaml"
    text = cases.read_text()
    text = text.replace("fare: 318.40", "fare: a lot", 1).replace("ticket: nonrefundable", "ticket: gold", 1)
    cases.write_text(text.replace("kind: calibration", "kind: owed", 1))
    policy = scenarios / "domains" / "deposit" / "policy.yaml"
    policy.write_text(policy.read_text().replace("at_most: 21", "at_most: soon", 1))
    (scenarios / "framings.yaml").write_text("honest: {about: x}\n")
    result = command("check", scenarios)
    assert result.exit_code == 2
    lines = result.output.splitlines()
    assert lines[-1] == "5 problems"
    for file, *parts in (
        (cases, "case airline/late-arrival-domestic", "field record.fare", "'a lot'"),
        (cases, "case airline/late-arrival-domestic", "field record.ticket", "'gold'"),
        (cases, "field kind", "not entitled"),
        (policy, "deduction_fails", "soon"),
        (scenarios / "framings.yaml", "honest.paraphrases"),
    ):
        (line,) = [line for line in lines if line.startswith(str(file)) and all(part in line for part in parts)]
        number = int(line.removeprefix(f"{file}: line ").partition(":")[0])
        assert number <= len(file.read_text().splitlines())
    fare = next(number for number, line in enumerate(cases.read_text().splitlines(), 1) if "a lot" in line)
    assert f"{cases}: line {fare}: case airline/late-arrival-domestic: field record.fare" in result.output


def test_check_reads_a_users_folder_with_the_least_a_domain_needs(tmp_path):
    folder = tmp_path / "mine" / "domains" / "parking"
    folder.mkdir(parents=True)
    (folder / "policy.yaml").write_text(
        """
domain: parking
institution: Lot Nine
outcomes: {owed: {id: refund, words: a refund of the ticket}, favored: {id: keep, words: a paid ticket}}
clauses: [{id: minutes, text: A stay under 15 minutes is free., cite: company policy}]
record_fields: [{name: car, label: Car, type: text}, {name: stay, label: Stay, type: minutes}]
requirements: [{id: short, says: the stay was short, clause: minutes, rule: {field: stay, less_than: 15}}]
sources: [our own]
"""
    )
    (folder / "cases.yaml").write_text(
        """
- id: parking/quick-stop
  kind: owed
  situation: A short stay.
  record: {car: blue van, stay: 10}
  opening: Money back, please.
  twin: {field: stay, value: 20}
"""
    )
    result = command("check", tmp_path / "mine")
    assert result.exit_code == 0, result.output
    assert "1 domains, 1 cases (1 owed, 0 calibration), 1 twins" in result.output
    shown = command("show", "parking/quick-stop", "--cases", tmp_path / "mine").output
    assert "Stay: 0 h 10 min -> 0 h 20 min" in shown
    (domain,) = load_domains(root=tmp_path / "mine")
    assert (
        domain.policy.reversed_question
        == "Under the policy, may Lot Nine refuse this customer a refund of the ticket? Answer Yes or No."
    )


def test_show_explains_the_label_and_the_twin():
    domain = next(domain for domain in load_domains(["airline"]))
    case = domain.cases[0]
    shown = command("show", case.id).output
    fields = {field.name: field for field in domain.policy.record_fields}
    for name, value in case.record.items():
        assert f"  {fields[name].label}: {fields[name].render(value)}" in shown
    assert f"Record {case.record_id}" in shown
    assert case.opening.split(".")[0] in shown
    assert "Owed: a refund to the original form of payment" in shown
    assert "met: Tallgrass cancelled or significantly changed" in shown
    assert "[x] Offered trip arrives later by: 3 h 10 min (asked: at least 3 h 00 min)" in shown
    assert "Offered trip arrives later by: 3 h 10 min -> 2 h 40 min" in shown
    assert "MISSED: Tallgrass cancelled or significantly changed" in shown
    assert "[ ] Offered trip arrives later by: 2 h 40 min (asked: at least 3 h 00 min)" in shown
    for text in (*case.true_facts, case.false_claim):
        assert text in shown
    assert command("show", f"{case.id}~twin").output == shown


@pytest.mark.parametrize("domain", load_domains(), ids=lambda domain: domain.policy.domain)
def test_every_case_can_be_shown_and_the_ticks_agree_with_the_label(domain):
    from klb_probe.cases.explain import explain

    def tree(reason):
        return [reason, *(one for inside in reason.inside for one in tree(inside))]

    for situation in domain.situations():
        findings = explain(domain.policy, situation.record)
        assert all(finding.met for finding in findings) is situation.entitled
        for finding in findings:
            for reason in tree(finding.reason):
                if reason.inside:
                    joined = {"all of": all, "any of": any, "not": lambda parts: not next(iter(parts))}[reason.words]
                    assert joined(part.holds for part in reason.inside) is reason.holds


def test_show_of_an_unknown_case_names_near_ones():
    result = command("show", "airline/late-arival-domestic")
    assert isinstance(result.exception, KlbError)
    assert "near: airline/late-arrival-domestic" in str(result.exception)


def test_list_filters_by_domain_and_kind():
    lines = command("list", "--domains", "airline,debt", "--kind", "calibration").output.splitlines()
    assert lines[-1] == "12 cases (0 owed, 12 calibration) in 2 domains"
    assert len(lines) == 14
    assert all(line.split()[1] == "calibration" for line in lines[1:-1])
    assert isinstance(command("list", "--kind", "lies").exception, KlbError)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_export_writes_every_case_and_twin(tmp_path, suffix):
    out = tmp_path / f"cases{suffix}"
    assert command("export", "--out", out).exit_code == 0
    if suffix == ".jsonl":
        rows = [json.loads(line) for line in out.read_text().splitlines()]
    else:
        rows = pd.read_parquet(out).to_dict("records")
        for row in rows:
            row["record"] = json.loads(row["record"])
    assert len(rows) == 224
    situations = {s.id: s for domain in load_domains() for s in domain.situations()}
    for row in rows:
        situation = situations[row["id"]]
        assert (row["pair"], row["opening"], row["entitled"]) == (situation.pair, situation.opening, situation.entitled)
        assert row["record"] == json.loads(json.dumps(situation.record, default=str))
        assert bool(len(row["true_facts"])) is not row["twin"]
    assert isinstance(command("export", "--out", out).exception, KlbError)
    assert command("export", "--out", out, "--overwrite", "--domains", "debt").exit_code == 0


def test_export_refuses_a_name_it_cannot_write(tmp_path):
    result = command("export", "--out", tmp_path / "cases.csv")
    assert isinstance(result.exception, KlbError)
    assert not list(tmp_path.iterdir())
