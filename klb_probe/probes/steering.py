"""Does a direction matter? Change the residual along it, and see what becomes of the yes-minus-no margin.

Directions are added (activation addition: Turner et al. 2023; Li et al. 2023, inference-time intervention) or mean-ablated
(Arditi et al. 2024 set the component to zero) at the output of one block: at the last prompt token, where probes of the
answer read, or at every token. Random directions of the same norm, changed in the same way, say what any change of that size
does. At every token the first one is changed like the rest: its residual is often a hundred times larger than others
(attention sinks), so ablating a direction that it holds can break a model by itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from klb_probe.errors import KlbError
from klb_probe.lens.contrast import TokenContrast
from klb_probe.models.residual_model import ResidualModel
from klb_probe.probes.steering_passes import AT_ANSWER, Change, at_last_position, read_changed

PROBE, RANDOM = "probe", "random"
ADD, ABLATE = "add", "ablate"
MODES = (ADD, ABLATE)

_FIRST_WORD = re.compile(r"\W*(yes|no)\b", re.IGNORECASE)


def add(unit: Tensor, size: float) -> Change:
    """Add ``size`` times the unit direction ``[d]`` to residuals ``[..., d]``."""
    return lambda residual: residual + size * unit.to(residual)


def ablate(unit: Tensor, level: float) -> Change:
    """Replace the component of residuals ``[..., d]`` along the unit direction ``[d]`` by ``level``, the same everywhere."""

    def change(residual: Tensor) -> Tensor:
        along = unit.to(residual)
        return residual + (level - residual @ along)[..., None] * along

    return change


def random_directions(d_model: int, n: int, seed: int) -> dict[str, Tensor]:
    """``n`` unit vectors ``[d_model]``, uniform over directions, by name."""
    rows = torch.randn(n, d_model, generator=torch.Generator().manual_seed(seed))
    return {f"{RANDOM} {number}": row / row.norm() for number, row in enumerate(rows, 1)}


@dataclass(frozen=True)
class Intervention:
    """One change of the residual.

    Attributes:
        direction: Name of the direction.
        kind: ``probe`` or ``random``.
        mode: ``add`` or ``ablate``.
        dose: What is added, in mean residual norms of the layer; NaN for an ablation.
        change: Does it.
    """

    direction: str
    kind: str
    mode: str
    dose: float
    change: Change


def interventions(
    directions: Mapping[str, Tensor], mean: Tensor, norm: float, *, modes: Sequence[str], scales: Sequence[float]
) -> list[Intervention]:
    """Every direction in every mode: added at each scale with both signs, ablated once.

    Args:
        directions: Directions ``[d]`` by name, scaled to unit norm here; names that start with ``random`` are the controls.
        mean: Mean residual ``[d]`` at the layer: an ablated component becomes that of the mean.
        norm: Mean L2 norm of the residuals at the layer, the unit of ``scales``.
        modes: ``add``, ``ablate`` or both.
        scales: Doses, not negative.
    """
    doses = sorted({sign * scale for scale in scales for sign in (-1, 1)})
    made = []
    for name, direction in directions.items():
        if not direction.norm() > 0:
            raise KlbError(f"direction {name} is zero: there is nothing to add or ablate")
        unit = direction / direction.norm()
        kind = RANDOM if name.startswith(RANDOM) else PROBE
        if ADD in modes:
            made += [Intervention(name, kind, ADD, dose, add(unit, dose * norm)) for dose in doses]
        if ABLATE in modes:
            made.append(Intervention(name, kind, ABLATE, float("nan"), ablate(unit, float(mean @ unit))))
    return made


def steering_effects(
    model: ResidualModel,
    contrast: TokenContrast,
    ids: Sequence[Sequence[int]],
    layer: int,
    planned: Sequence[Intervention],
    *,
    at: str,
    batch_size: int = 8,
    on_batch: Callable[[int], object] = lambda _: None,
) -> pd.DataFrame:
    """The model's own margin at the last token of every prompt under every intervention.

    Args:
        model: The model.
        contrast: The tokens of the margin.
        ids: Prompts of at least two tokens.
        layer: The block whose output is changed.
        planned: What to do, from :func:`interventions`.
        at: Where: ``answer``, the last prompt token only, or ``all``, every token.
        batch_size: Most rows in one forward pass, see :func:`~klb_probe.probes.steering_passes.read_changed`.
        on_batch: Called with the number of margins just read; those without intervention count too.

    Returns:
        One row a prompt and intervention: prompt (its index), direction, kind, mode, dose, margin and baseline (yes minus
        no with and without, in logits), other and baseline_other (whether the likeliest next token is neither yes nor no).

    Raises:
        KlbError: When a margin is not a finite number.
    """
    names = ["without intervention", *(f"{one.direction}, {one.mode} {one.dose:g}" for one in planned)]
    margins = np.full((len(names), len(ids)), np.nan)
    other = np.zeros(margins.shape, bool)
    answers = torch.tensor(contrast.token_ids)

    def keep(numbers: Sequence[int], prompts: Sequence[int], logits: Tensor) -> None:
        logits, where = logits.cpu(), (np.array(numbers), np.array(prompts))  # one of the two is a single number
        margins[where] = contrast.margin(logits[:, answers]).double().numpy()
        other[where] = ~torch.isin(logits.argmax(-1), answers).numpy()
        if not (finite := np.isfinite(margins[where])).all():
            name = names[np.broadcast_to(where[0], finite.shape)[~finite][0]]
            raise KlbError(f"{name}: margins are not finite in {model.dtype}; lower --scales or load it with --dtype float32")
        on_batch(len(logits))

    changes = [lambda residual: residual, *(one.change for one in planned)]
    read_changed(model, ids, layer, changes, keep, at=at, batch_size=batch_size)
    tables = []
    for number, one in enumerate(planned, 1):
        what = {"direction": one.direction, "kind": one.kind, "mode": one.mode, "dose": one.dose}
        values = {"margin": margins[number], "baseline": margins[0], "other": other[number], "baseline_other": other[0]}
        tables.append(pd.DataFrame({"prompt": np.arange(len(ids)), **what, **values}))
    return pd.concat(tables, ignore_index=True)


def steered_replies(
    model: ResidualModel,
    ids: Sequence[Sequence[int]],
    layer: int,
    planned: Sequence[Intervention],
    n_tokens: int,
    *,
    at: str,
    on_reply: Callable[[int], object] = lambda _: None,
) -> pd.DataFrame:
    """Greedy replies of ``n_tokens`` without intervention (direction ``none``) and under each, changed in every step.

    With ``at`` ``answer`` the last prompt token and every token of the reply are changed, with ``all`` the prompt as well.

    Returns:
        One row a prompt and intervention: prompt, direction, kind, mode, dose, begins (``Yes``, ``No`` or ``neither``), text.
    """

    def reply(prompt: Sequence[int]) -> str:
        # One at a time: prompts differ in length.
        text = model.tokenizer.decode(model.generate([prompt], n_tokens, temperature=0, seed=0)[0], skip_special_tokens=True)
        on_reply(1)
        return text

    def rows(what: tuple[str, str, str, float]) -> list[tuple]:
        texts = [reply(prompt) for prompt in ids]
        return [(number, *what, reply_begins(text), text) for number, text in enumerate(texts)]

    found = rows(("none", "none", "none", 0.0))
    for one in planned:
        with model.intervening(layer, at_last_position(one.change) if at == AT_ANSWER else one.change):
            found += rows((one.direction, one.kind, one.mode, one.dose))
    return pd.DataFrame(found, columns=["prompt", "direction", "kind", "mode", "dose", "begins", "text"])


def reply_begins(text: str) -> str:
    """The answer a reply begins with: ``Yes``, ``No`` or ``neither``."""
    found = _FIRST_WORD.match(text)
    return found[1].capitalize() if found else "neither"
