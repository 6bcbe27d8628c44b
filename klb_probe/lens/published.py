"""Lenses by reference: a path, a file in a hub repository, or the one that was published for a model."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from pydantic import BaseModel, ConfigDict

from klb_probe.errors import KlbError
from klb_probe.models.hub import hub_errors

if TYPE_CHECKING:
    from klb_probe.models.residual_model import ResidualModel

log = logging.getLogger(__name__)

_SCHEME = "hub:"


@dataclass(frozen=True)
class HubFile:
    """One file of a hub repository; as text, ``hub:OWNER/REPO::FILE[@REVISION]``."""

    repo: str
    file: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{_SCHEME}{self.repo}::{self.file}" + (f"@{self.revision}" if self.revision else "")

    def cached(self) -> bool:
        """Whether the file is in the local hub cache."""
        from huggingface_hub import try_to_load_from_cache

        return isinstance(try_to_load_from_cache(self.repo, self.file, revision=self.revision), str)

    def fetch(self) -> Path:
        """The file on this machine, downloaded first if it must be (never under HF_HUB_OFFLINE).

        Raises:
            KlbError: In one line, when it cannot be had.
        """
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

        with self._asking():
            if not self.cached():
                # Asked once, so that an unreachable hub shows at once: the download itself would retry for half a minute.
                size = get_hf_file_metadata(hf_hub_url(self.repo, self.file, revision=self.revision)).size
                log.info("%s: downloading %.1f GB", self, (size or 0) / 1e9)
            return Path(hf_hub_download(self.repo, self.file, revision=self.revision))

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        with hub_errors(self.repo, instead="pass a lens file with --lens"):
            try:
                yield
            except EntryNotFoundError as error:
                if isinstance(error, LocalEntryNotFoundError):  # not reached, which is another matter
                    raise
                raise KlbError(f"{self.repo} has no file {self.file} at revision {self.revision or 'main'}") from error


def parse_lens_spec(text: str) -> Path | HubFile:
    """What ``--lens`` names: ``hub:OWNER/REPO::FILE[@REVISION]``, else a path.

        >>> parse_lens_spec("hub:owner/repo::folder/lens.pt@main")
        HubFile(repo='owner/repo', file='folder/lens.pt', revision='main')

    What follows the last ``@`` is the revision. Raises KlbError for anything else that starts with ``hub:``.
    """
    if not text.startswith(_SCHEME):
        return Path(text).expanduser()
    repo, colons, rest = text.removeprefix(_SCHEME).partition("::")
    file, at, revision = rest.rpartition("@") if "@" in rest else (rest, "", "")
    if not (re.fullmatch(r"[\w.-]+/[\w.-]+", repo) and colons and file) or (at and not revision):
        raise KlbError(f"lens {text!r}: a hub file is written hub:OWNER/REPO::FILE[@REVISION]")
    return HubFile(repo, file, revision or None)


class PublishedLens(BaseModel):
    """One entry of ``published.yaml``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    file: str
    note: str = ""


class PublishedLenses(BaseModel):
    """``published.yaml``: files of one repository at one commit, by the hub id of the model they belong to."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    repo: str
    revision: str
    lenses: dict[str, PublishedLens]


@cache
def published_lenses() -> PublishedLenses:
    """The published lenses this project knows."""
    raw = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))
    return PublishedLenses.model_validate(raw)


def find_published(model: ResidualModel) -> HubFile | None:
    """The published lens of a model, on this machine when this returns; None if there is none or it cannot be had.

    Only a model that came from the hub under its own id has one: a name or a folder proves nothing, and with an adapter merged
    into it, or its weights rounded here, a model is another.
    """
    listing = published_lenses()
    changed = "adapter_sha256" in model.identity or model.identity.get("quantised") in ("4bit", "8bit")
    entry = None if changed else listing.lenses.get(model.identity.get("hub") or "")
    if entry is None:
        return None
    source = HubFile(listing.repo, entry.file, listing.revision)
    if entry.note:
        log.warning("published lens for %s: %s", model.name, entry.note)
    try:
        source.fetch()
    except KlbError as error:
        log.info("published lens for %s passed over: %s", model.name, error)
        return None
    return source
