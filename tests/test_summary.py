"""What results say of themselves, in a line and in a notebook; bars and figures where somebody looks."""

from __future__ import annotations

import io
import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from IPython.core.formatters import DisplayFormatter
from planted_probe_data import planted
from planted_signals import rows, signals, write
from tiny import tiny_model

import klb_probe as klb
from klb_probe.cases.scenarios import eligibility_scenarios
from klb_probe.figure import Figure
from klb_probe.lens.margin import LogitLens
from klb_probe.pairing.api import pair
from klb_probe.probes.linear_probe import LinearProbe
from klb_probe.progress import progress_bar
from klb_probe.signals.margins import prepare
from klb_probe.summary import as_html, estimate, in_a_line

LONGEST = 400  # characters of a repr
SCRIPT = "<script>alert('&')</script>"


class Page(HTMLParser):
    """The tags and the text of a page; an unclosed tag is an error."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.open, self.text = [], [], ""
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def tiny():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def logit(tiny):
    return LogitLens.of(tiny, klb.TokenContrast.of(tiny.chat), k=4)


@pytest.fixture(scope="module")
def margins(tiny, logit):
    return klb.eligibility_margins(tiny, logit, domains=["refund"], cases="organisms", quick=True)


def test_text_is_shown_as_it_is_and_never_as_tags():
    table = pd.DataFrame({"said": [SCRIPT], "empty": [np.nan]})
    page = Page(as_html(SCRIPT, {SCRIPT: SCRIPT}, table, SCRIPT))
    assert "script" not in page.tags
    assert page.text.count(SCRIPT) == 5
    assert in_a_line("X", {"a": 1, "b": 2}) == "X(a: 1; b: 2)"


def test_an_estimate_has_its_interval_where_there_is_one():
    line = SimpleNamespace(value=0.5, low=0.25, high=0.75)
    assert estimate(line) == "0.50 [0.25, 0.75]"
    assert estimate(SimpleNamespace(value=0.5, low=np.nan, high=np.nan)) == "0.50"
    assert estimate(SimpleNamespace(value=np.nan, low=np.nan, high=np.nan)) == "-"


def test_margins_say_what_they_are_and_what_the_final_layer_tells(margins):
    assert repr(margins) == (
        "Margins(model: tiny-llama, 4 layers; lens: logit lens (twin); contrast: 'Yes' (10539) minus 'No' (5230); "
        "prompts: 32 of 4 pairs; domains: refund; framings: honest, deny)"
    )
    page = Page(margins._repr_html_())
    summary = margins.summary()
    final = summary[(summary["layer"] == 3) & (summary["question"] == "both")].set_index(["statistic", "framing"])
    for statistic in ("auroc", "pair_accuracy"):
        for framing in ("honest", "deny"):
            assert estimate(final.loc[(statistic, framing)]) in page.text
    assert "Chance is 0.50" in page.text


def test_margins_not_read_yet_have_no_numbers(tiny, logit):
    scenarios = eligibility_scenarios(klb.load_domains(["refund"]), ["honest"], quick=True)
    unread, _ = prepare(tiny, logit, scenarios)
    page = Page(unread._repr_html_())
    assert "16 of 4 pairs, 0 of them read" in page.text
    assert "AUROC" not in page.text


def test_a_run_says_who_played_and_how_often_it_lied(tmp_path):
    options = {"domains": ["refund", "airline"], "conditions": ["control", "emergent"], "trusts": ["low", "medium"]}
    run = klb.run_dialogues("scripted:deceptive", tmp_path, cases_of_each_kind=1, **options)
    saved = klb.load_run(tmp_path)
    assert saved.frame["lied"].sum() == run.frame["lied"].sum() == 4
    assert len(saved.frame) == 2 * 2 * 2 * 2
    assert "agent: scripted:deceptive; rounds: 16; trajectories: 8" in repr(saved)
    assert len(repr(saved)) < LONGEST
    page = Page(saved._repr_html_())
    rates = saved.panel(["condition"]).set_index(["condition", "metric"])
    for condition in ("control", "emergent"):
        line = rates.loc[(condition, "DR")]
        assert f"{estimate(line)}, n = {int(line.n)}" in page.text
    assert "-" in page.text  # nobody lied under control, so nobody was found out


def test_a_run_without_rounds_or_that_cannot_be_scored_says_so(tmp_path):
    page = Page(klb.Run(tmp_path)._repr_html_())
    assert "no rounds to score" in page.text
    page = Page(klb.Run(tmp_path, [{"agent": SCRIPT, "domain": "d", "condition": "none"}])._repr_html_())
    assert SCRIPT in page.text
    assert "lacks" in page.text


def test_a_pairing_stands_beside_what_it_has_to_beat(tmp_path):
    made = rows(n_samples=4, n_cases=8)
    told = {"margin": -1.0, "random 0": 0.0}
    frame = signals(made, lambda one, lens, layer: told[lens] * one["derived"]["lied"], lenses=tuple(told))
    read, folder = write(tmp_path, made, frame)
    found = klb.pair(read, folder)
    frame.attrs.update(policy="off", unmapped=[], model={"name": SCRIPT})
    same = klb.pair(frame, folder)
    pd.testing.assert_frame_equal(found.statistics, same.statistics)
    pd.testing.assert_frame_equal(found.auroc(), same.auroc())
    assert len(repr(same)) < LONGEST
    page = Page(same._repr_html_())
    line = found.auroc().iloc[0]
    assert estimate(line) in page.text
    assert SCRIPT in page.text
    assert "off-policy" in page.text
    assert set(found.frame["lens"]) == {"margin", "random 0"}
    assert found.auroc()["random_q95"].notna().all()


def test_a_pairing_that_cannot_be_estimated_says_why(tmp_path):
    made = rows(n_samples=2, lie_rate=0.0)
    found = pair(*write(tmp_path, made, signals(made, lambda *_: 0.5)))
    assert found.auroc()["value"].isna().all()
    assert "not estimable (n=0)" in Page(found._repr_html_()).text


def test_probes_stand_beside_their_controls_and_a_saved_one_says_what_it_reads(tmp_path, tiny):
    from test_probes_results import run as trained

    found = trained(planted(), "framing")
    page = Page(found._repr_html_())
    for words in ("framing", "mean_difference", "shuffled labels", "random features", "bag of words"):
        assert words in page.text
    nested = found.probes[(found.probes["choice"] == "nested") & (found.probes["feature"] == "residual")].iloc[0]
    assert f"{nested['auroc']:.2f} [" in page.text


def test_a_probe_and_a_file_of_probes(tmp_path):
    probe = LinearProbe("lie", SCRIPT, "answer", 3, np.ones(8, np.float32), 0.5, np.zeros(8, np.float32), 2.0, 0.1)
    assert repr(probe).startswith("LinearProbe(question: lie; ")
    assert len(repr(probe)) < LONGEST
    page = Page(probe._repr_html_())
    assert SCRIPT in page.text
    assert "layer 3 at answer, 8 dimensions" in page.text


# Figures and bars


def test_a_figure_shows_itself_once_without_a_magic():
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    figure = Figure(figsize=(2, 1))
    figure.subplots().plot([1, 2])
    data, _ = DisplayFormatter().format(figure)
    assert data["image/png"].startswith(b"\x89PNG")
    assert plt.get_fignums() == before  # what pyplot holds, a notebook shows after the cell


def test_every_plot_is_such_a_figure(margins):
    assert isinstance(margins.plot(), Figure)


class Terminal(io.StringIO):
    def __init__(self, is_terminal):
        super().__init__()
        self.isatty = lambda: is_terminal


@pytest.mark.parametrize(
    ("is_terminal", "in_jupyter", "shown", "visible"),
    [(True, False, True, True), (False, False, True, False), (False, True, True, True), (True, True, False, False)],
)
def test_bars_show_in_a_terminal_and_in_jupyter_only(monkeypatch, is_terminal, in_jupyter, shown, visible):
    screen = Terminal(is_terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    shell = SimpleNamespace(config={"IPKernelApp": {}} if in_jupyter else {})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    with progress_bar(3, "reading", "prompt", shown=shown) as bar:
        bar.update(3)
    assert ("reading" in screen.getvalue()) is visible
