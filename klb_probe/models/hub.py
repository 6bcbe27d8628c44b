"""The model hub's failures, each in one line with a remedy."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from safetensors import SafetensorError

from klb_probe.errors import KlbError

_UNREACHABLE = {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError", "ConnectError", "TimeoutException"}


@contextlib.contextmanager
def hub_errors(repo: str, *, instead: str, hint: str = "") -> Iterator[None]:
    """Turn what hub and loader raise about a repository into a KlbError.

    Args:
        repo: The repository, ``owner/name``.
        instead: What else to do, as the end of a sentence.
        hint: Anything else worth knowing, appended.
    """
    try:
        yield
    except Exception as error:
        kinds = {kind.__name__ for raised in _causes(error) for kind in type(raised).__mro__}
        # The client lets some errors of its transport through, whichever library that is today.
        if not (isinstance(error, (OSError, ValueError, RuntimeError, SafetensorError)) or kinds & _UNREACHABLE):
            raise
        if "GatedRepoError" in kinds:
            raise KlbError(f"{repo} is gated: accept its licence on the hub, then `hf auth login`, or {instead}") from error
        if "RepositoryNotFoundError" in kinds or "RevisionNotFoundError" in kinds:
            raise KlbError(f"no {repo} (or no such revision) on the hub, or it is private{hint}") from error
        if kinds & _UNREACHABLE or "couldn't connect" in str(error):
            offline = "HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE") else "the model hub cannot be reached"
            raise KlbError(f"{repo}: {offline} and it is not in the local cache; {instead}{hint}") from error
        raise KlbError(f"cannot load {repo}: {first_line(error)}{hint}") from error


def first_line(error: BaseException) -> str:
    """What an exception says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
