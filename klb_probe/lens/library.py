"""Getting a lens for a model: an explicit one, a published, shipped or cached one, or one fitted on the spot."""

from __future__ import annotations

import logging
from pathlib import Path

from klb_probe.errors import KlbError
from klb_probe.lens.checkpoint import Checkpoint
from klb_probe.lens.contrast import TokenContrast
from klb_probe.lens.fit_run import fit_with_progress
from klb_probe.lens.fitting import FitOptions
from klb_probe.lens.jacobian import JacobianLens
from klb_probe.lens.jacobian_files import SUFFIXES as FULL_LENS_SUFFIXES
from klb_probe.lens.margin import MarginLens
from klb_probe.lens.published import HubFile, find_published, parse_lens_spec
from klb_probe.lens.store import cached_lens_path, find_lens, open_lens, save_lens
from klb_probe.models.residual_model import ResidualModel

log = logging.getLogger(__name__)

# A fit that the first prompt shows to take longer than this is not started unasked.
UNASKED_FIT_SECONDS = 600
_SPOT_PROMPTS, _SPOT_TOKENS = 64, 128


def load_lens(
    model: ResidualModel, contrast: TokenContrast | None = None, *, path: Path | str | None = None, fit: bool = False
) -> MarginLens:
    """The margin lens of a model; its ``file`` says where it was found.

    Looks, in order, at ``path``; the full lens that was published for the model (on the hub or in its cache); lenses that
    ship with the project; the user's cache; else fits one (64 prompts the model samples itself) and caches it. A full lens
    becomes the margin lens of the contrast, exactly.

    Args:
        model: The model.
        contrast: Its yes/no tokens (default: capitalised Yes and No).
        path: The lens to use and no other: a margin lens file, a full lens (.pt, or a folder with one), or a file of either
            kind on the hub, ``hub:OWNER/REPO::FILE[@REVISION]``.
        fit: Fit even where that takes more than ten minutes.

    Raises:
        KlbError: When the file belongs to another model or contrast, or a fit would take long and was not asked for.

    Examples:
        >>> lens = klb.load_lens(model)
        >>> len(lens.metadata.source_layers), lens.metadata.target_layer, lens.metadata.k
        (29, 29, 32)
    """
    contrast = contrast or TokenContrast.of(model.chat)
    lens = _open(parse_lens_spec(str(path)), model, contrast) if path else _published(model, contrast)
    if lens is None:
        found = find_lens(model, contrast)
        if found is None:
            found = cached_lens_path(model, contrast)
            checkpoint = Checkpoint.beside(found)
            log.info("no lens for %s and this contrast yet: fitting one on text it samples itself", model.name)
            fitted = fit_with_progress(
                model,
                contrast,
                FitOptions(),
                corpus="sampled",
                n=_SPOT_PROMPTS,
                max_tokens=_SPOT_TOKENS,
                bos="auto",
                command=f"klb-probe fit --model {model.name}",
                limit_seconds=None if fit else UNASKED_FIT_SECONDS,
                checkpoint=checkpoint,
                resume=True,
            )
            assert isinstance(fitted, MarginLens)  # the options are those of a margin lens
            save_lens(fitted, found)
            checkpoint.remove()
        lens = open_lens(found, model, contrast)
    log.info("lens for %s: %s", model.name, lens.file)
    return lens


def _open(source: Path | HubFile, model: ResidualModel, contrast: TokenContrast) -> MarginLens:
    """A lens of either kind, by what its name says it is."""
    name = source.file if isinstance(source, HubFile) else source.name
    is_folder = isinstance(source, Path) and source.is_dir()
    if is_folder or Path(name).suffix in FULL_LENS_SUFFIXES:
        return JacobianLens.open(source).to_margin_lens(model, contrast)
    return open_lens(source.fetch() if isinstance(source, HubFile) else source, model, contrast)


def _published(model: ResidualModel, contrast: TokenContrast) -> MarginLens | None:
    """The lens that was published for a model, if it can be had and is what it should be."""
    source = find_published(model)
    if source is None:
        return None
    try:
        return _open(source, model, contrast)
    except KlbError as error:
        log.warning("published lens for %s passed over: %s", model.name, error)
        return None
