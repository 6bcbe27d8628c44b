"""Margins of played rounds, from the token ids they were played with: one teacher-forced pass a turn, all layers and lenses.

Where the model allows it, keys and values of the last turn of each part are kept, so that a turn is read from where it
departs from the one before it (and a round's first turn after the policy it shares with the round before). Nothing else is
kept: what is in memory at once is one turn's readouts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from klb_probe.dialogue.prefixes import KeptPrefixes
from klb_probe.lens.margin import Lens
from klb_probe.models.key_values import KeyValues
from klb_probe.models.residual_model import ResidualModel
from klb_probe.signals.spots import KINDS, Spot, Unmapped, spots_of_round, unplaced_claim

_KEPT_TOKENS = 32_768
RANDOM_READOUTS = 8  # of the first lens, read beside it: what any direction of the same residuals gives


@dataclass(frozen=True)
class RoundSignals:
    """What was read in one round.

    Attributes:
        rows: Tidy: turn, position (the kind), lens, layer, n_tokens, margin, own_margin. Lenses named ``random 0`` ... are
            random readouts.
        unmapped: Moments that could not be found.
    """

    rows: list[dict[str, Any]]
    unmapped: list[Unmapped]


def round_signals(
    model: ResidualModel,
    lenses: Sequence[Lens],
    turns: Sequence[Mapping[str, Any]],
    row: Mapping[str, Any],
    closing_tools: Iterable[str],
    kept: KeptPrefixes | None = None,
    positions: Collection[str] = KINDS,
) -> RoundSignals:
    """Read every moment of one round.

    Args:
        model: The model; its tokenizer must be the one the ids come from.
        lenses: What to read with.
        turns: The round's sidecar turns, with whole prompts, in order.
        row: The round's row.
        closing_tools: Names of the tools that close a case.
        kept: What was read before, to go on from; see :func:`prefixes_for`.
        positions: Kinds of moments; a turn without any of them is not read.
    """
    kept = prefixes_for(model) if kept is None else kept
    rows: list[dict[str, Any]] = []
    unmapped: list[Unmapped] = []
    for turn, spots, missing in spots_of_round(turns, row, closing_tools, model.tokenizer):
        unmapped += missing
        if wanted := [spot for spot in spots if spot.kind in positions]:
            rows += _read_turn(model, lenses, turn, wanted, kept)
    if (claim := unplaced_claim(row, turns)) is not None:
        unmapped.append(claim)
    return RoundSignals(rows, [one for one in unmapped if one.kind in positions])


def prefixes_for(model: ResidualModel) -> KeptPrefixes | None:
    """Room for what was read last, or None for a model that cannot go on from it."""
    return KeptPrefixes(max_tokens=_KEPT_TOKENS) if model.keeps_every_position() else None


def _read_turn(
    model: ResidualModel, lenses: Sequence[Lens], turn: Mapping[str, Any], spots: Sequence[Spot], kept: KeptPrefixes | None
) -> Iterator[dict[str, Any]]:
    """One forward pass over the turn's ids up to the last position asked for."""
    wanted = sorted({position for spot in spots for position in spot.positions})
    ids = [*turn["prompt_ids"], *turn["ids"]][: wanted[-1] + 1]
    cache, start = kept.start(ids[: wanted[0] + 1]) if kept is not None else (model.new_cache(), 0)
    contrast = lenses[0].contrast
    positions = torch.tensor([[position - start for position in wanted]])
    capture = model.capture(torch.tensor([ids[start:]]), range(model.n_layers), positions, contrast.token_ids, cache)
    if kept is not None:
        kept.keep(turn["part"], ids, KeyValues.of(cache))
    own = contrast.margin(capture.logits[0].cpu())  # [position]
    place = {position: index for index, position in enumerate(wanted)}
    for name, layers, values in _readings(model, lenses, capture.residuals[:, 0]):
        for spot in spots:
            columns = [place[position] for position in spot.positions]
            for layer, margin in zip(layers, values[:, columns].mean(-1).tolist(), strict=True):
                yield {
                    "turn": spot.turn,
                    "position": spot.kind,
                    "n_tokens": len(columns),
                    "lens": name,
                    "layer": layer,
                    "margin": margin,
                    "own_margin": float(own[columns].mean()),
                }


def _readings(model: ResidualModel, lenses: Sequence[Lens], residuals: Tensor) -> Iterator[tuple[str, list[int], Tensor]]:
    """Name, layers, and ``[layer, position]`` of every lens, and of the first lens's random readouts."""
    for number, lens in enumerate(lenses):
        layers = [layer for layer in range(model.n_layers) if lens.reads(layer)]
        decoded = [lens.decode(residuals[layer], layer) for layer in layers]
        yield lens.name, layers, torch.stack([one.margin for one in decoded]).cpu()
        if number == 0:
            random = torch.stack([one.random for one in decoded]).cpu()  # [layer, position, row]
            for row in range(min(RANDOM_READOUTS, random.shape[-1])):
                yield f"random {row}", layers, random[..., row]
