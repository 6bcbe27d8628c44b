"""What a fitted lens belongs to."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class CorpusRecord(BaseModel):
    """The text a lens was fitted on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str
    sha256: str
    n_prompts: int
    n_skipped: int
    max_tokens: int


class LensMetadata(BaseModel):
    """Everything that makes two lenses comparable, or not. Layers are block outputs, 0-based.

    None means unknown: published files say little about themselves.
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
