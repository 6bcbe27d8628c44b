"""A run of ``jlens --positions all``: one scenario as a layer x token map, and the lens's top tokens if they were asked for."""

from __future__ import annotations

from klb_probe.report.data import lens_title, short
from klb_probe.report.margins import contrast_words, lens_words
from klb_probe.report.part import Part, View
from klb_probe.report.recognise import Output

_TOP = ("lens", "layer", "rank", "token", "logit")


def tokens_part(output: Output) -> Part:
    """The part of a whole view."""
    frame = output.table("tokens.csv", ("position", "token", "lens", "layer", "margin"), text=["token"])
    tokens = frame.drop_duplicates("position").sort_values("position")["token"].tolist()
    lenses = []
    for name, rows in frame.groupby("lens", sort=False):
        grid = rows.pivot(index="layer", columns="position", values="margin")
        lenses.append(
            {"title": lens_title(str(name)), "layers": grid.index.tolist(), "rows": [short(row, 3) for row in grid.to_numpy()]}
        )
    owed = "owed" if output.of("entitled") else "not owed"
    scenario, framing, model = output.of("scenario"), output.of("framing"), output.of("model", "name")
    about = f"{scenario}, {owed}, framing {framing}"
    data = {"about": about, "model": model, "tokens": tokens, "lenses": lenses, "top": _top_tokens(output)}
    return Part(
        title=f"Token map of {model}",
        folder=str(output.path),
        facts=[
            ("model", model),
            ("lens", lens_words(output.of("lens"))),
            ("contrast", contrast_words(output.of("contrast"))),
            ("scenario", f"{about}; {len(tokens)} tokens"),
        ],
        views=[View("tokens", data)],
    )


def _top_tokens(output: Output) -> dict | None:
    if not (output.path / "top_tokens.csv").is_file():
        return None
    table = output.table("top_tokens.csv", _TOP, text=["token"])
    rows = [
        [lens_title(str(lens)), str(layer), *(repr(token) for token in found.sort_values("rank")["token"])]
        for (lens, layer), found in table.groupby(["lens", "layer"], sort=False)
    ]
    width = max(map(len, rows)) - 2
    rows = [row + [""] * (width + 2 - len(row)) for row in rows]
    return {
        "title": "Top tokens where the answer starts",
        "columns": ["lens", "layer", *map(str, range(1, width + 1))],
        "rows": rows,
    }
