"""Two lenses with one readout: the logit lens, and the Jacobian lens restricted to what a margin needs.

The Jacobian lens (Gurnee, Sofroniew, Lindsey et al. 2026; reference code anthropics/jacobian-lens) decodes the output h
of block l as ``unembed(J_l h)``, ``J_l = E[d h_final / d h_l]``. A yes-minus-no margin needs only

* one row a contrast token, ``r = J_l^T v`` with ``v`` the token's head row folded with the final norm's gain, which gives
  the margin's numerator exactly (and so its sign, for an RMS final norm, one pair and no biases), and
* the norm of ``J_l h``, a positive scale, estimated from ``k`` random rows ``S J_l``: ``|S J_l h| ~ |J_l h|`` with a
  relative error of about ``1 / sqrt(2 k)`` that all readouts of a layer share (no interval printed here holds it).

The sketch rows are also k random readouts of the same transported residual: a null for any statistic of the margin.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from einops import reduce
from torch import Tensor

from klb_probe.errors import KlbError
from klb_probe.lens.contrast import TokenContrast, gaussian_rows
from klb_probe.lens.metadata import LensMetadata
from klb_probe.models.readout import TokenReadout
from klb_probe.models.residual_model import ResidualModel
from klb_probe.summary import in_a_line


@dataclass(frozen=True)
class Decoded:
    """What a lens reads from residuals ``[..., d_model]``.

    Attributes:
        margin: Yes-minus-no logit margin ``[...]``.
        random: The same residuals under the lens's random rows ``[..., k]``, in units of the residual's RMS.
    """

    margin: Tensor
    random: Tensor


class Lens(Protocol):
    """Anything that reads a margin from the residual stream."""

    name: str
    contrast: TokenContrast

    def reads(self, layer: int) -> bool:
        """Whether the lens can read a layer."""
        ...

    def decode(self, residual: Tensor, layer: int) -> Decoded:
        """Read residuals ``[..., d_model]``, outputs of block ``layer``."""
        ...


class LogitLens:
    """The model's own readout applied to every layer as it is: the twin shown beside every other lens.

    Attributes:
        contrast: The tokens of the margin.
        readout: The model's final norm and head rows of those tokens.
        random_rows: ``[k, d_model]`` random readouts for the null.

    Examples:
        >>> ids = model.chat.encode("Answer with yes or no.", "Is water wet?")
        >>> residual = model.residuals([ids], [14], [-1])  # [layer, prompt, position, d_model]
        >>> klb.LogitLens.of(model, lens.contrast).margin(residual[0], 14).shape  # [prompt, position]
        torch.Size([1, 1])
    """

    name = "logit"

    def __init__(self, contrast: TokenContrast, readout: TokenReadout, random_rows: Tensor) -> None:
        self.contrast, self.readout, self.random_rows = contrast, readout, random_rows

    @classmethod
    def of(cls, model: ResidualModel, contrast: TokenContrast, *, k: int = 32, seed: int = 0) -> LogitLens:
        """The logit lens of a model, with ``k`` random readouts for the null."""
        rows = gaussian_rows(k, model.d_model, seed).to(model.device)
        return cls(contrast, model.token_readout(contrast.token_ids).to(model.device), rows)

    def __repr__(self) -> str:
        return in_a_line("LogitLens", {"contrast": self.contrast, "random readouts": len(self.random_rows)})

    def reads(self, layer: int) -> bool:
        """Every layer."""
        return True

    def margin(self, residual: Tensor, layer: int) -> Tensor:
        """Margin ``[...]`` of residuals ``[..., d_model]``, outputs of block ``layer``, in logits (float32)."""
        return self.decode(residual, layer).margin

    def decode(self, residual: Tensor, layer: int) -> Decoded:
        """Margin and random readouts; the same at every layer."""
        residual = residual.float()
        centred = self.readout.centre(residual)
        mean_square = reduce(centred.square(), "... d -> ...", "mean")
        logits = self.readout.from_products(residual @ self.readout.directions.T, mean_square)
        return Decoded(self.contrast.margin(logits), self.readout.scaled(centred @ self.random_rows.T, mean_square))


class MarginLens:
    """The Jacobian lens, restricted to a contrast's rows and a norm sketch.

    Attributes:
        contrast: The tokens of the margin.
        readout: The model's final norm and head rows of those tokens.
        rows: ``[source, token, d_model]``: ``J_l^T v_t`` of each source layer and contrast token.
        sketch: ``[source, k, d_model]``: ``S J_l`` (mean-subtracted on the left for LayerNorm models).
        metadata: What the lens was fitted on and how.
        file: The file it was read from, if any.

    Examples:
        >>> ids = model.chat.encode("Answer with yes or no.", "Is water wet?")
        >>> residual = model.residuals([ids], [14], [-1])
        >>> read = lens.decode(residual[0], 14)
        >>> read.margin.shape, read.random.shape  # in logits; random readouts beside it
        (torch.Size([1, 1]), torch.Size([1, 1, 32]))
    """

    name = "margin"

    def __init__(
        self,
        contrast: TokenContrast,
        readout: TokenReadout,
        rows: Tensor,
        sketch: Tensor,
        metadata: LensMetadata,
        file: Path | None = None,
    ) -> None:
        self.contrast, self.readout, self.file = contrast, readout, file
        self.rows, self.sketch, self.metadata = rows, sketch, metadata
        self._index = {layer: i for i, layer in enumerate(metadata.source_layers)}
        # At and above the target layer there is nothing to transport: J is the identity, S J the sketch itself.
        sketch_itself = gaussian_rows(metadata.k, metadata.d_model, metadata.seed).to(rows.device)
        self._identity = LogitLens(contrast, readout, sketch_itself)

    def __repr__(self) -> str:
        about, corpus = self.metadata, self.metadata.corpus
        fitted = f"{corpus.n_prompts} prompts, {corpus.source}" if corpus else "unknown"
        facts = {
            **{"contrast": self.contrast, "layers": f"{about.n_layers}, target layer {about.target_layer}"},
            **{"fitted on": fitted, "random readouts": about.k, "file": self.file or "none"},
        }
        return in_a_line("MarginLens", facts)

    def margin(self, residual: Tensor, layer: int) -> Tensor:
        """Margin ``[...]`` of residuals ``[..., d_model]``, outputs of block ``layer``, in logits (float32)."""
        return self.decode(residual, layer).margin

    def reads(self, layer: int) -> bool:
        """Layers it has rows for, and those from the target layer on."""
        return layer in self._index or layer >= self.metadata.target_layer

    def logits(self, residual: Tensor, layer: int) -> Tensor:
        """Logits ``[..., token]`` of the contrast's tokens."""
        if layer >= self.metadata.target_layer:
            return self.readout.logits(residual)
        residual, i = residual.float(), self._source(layer)
        return self.readout.from_products(residual @ self.rows[i].T, self._sketched(residual, i)[1])

    def decode(self, residual: Tensor, layer: int) -> Decoded:
        """Margin and random readouts; KlbError for a layer the lens has no rows for."""
        if layer >= self.metadata.target_layer:
            return self._identity.decode(residual, layer)
        residual, i = residual.float(), self._source(layer)
        products, mean_square = self._sketched(residual, i)
        logits = self.readout.from_products(residual @ self.rows[i].T, mean_square)
        return Decoded(self.contrast.margin(logits), self.readout.scaled(products, mean_square))

    def _source(self, layer: int) -> int:
        if layer not in self._index:
            raise KlbError(f"this lens has no layer {layer}; it has {', '.join(map(str, self._index))}")
        return self._index[layer]

    def _sketched(self, residual: Tensor, i: int) -> tuple[Tensor, Tensor]:
        """Products with the sketch rows ``[..., k]``, and the mean square of the transported residual they estimate."""
        products = residual @ self.sketch[i].T
        return products, reduce(products.square(), "... k -> ...", "sum") / self.metadata.d_model
