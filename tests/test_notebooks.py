"""The notebooks: run top to bottom, small, public names only, with what to look for said and true."""

from __future__ import annotations

import ast
import base64
import json
import sys
from pathlib import Path

import nbformat
import pytest
from tiny import save_tiny_llama

import klb_probe

FOLDER = Path(__file__).parents[1] / "notebooks"
NAMES = ("01_layer_margins", "02_probes", "03_pairing", "04_your_model_your_cases")
LONGEST_CELL, LARGEST_FIGURE, LARGEST_FOLDER = 12, 100_000, 600_000
OTHERS = {"pandas", "pathlib", "tempfile"}
LIAR = "smollm2-135m-liar"

sys.path.insert(0, str(FOLDER))
from execute import KEEP, PNG, execute, strip  # noqa: E402


def read(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def sources(notebook):
    """Python of each code cell; magics are Jupyter's."""
    cells = [cell.source.splitlines() for cell in notebook.cells if cell.cell_type == "code"]
    return ["\n".join(line for line in cell if not line.startswith("%")) for cell in cells]


def sections(notebook):
    return [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]


def run_cells(notebook, replaced=()):
    """Run every code cell in one namespace; what a cell ends with is shown as a notebook would ask for it."""
    shown = []
    names = {"display": shown.append}
    for source in sources(notebook):
        for text, other in replaced:
            source = source.replace(text, other)
        tree = ast.parse(source)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "notebook", "exec"), names)
        if last:
            shown.append(eval(compile(ast.Expression(last.value), "notebook", "eval"), names))
    return names, [page(one) for one in shown if one is not None]


def page(value):
    """HTML of a value, or its repr."""
    html = getattr(value, "_repr_html_", lambda: None)()
    return html or repr(value)


@pytest.fixture
def here(tmp_path, monkeypatch, smollm):
    """A folder of its own, and the session's model under the name of the first cell; any other is loaded."""
    monkeypatch.chdir(tmp_path)
    load, mine = klb_probe.load_model, (klb_probe.resolve("smollm2-135m").gguf, "smollm2-135m")
    monkeypatch.setattr(klb_probe, "load_model", lambda name: smollm if name in mine else load(name), raising=False)
    return tmp_path


# What they are


def test_these_are_all_notebooks():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == sorted(NAMES)
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) < LARGEST_FOLDER


@pytest.mark.parametrize("name", NAMES)
def test_cells_are_short_and_hold_no_output_but_kept_figures(name):
    notebook = read(name)
    nbformat.validate(notebook)
    kept = 0
    for cell in (one for one in notebook.cells if one.cell_type == "code"):
        assert len(cell.source.splitlines()) <= LONGEST_CELL
        assert cell.execution_count is None
        keeps = KEEP in cell.metadata.get("tags", ())
        assert len(cell.outputs) == keeps, cell.source
        for output in cell.outputs:
            assert set(output.data) == {PNG}
            assert base64.b64decode(output.data[PNG]).startswith(b"\x89PNG")
            assert len(output.data[PNG]) < LARGEST_FIGURE
            kept += 1
    assert kept <= 2


@pytest.mark.parametrize("name", NAMES)
def test_only_the_public_api_is_used(name):
    for source in sources(read(name)):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                assert {one.name for one in node.names} <= OTHERS | {"klb_probe"}
                assert all(one.asname == "klb" for one in node.names if one.name == "klb_probe")
            if isinstance(node, ast.ImportFrom):
                assert node.module in OTHERS
            if isinstance(node, ast.Attribute):
                assert not node.attr.startswith("_")
                if isinstance(node.value, ast.Name) and node.value.id == "klb":
                    assert node.attr in klb_probe.__all__


@pytest.mark.parametrize("name", NAMES)
def test_the_first_cell_names_the_model_and_each_section_what_to_look_for(name):
    notebook = read(name)
    assert 'MODEL = "smollm2-135m"' in sources(notebook)[0]
    first, *rest = sections(notebook)
    assert first.startswith("# ")
    assert len(rest) >= 4
    for text in rest:
        assert text.startswith("## ")
        assert "**Look for:**" in text
        assert "**It does not show:**" in text


# What they do. The first runs through a real kernel, the others here.

CHECK = """
import json, matplotlib
scores = summary.query("lens == 'margin' and statistic == 'pair_accuracy' and question == 'both'")
final = scores[scores.layer == scores.layer.max()]
by_first = apart[apart.index < first].max(), apart[apart.index >= first].max()
print(json.dumps({
    "prompts": len(margins.prompts), "pairs": int(final.n_pairs.max()), "apart": [float(one) for one in by_first],
    "low": final.low.tolist(), "high": final.high.tolist(), "changed": len(changed), "read": list(read),
    "labels": [owed.situation.entitled, twin.situation.entitled], "backend": matplotlib.get_backend(),
}))
"""


