"""Lenses that should read nothing of the entitlement: what a Jacobian lens has to beat before it says anything.

All come from the full lens, because they change its matrices (or the tokens read) while keeping its norms:

* ``permuted``: the rows of every J_l in another order, so that the transported residual has the right size and spectrum in
  the wrong coordinates;
* ``random transport``: every J_l replaced by one with the same singular values and random orthogonal factors;
* ``random pairs``: the lens as it is, reading random pairs of tokens instead of yes and no; its null column is their spread.

At the target layer and above a lens is the identity, and so are the first two controls.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from klb_probe.lens.contrast import TokenContrast
from klb_probe.lens.jacobian import JacobianLens
from klb_probe.lens.margin import Decoded, MarginLens
from klb_probe.models.residual_model import ResidualModel


class RandomPairs:
    """A margin lens over many random token pairs: the first is its margin, all of them its random readouts."""

    name = "random pairs"

    def __init__(self, lens: MarginLens) -> None:
        self.lens, self.contrast = lens, lens.contrast

    def reads(self, layer: int) -> bool:
        """As the lens it reads with."""
        return self.lens.reads(layer)

    def decode(self, residual: Tensor, layer: int) -> Decoded:
        """Margins ``[...]`` of the first pair and ``[..., pair]`` of all, in logits."""
        logits = self.lens.logits(residual, layer)
        margins = logits[..., 0::2] - logits[..., 1::2]
        return Decoded(margins[..., 0], margins)


def control_lenses(
    lens: JacobianLens, model: ResidualModel, contrast: TokenContrast, *, k: int = 32, seed: int = 0
) -> list[MarginLens | RandomPairs]:
    """The three controls of a full lens on a model, each with ``k`` random readouts for its own null.

    Args:
        lens: The full lens.
        model: Its model.
        contrast: The tokens of the margin.
        k: Rows of the norm sketch, random readouts, and random pairs.
        seed: Seed of permutation, orthogonal factors and pairs.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(lens.d_model, generator=generator)
    pairs = random_pairs(model, k, generator)
    permuted = _changed(lens, lambda matrix: matrix[order])
    random = _changed(lens, lambda matrix: random_transport(matrix, generator))
    made: list[MarginLens | RandomPairs] = []
    for name, changed in (("permuted", permuted), ("random transport", random)):
        control = changed.to_margin_lens(model, contrast, k=k, seed=seed)
        control.name = name
        made.append(control)
    return [*made, RandomPairs(lens.to_margin_lens(model, pairs, k=k, seed=seed))]


def random_transport(matrix: Tensor, generator: torch.Generator) -> Tensor:
    """A matrix of the same singular values as ``matrix [d, d]`` whose singular vectors are random (Haar)."""
    left, right = (_orthogonal(len(matrix), generator) for _ in range(2))
    values = torch.linalg.svdvals(matrix.cpu())
    return (left * values) @ right.T


def random_pairs(model: ResidualModel, n: int, generator: torch.Generator) -> TokenContrast:
    """``n`` pairs of distinct ordinary tokens, no token twice."""
    special = set(model.tokenizer.all_special_ids)
    order = torch.randperm(min(len(model.tokenizer), model.vocab_size), generator=generator).tolist()
    ids = [token for token in order if token not in special][: 2 * n]
    named = [(model.tokenizer.decode([token]), token) for token in ids]
    return TokenContrast(tuple(zip(named[0::2], named[1::2], strict=True)))


def _changed(lens: JacobianLens, change: Callable[[Tensor], Tensor]) -> JacobianLens:
    matrices = {layer: change(lens.matrix(layer, "cpu")) for layer in lens.source_layers}
    return JacobianLens(matrices, n_prompts=lens.n_prompts, target_layer=lens.target_layer, facts=lens.facts)


def _orthogonal(size: int, generator: torch.Generator) -> Tensor:
    q, r = torch.linalg.qr(torch.randn(size, size, generator=generator))
    return q * r.diagonal().sign()  # without the signs the distribution would not be uniform
