"""Where the modules of a model compute and where their weights lie, for models that accelerate spread over devices.

A weight that accelerate offloaded to the host or to disk is on the meta device between passes; its value is in a hook.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook
from torch import Tensor, nn

from klb_probe.errors import KlbError
from klb_probe.models.batch_size import is_out_of_memory
from klb_probe.models.hub import first_line


def load_spread(load: Callable[..., tuple[nn.Module, Any]], **options: Any) -> tuple[nn.Module, Any]:
    """Load a model over all devices with the map that accelerate chooses.

    Weights that go to disk and are not there as the model has them (experts put together, other formats than safetensors)
    are written to a temporary folder, which is removed with the model.

    Args:
        load: A class's ``from_pretrained``, with all else that it needs; returns the model and what was found in loading.
        options: Further options of it.
    """
    folder = tempfile.mkdtemp(prefix="klb-probe-offload-")
    try:
        model, found = load(**options, device_map="auto", offload_folder=folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)
    return model, found


def is_spread(model: nn.Module) -> bool:
    """Whether hooks of accelerate move inputs or weights while the model runs."""
    return any(_hooks(module) for module in model.modules())


def computing_device(module: nn.Module) -> torch.device | None:
    """The device that a module computes on; None for one without weights, which takes what it is given."""
    for hook in _hooks(module):
        if hook.execution_device is not None:
            where = hook.execution_device
            return torch.device("cuda", where) if isinstance(where, int) else torch.device(where)
    return next((parameter.device for parameter in module.parameters()), None)


def weight(module: nn.Module, name: str) -> Tensor | None:
    """A weight of a module, fetched from where it is offloaded to; None where the module has none of that name."""
    tensor = getattr(module, name, None)
    if tensor is not None and tensor.is_meta:
        tensor = next((hook.weights_map[name] for hook in _hooks(module) if hook.offload), tensor)
    return tensor


def all_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What a model's ``state_dict`` holds, those that are offloaded fetched one at a time."""
    for name, tensor in model.state_dict().items():
        path, _, own = name.rpartition(".")
        if tensor.is_meta:
            tensor = weight(model.get_submodule(path), own)
            assert tensor is not None  # the state dict has it
        yield name, tensor


def places(model: nn.Module) -> list[str]:
    """The devices that hold weights; ``offloaded`` where some come to a device only while they are used."""
    devices = {parameter.device for parameter in model.parameters()}
    return ["offloaded" if device.type == "meta" else str(device) for device in sorted(devices, key=str)]


@contextmanager
def mixture_explained(model: nn.Module, name: str) -> Iterator[None]:
    """Turn what torch says of a model whose weights do not go together into one line."""
    try:
        yield
    except RuntimeError as error:
        kinds = sorted({f"{str(one.dtype).removeprefix('torch.')} on {one.device}" for one in model.parameters()})
        mixed = any(word in str(error).lower() for word in ("dtype", "device", "same type", "meta tensor"))
        if len(kinds) == 1 or is_out_of_memory(error) or not mixed:
            raise
        raise KlbError(
            f"{name} does not run with weights in {', '.join(kinds)}: bring them to one type and device, or load it with "
            f"--device auto-map ({first_line(error)})"
        ) from error


def _hooks(module: nn.Module) -> list[AlignDevicesHook]:
    """Those of accelerate that are on a module: one, or several in a row."""
    hook = getattr(module, "_hf_hook", None)
    return [one for one in getattr(hook, "hooks", (hook,)) if isinstance(one, AlignDevicesHook)]