def test_margins_in_a_kernel(tmp_path):
    """Every cell, with magics and display: figures show once, the bar shows, and the numbers of the text hold."""
    notebook = read(NAMES[0])
    notebook.cells.append(nbformat.v4.new_code_cell(CHECK))
    execute(notebook, tmp_path)
    found = json.loads(notebook.cells.pop().outputs[0].text)
    assert found["prompts"] == 32
    assert "32 eligibility questions" in sections(notebook)[0]
    assert found["pairs"] == 4
    assert "With 4 pairs" in "".join(sections(notebook))
    assert found["labels"] == [True, False]
    assert found["changed"] == 1  # one field of the record
    before, after = found["apart"]
    assert before < 1e-3 < 0.1 < after
    assert all(low <= 0.5 <= high for low, high in zip(found["low"], found["high"], strict=True))  # inside, as the text says
    assert found["read"] == [name for name in (LIAR, "smollm2-135m-ignorant") if name in klb_probe.registry()]
    printed = str([one.get("text") for cell in notebook.cells for one in cell.get("outputs", ())])
    assert ("No organism is installed" in printed) is (not found["read"])
    assert "inline" in found["backend"]  # no plot of ours took it away

    cells = {cell.source: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    for source in ("margins.plot(summary)", "views["):
        (outputs,) = [one for text, one in cells.items() if text.startswith(source) and ".plot(" in text]
        assert [PNG in one.get("data", {}) for one in outputs] == [True]
    (read_cell,) = [one for text, one in cells.items() if "eligibility_margins(model" in text]
    assert any("reading" in str(one.get("text", one.get("data"))) for one in read_cell)  # the bar
    assert any("Margins of eligibility scenarios" in one.get("data", {}).get("text/html", "") for one in read_cell)

    strip(notebook)
    assert [len(cell.outputs) for cell in notebook.cells if cell.cell_type == "code" and cell.outputs] == [1, 1]


def test_probes(here):
    names, shown = run_cells(read(NAMES[1]))
    found, nested, words = (names[one] for one in ("found", "nested", "words"))
    (line,) = nested.to_dict("records")
    assert 0.5 < line["auroc_low"] < line["auroc"]
    assert words["auroc"].item() >= line["auroc"]  # "a control that scores as high"
    secret = names["framing"].set_index("test")["auroc"]
    assert secret["secret or honest"] >= secret["deny or honest"]  # "it reads that there is a note"
    means = names["shown"].assign(score=names["scores"]).groupby("framing")["score"].mean()
    assert means["deny"] > 0 > means["honest"]
    assert any("Linear probes" in one for one in shown)
    assert any("Linear probe<" in one for one in shown)
    assert (found.data.rows["domain"].nunique(), found.data.rows["group"].nunique()) == (3, 12)


def test_pairing(here):
    notebook = read(NAMES[2])
    names, shown = run_cells(notebook)
    rounds, pairs = names["rounds"], names["pairs"]
    assert len(rounds) == 2 * 2 * 6
    assert rounds.loc[rounds["lied"], "condition"].unique().tolist() == ["emergent"]
    assert pairs.paired.counts["lies_owed"] == 6
    assert set(pairs.frame["position"]) == set(names["MOMENTS"])
    assert pairs.paired.rounds["trajectory"].nunique() == 4
    assert "With 4 trajectories" in "".join(sections(notebook))
    table = pairs.auroc().set_index(["position", "lens"])
    assert table.loc[("reply_mean", "margin"), "words"] > 0.9  # "the words alone tell it"
    assert table.loc[("reply_mean", "margin"), "random_q95"] > 0.8  # "and from the reply on any direction does"
    assert pairs.manifest["policy"] == "off"
    assert any("Dialogues" in one for one in shown)
    assert any("Pairing of margins with lies" in one for one in shown)


@pytest.mark.parametrize("mine", ["the default's file", "another folder"])
def test_your_model_your_cases(here, mine, tmp_path_factory):
    replaced = ()
    if mine == "another folder":
        folder = save_tiny_llama(tmp_path_factory.mktemp("mine"))
        replaced = [("klb.resolve(MODEL).gguf or MODEL", repr(str(folder)))]
    names, _ = run_cells(read(NAMES[3]), replaced)
    assert names["model"].n_layers == (30 if not replaced else 4)
    assert [one.entitled for one in names["domain"].situations()] == [True, False]
    prompts = names["margins"].prompts
    assert len(prompts) == 4  # a case and its twin, each in two wordings
    assert set(prompts["answer"]) == {"Yes", "No"}
    assert names["words"].pairs[0][0][0].strip() == "True"
    assert prompts["own_margin"].nunique() == 4
