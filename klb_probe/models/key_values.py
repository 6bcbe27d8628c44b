"""Keys and values of what a model has read, as plain tensors: cut at a position, copied, stacked into a batch, split again.

Only for models that keep every position (:meth:`~klb_probe.models.residual_model.ResidualModel.keeps_every_position`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

# Positions allocated ahead of what a stack holds.
_ROOM = 64


@dataclass(frozen=True)
class KeyValues:
    """One row: for each layer its keys and values ``[1, head, position, head_dim]``. The tensors are never written to."""

    layers: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def of(cls, cache: DynamicCache, row: int = 0, first: int = 0) -> KeyValues:
        """A copy of one row of a cache, from position ``first`` on."""
        rows = [(layer.keys[row : row + 1, :, first:], layer.values[row : row + 1, :, first:]) for layer in cache.layers]
        return cls(tuple((keys.clone(), values.clone()) for keys, values in rows))

    def __len__(self) -> int:
        """Positions kept."""
        return self.layers[0][0].shape[-2]

    def cache(self, length: int, rows: int = 1) -> DynamicCache:
        """A cache of its own that holds the first ``length`` positions, as many times as there are to be rows."""
        cut = [[part[..., :length, :].expand(rows, -1, -1, -1) for part in layer] for layer in self.layers]
        return _filled([(keys, values) for keys, values in cut])


@dataclass
class Stack:
    """Several rows in one cache, padded on the left to the longest of them.

    Attributes:
        cache: Keys and values, extended by whoever reads on.
        padding: Positions of padding before each row.
    """

    cache: DynamicCache
    padding: Tensor

    @classmethod
    def of(cls, rows: Sequence[KeyValues]) -> Stack:
        """Stack copies of rows."""
        longest = max(map(len, rows))
        layers = [
            (_padded([keys for keys, _ in layer], longest), _padded([values for _, values in layer], longest))
            for layer in zip(*(row.layers for row in rows), strict=True)
        ]
        return cls(_filled(layers), torch.tensor([longest - len(row) for row in rows]))

    def mask_and_positions(self) -> tuple[Tensor | None, Tensor | None]:
        """Mask and positions with which one more token a row is read; none needed where nothing is padded."""
        if not self.padding.any():
            return None, None
        length = self.cache.get_seq_length()
        mask = torch.arange(length + 1) >= self.padding[:, None]
        return mask.long(), length - self.padding[:, None]

    def row(self, index: int) -> KeyValues:
        """A copy of a row without its padding."""
        return KeyValues.of(self.cache, index, int(self.padding[index]))

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        indices = torch.tensor(rows)
        self.padding = self.padding[indices]
        self.cache.reorder_cache(indices)


class _RoomyLayer(DynamicLayer):
    """A layer with room to grow into: the library's own copies all it holds for every token."""

    keys: Tensor
    values: Tensor
    _room: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        held = self.get_seq_length()
        length = held + key_states.shape[-2]
        if self._room is None or self._room[0].shape[-2] < length:
            room = [new.new_empty(*new.shape[:2], length + _ROOM, new.shape[-1]) for new in (key_states, value_states)]
            if held:
                room[0][..., :held, :], room[1][..., :held, :] = self.keys, self.values
            self._room = (room[0], room[1])
        for part, new in zip(self._room, (key_states, value_states), strict=True):
            part[..., held:length, :] = new
        self.keys, self.values = (part[..., :length, :] for part in self._room)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._room = None


def _filled(layers: Sequence[tuple[Tensor, Tensor]]) -> DynamicCache:
    cache = DynamicCache()  # without the model's config: layers with a sliding window keep everything too
    cache.layer_class_to_replicate = _RoomyLayer
    for index, (keys, values) in enumerate(layers):
        cache.update(keys, values, index)
    return cache


def _padded(rows: Sequence[Tensor], length: int) -> Tensor:
    """``[row, head, length, head_dim]`` with zeros before the shorter rows."""
    return torch.cat([pad(row, (0, 0, length - row.shape[-2], 0)) for row in rows])
