"""The one seam between models and everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from klb_probe.models.chat import ChatFormat
from klb_probe.models.readout import TokenReadout


@dataclass(frozen=True)
class Capture:
    """What one forward pass left behind.

    Attributes:
        residuals: ``[layer, batch, position, d_model]`` in the model's dtype; layer l is the OUTPUT of block l (0-based).
        logits: The model's own logits ``[batch, position, token]`` for the asked-for token ids (float32).
    """

    residuals: Tensor
    logits: Tensor


class ResidualModel(Protocol):
    """A causal language model with a readable residual stream. Ids cross this seam, never text.

    Layer l means the output of block l (0-based) everywhere; positions index the ids of a prompt and may be negative.
    """

    name: str
    backend: str
    identity: dict[str, str | None]
    fingerprint: str
    settings: str
    n_layers: int
    d_model: int
    vocab_size: int
    tokenizer: Any
    chat: ChatFormat
    stop_ids: frozenset[int]
    context_length: int | None

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, and of what is captured."""
        ...

    @property
    def device(self) -> torch.device:
        """Where ids go in and what is read arrives."""
        ...

    @property
    def where(self) -> str:
        """Type and place of the weights, in a few words."""
        ...

    def residuals(
        self, ids: Sequence[Sequence[int]], layers: Sequence[int], positions: Sequence[int], padding: str = "right"
    ) -> Tensor:
        """Residuals ``[layer, batch, position, d_model]`` of prompts of any lengths at the same positions of each."""
        ...

    def capture(
        self, ids: Tensor, layers: Sequence[int], positions: Tensor, token_ids: Sequence[int], cache: Any = None
    ) -> Capture:
        """One forward pass on ``ids [batch, sequence]`` (right-padded), read at ``positions [batch, position]``.

        ``cache`` holds the keys and values of a shared prefix and is extended in place; positions count from its end.
        """
        ...

    def new_cache(self) -> Any:
        """An empty key-value cache for :meth:`capture` and :meth:`next_logits`."""
        ...

    def keeps_every_position(self) -> bool:
        """Whether all that is read can be kept as keys and values of every position, to be cut, copied and stacked."""
        ...

    def next_logits(self, ids: Tensor, cache: Any, mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Logits ``[batch, vocab]`` after the last of ``ids [batch, sequence]``, which extend ``cache`` in place.

        Rows whose cached parts differ in length are padded on the left: ``mask [batch, cached + sequence]`` is 1 where there
        is a token, and ``positions [batch, sequence]`` count without the padding.
        """
        ...

    def gradient_graph(
        self, ids: Tensor, layers: Sequence[int], target_layer: int, first_position: int = 0
    ) -> AbstractContextManager[tuple[list[Tensor], Tensor]]:
        """Source residuals (one ``[1, sequence, d_model]`` a layer) and the target residual that depends on them.

        The graph starts at the earliest layer; parameters need no gradient inside the context and get theirs back after.
        With ``first_position`` the residuals start there, and the positions before it are constants.
        """
        ...

    def intervening(self, layer: int, change: Callable[[Tensor], Tensor]) -> AbstractContextManager[None]:
        """While inside, ``change`` makes the output ``[batch, sequence, d_model]`` of block ``layer`` in every forward pass.

        ``change`` sees float32 (float64 for a float64 model); what it returns is cast to the model's dtype. The next blocks,
        and any capture inside, see the changed residual; of nested interventions at one layer the outer one acts first. A
        key-value cache filled inside holds changed states: do not read on with it outside. A long prompt is read in several
        passes, each of which is changed.
        """
        ...

    def token_readout(self, token_ids: Sequence[int]) -> TokenReadout:
        """Final norm and unembedding of some tokens in closed form (float32)."""
        ...

    def final_norm(self, residual: Tensor) -> Tensor:
        """The model's own final norm."""
        ...

    def unembed(self, normed: Tensor) -> Tensor:
        """The model's own head on a normed residual, soft-cap included: ``[..., vocab]``."""
        ...

    def generate(
        self, ids: Sequence[Sequence[int]], max_new_tokens: int, *, temperature: float, seed: int, stop: bool = True
    ) -> list[list[int]]:
        """New ids for each prompt (all prompts of one length); greedy at temperature 0; ``stop=False`` bars end of text."""
        ...


def chunks(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """Consecutive slices of at most ``size`` items."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
