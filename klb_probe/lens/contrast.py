"""Which tokens mean yes and which mean no."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from einops import rearrange, reduce
from torch import Tensor

from klb_probe.errors import KlbError
from klb_probe.models.chat import ChatFormat

DEFAULT_PAIRS = (("Yes", "No"),)


@dataclass(frozen=True)
class TokenContrast:
    """Paired single-token word forms; the margin is the mean over pairs of logit(yes) minus logit(no).

    Attributes:
        pairs: ``((yes text, yes id), (no text, no id))`` of each pair. A form counts only if both sides are one token,
            so that neither side gets more tokens than the other.
        dropped: Pairs left out because a side is several tokens.
    """

    pairs: tuple[tuple[tuple[str, int], tuple[str, int]], ...]
    dropped: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, chat: ChatFormat, words: Sequence[tuple[str, str]] = DEFAULT_PAIRS) -> TokenContrast:
        """The contrast of word pairs as they would stand where the answer starts (spaced or not, as the prompt leads to).

        Raises:
            KlbError: When no pair has a single token on both sides.
        """
        pairs, dropped = [], []
        for yes, no in words:
            ids = chat.next_id(yes), chat.next_id(no)
            if None in ids or ids[0] == ids[1]:
                dropped.append((yes, no))
            else:
                prefix = chat.answer_prefix
                pairs.append(((prefix + yes, ids[0]), (prefix + no, ids[1])))
        if not pairs:
            named = ", ".join(f"{yes}/{no}" for yes, no in dropped)
            raise KlbError(
                f"contrast {named}: a word is not a single token where the answer starts; "
                "name word forms that are, with --contrast YES/NO[,YES/NO]"
            )
        return cls(tuple(dict.fromkeys(pairs)), tuple(dropped))

    @property
    def token_ids(self) -> list[int]:
        """Ids in the order every token axis uses: yes, no of the first pair, yes, no of the next."""
        return [token for yes, no in self.pairs for token in (yes[1], no[1])]

    def margin(self, logits: Tensor) -> Tensor:
        """Margin ``[...]`` of logits ``[..., token]`` in the order of :attr:`token_ids`."""
        sides = rearrange(logits, "... (pair side) -> ... pair side", side=2)
        return reduce(sides[..., 0] - sides[..., 1], "... pair -> ...", "mean")

    def __str__(self) -> str:
        return ", ".join(f"{yes[0]!r} ({yes[1]}) minus {no[0]!r} ({no[1]})" for yes, no in self.pairs)


def parse_pairs(text: str) -> tuple[tuple[str, str], ...]:
    """``"Yes/No,yes/no"`` to word pairs; KlbError for anything else."""
    pairs = []
    for item in text.split(","):
        yes, slash, no = item.strip().partition("/")
        if not (slash and yes and no) or "/" in no:
            raise KlbError(f"--contrast wants YES/NO pairs, separated by commas; got {item.strip()!r}")
        pairs.append((yes, no))
    return tuple(pairs)


def gaussian_rows(rows: int, d_model: int, seed: int) -> Tensor:
    """A norm sketch ``[rows, d_model]``: Gaussian entries of variance 1/rows, so that E|S u|^2 = |u|^2."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, d_model, generator=generator) / rows**0.5
