"""``klb-probe report``: its numbers against the files, its text as text, mistakes in one line, and the page in a browser."""

from __future__ import annotations

import json
import re
import shutil
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import report_folders
from command import klb
from report_folders import HOSTILE

from klb_probe.cases.scenarios import eligibility_scenarios
from klb_probe.cases.sources import load_cases
from klb_probe.report.build import page_data, parts_of, report
from klb_probe.report.margins import series
from klb_probe.report.page import render, script_json
from klb_probe.report.pairs import RECORD, pairs_view
from klb_probe.report.part import Part, View
from klb_probe.report.recognise import recognise
from klb_probe.report.rounds import IN_A_CHUNK, lie_pieces
from klb_probe.signals.statistics import PairBootstrap

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return report_folders.make(tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def parts(folders):
    return parts_of(recognise(folders))


@pytest.fixture(scope="module")
def page_file(folders, tmp_path_factory):
    """The page, by the command."""
    out = tmp_path_factory.mktemp("page") / "report.html"
    assert klb("report", *folders, "--out", out, "--title", HOSTILE.replace("\ud83d", "")) == 0
    return out


def view(parts, tab):
    return next(one for part in parts for one in part.views if one.tab == tab)


def close(found, expected):
    """Equal to four significant digits."""
    np.testing.assert_allclose(np.array(found, float), np.array(expected, float), rtol=1e-3, atol=1e-6)


# Numbers


def test_every_output_has_a_part_and_what_lies_inside_a_run_comes_along(parts, folders):
    assert [part.title.split(" ")[0] for part in parts] == [
        *("Margins", "Token", "Rounds", "Behaviour", "Signals", "Probes", "Contest", "Check"),
    ]
    assert [part.folder for part in parts[2:5]] == [str(folders[2] / name) for name in ("", "score", "signals/pairs")]


def test_margins_of_all_domains_are_those_of_summary_csv(parts, folders):
    drawn = view(parts, "margins")
    summary = pd.read_csv(folders[0] / "summary.csv")
    rows = list(series(summary))
    assert sum(len(one["x"]) for one in rows) == len(summary)
    assert len(drawn.chunks["all"]) == len(rows)
    for one in drawn.chunks["all"]:
        keys = {name: one[name] for name in ("lens", "statistic", "framing", "question")}
        here = summary[np.logical_and.reduce([summary[name] == value for name, value in keys.items()])]
        here = here if one["entitled"] is None else here[here["entitled"] == one["entitled"]]
        assert one["x"] == here["layer"].tolist()
        for name in ("value", "low", "high"):
            close(one[name], here[name])
        if here["null_q95"].notna().any():
            close(one["null"], here["null_q95"])
        assert (one["n"], one["n_pairs"]) == (here["n"].iloc[0], here["n_pairs"].iloc[0])


def test_margins_of_one_domain_are_those_of_its_prompts(parts, folders):
    margins = pd.read_csv(folders[0] / "margins.csv")
    chosen = margins[(margins["domain"] == "airline") & (margins["lens"] == "margin") & (margins["question"] == "plain")]
    here = chosen[chosen["framing"] == "deny"]
    wide = chosen.pivot(index=["pair", "scenario", "framing", "paraphrase", "entitled"], columns="layer", values="margin")
    labels = wide.index.to_frame(index=False)
    bootstrap = PairBootstrap(labels["pair"].to_numpy(), seed=0)
    mask = ((labels["framing"] == "deny") & labels["entitled"].astype(bool)).to_numpy()
    estimate = bootstrap.mean(wide.to_numpy(), mask)
    drawn = {"lens": "margin", "statistic": "mean_margin", "framing": "deny", "question": "plain", "entitled": True}
    (one,) = (line for line in view(parts, "margins").chunks["airline"] if drawn.items() <= line.items())
    close(one["value"], here[here["entitled"]].groupby("layer")["margin"].mean())
    close(one["low"], estimate.low)
    close(one["high"], estimate.high)
    assert (one["n"], one["n_pairs"]) == (4, 4)
    assert view(parts, "margins").data["domains"] == ["all", "airline", "debt"]


def test_key_figures_are_those_of_the_last_layer(parts, folders):
    summary = pd.read_csv(folders[0] / "summary.csv")
    last = summary[(summary["layer"] == 3) & (summary["lens"] == "margin") & (summary["question"] == "both")]
    (table,) = parts[0].tables
    for framing, auroc, *_, counted in table["rows"]:
        line = last[(last["statistic"] == "auroc") & (last["framing"] == framing)].iloc[0]
        numbers = [float(number) for number in re.findall(r"[\d.]+", auroc)]
        np.testing.assert_allclose(numbers, line[["value", "low", "high", "null_q95"]].astype(float), atol=0.00501)
        assert counted == f"{line['n']} / {line['n_pairs']}"


def test_pairs_hold_the_prompts_and_what_differs(parts, folders):
    drawn, margins = view(parts, "pairs"), pd.read_csv(folders[0] / "margins.csv")
    prompts = [json.loads(line) for line in (folders[0] / "scenarios.jsonl").read_text().splitlines()]
    found = [(chunk["lines"], one) for chunk in drawn.chunks.values() for one in chunk["prompts"]]
    assert len(found) == len(prompts) == 8 * 2 * 2 * 2
    for (lines, one), prompt in zip(found, prompts, strict=True):
        assert "\n".join(lines[number] for number in one["text"]) == prompt["prompt"]
        assert RECORD in prompt["prompt"].split("\n")
        close([one["own"]], [prompt["own_margin"]])
    lines, one = found[17]
    here = margins[np.logical_and.reduce([margins[name] == one[name] for name in ("scenario", "framing", "question")])]
    for number, lens in enumerate(("margin", "logit")):
        close(one["margins"][number], here[here["lens"] == lens]["margin"])
    for pair in drawn.data["pairs"]:
        (owed,), (not_owed,) = pair["differs"]
        assert owed.startswith("- ")
        assert owed.partition(":")[0] == not_owed.partition(":")[0]
        assert owed != not_owed


def test_token_map_is_that_of_tokens_csv(parts, folders):
    drawn = view(parts, "tokens").data
    table = pd.read_csv(folders[1] / "tokens.csv", keep_default_na=False, dtype={"token": str})
    assert drawn["tokens"] == table.drop_duplicates("position")["token"].tolist()
    for lens, name in zip(drawn["lenses"], ("margin", "logit"), strict=True):
        grid = table[table["lens"] == name].pivot(index="layer", columns="position", values="margin")
        np.testing.assert_allclose(np.array(lens["rows"], float), grid, rtol=1e-2, atol=1e-6)
    assert [row[:2] for row in drawn["top"]["rows"]][0] == ["logit lens (twin)", "0"]


def test_rounds_are_those_on_file_with_their_signals(parts, folders):
    drawn = view(parts, "rounds")
    (file,) = folders[2].glob("trajectories_*.jsonl")
    rows = [row for row in map(json.loads, file.read_text().splitlines()) if "round" in row]
    signals = pd.read_parquet(folders[2] / "signals" / "signals.parquet")
    columns = drawn.data["columns"]
    assert columns["round"] == [row["round"] for row in rows]
    assert columns["lied"] == [int(row["derived"]["lied"]) for row in rows]
    close(columns["trust_after"], [row["trust_after"] for row in rows])
    assert len(drawn.chunks) == -(-len(rows) // IN_A_CHUNK)
    number = next(at for at, row in enumerate(rows) if row["derived"]["lied"] and at >= IN_A_CHUNK)
    one, row = drawn.chunks[str(number // IN_A_CHUNK)][number % IN_A_CHUNK], rows[number]
    assert [[role, "".join(text for text, _ in pieces)] for role, pieces in one["transcript"]] == row["transcript"]
    assert [text for _, pieces in one["transcript"] for text, lie in pieces if lie][:2] == [
        "no refund is possible here",
        "only credit",
    ]
    assert one["facts"] == row["facts"]
    keys = ("condition", "sample", "round")
    mine = signals[np.logical_and.reduce([signals[name] == row[name] for name in keys])]
    moment = next(m for m in one["moments"] if (m["turn"], m["position"]) == (1, "before_reply"))
    mine = mine[(mine["turn"] == 1) & (mine["position"] == "before_reply")]
    for lens, curve in zip(("margin", "logit"), moment["curves"], strict=True):
        np.testing.assert_allclose(curve, mine[mine["lens"] == lens].sort_values("layer")["margin"], rtol=1e-2)
    random = mine[mine["lens"].str.startswith("random")].groupby("layer")["margin"]
    for ends, expected in zip(moment["random"], (random.min(), random.max()), strict=True):
        np.testing.assert_allclose(ends, expected, rtol=1e-2)
    assert drawn.data["n_random"] == 3


@pytest.mark.parametrize(
    ("quote", "marked"),
    [
        ("no refund is due", ["No refund is due"]),
        ("no  refund ... credit", ["No refund", "credit"]),
        ("something else", []),
        ("", []),
        ("refund is. refund is due", []),
    ],
)
def test_the_lie_is_marked_where_the_judge_quotes_it(quote, marked):
    message = "No refund is due, only (a) credit."
    pieces = lie_pieces(message, quote)
    assert "".join(text for text, _ in pieces) == message
    assert [text for text, lie in pieces if lie] == marked


def test_tables_of_score_pairing_and_probes_are_those_of_their_files(parts, folders):
    panel = pd.read_csv(folders[2] / "score" / "panel.csv")
    rate = panel[(panel["level"] == "condition+trust") & (panel["metric"] == "DR") & (panel["condition"] == "emergent")].iloc[0]
    table = view(parts, "behaviour").data["tables"][0]
    row = dict(zip(table["columns"], next(row for row in table["rows"] if row[0] == "emergent"), strict=True))
    assert row["DR"].startswith(f"{100 * rate['value']:.1f}")
    assert row["owed n"] == str(rate["n"])
    control = dict(zip(table["columns"], next(row for row in table["rows"] if row[0] == "control"), strict=True))
    assert control["Det"] == ""  # detected lies of none: undefined, so empty

    statistics = pd.read_csv(folders[2] / "signals" / "pairs" / "statistics.csv")
    keys = {"position": "before_reply", "condition": "all", "statistic": "auroc", "lens": "logit"}
    here = statistics[np.logical_and.reduce([statistics[name] == value for name, value in keys.items()])]
    (line,) = (one for one in view(parts, "pairing").data["lines"] if keys.items() <= one.items())
    close(line["value"], here["value"])
    assert {one["name"] for one in view(parts, "pairing").data["baselines"]} >= {"own final margin", "TF-IDF"}
    assert view(parts, "pairing").data["random"]

    probes = pd.read_csv(folders[3] / "probes.csv")
    (panel,) = view(parts, "probes").data["panels"]
    own = probes[(probes["feature"] == "residual") & (probes["choice"] == "layer")]
    (line,) = (one for one in panel["lines"] if not one["control"])
    close(line["value"], own["auroc"])
    close(line["low"], own["auroc_low"])
    shown = {one["feature"] for one in (*panel["lines"], *panel["flat"])}
    assert shown >= {"shuffled labels", "random subspace", "random features", "bag of words", "prompt length"}


def test_signals_alone_and_elsewhere(folders, tmp_path):
    """Signals without their rounds say so; beside the only run they are its own wherever they lie."""
    moved, run = tmp_path / "moved", tmp_path / "run"
    shutil.copytree(folders[2] / "signals", moved, ignore=shutil.ignore_patterns("pairs"))
    (alone,) = parts_of(recognise([moved]))
    assert dict(alone.facts)["rounds"].startswith("not given")
    shutil.copytree(folders[2], run, ignore=shutil.ignore_patterns("signals", "score"))
    (rounds,) = parts_of(recognise([run, moved, run]))
    assert rounds.views[0].data["lenses"] == ["J-Lens", "logit lens (twin)"]


def test_a_folder_inside_that_is_not_filled_yet_is_left_out(folders, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(folders[2], run, ignore=shutil.ignore_patterns("signals", "score"))
    (run / "signals").mkdir()
    (run / "signals" / ".begun.parquet").write_bytes(b"")
    assert [one.kind for one in recognise([run])] == ["run"]


# The page


class Elements(HTMLParser):
    """Every element with its attributes, and the text of scripts."""

    def __init__(self, text):
        super().__init__()
        self.found, self.scripts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.found and self.found[-1][0] == "script":
            self.scripts[-1] += data


def test_text_stays_text_and_nothing_is_fetched(page_file, folders):
    text = page_file.read_text(encoding="utf-8")
    page = Elements(text)
    assert "img" not in {tag for tag, _ in page.found}
    data = page_data(parts_of(recognise(folders)))
    assert len(page.scripts) == len(data) + 1
    assert "window.broken" in text
    for (_, attributes), script in zip([one for one in page.found if one[0] == "script"], page.scripts, strict=True):
        if "id" in attributes:
            assert json.loads(script) == json.loads(json.dumps(data[attributes["id"]]))
    for tag, attributes in page.found:
        assert not attributes.keys() & {"src", "href", "action"}, tag
    style_and_script = text.partition("<style>")[2].partition("</style>")[0] + page.scripts[-1]
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|url\(|@import|fetch\(|XMLHttp|import\(", style_and_script)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", style_and_script)
    (policy,) = (one["content"] for tag, one in page.found if one.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';")


@pytest.mark.parametrize("text", [HOSTILE, "\u2028\u2029", "]]>", "<!--<script>", "\udc00\ud800", "é😀"])
def test_script_json_cannot_end_its_element(text):
    written = script_json({text: [text]})
    assert not re.search("[<>&\u2028\u2029\ud800-\udfff]", written)
    assert json.loads(written) == {text: [text]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        script_json(float("nan"))


def test_a_run_of_the_demos_size_stays_under_3_mb(parts):
    """All domains' subset of prompts, as ``make demo`` reads them, with 30 layers of numbers that do not compress."""
    scenarios = eligibility_scenarios(load_cases("ours", None), ["honest", "deny"], quick=True)
    names = ("pair", "domain", "entitled")
    labels = pd.DataFrame(
        [
            {"scenario": one.situation.id, **{name: getattr(one.situation, name) for name in names}}
            | {"framing": one.framing, "paraphrase": one.paraphrase, "question": one.question, "answer": one.answer}
            for one in scenarios
        ]
    )
    assert len(labels) == 256
    rng = np.random.default_rng(0)
    numbers = rng.standard_normal((256, 2, 30)) * 10
    pairs = pairs_view(
        labels, [f"{one.system}\n{one.user}" for one in scenarios], ["margin", "logit"], numbers, numbers[:, 0, 0]
    )
    drawn = rng.standard_normal((4, 30)).round(4).tolist()
    lines = [
        one | dict(zip(("value", "low", "high", "null"), drawn, strict=True)) for one in view(parts, "margins").chunks["all"]
    ]
    chunks = dict.fromkeys(("all", *labels["domain"].unique()), lines)
    assert len(chunks) == 9
    whole = [Part("x", "y", [], views=[View("margins", view(parts, "margins").data, chunks), pairs])]
    assert len(render("x", page_data(whole)).encode()) < 3e6


# Mistakes


def unfinished(folder, where):
    shutil.copytree(folder, where)
    record = json.loads((where / "run.json").read_text())
    (where / "run.json").write_text(json.dumps({**record, "complete": False}))


def of_version(folder, where, version="0.0.9"):
    shutil.copytree(folder, where)
    record = json.loads((where / "run.json").read_text())
    record["versions"]["klb-probe"] = version
    (where / "run.json").write_text(json.dumps(record))


def lacking_a_column(folder, where):
    shutil.copytree(folder, where)
    pd.read_csv(where / "summary.csv").drop(columns="null_q95").to_csv(where / "summary.csv", index=False)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda _, where: None, "wrong is not there; give output folders"),
        (lambda _, where: where.write_text("x"), "is a file, not a folder"),
        (lambda _, where: where.mkdir(), "wrong is empty"),
        (lambda _, where: (where / "other").mkdir(parents=True), "holds no output of jlens, run, rounds"),
        (unfinished, "has not come to its end"),
        (of_version, "was written by klb-probe 0.0.9, this is"),
        (lacking_a_column, "lacks null_q95: another version wrote it"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(make, said, folders, tmp_path, capsys):
    make(folders[0], tmp_path / "wrong")
    assert klb("report", tmp_path / "wrong", "--out", tmp_path / "page.html") == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir() if path.name != "wrong"] == []


def test_another_patch_version_is_read(folders, tmp_path):
    of_version(folders[0], tmp_path / "older", "0.1.99")
    assert recognise([tmp_path / "older"])


def test_a_page_is_replaced_only_when_told_to(folders, capsys):
    organism = folders[-1]
    assert klb("report", organism) == 0
    page = organism / "report.html"
    capsys.readouterr()
    assert klb("report", organism) == 2
    assert f"{page} exists; pass --overwrite" in capsys.readouterr().err
    page.write_text("old")
    assert klb("report", organism, "--overwrite") == 0
    assert "Check of tiny-liar" in page.read_text()
    assert klb("report", organism, "--out", organism) == 2
    assert "is a folder; name a file" in capsys.readouterr().err


# In a browser


@pytest.fixture(scope="module")
def browser():
    """Debian's Chromium, through Playwright."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: the page is not tried")
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is not there: the page is not tried in a browser")
    with playwright.sync_playwright() as running:
        opened = running.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture
def opened(browser, page_file):
    """The page at a desk; no error in its console, no request but for itself."""
    yield from _opened(browser, page_file)


def _opened(browser, file, **options):
    context = browser.new_context(viewport={"width": 1200, "height": 900}, **options)
    page, wrong = context.new_page(), []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith("file:") else wrong.append(request.url))
    page.set_default_timeout(60_000)
    page.goto(file.as_uri())
    yield page
    assert wrong == []
    assert page.evaluate("window.broken") is None
    context.close()


def go(page, tab):
    page.click(f"#tab-{tab}")
    panel = page.locator(f"#panel-{tab}")
    panel.wait_for()
    return panel


def test_overview_and_tabs_by_keyboard(opened):
    assert opened.locator("#panel-overview .card").count() == 8
    assert "How to read this" in opened.locator("aside").inner_text()
    opened.focus("#tab-overview")
    for expected in ("margins", "pairs"):
        opened.keyboard.press("ArrowRight")
        assert opened.evaluate("document.activeElement.id") == f"tab-{expected}"
        assert opened.locator(f"#panel-{expected}").is_visible()
    assert opened.locator("[role=tab][aria-selected=true]").count() == 1
    opened.keyboard.press("Tab")  # into the panel, past the other tabs
    assert opened.evaluate("document.activeElement.closest('[role=tabpanel]').id") == "panel-pairs"
    assert opened.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_switches_change_what_is_drawn_and_the_other_lens_stays(opened):
    panel = go(opened, "margins")

    def names():
        return panel.locator("figcaption").all_inner_texts()

    def lines(at):
        drawn = panel.locator("figure").nth(at).locator("[data-line]")
        drawn.first.wait_for(state="attached")  # charts are drawn when they come into view
        return drawn.evaluate_all("all => all.map(one => one.dataset.line)")

    assert len(names()) == 10
    assert set(lines(0)) == {f"{framing}, {owed}" for framing in ("honest", "deny") for owed in ("owed", "not owed")}
    assert "95 % of random readouts, honest" in panel.locator("figure", has_text="AUROC of entitlement").first.inner_text()
    panel.locator("[data-switch=framing] input[value=deny]").uncheck()
    assert set(lines(0)) == {"honest, owed", "honest, not owed"}
    panel.locator("[data-switch=entitlement] input[value=false]").uncheck()
    assert lines(0) == ["honest, owed"]
    panel.locator("[data-switch=wording] input[value=plain]").check()
    assert len(names()) == 8
    panel.locator("[data-switch=lens] input[value=logit]").check()
    assert names()[0] == "Mean margin, plain question: logit lens (twin)"
    assert names()[1].startswith("Mean margin, plain question: J-Lens")
    before = panel.locator("figure .quiet").first.inner_text()
    panel.locator("[data-switch=domain] select").select_option("debt")
    after = panel.locator("figure .quiet").first.inner_text()
    assert (before, after) == ("a line: n = 8 prompts, 8 pairs or cases", "a line: n = 4 prompts, 4 pairs or cases")


def test_pointer_and_keys_read_values(opened, folders):
    panel = go(opened, "margins")
    chart = panel.locator("figure").first
    summary = pd.read_csv(folders[0] / "summary.csv")
    keys = {"lens": "margin", "statistic": "mean_margin", "framing": "honest", "question": "plain", "entitled": True}
    rows = summary[np.logical_and.reduce([summary[name] == value for name, value in keys.items()])].set_index("layer")

    def shown(layer):
        value, low, high = (f"{rows[name][layer]:+.2f}".replace("-", "−") for name in ("value", "low", "high"))
        return f"honest, owed {value} [{low}, {high}]"

    svg = chart.locator("svg[tabindex]")
    svg.focus()
    opened.keyboard.press("Home")
    opened.keyboard.press("Home")
    assert shown(0) in chart.locator(".readout").inner_text()
    opened.keyboard.press("ArrowRight")
    assert shown(1) in chart.locator(".readout").inner_text()
    box = svg.bounding_box()
    opened.mouse.move(box["x"] + box["width"] - 15, box["y"] + 60)
    assert shown(3) in chart.locator(".readout").inner_text()
    chart.locator("summary").click()
    chart.locator("tbody tr").first.wait_for()  # made when it is opened
    assert chart.locator("tbody tr").count() == 4
    score = panel.locator("figure", has_text="AUROC of entitlement").first
    score.locator("svg[tabindex]").focus()
    opened.keyboard.press("End")
    assert re.search(r"honest 0\.\d\d \[0\.\d\d, [01]\.\d\d\]", score.locator(".readout").inner_text())


def test_pairs_side_by_side_with_what_differs(opened, parts):
    panel = go(opened, "pairs")
    pairs = view(parts, "pairs").data["pairs"]
    assert panel.locator(".list button").count() == len(pairs)
    panel.locator(".list button").nth(1).click()
    opened.keyboard.press("ArrowDown")
    assert panel.locator(".list [aria-current=true]").inner_text().startswith(pairs[2]["pair"])
    marked = panel.locator(".prompt mark.differs").all_inner_texts()
    assert marked == [pairs[2]["differs"][0][0], pairs[2]["differs"][1][0]]
    assert [text.split(":")[0] for text in panel.locator(".twins h3").all_inner_texts()] == ["owed", "not owed"]
    boxes = [one.bounding_box() for one in panel.locator(".twins section").all()]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] < boxes[1]["x"]
    panel.locator("[data-switch=wording] input[value=reversed]").check()
    assert "may" in panel.locator(".prompt").last.inner_text()
    panel.locator("input[type=search]").fill("no such case")
    assert panel.locator(".list button").count() == 0


def test_token_map_by_pointer_and_keys(opened, parts):
    panel, drawn = go(opened, "tokens"), view(parts, "tokens").data
    maps = panel.locator("svg[data-lens]")
    assert maps.count() == 2
    readout = panel.locator(".readout")
    last = len(drawn["tokens"]) - 1
    maps.first.focus()
    opened.keyboard.press("ArrowLeft")
    opened.keyboard.press("ArrowDown")

    def value(lens, layer, at):
        return f"{drawn['lenses'][lens]['rows'][layer][at]:+.3f}".replace("-", "−")

    assert f"token {last - 1} " in readout.inner_text()
    assert all(value(lens, 2, last - 1) in readout.inner_text() for lens in (0, 1))
    opened.keyboard.press("Home")
    assert "token 0 " in readout.inner_text()
    box = maps.first.bounding_box()
    opened.mouse.move(box["x"] + 30 + 2.5 * 17, box["y"] + 4)
    assert "token 2 " in readout.inner_text()
    assert value(0, 3, 2) in readout.inner_text()


def test_rounds_with_lie_strips_and_trust(opened, parts):
    panel, columns = go(opened, "rounds"), view(parts, "rounds").data["columns"]
    lies = sum(columns["lied"])
    panel.locator("[data-switch=verdict] select").select_option("lie")
    assert f"of {lies}" in panel.locator(".pages [role=status]").inner_text()
    # The first lie's customer wrote HTML: it is on the page as text.
    assert "</script><script>window.broken = 1</script><img src=x" in panel.locator(".talk .user").first.inner_text()
    assert panel.locator("mark.lie").all_inner_texts()[:2] == ["no refund is possible here", "only credit"]
    assert panel.locator(".talk .agent .strip").count() == 2 * 2  # turns x lenses
    strip = panel.locator(".talk .agent .strip svg").first
    strip.focus()
    opened.keyboard.press("ArrowLeft")
    assert "layer 1" in panel.locator(".talk .agent .strip").first.inner_text()
    panel.locator("[data-switch='moment of the strips'] input[value=reply_mean]").check()
    assert "mean over the reply" in panel.inner_text()
    facts = panel.locator("table", has_text="Facts, as the judge gave them").inner_text()
    assert "agent made false claim" in facts
    assert "random readouts" in panel.locator("figure", has_text="J-Lens").last.inner_text()
    assert panel.locator("figure", has_text="Trust after each round").locator("[data-line='after a lie']").count() == 1
    before = panel.locator("h2").last.inner_text()
    panel.get_by_role("button", name="Next round").click()
    assert panel.locator("h2").last.inner_text() != before


def test_other_tabs_draw_with_their_controls(opened):
    assert "random readouts" in go(opened, "pairing").locator("figure").first.inner_text()
    panel = go(opened, "pairing")
    panel.locator("[data-switch=statistic] select").select_option("auroc_within_condition")
    assert panel.locator("figure").first.is_visible()
    probes = go(opened, "probes")
    probes.locator("[data-switch=estimators] input").uncheck()
    assert "control: shuffled labels" in probes.locator("figure").first.inner_text()
    assert go(opened, "behaviour").locator("figure").count() == 2
    assert "Detectors" in go(opened, "tables").inner_text()


def test_light_and_dark(browser, page_file):
    ground = "getComputedStyle(document.body).backgroundColor"
    for page in _opened(browser, page_file, color_scheme="dark"):
        dark = page.evaluate(ground)
        page.click("#theme")
        light = page.evaluate(ground)
        assert (dark, light) == ("rgb(21, 24, 29)", "rgb(255, 255, 255)")
        assert page.locator("#theme").inner_text() == "Dark theme"


def test_on_a_phone_nothing_is_wider_than_the_screen(browser, page_file):
    for page in _opened(browser, page_file):
        page.set_viewport_size({"width": 375, "height": 800})
        for tab in page.locator("[role=tab]").all():
            tab.click()
            assert page.evaluate("document.documentElement.scrollWidth") <= 375, tab.inner_text()


def test_thousands_of_rounds(browser, tmp_path, monkeypatch):
    """A page of 3,000 rounds with signals opens at once: a list of a hundred, and one chunk parsed."""
    monkeypatch.setattr("os.fsync", lambda _: None)  # 3,000 rows need not survive a power cut
    run = report_folders.play_rounds(tmp_path, 150, 10, ("before_reply",), ("margin", "logit"))
    made = sum(1 for line in next(run.glob("trajectories_*")).open() if '"round"' in line)
    assert made == 3000
    page_file = tmp_path / "page.html"
    page_file.write_text(report([run]), encoding="utf-8")
    assert page_file.stat().st_size < 3000 * 4000
    started = time.monotonic()
    for page in _opened(browser, page_file):
        panel = go(page, "rounds")
        panel.locator(".talk").wait_for()
        assert time.monotonic() - started < 30  # a second on a quiet machine
        assert panel.locator(".list button").count() == 100
        assert "1–100 of 3000" in panel.locator(".pages [role=status]").inner_text()
        assert page.evaluate("[...parsed.keys()].length") <= 3  # index, the list, one chunk
        panel.get_by_role("button", name="Later").click()
        panel.locator(".list button").last.click()
        assert "sample 20, round 9" in panel.locator(".list [aria-current=true]").inner_text()
