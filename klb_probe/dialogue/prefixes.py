"""What was read of each conversation, kept so that whatever starts the same way is not read again."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import DynamicCache

from klb_probe.models.key_values import KeyValues

# Fewest shared tokens that are worth a copy.
MIN_SHARED = 16


class KeptPrefixes:
    """Ids, keys and values of conversations, oldest first, bounded by the number of tokens.

    Args:
        max_tokens: Most tokens kept over all conversations; beyond it the oldest conversation is dropped.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._kept: dict[str, tuple[list[int], KeyValues]] = {}

    @property
    def tokens(self) -> int:
        """Tokens kept now."""
        return sum(len(ids) for ids, _ in self._kept.values())

    def start(self, ids: Sequence[int]) -> tuple[DynamicCache, int]:
        """A cache that holds the longest start of ``ids`` any conversation has, and its length.

        The last id is always left to be read, since its logits are wanted.
        """
        shared = {name: _shared(kept, ids[:-1]) for name, (kept, _) in self._kept.items()}
        best = max(shared, key=shared.__getitem__, default=None)
        if best is None or shared[best] < MIN_SHARED:
            return DynamicCache(), 0
        return self._kept[best][1].cache(shared[best]), shared[best]

    def keep(self, conversation: str, ids: Sequence[int], keys_and_values: KeyValues) -> None:
        """Keep what was read of a conversation, in place of what was kept before."""
        self.forget(conversation)
        self._kept[conversation] = (list(ids), keys_and_values)
        while self.tokens > self.max_tokens:
            self.forget(next(iter(self._kept)))

    def forget(self, conversation: str) -> None:
        """Free what is kept of a conversation, if anything is."""
        self._kept.pop(conversation, None)

    def clear(self) -> None:
        """Free everything."""
        self._kept.clear()


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Ids that both start with."""
    length = min(len(one), len(other))
    return next((i for i in range(length) if one[i] != other[i]), length)
