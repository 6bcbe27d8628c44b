"""What a fitted lens belongs to."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class CorpusRecord(BaseModel):
    """The text a lens was fitted on.

    ``n_prompts`` were used, ``n_skipped`` too short, and ``n_available`` there to be used (more than ``n_prompts`` where a
    fit stopped early or fitted a shard; None in files written before it was kept).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str
    sha256: str
    n_prompts: int
    n_skipped: int
    max_tokens: int
    n_available: int | None = None


class LensMetadata(BaseModel):
    """Everything that makes two lenses comparable, or not. Layers are block outputs, 0-based.

    None means unknown: published files say little about themselves.

    Attributes:
        kind: ``margin`` (contrast rows and sketch) or ``full`` (whole Jacobians; no contrast, no sketch).
        norms: Mean Jacobian norm of each source layer, where each prompt was divided by its own; else None.
        shard: ``i/n`` of a fit that took every n-th prompt only.
        split_half: Agreement of the even and the odd prompts' estimates (median cosine over layers), where known.
        until: The agreement at which the fit was to stop early; ``stopped_early`` says whether it did.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: dict[str, str | None]
    fingerprint: str | None
    n_layers: int
    d_model: int
    dtype: str
    site: str = "block_output"
    source_layers: tuple[int, ...]
    target_layer: int
    contrast: tuple[tuple[tuple[str, int], tuple[str, int]], ...]
    k: int
    seed: int
    skip_first: int | None
    drop_last: int = 1
    bos: str | None
    corpus: CorpusRecord | None
    command: str
    versions: dict[str, str]
    kind: str = "margin"
    norms: tuple[float, ...] | None = None
    shard: str | None = None
    split_half: float | None = None
    until: float | None = None
    stopped_early: bool = False

    @property
    def normalised(self) -> bool:
        """Whether each prompt was divided by the norm of its own Jacobian."""
        return self.norms is not None
