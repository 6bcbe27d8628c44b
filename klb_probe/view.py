"""``klb-probe jlens --positions all``: one scenario at every layer and token, written and drawn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from klb_probe.errors import KlbError

if TYPE_CHECKING:
    from klb_probe.cases.scenarios import Scenario
    from klb_probe.lens.contrast import TokenContrast
    from klb_probe.lens.jacobian import JacobianLens
    from klb_probe.models.residual_model import ResidualModel
    from klb_probe.signals.whole_view import WholeView

VIEW_FILES = ("tokens.csv", "heat_map.png", "top_tokens.csv", "run.json")
POSITIONS = ("answer", "all")
NO_VOCABULARY = "a margin lens has no vocabulary: top tokens are the logit lens's (a full Jacobian lens file has its own)"


def check_view_options(
    positions: str, top_k: int, scenario: str | None, top_layers: str | None, resume: bool, controls: bool = False
) -> None:
    """Refuse a mix of options that has no meaning."""
    if positions not in POSITIONS:
        raise KlbError(f"unknown --positions {positions!r}; one of {', '.join(POSITIONS)}")
    if positions == "answer" and (top_k or scenario or top_layers):
        raise KlbError("--scenario, --top-k and --top-layers read one scenario whole; add --positions all")
    if top_layers and not top_k:
        raise KlbError("--top-layers chooses layers of --top-k; pass --top-k N too")
    if positions == "all" and controls:
        raise KlbError("--controls and --shuffled stand beside the answer position; leave out --positions all")
    if positions == "all" and resume:
        raise KlbError("--positions all reads one scenario: nothing to --resume; pass --overwrite to read it again")


def parse_layers(text: str | None) -> list[int] | None:
    """``"0,10,29"`` to layers; KlbError for anything else."""
    if text is None:
        return None
    try:
        return [int(layer) for layer in text.split(",")]
    except ValueError:
        raise KlbError(f"--top-layers wants layers with commas, such as 0,10,20; got {text!r}") from None


def choose_scenario(scenarios: Iterable[Scenario], wanted: str | None) -> Scenario:
    """The first scenario (of the first framing, paraphrase 1), or the one of a situation's id (``airline/slug[~twin]``)."""
    found: dict[str, Scenario] = {}
    for scenario in scenarios:
        found.setdefault(scenario.situation.id, scenario)
    if wanted is None:
        return next(iter(found.values()))
    if wanted not in found:
        import difflib

        close = difflib.get_close_matches(wanted, found, n=3, cutoff=0.3) or list(found)[:3]
        raise KlbError(f"unknown scenario {wanted!r} among {len(found)}; for example {', '.join(close)}")
    return found[wanted]


def view_scenario(model: ResidualModel, lens: Any, scenario: Scenario, contrast: TokenContrast | None = None) -> WholeView:
    """One scenario at every layer and token: ``.frame``, ``.plot()``.

    Args:
        model: The model.
        lens: A logit, margin or full Jacobian lens; its logit-lens twin is read beside it.
        scenario: What to read, such as one of a :class:`klb_probe.Margins`' ``scenarios``.
        contrast: The tokens of the margin; a full lens has none of its own.

    Raises KlbError where the lens does not give the model's own margin at the last block.

    Examples:
        >>> logit = klb.LogitLens.of(small, klb.TokenContrast.of(small.chat))
        >>> margins = klb.eligibility_margins(small, logit, domains=["refund"], questions=["plain"], quick=True)
        >>> view = klb.view_scenario(small, logit, margins.scenarios[0])
        >>> len(view.frame) == len(view.texts) * len(view.layers)
        True
    """
    from klb_probe.lens.margin import LogitLens
    from klb_probe.signals.whole_view import view_prompt

    tokens, full = contrast or lens.contrast, _full_lens(model, lens)
    readers: dict[str, Any] = {"logit": LogitLens.of(model, tokens).margin}
    if full:
        readers = {full.name: lambda h, layer: full.margin(model, tokens, h, layer)} | readers
    elif lens.name != "logit":
        readers = {lens.name: lens.margin} | readers
    ids = model.chat.encode(scenario.system, scenario.user)
    return view_prompt(model, ids, tokens, readers, layers=_readable_layers(model, full or lens))


