"""Does a direction matter? Change the residual along it, and see what becomes of the yes-minus-no margin.

Directions are added (activation addition: Turner et al. 2023; Li et al. 2023, inference-time intervention) or mean-ablated
(Arditi et al. 2024 set the component to zero) at the output of one block, at every position of the prompt. Random directions
of the same norm, changed in the same way, say what any change of that size does. The first token is changed like the rest:
its residual is often a hundred times larger than others (attention sinks), so ablating a direction that it holds can break a
model by itself.
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
from klb_probe.models.prefix import prefill
from klb_probe.models.residual_model import ResidualModel

PROBE, RANDOM = "probe", "random"
ADD, ABLATE = "add", "ablate"
MODES = (ADD, ABLATE)

Change = Callable[[Tensor], Tensor]
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
    batch_size: int = 8,
    on_batch: Callable[[int], None] = lambda _: None,
) -> pd.DataFrame:
    """The model's own margin at the last token of every prompt under every intervention.

    Args:
        model: The model.
        contrast: The tokens of the margin.
        ids: Prompts. A prefix they share is read once an intervention, and is changed like the rest.
        layer: The block whose output is changed.
        planned: What to do, from :func:`interventions`.
        batch_size: Most prompts in one forward pass.
        on_batch: Called with the number of prompts just read; without intervention counts too.

    Returns:
        One row a prompt and intervention: prompt (its index), direction, kind, mode, dose, margin and baseline (yes minus
        no with and without, in logits), other and baseline_other (whether the likeliest next token is neither yes nor no).

    Raises:
        KlbError: When a margin is not a finite number.
    """

    def read(name: str) -> tuple[np.ndarray, np.ndarray]:
        margins, other = np.full(len(ids), np.nan), np.zeros(len(ids), bool)
        answers = torch.tensor(contrast.token_ids)
        for indices, capture in prefill(model, ids, [], range(model.vocab_size), batch_size=batch_size):
            logits = capture.logits[:, 0].cpu()
            margins[indices] = contrast.margin(logits[:, answers]).double().numpy()
            other[indices] = ~torch.isin(logits.argmax(-1), answers).numpy()
            on_batch(len(indices))
        if not np.isfinite(margins).all():
            raise KlbError(f"{name}: margins are not finite in {model.dtype}; lower --scales or load it with --dtype float32")
        return margins, other

    baseline, baseline_other = read("without intervention")
    tables = []
    for one in planned:
        with model.intervening(layer, one.change):
            margins, other = read(f"{one.direction}, {one.mode} {one.dose:g}")
        what = {"direction": one.direction, "kind": one.kind, "mode": one.mode, "dose": one.dose}
        values = {"margin": margins, "baseline": baseline, "other": other, "baseline_other": baseline_other}
        tables.append(pd.DataFrame({"prompt": np.arange(len(ids)), **what, **values}))
    return pd.concat(tables, ignore_index=True)


def steered_replies(
    model: ResidualModel,
    ids: Sequence[Sequence[int]],
    layer: int,
    planned: Sequence[Intervention],
    n_tokens: int,
    *,
    on_reply: Callable[[int], None] = lambda _: None,
) -> pd.DataFrame:
    """Greedy replies of ``n_tokens`` without intervention (direction ``none``) and under each, changed in every step.

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
        with model.intervening(layer, one.change):
            found += rows((one.direction, one.kind, one.mode, one.dose))
    return pd.DataFrame(found, columns=["prompt", "direction", "kind", "mode", "dose", "begins", "text"])


def reply_begins(text: str) -> str:
    """The answer a reply begins with: ``Yes``, ``No`` or ``neither``."""
    found = _FIRST_WORD.match(text)
    return found[1].capitalize() if found else "neither"
