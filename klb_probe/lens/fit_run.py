"""A fit as a user sees it: text made or read, bars with an estimate of the time left, a checkpoint to go on from."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from klb_probe.errors import KlbError
from klb_probe.lens.checkpoint import Checkpoint, Saved, refuse_other_settings
from klb_probe.lens.contrast import TokenContrast
from klb_probe.lens.corpus import SHUFFLED, Corpus, CorpusRequest, sampled_source
from klb_probe.lens.fitting import Fit, FitOptions, fit_lens, fit_settings
from klb_probe.lens.margin import MarginLens
from klb_probe.models.chat import BosPolicy
from klb_probe.models.residual_model import ResidualModel
from klb_probe.progress import progress_bar

if TYPE_CHECKING:
    from klb_probe.lens.jacobian import JacobianLens

log = logging.getLogger(__name__)


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
    shuffle: bool = False,
    limit_seconds: float | None = None,
    checkpoint: Checkpoint | None = None,
    resume: bool = False,
) -> MarginLens | JacobianLens:
    """Make the corpus and fit, with bars on a terminal.

    Args:
        corpus: What :class:`~klb_probe.lens.corpus.CorpusRequest` reads.
        shuffle: Fit on the same tokens in random order, as a control.
        limit_seconds: Stop a fit whose first prompt shows it longer.
        checkpoint: Where to keep the fit while it is under way.
        resume: Go on from the checkpoint, if there is one.

    Raises:
        KlbError: For text that cannot be read, and for a checkpoint of another fit, by naming what differs.
    """
    if bos not in ("auto", "always", "never"):
        raise KlbError(f"unknown BOS policy {bos!r}; one of auto, always, never")
    request = CorpusRequest(corpus, n, max_tokens, options.skip_first + 2, bos, options.seed, shuffle)
    asked = _asked(request)
    saved = checkpoint.load() if checkpoint and resume else None
    if saved and checkpoint:
        kept = {name: value for name, value in saved.settings.items() if name not in _FOUND}
        refuse_other_settings(checkpoint.path, kept, fit_settings(model, contrast, options) | asked)
    text = _text(model, request, saved, limit_seconds)
    found = {"corpus hash": text.sha256, "too short": text.n_short}
    if saved and checkpoint:
        refuse_other_settings(checkpoint.path, {name: saved.settings.get(name) for name in _FOUND}, found)
        log.info("resuming: %d of the prompts were fitted before", saved.sums.index)
    if len(text.prompts) < n:
        log.warning("%s holds %d prompts of the %d asked for (paragraphs are cut at --max-len)", corpus, len(text.prompts), n)
    if line := text.warning():
        log.warning("%s", line)
    total = len(options.shard.of(text.prompts) if options.shard else text.prompts)
    with _Pace("fitting lens", total, limit_seconds, model.name, saved.sums.index if saved else 0) as pace:
        return fit_lens(
            model,
            text,
            contrast,
            options,
            command=command,
            on_prompt=pace.fitted,
            checkpoint=checkpoint,
            resume=saved.sums if saved else None,
            settings=asked | found,
        )


# Settings that are known only once the text is there.
_FOUND = ("corpus hash", "too short")


def _asked(request: CorpusRequest) -> dict[str, Any]:
    return {
        "corpus": request.what,
        "n": request.n,
        "max len": request.max_tokens,
        "bos": request.bos,
        "shuffle": request.shuffle,
    }


def _text(model: ResidualModel, request: CorpusRequest, saved: Saved | None, limit_seconds: float | None) -> Corpus:
    """The corpus; text that was sampled before is taken from the checkpoint."""
    if request.what != "sampled":
        return request.make(model)
    if saved:
        source = sampled_source(model, request.seed) + SHUFFLED * request.shuffle
        return Corpus(saved.prompts, source, request.bos, request.max_tokens)
    with _Pace("sampling text", request.n, limit_seconds, model.name) as pace:
        return request.make(model, pace.done)


class _Pace:
    """A bar over prompts that stops the work when its first step shows it would take too long."""

    def __init__(self, what: str, total: int, limit: float | None, name: str, initial: int = 0) -> None:
        self.bar = progress_bar(total, what, "prompt", initial=initial)
        self.total, self.limit, self.name = total, limit, name
        self.start = time.monotonic()

    def __enter__(self) -> _Pace:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def fitted(self, fit: Fit) -> None:
        """Count a prompt; show how well the halves of the prompts agree so far."""
        if not self.bar.disable and (agreement := fit.agreement()) is not None:
            self.bar.set_postfix_str(f"split-half {agreement:.3f}", refresh=False)
        self.done()

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
