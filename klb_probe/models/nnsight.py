"""The nnsight backend: residuals are read and changed inside a trace, as the outputs of its envoys."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from nnsight import NNsight
from transformers import PreTrainedModel

from klb_probe.errors import KlbError
from klb_probe.models.block_output import Keep, through
from klb_probe.models.hook_map import HookMap
from klb_probe.models.huggingface import HuggingFaceModel


class NnsightModel(HuggingFaceModel):
    """A :class:`~klb_probe.models.residual_model.ResidualModel` over a model that nnsight wraps.

    A pass in which a residual is read, changed or differentiated runs as a trace; the block's envoy gives its output and
    takes another. A pass in which none is (the head's logits, plain generation) calls the wrapped model. The trace is that of
    an ``NNsight`` of our own over the same modules, so that the ids go in as they are; edits stored on a user's object would
    not act in it and are refused. Changes act in passes of this object, not in calls of the wrapped model itself.

    A direction added by hand, with what :meth:`hook_name` names (``"model.model.layers[2].output"`` for a Llama):

        >>> tree = model.nnsight
        >>> with tree.trace(torch.tensor([ids])):
        ...     layers = tree.get(model.layout.paths["blocks"])
        ...     layers[2].output = layers[2].output + direction
        ...     logits = tree.output.logits.save()

    Attributes:
        nnsight: The ``NNsight`` over the model.
    """

    backend = "nnsight"

    def __init__(
        self,
        model: PreTrainedModel | NNsight,
        tokenizer: Any,
        hook_map: HookMap,
        *,
        name: str,
        identity: dict[str, str | None],
    ) -> None:
        """nnsight puts its own ``forward`` on every module of the model and leaves it there; outside a trace it does nothing.

        An nnsight model without weights yet is dispatched.

        Raises:
            KlbError: For an nnsight model with stored edits.
        """
        if not isinstance(model, PreTrainedModel):
            if model._edits:
                raise KlbError(f"{name}: this nnsight model has stored edits; take them off with clear_edits()")
            if not getattr(model, "dispatched", True):
                model.dispatch()
            model = model._module
        self.nnsight = NNsight(model)
        self._taps: list[tuple[list[int], Keep]] = []
        self._returns_tuples = False
        super().__init__(model, tokenizer, hook_map, name=name, identity=identity)

    def hook_name(self, layer: int) -> str:
        """The residual after block ``layer`` as a trace spells it, ``model`` being the nnsight object."""
        blocks = f"model.{self.layout.paths['blocks']}"
        return f"{blocks}[{self._checked([layer])[0]}].output{'[0]' if self._returns_tuples else ''}"

    @contextmanager
    def _hooks(self, layers: Sequence[int], keep: Keep) -> Iterator[None]:
        tap = (self._checked(layers), keep)
        self._taps.append(tap)
        try:
            yield
        finally:
            self._taps = [other for other in self._taps if other is not tap]

    def _run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        layers = sorted({layer for wanted, _ in self._taps for layer in wanted})
        if not layers:
            return super()._run(function, *args, **kwargs)
        returned: list[Any] = []
        blocks = self.nnsight.get(self.layout.paths["blocks"])
        passes = 1 if function is self.model else None  # generation makes as many as it needs

        def call(*inputs: Any, **options: Any) -> None:
            returned.append(function(*inputs, **options))

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*the loop asked for a step")
            # What follows runs inside the pass: nnsight takes this block apart and lets it wait at each output.
            with self.nnsight.trace(*args, fn=call, **kwargs) as tracer:
                for _ in tracer.iter[:passes]:
                    for layer in layers:
                        output = blocks[layer].output
                        replaced = self._through(layer, output)
                        if replaced is not output:
                            blocks[layer].output = replaced
        return returned[0]

    def _through(self, layer: int, output: Any) -> Any:
        """The output of a block after all that is done there, in the order in which it was asked for."""
        self._returns_tuples = not torch.is_tensor(output)
        for layers, keep in self._taps:
            if layer in layers and (replaced := through(keep, layer, output)) is not None:
                output = replaced
        return output
