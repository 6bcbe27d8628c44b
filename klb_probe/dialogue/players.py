"""Opening a player from what a command or a notebook names."""

from __future__ import annotations

from typing import Any

from klb_probe.dialogue.player import Part, Player
from klb_probe.errors import KlbError

_SCRIPTED = {"agent": ("honest", "deceptive"), "customer": ("accepting", "verifying"), "judge": ()}
_SPECS = {
    "agent": "a model (alias, hub id, folder, .gguf), endpoint:MODEL, scripted:honest or scripted:deceptive",
    "customer": "endpoint:MODEL, a model, scripted:accepting or scripted:verifying",
    "judge": "rules, endpoint:MODEL or a model",
}


class Players:
    """Opens players, each model and endpoint once, however many parts it plays.

    Args:
        seed: Of local sampling and of seeds sent to endpoints.
        batch_size: Most sequences a local model decodes at once.
        constrain: Hold a local gate, customer and judge to their JSON schemas.
        model_options: Of ``load_model``: device, dtype, quantise, revision, hooks, backend.
    """

    def __init__(self, *, seed: int = 0, batch_size: int = 8, constrain: bool = False, **model_options: Any) -> None:
        self.seed, self.batch_size, self.constrain, self.model_options = seed, batch_size, constrain, model_options
        self._opened: dict[str, Player] = {}

    def open(self, part: Part, spec: Any) -> Player:
        """A player for a part, from a spec, a loaded model, or a player (handed back as it is)."""
        if not isinstance(spec, str):
            return self._local(spec) if hasattr(spec, "n_layers") else spec
        kind, _, rest = spec.partition(":")
        if (kind == "scripted" and rest not in _SCRIPTED[part]) or (spec == "rules" and part != "judge"):
            raise KlbError(f"{spec} does not play the {part}; give {_SPECS[part]}")
        if spec not in self._opened:
            self._opened[spec] = self._named(spec)
        return self._opened[spec]

    def _named(self, spec: str) -> Player:
        kind, _, rest = spec.partition(":")
        if kind == "scripted":
            from klb_probe.dialogue.scripted import open_scripted

            return open_scripted(spec)
        if spec == "rules":
            from klb_probe.dialogue.rules_judge import open_judge

            return open_judge(spec)
        if kind == "endpoint" and rest:
            from klb_probe.dialogue.endpoint import open_endpoint

            return open_endpoint(spec, seed=self.seed, json_mode=self.constrain)
        from klb_probe.models.load import load_model

        return self._local(load_model(spec, **self.model_options))

    def _local(self, model: Any) -> Player:
        from klb_probe.dialogue.local import LocalPlayer

        return LocalPlayer(model, batch_size=self.batch_size, seed=self.seed, constrain=self.constrain)
