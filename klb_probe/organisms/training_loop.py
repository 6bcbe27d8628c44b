"""The loop: trl's trainer with a loss over completions only, a clock, and checkpoints. Needs the extra ``train``."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from peft.helpers import disable_input_dtype_casting
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState
from trl import SFTTrainer

from klb_probe.errors import KlbError

log = logging.getLogger(__name__)

CHECKPOINT_SECONDS = 180
EVALUATIONS = 6  # each reads all that is held out, which takes about a minute of the default model on 2 cores


class Clock(TrainerCallback):
    """Counts seconds over all runs of one training, and decides when to checkpoint, to evaluate and to stop.

    Args:
        limit: Seconds after which training stops.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.before, self.start, self.first_step = 0.0, time.monotonic(), 0
        self.saved = self.start
        self.bar: Any = None

    def seconds(self) -> float:
        return self.before + time.monotonic() - self.start

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.before = next((entry["seconds"] for entry in reversed(state.log_history) if "seconds" in entry), 0.0)
        self.start = self.saved = time.monotonic()
        self.first_step = state.global_step
        self.bar = tqdm(total=state.max_steps, initial=state.global_step, desc="training", unit="step", disable=None)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.bar.update()
        done, last = state.global_step - self.first_step, state.global_step >= state.max_steps
        if done == 5 and not last:
            self._look_ahead(state)
        out_of_time = not last and self.seconds() >= self.limit
        control.should_training_stop |= out_of_time
        every = max(1, state.max_steps // EVALUATIONS)
        control.should_evaluate = last or out_of_time or state.global_step % every == 0
        if out_of_time or time.monotonic() - self.saved > CHECKPOINT_SECONDS:
            control.should_save, self.saved = True, time.monotonic()

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **_: Any) -> None:
        if not math.isfinite(logs.get("grad_norm", 0.0)):
            raise KlbError(f"training diverged at step {state.global_step}: the gradient is not finite; lower --lr")
        shown = {name: logs[name] for name in ("loss", "eval_loss", "eval_right") if name in logs}
        self.bar.set_postfix({name.replace("eval_", "held-out "): f"{value:.3f}" for name, value in shown.items()})

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.bar.close()

    def _look_ahead(self, state: TrainerState) -> None:
        pace = (time.monotonic() - self.start) / 5
        needed, left = pace * (state.max_steps - state.global_step), self.limit - self.seconds()
        if needed > left:
            reached = state.global_step + int(left / pace)
            log.warning(
                "%.1f s a step: the limit of %g min comes near step %d of %d, before the learning rate has fallen; fewer steps "
                "would be better",
                pace,
                self.limit / 60,
                reached,
                state.max_steps,
            )


class CompletionTrainer(SFTTrainer):
    """trl's trainer with the loss of this project.

    The loss is the weighted negative log-likelihood of the completions of a batch, divided by its trees and by ``per_tree``,
    the mean weight of a tree: a token counts the same whichever rows it is read with. Logits are computed where there is a
    loss and nowhere else (trl does so on GPUs only). ``right`` is the share of completions whose answer is the most likely one:
    the token that tells it, or every token where no other answer is known.
    """

    # A mean over the trees of one forward pass, which the loop then averages over those of a step.
    loss_is_scaled_for_ga = False

    def __init__(self, *args: Any, per_tree: float, formats: Sequence[str], clock: Clock, **options: Any) -> None:
        super().__init__(*args, callbacks=[clock], **options)
        self.per_tree, self.formats, self.clock = per_tree, formats, clock

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        dtype, visible, owners = model.dtype, inputs["visible"], inputs["owners"]
        # Added to the attention scores, which eager attention and scaled-dot-product attention both understand.
        mask = torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
        columns, places = inputs["at"].unique(return_inverse=True)
        text = {name: inputs[name] for name in ("input_ids", "position_ids")}
        # The adapter is float32; beside a base of fewer bits its products are made in the base's dtype, which is much faster.
        fewer = torch.autocast(visible.device.type, dtype, enabled=dtype != torch.float32)
        with fewer, disable_input_dtype_casting(model):
            output = model(**text, attention_mask=mask, logits_to_keep=columns, use_cache=False)
        logits = output.logits[inputs["tree"], places]
        losses = cross_entropy(logits.float(), inputs["labels"], reduction="none")
        wrong = logits.detach().argmax(-1) != inputs["labels"]
        rows, decisive = len(inputs["format"]), inputs["decisive"]
        told = torch.bincount(owners[decisive], minlength=rows) > 0
        wrong &= decisive | ~told[owners]
        right = (torch.bincount(owners[wrong], minlength=rows) == 0).tolist()
        training = self.model.training
        metrics = self._metrics["train" if training else "eval"]
        metrics["right"] += right
        if not training and len(self.formats) > 1:
            for number, one in zip(inputs["format"].tolist(), right, strict=True):
                metrics[f"right_{self.formats[number]}"].append(one)
        return (losses * inputs["weights"]).sum() / (self.per_tree * len(visible))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        logs["seconds"] = round(self.clock.seconds(), 2)
        super().log(logs, start_time)

    def _send_telemetry(self) -> None:
        """Nothing about a training leaves the machine."""

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """The card of an organism is not trl's."""