def write_view(
    model: ResidualModel,
    lens: Any,
    contrast: TokenContrast,
    scenario: Scenario,
    folder: Path,
    *,
    top_k: int,
    layers: Sequence[int] | None,
    record: Mapping[str, Any],
) -> list[str]:
    """Read a scenario whole and write tokens.csv, heat_map.png, top_tokens.csv (if ``top_k``) and run.json.

    Args:
        model: The model.
        lens: A logit, margin or full Jacobian lens; its logit-lens twin is read beside it.
        contrast: The tokens of the margin.
        scenario: What to read.
        folder: Where to write.
        top_k: Tokens a layer in top_tokens.csv; 0 for none.
        layers: Layers of top_tokens.csv; about nine, evenly spread, when None.
        record: What run.json says besides.

    Returns:
        Lines for the reader.
    """
    from klb_probe.files import replacing, write_json
    from klb_probe.heat_map import heat_map
    from klb_probe.signals.report import shown_layers
    from klb_probe.signals.whole_view import logit_lens_logits, top_tokens

    full = _full_lens(model, lens)
    vocabularies: dict[str, Any] = {"logit": logit_lens_logits(model)}
    if full:
        vocabularies = {full.name: lambda h, layer: full.logits(model, h, layer)} | vocabularies
    readable = _readable_layers(model, full or lens)
    chosen = shown_layers(readable) if layers is None else list(layers)
    if bad := [layer for layer in chosen if not 0 <= layer < model.n_layers]:
        raise KlbError(f"--top-layers: {model.name} has layers 0-{model.n_layers - 1}, not {', '.join(map(str, bad))}")

    view = view_scenario(model, full or lens, scenario, contrast)
    lines, written = [], ["tokens.csv", "heat_map.png"]
    label = f"{scenario.situation.id}, {'owed' if scenario.situation.entitled else 'not owed'}, framing {scenario.framing}"
    with replacing(folder / "tokens.csv") as path:
        view.frame.to_csv(path, index=False, float_format="%.6g")
    with replacing(folder / "heat_map.png") as path:
        heat_map(view.frame, f"{model.name}: {contrast}\n{label}").savefig(path, dpi=130)
    if top_k:
        table = top_tokens(model, view, vocabularies, chosen, top_k)
        with replacing(folder / "top_tokens.csv") as path:
            table.to_csv(path, index=False, float_format="%.6g")
        written.append("top_tokens.csv")
        lines += [f"note: {NO_VOCABULARY}"] if full is None and lens.name == "margin" else []
        for (name, layer), rows in table.groupby(["lens", "layer"], sort=False):
            lines.append(f"{name:>8} layer {layer:>2}: {' '.join(map(repr, rows['token']))}")
    own = view.margins[0, -1, -1]
    lines.append(f"read {label}: {len(view.ids)} tokens, {len(view.layers)} layers; the model's own margin {own:+.3f} logits")
    lines.append(f"Last block against the model's own margin: max error {view.last_block_error:.1e} logits.")
    details = {
        "complete": True,
        "scenario": scenario.situation.id,
        "entitled": scenario.situation.entitled,
        "framing": scenario.framing,
        "paraphrase": scenario.paraphrase,
        "position": "all",
        "token_ids": list(view.ids),
        "top_layers": chosen if top_k else None,
        "last_block_max_error": view.last_block_error,
    }
    write_json(folder / "run.json", {**record, **details})
    lines.append(f"Files in {folder}: {', '.join([*written, 'run.json'])}")
    return lines


def _full_lens(model: ResidualModel, lens: Any) -> JacobianLens | None:
    """The full Jacobian lens that a lens is, or was cut from; a margin lens of our own files is neither."""
    from klb_probe.lens.jacobian import JacobianLens
    from klb_probe.lens.jacobian_files import SUFFIXES

    if not isinstance(lens, JacobianLens):
        file = getattr(lens, "file", None)
        if file is None or file.suffix not in SUFFIXES:
            return None
        lens = JacobianLens.open(file)
    return lens.for_model(model)


def _readable_layers(model: ResidualModel, lens: Any) -> list[int]:
    """Layers a lens can read: those it was fitted for, and from its target layer on, where it is the identity."""
    about: Any = getattr(lens, "metadata", None) if lens.name == "margin" else lens
    if not hasattr(about, "source_layers"):
        return list(range(model.n_layers))
    return sorted({*about.source_layers, *range(about.target_layer, model.n_layers)})
