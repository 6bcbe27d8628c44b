"""Getting a lens for a model: an explicit file, a shipped one, a cached one, or one fitted on the spot."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from tqdm.auto import tqdm

from klb_probe.errors import KlbError
from klb_probe.lens.contrast import TokenContrast
from klb_probe.lens.corpus import file_corpus, sampled_corpus
from klb_probe.lens.fitting import FitOptions, fit_margin_lens
from klb_probe.lens.margin import MarginLens
from klb_probe.lens.store import cached_lens_path, find_lens, open_lens, save_lens
from klb_probe.models.chat import BosPolicy
from klb_probe.models.residual_model import ResidualModel

log = logging.getLogger(__name__)

# A fit that the first prompt shows to take longer than this is not started unasked.
UNASKED_FIT_SECONDS = 600
_SPOT_PROMPTS, _SPOT_TOKENS = 64, 128


def load_lens(
    model: ResidualModel, contrast: TokenContrast | None = None, *, path: Path | None = None, fit: bool = False
) -> MarginLens:
    """The margin lens of a model; its ``file`` says where it was found.

    Looks, in order, at ``path``; lenses that ship with the project; the user's cache; else fits one (64 prompts the
    model samples itself) and caches it.

    Args:
        model: The model.
        contrast: Its yes/no tokens (default: capitalised Yes and No).
        path: A lens file to use and no other.
        fit: Fit even where that takes more than ten minutes.

    Raises:
        KlbError: When the file belongs to another model or contrast, or a fit would take long and was not asked for.
    """
    contrast = contrast or TokenContrast.of(model.chat)
    found = path or find_lens(model, contrast)
    if found is None:
        found = cached_lens_path(model, contrast)
        log.info("no lens for %s and this contrast yet: fitting one on text it samples itself", model.name)
        lens = fit_with_progress(
            model,
            contrast,
            FitOptions(),
            corpus="sampled",
            n=_SPOT_PROMPTS,
            max_tokens=_SPOT_TOKENS,
            bos="auto",
            command=f"klb-probe fit --model {model.name}",
            limit_seconds=None if fit else UNASKED_FIT_SECONDS,
        )
        save_lens(lens, found)
    return open_lens(found, model, contrast)


def fit_with_progress(
    model: ResidualModel,
    contrast: TokenContrast,
    options: FitOptions,
    *,
    corpus: str,
    n: int,
    max_tokens: int,
    bos: BosPolicy,
    command: str,
    limit_seconds: float | None = None,
) -> MarginLens:
    """Make the corpus and fit, with bars on a terminal. ``limit_seconds`` stops a fit whose first prompt shows it longer."""
    if bos not in ("auto", "always", "never"):
        raise KlbError(f"unknown BOS policy {bos!r}; one of auto, always, never")
    options.target_layer(model.n_layers)
    if corpus == "sampled":
        with _Pace("sampling text", n, limit_seconds, model.name) as pace:
            prompts = sampled_corpus(model, n=n, max_tokens=max_tokens, seed=options.seed, bos=bos, progress=pace.done)
    else:
        prompts = file_corpus(model, Path(corpus), n=n, max_tokens=max_tokens, bos=bos)
    with _Pace("fitting lens", len(prompts.prompts), limit_seconds, model.name) as pace:
        return fit_margin_lens(model, prompts, contrast, options, command=command, on_prompt=pace.done)


class _Pace:
    """A bar over prompts that stops the work when its first step shows it would take too long."""

    def __init__(self, what: str, total: int, limit: float | None, name: str) -> None:
        self.bar = tqdm(total=total, desc=what, unit="prompt", disable=None)
        self.total, self.limit, self.name = total, limit, name
        self.start = time.monotonic()

    def __enter__(self) -> _Pace:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def done(self, count: int = 1) -> None:
        """Count prompts done; KlbError after the first step if all of them would take longer than the limit."""
        self.bar.update(count)
        if self.limit is None:
            return
        expected, limit = (time.monotonic() - self.start) * self.total / count, self.limit
        self.limit = None
        if expected > limit:
            raise KlbError(
                f"a lens for {self.name} would take {max(1, expected / 60):.0f} min or more to fit here; start it with "
                "--fit, pass a lens file with --lens, or read the logit lens with --lens logit"
            )
