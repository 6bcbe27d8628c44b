"""Replies held to a JSON schema while they are written, by the llguidance library (the extra ``constrain``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from klb_probe.errors import KlbError
from klb_probe.models.residual_model import ResidualModel

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Models that are forced to go on would fill a page with blanks: at most one space or line break between JSON tokens.
_JSON_OPTIONS: Any = {"whitespace_pattern": "[ \\n]?"}


class Constraint:
    """What one reply may still say."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def allowed(self, logits: Tensor) -> Tensor:
        """``logits [vocab]`` with minus infinity for every id that would break the schema."""
        bias = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
        return logits.masked_fill((bias == 0).to(logits.device), -torch.inf)

    def satisfied_by(self, chosen: int) -> bool:
        """Whether the reply is complete with this next id."""
        if not self._matcher.consume_token(chosen):
            raise KlbError(f"constrained decoding failed: {self._matcher.get_error()}")
        return self._matcher.is_stopped()


class Constraints:
    """Makes constraints for one model's vocabulary.

    Raises:
        KlbError: llguidance is not installed, or cannot read the model's tokenizer.
    """

    def __init__(self, model: ResidualModel) -> None:
        try:
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise KlbError("constrained replies need llguidance: pip install 'klb-probe[constrain]'") from error
        try:
            self._tokenizer = from_tokenizer(model.tokenizer, n_vocab=model.vocab_size, eos_token=sorted(model.stop_ids))
        except ValueError as error:
            raise KlbError(f"llguidance cannot read the tokenizer of {model.name}: {error}") from error

    def of(self, schema: dict[str, Any]) -> Constraint:
        """A constraint for one reply."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS))
        if matcher.is_error():
            raise KlbError(f"llguidance refuses the schema: {matcher.get_error()}")
        return Constraint(matcher)
