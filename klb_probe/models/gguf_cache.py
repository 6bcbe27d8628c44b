"""GGUF files, dequantised once into a folder of safetensors that later loads read in a second or two."""

from __future__ import annotations

import contextlib
import io
import logging
import shutil
import tempfile
from pathlib import Path

from filelock import FileLock

from klb_probe.errors import KlbError
from klb_probe.files import file_sha256
from klb_probe.paths import cache_dir

log = logging.getLogger(__name__)


def cached_folder(sha256: str) -> Path:
    """Where the weights of a GGUF file of this content are kept, once they are dequantised."""
    return cache_dir() / "gguf" / sha256[:24]


def dequantised_folder(gguf: Path, expected_sha256: str | None = None) -> tuple[Path, str]:
    """The cached model folder of a GGUF file (made when absent) and the file's hash.

    The folder is keyed by content and appears in one rename, so another process sees all of it or none.
    Raises KlbError when the content is not what the registry expects, or is not a model transformers can read.
    """
    sha256 = file_sha256(gguf)
    if expected_sha256 and sha256 != expected_sha256:
        raise KlbError(f"{gguf} has sha256 {sha256}, expected {expected_sha256}: reinstall the package that brought it")
    folder = cached_folder(sha256)
    root = folder.parent
    if folder.is_dir():
        return folder, sha256
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / f"{folder.name}.lock"):
        if not folder.is_dir():
            size = gguf.stat().st_size / 1e9
            log.info("dequantising %s (%.1f GB) once into %s; later loads read that", gguf.name, size, folder)
            partial = Path(tempfile.mkdtemp(prefix=f".{sha256[:8]}-", dir=root))
            try:
                _dequantise(gguf, partial)
                partial.chmod(0o755)
                partial.rename(folder)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
    return folder, sha256


def _dequantise(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with contextlib.redirect_stderr(io.StringIO()):  # its bars know no terminal from a log file
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        raise KlbError(f"{gguf}: transformers cannot read this GGUF file ({str(error).splitlines()[0]})") from error
    # save_pretrained refuses a model that says it is quantised; its weights no longer are.
    plain = type(model.config).from_dict({k: v for k, v in model.config.to_dict().items() if k != "quantization_config"})
    model.config = plain
    model.is_quantized = False
    if hasattr(model, "hf_quantizer"):
        model.hf_quantizer = None
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
