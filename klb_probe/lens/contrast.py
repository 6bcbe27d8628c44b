"""Which tokens mean yes and which mean no."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from einops import rearrange, reduce
from torch import Tensor

from klb_probe.errors import KlbError
from klb_probe.models.chat import ChatFormat

DEFAULT_PAIRS = (("Yes", "No"),)


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda side: reduce(side, "... pair -> ...", "mean"),
    "first": lambda side: side[..., 0],
    "max": lambda side: reduce(side, "... pair -> ...", "max"),
    "logsumexp": lambda side: side.logsumexp(-1),
}
SPACES = {"lead": "as the prompt leads to", "both": "with and without a leading space"}


@dataclass(frozen=True)
class TokenContrast:
    """Paired single-token word forms; the margin is the reduced yes side minus the reduced no side.

    Attributes:
        pairs: ``((yes text, yes id), (no text, no id))`` of each pair. A form counts only if both sides are one token,
            so that neither side gets more tokens than the other.
        dropped: Pairs left out because a side is several tokens.
        reduction: How the logits of a side become one: ``mean`` (default), ``first``, ``max`` or ``logsumexp``.

    Examples:
        >>> contrast = klb.TokenContrast.of(model.chat, [("Yes", "No"), ("yes", "no")])
        >>> [(yes, no) for (yes, _), (no, _) in contrast.pairs]
        [('Yes', 'No'), ('yes', 'no')]
    """

    pairs: tuple[tuple[tuple[str, int], tuple[str, int]], ...]
    dropped: tuple[tuple[str, str], ...] = ()
    reduction: str = "mean"

    @classmethod
    def of(
        cls,
        chat: ChatFormat,
        words: Sequence[tuple[str, str]] = DEFAULT_PAIRS,
        *,
        spaces: str = "lead",
        reduction: str = "mean",
    ) -> TokenContrast:
        """The contrast of word pairs as they would stand where the answer starts (spaced or not, as the prompt leads to).

        Raises:
            KlbError: When no pair has a single token on both sides.
        """
        if reduction not in REDUCTIONS:
            raise KlbError(f"unknown reduction {reduction!r}; one of {', '.join(REDUCTIONS)}")
        if spaces not in SPACES:
            raise KlbError(f"unknown --spaces {spaces!r}; one of {', '.join(SPACES)}")
        pairs, dropped = [], []
        prefixes = [chat.answer_prefix] if spaces == "lead" else ["", " "]
        for prefix in prefixes:
            for yes, no in words:
                yes_id, no_id = chat.next_id(yes, prefix), chat.next_id(no, prefix)
                if yes_id is None or no_id is None or yes_id == no_id:
                    dropped.append((prefix + yes, prefix + no))
                else:
                    pairs.append(((prefix + yes, yes_id), (prefix + no, no_id)))
        if not pairs:
            named = ", ".join(f"{yes}/{no}" for yes, no in dropped)
            raise KlbError(
                f"contrast {named}: a word is not a single token where the answer starts; "
                "name word forms that are, with --contrast YES/NO[,YES/NO]"
            )
        return cls(tuple(dict.fromkeys(pairs)), tuple(dropped), reduction)

    @property
    def token_ids(self) -> list[int]:
        """Ids in the order every token axis uses: yes, no of the first pair, yes, no of the next."""
        return [token for yes, no in self.pairs for token in (yes[1], no[1])]

    def margin(self, logits: Tensor) -> Tensor:
        """Margin ``[...]`` of logits ``[..., token]`` in the order of :attr:`token_ids`."""
        yes, no = rearrange(logits, "... (pair side) -> side ... pair", side=2)
        return REDUCTIONS[self.reduction](yes) - REDUCTIONS[self.reduction](no)

    def __str__(self) -> str:
        pairs = ", ".join(f"{yes[0]!r} ({yes[1]}) minus {no[0]!r} ({no[1]})" for yes, no in self.pairs)
        return pairs if len(self.pairs) == 1 else f"{self.reduction} of {pairs}"


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
