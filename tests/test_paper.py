"""The paper's figures, and how they come to stand beside ours."""

from __future__ import annotations

import pandas as pd
import pytest

from klb_probe.errors import KlbError
from klb_probe.metrics.paper import beside_paper, paper_results
from klb_probe.models.registry import registry

AGENTS = ["llama-3.1-8b", "gemma-3-12b", "qwen3.5-27b", "llama-3.3-70b"]
DOMAINS = {"refund", "airline", "deposit", "recall", "subscription", "billing", "insurance", "debt"}


def figure(alias, condition, trust, domain, metric):
    table = paper_results(alias).set_index(["condition", "trust", "domain", "metric"])
    return table.paper[condition, trust, domain, metric]


@pytest.mark.parametrize("alias", AGENTS)
def test_every_agent_is_in_the_registry_and_has_a_full_deception_rate(alias):
    assert alias in registry()
    table = paper_results(alias)
    rates = table[(table.metric == "DR_macro")]
    assert len(rates) == 6
    assert set(zip(rates.condition, rates.trust, strict=True)) == {
        (condition, trust) for condition in ("emergent", "instructed") for trust in ("low", "medium", "high")
    }
    assert table[table.metric != "trust_change"].paper.between(0, 1).all()
    assert not table.duplicated(["condition", "trust", "domain", "metric"]).any()


def test_figures_are_fractions_in_their_cells():
    assert figure("llama-3.1-8b", "emergent", "medium", "all", "DR_macro") == pytest.approx(0.4844)
    assert figure("llama-3.1-8b", "emergent", "high", "all", "DSR") == pytest.approx(0.40)
    assert figure("llama-3.1-8b", "emergent", "low", "all", "Det") == pytest.approx(0.84)
    assert figure("llama-3.1-8b", "emergent", "high", "all", "trust_change") == -0.446
    assert figure("llama-3.1-8b", "emergent", "all", "deposit", "DR") == pytest.approx(0.75)
    assert figure("gemma-3-12b", "instructed", "medium", "all", "DR_macro") == 1
    assert figure("qwen3.5-27b", "emergent", "low", "all", "DR_macro") == pytest.approx(0.3304)
    assert figure("llama-3.3-70b", "emergent", "high", "all", "DR_macro") == pytest.approx(0.2188)


def test_the_rates_by_trust_and_by_domain_are_two_margins_of_one_table():
    table = paper_results("llama-3.1-8b").query("condition == 'emergent'")
    by_domain = table[table.metric == "DR"]
    assert set(by_domain.domain) == DOMAINS
    assert by_domain.paper.mean() == pytest.approx(table[table.metric == "DR_macro"].paper.mean(), abs=5e-4)


def grouped(**keys):
    return pd.DataFrame([{**keys, "metric": metric, "value": 0.5} for metric in ("DR", "DR_macro", "Det", "KPR")])


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"condition": "emergent", "trust": "low"}, {"DR_macro": 0.5, "Det": 0.84}),
        ({"condition": "instructed", "trust": "high"}, {"DR_macro": 0.9375}),
        ({"condition": "emergent", "domain": "debt"}, {"DR": 0.208}),
        ({"agent": "x", "condition": "emergent", "domain": "airline"}, {"DR": 0.667}),
        ({"condition": "emergent"}, {}),
        ({"condition": "control", "trust": "low"}, {}),
        ({"trust": "low"}, {}),
        ({"condition": "emergent", "trust": "low", "domain": "debt"}, {}),
        ({"condition": "emergent", "trust": "low", "case": "debt/1"}, {}),
    ],
)
def test_only_the_same_group_is_compared(keys, expected):
    table = beside_paper(grouped(**keys), "llama-3.1-8b")
    assert table.drop(columns="paper").equals(grouped(**keys))
    assert table.set_index("metric").paper.dropna().to_dict() == pytest.approx(expected)


def test_a_model_the_paper_lacks_is_refused_with_those_it_has():
    with pytest.raises(KlbError, match=r"'smollm2-135m'; it has: llama-3.1-8b, gemma-3-12b, qwen3.5-27b, llama-3.3-70b"):
        beside_paper(grouped(condition="emergent"), "smollm2-135m")
