"""A model served by NDIF: passes run on the server as nnsight traces, and what was asked for comes back."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import nnsight
import torch
from nnsight.modeling.transformers import TransformersModel
from nnsight.schema.config import CONFIG
from torch import Tensor
from transformers import AutoTokenizer

from klb_probe.errors import KlbError
from klb_probe.models.backends import inner_model
from klb_probe.models.fingerprint import Sample
from klb_probe.models.hook_map import HookMap, find_hook_map
from klb_probe.models.hub import first_line, hub_errors
from klb_probe.models.huggingface import HuggingFaceModel
from klb_probe.models.residual_model import Capture

KEY = "NDIF_API_KEY"
_TRANSPORT = {"httpx", "httpcore", "websocket", "websockets"}


class NdifModel(HuggingFaceModel):
    """Residuals, logits and margins of a model whose weights stay on an NDIF server.

    What leaves the server: residuals at the positions read, logits of the tokens asked for there, the head's rows of those
    tokens with the final norm's weights, and, once, the samples of the weights that make the fingerprint. There are no
    key-value caches across requests: prompts that share a prefix are sent whole. What needs the model itself (generation,
    gradients, changes, left padding) is refused.

    What remains a risk: the prompts go to the server, as ids; its answers are unpickled by nnsight, so the server is
    trusted with this machine; it computes the logits of every position and token before they are cut; and it may run other
    versions of the libraries, or quantised weights, which the self-check and the fingerprint show only as far as they go.

    Args:
        language_model: An nnsight model of the hub repository, with or without weights here.
        where: As ``remote`` of an nnsight trace: True for NDIF, ``"local"`` for its rehearsal in this process.
    """

    backend = "nnsight"

    def __init__(
        self,
        language_model: TransformersModel,
        tokenizer: Any,
        hook_map: HookMap,
        *,
        name: str,
        identity: dict[str, str | None],
        where: bool | str = True,
    ) -> None:
        self._language_model, self._where = language_model, where
        self._dtype: torch.dtype | None = None
        super().__init__(inner_model(language_model), tokenizer, hook_map, name=name, identity=identity)

    @property
    def dtype(self) -> torch.dtype:
        """What the server computes in, as its first answer shows."""
        return self._dtype or super().dtype

    @property
    def device(self) -> torch.device:
        """Where answers arrive."""
        return torch.device("cpu")

    @property
    def where(self) -> str:
        """Type of the weights; they are on the server."""
        return f"{str(self.dtype).removeprefix('torch.')} on the server"

    def capture(
        self, ids: Tensor, layers: Sequence[int], positions: Tensor, token_ids: Sequence[int], cache: Any = None
    ) -> Capture:
        if cache is not None:
            start = cache.ids.shape[1]
            ids = cache.ids = torch.cat([cache.ids.expand(len(ids), -1), ids], dim=1)
            positions = torch.where(positions < 0, positions, positions + start)
        if not layers and not token_ids:  # a prefix: read with what follows it
            return Capture(torch.empty(0), torch.empty(*positions.shape, 0))
        return self._forward(ids, layers, positions, token_ids)

    def new_cache(self) -> ReadIds:
        return ReadIds(torch.empty(1, 0, dtype=torch.long))

    def keeps_every_position(self) -> bool:
        return False

    def _not_served(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise KlbError(f"{self.name} is served by NDIF, where only residuals and margins are read; load it here for the rest")

    gradient_graph = intervening = next_logits = generate = final_norm = unembed = _not_served

    def _forward(
        self,
        ids: Tensor,
        layers: Sequence[int],
        positions: Tensor,
        token_ids: Sequence[int],
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> Capture:
        if attention_mask is not None and not attention_mask[:, 0].all():
            self._not_served()
        at = self._checked(layers)
        with _reached(self.name):
            residuals, logits = read(
                self._language_model, self.layout.paths["blocks"], ids, at, positions, list(token_ids), self._where
            )
        if at:
            self._dtype = residuals.dtype
        if not torch.isfinite(residuals).all():
            raise KlbError(f"{self.name}: residuals from the server are not finite in {residuals.dtype}")
        return Capture(residuals[[at.index(layer) for layer in layers]] if at else residuals, logits)

    def _samples(self) -> dict[str, Sample]:
        with _reached(self.name):
            return read_samples(self._language_model, self._where)

    def _readout_weights(self, token_ids: Sequence[int]) -> tuple[Tensor | None, ...]:
        with _reached(self.name):
            return read_rows(self._language_model, self.layout.paths, list(token_ids), self._where)

    def _decoded(self, last: Tensor, token_ids: Sequence[int]) -> list[Tensor]:
        return [self.token_readout(token_ids).logits(last)]


@dataclass
class ReadIds:
    """In place of keys and values: the ids ``[row, position]`` that come before what is read next."""

    ids: Tensor

    def reorder_cache(self, rows: Tensor) -> None:
        """Go on with these rows."""
        self.ids = self.ids[rows]


def open_served(hub: str, *, name: str, revision: str | None = None, hooks: Iterable[Path] = ()) -> NdifModel:
    """A model of the hub as NDIF serves it; only its config and tokenizer are fetched here.

    The key comes from the environment (``NDIF_API_KEY``), the server from ``NDIF_HOST`` where that is set.

    Raises:
        KlbError: Without a key, and when hub or server cannot be reached.
    """
    if not (key := os.environ.get(KEY)):
        raise KlbError(f"--remote needs a key of NDIF in the environment: set {KEY} (keys: https://login.ndif.us)")
    CONFIG.API.APIKEY = key
    CONFIG.APP.REMOTE_LOGGING = False  # one line a request otherwise
    with hub_errors(hub, instead="check the name"):
        language_model = TransformersModel(hub, revision=revision, task="text-generation")
        tokenizer = AutoTokenizer.from_pretrained(hub, revision=revision, trust_remote_code=False)
    hook_map = find_hook_map(inner_model(language_model), hooks)
    identity = {"name": name, "hub": hub, "revision": revision, "served_by": CONFIG.API.HOST}
    return NdifModel(language_model, tokenizer, hook_map, name=name, identity=identity)


# The boundary: what the three functions below save is all that a server sends back. Their blocks run there, as source.


def read(
    model: TransformersModel,
    blocks: str,
    ids: Tensor,
    layers: Sequence[int],
    positions: Tensor,
    token_ids: Sequence[int],
    where: bool | str,
) -> tuple[Tensor, Tensor]:
    """One pass: residuals ``[layer, batch, position, d_model]`` (layers ascending), logits ``[batch, position, token]``."""
    rows = torch.arange(len(ids))[:, None]
    with model.trace(ids, remote=where):
        kept = []
        for layer in layers:
            output = model.get(blocks)[layer].output
            hidden = output if isinstance(output, torch.Tensor) else output[0]
            kept.append(hidden[rows, positions].detach().cpu())  # blocks may be on several devices
        residuals = nnsight.save(torch.stack(kept) if kept else torch.empty(0))
        logits = nnsight.save(model.output.logits[rows, positions][..., token_ids].detach().float().cpu())
    return residuals, logits


def read_rows(
    model: TransformersModel, paths: Mapping[str, str], token_ids: Sequence[int], where: bool | str
) -> tuple[Tensor | None, ...]:
    """Head rows and biases of some tokens, weight and bias of the final norm (float32); None for what it has not."""
    ids, head_path, norm_path = torch.zeros(1, 1, dtype=torch.long), paths["unembed"], paths["final_norm"]
    with model.trace(ids, remote=where):
        head, norm = model.get(head_path), model.get(norm_path)
        found = [head.weight[token_ids]]
        found.append(None if getattr(head, "bias", None) is None else head.bias[token_ids])
        found.append(getattr(norm, "weight", None))
        found.append(getattr(norm, "bias", None))
        weights = nnsight.save([None if one is None else one.detach().float().cpu() for one in found])
    return tuple(weights)


def read_samples(model: TransformersModel, where: bool | str) -> dict[str, Sample]:
    """Samples of all weights, as :func:`~klb_probe.models.fingerprint.weight_samples` takes them."""
    ids = torch.zeros(1, 1, dtype=torch.long)
    with model.trace(ids, remote=where):
        samples = nnsight.save({})
        for name, tensor in model.state_dict().items():
            flat = tensor.detach().reshape(-1)
            part = flat[:: max(1, flat.numel() // 256)][:256].to("cpu", torch.bfloat16)
            samples[name] = (tuple(tensor.shape), part)
    return samples


@contextmanager
def _reached(name: str) -> Iterator[None]:
    """Turn what transport and server raise into one line, without the key."""
    try:
        yield
    except Exception as error:
        kinds = {kind.__name__ for kind in type(error).__mro__} | {
            kind.__module__.partition(".")[0] for kind in type(error).__mro__
        }
        if not (isinstance(error, OSError) or kinds & {"RemoteError", *_TRANSPORT}):
            raise
        said = first_line(error).replace(os.environ.get(KEY) or "\0", "...")
        raise KlbError(f"{name} could not be read at {CONFIG.API.HOST}: {said}") from None
