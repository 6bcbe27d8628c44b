"""Hashes that say which model something belongs to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from klb_probe.models.hook_map import HookMap

# Of a config: where it came from, and what the weights and the call say anyway.
_NOT_DECIDING = ("_name_or_path", "transformers_version", "dtype", "architectures", "use_cache", "return_dict")


# Shape and sample of a tensor.
Sample = tuple[tuple[int, ...], Tensor]


def weight_samples(weights: Iterable[tuple[str, Tensor]]) -> dict[str, Sample]:
    """A strided sample of every weight tensor, in bfloat16: the same for float32 and bfloat16 copies."""
    samples = {}
    for name, tensor in weights:
        flat = tensor.detach().reshape(-1)
        samples[name] = (tuple(tensor.shape), flat[:: max(1, flat.numel() // 256)][:256].to("cpu", torch.bfloat16))
    return samples


def weights_fingerprint(samples: Mapping[str, Sample]) -> str:
    """A hash of samples of all weights."""
    digest = hashlib.sha256()
    for name, (shape, sample) in sorted(samples.items()):
        digest.update(f"{name}{shape}".encode())
        digest.update(sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def settings_hash(config: Any, hook_map: HookMap) -> str:
    """A hash of what decides residuals beside the weights: the text model's config and how its blocks are found."""
    deciding = {key: value for key, value in config.to_dict().items() if key not in _NOT_DECIDING}
    found = hook_map.model_dump(mode="json", exclude={"model_types"}, exclude_none=True)
    said = json.dumps([deciding, found], sort_keys=True, default=str)
    return hashlib.sha256(said.encode()).hexdigest()
