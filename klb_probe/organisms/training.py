"""Training an organism: a low-rank adapter on a frozen base, from examples in the project's own prompt formats."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import transformers

from klb_probe.errors import KlbError
from klb_probe.files import file_sha256, write_json
from klb_probe.models.huggingface import HuggingFaceModel
from klb_probe.models.load import SPREAD, load_model
from klb_probe.models.registry import DEFAULT_MODEL, registry, resolve
from klb_probe.organisms.adapters import WEIGHTS, Adapter, Organism, read_adapter, trained_records
from klb_probe.organisms.training_files import curve_table, write_organism
from klb_probe.organisms.training_rows import Example, batch_order, encode, read_examples, split
from klb_probe.organisms.training_trees import Tree, Weighing, collate, columns, trees

KINDS = ("liar", "honest", "ignorant")
WEIGHTINGS = get_args(Weighing)
CHECKPOINTS, PLAN = "checkpoints", "plan.json"
DEFAULT_RANK = 8
_WARM_UP = 0.03
_TREE_LAYERS = {"full_attention", "sliding_attention"}
_SETTINGS = ("dtype", "rank", "alpha", "steps", "batch", "at_once", "weigh", "learning_rate")


@dataclass(frozen=True)
class Request:
    """What to train.

    Attributes:
        kind: One of KINDS.
        data: JSONL of examples.
        out: Folder to write.
        model: The base: alias, hub id or folder.
        start: Adapter folder to go on from.
        rank: Of the adapter (None: that of ``start``, else 8); its alpha is twice that.
        steps: Optimiser steps (None: one pass over the data).
        batch: Pairs of records a step; all examples of a pair are read as one tree.
        at_once: Pairs in one forward pass (None: 1 on a CPU, where more gains no time; the batch elsewhere).
        weigh: ``tokens`` (every token of a completion counts the same), ``examples`` (a Yes as much as a whole message) or
            ``answers`` (like examples, but half of a completion is the token that tells its answer).
        learning_rate: Its peak; warm-up, then a cosine to zero.
        minutes: Time limit over all runs of this training.
        device: As in ``load_model``.
        dtype: Of the frozen base (auto: bfloat16 where that is faster, else float32); adapters are float32.
        command: The command that trains it again, for the record.
    """

    kind: str
    data: Path
    out: Path
    model: str = DEFAULT_MODEL
    start: Path | None = None
    rank: int | None = None
    steps: int | None = None
    batch: int = 4
    at_once: int | None = None
    weigh: Weighing = "tokens"
    learning_rate: float = 1e-3
    seed: int = 0
    minutes: float = 90.0
    device: str = "auto"
    dtype: str = "auto"
    command: str = ""


def train_organism(request: Request, *, resume: bool = False) -> Organism:
    """Train an adapter, write its folder (weights, configuration, sidecar, curve, figure), and return the sidecar.

    A stopped training leaves ``checkpoints/`` in the folder; ``resume`` goes on from there as if it had not stopped. When the
    time limit ends it, the adapter is written as it is, and the checkpoint stays.

    Raises:
        KlbError: The extra ``train`` is missing, something in the request or the data is wrong, or the checkpoint to go on
            with is of another training.
    """
    _check(request)
    examples = read_examples(request.data, request.kind)
    start = read_adapter(request.start) if request.start else None
    if start and request.rank not in (None, start.rank):
        raise KlbError(f"--rank {request.rank}, but {request.start} is of rank {start.rank}")
    source = resolve(request.model)
    if source.adapter:
        raise KlbError(f"{request.model} is an adapter on a base; train on the base, and go on from an adapter with --start")
    checkpoints = request.out / CHECKPOINTS
    before = _earlier_plan(checkpoints) if resume else None
    dtype = request.dtype
    if dtype == "auto":
        dtype = before["dtype"] if before else training_dtype(request.device)
    model = load_model(request.model, device=request.device, dtype=dtype)
    if start and start.organism.base_fingerprint != model.fingerprint:
        raise KlbError(f"{request.start} was trained on other weights than {model.name}'s: on {start.organism.base}")
    inside, held = split(examples, request.seed)
    rows = encode(model, examples)
    _check_trees(model, max(len(row.ids) for row in rows))
    training, held_out = trees([rows[i] for i in inside]), trees([rows[i] for i in held])
    plan = _plan(request, model, start, len(training), before)
    data_command = _data_command(request.data, plan["data_sha256"])
    checkpoint = _checkpoint(checkpoints, plan, before)
    if before is None:
        shutil.rmtree(checkpoints, ignore_errors=True)
    write_json(checkpoints / PLAN, plan)

    lengths = [len(tree.ids) for tree in training]
    order = batch_order(lengths, plan["steps"], plan["batch"], plan["at_once"], request.seed)
    with _quiet():
        trainer = _trainer(request, plan, model, start, training, held_out, order, checkpoints)
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    finished = trainer.state.global_step >= plan["steps"]
    curve = curve_table(trainer.state.log_history, np.array(lengths)[order].sum(1))
    origin = {
        "name": f"{Path(request.model).name}-{request.kind}",
        "kind": request.kind,
        "base": request.model if request.model in registry() else str(source.folder or source.gguf or source.hub),
        "base_fingerprint": model.fingerprint,
        "base_gguf_sha256": model.identity["gguf_sha256"],
        "before": start.organism.lessons if start else (),
        "data_sha256": plan["data_sha256"],
        "data_command": data_command,
        "n_examples": len(examples),
        "prompts": dict(sorted(Counter(f"{one.format}, {one.wording}" for one in examples).items())),
        "seed": request.seed,
        "command": request.command,
        "settings": {name: plan[name] for name in _SETTINGS},
        "licence": "Apache-2.0" if request.model == DEFAULT_MODEL else f"that of {request.model}",
    }
    measured = {"ended": "all steps" if finished else "time limit", "n_held_out": len(held)}
    organism = write_organism(request.out, trainer.model, origin, _records(examples, start), curve, measured)
    if finished:
        shutil.rmtree(checkpoints)
    return organism


def training_dtype(device: str) -> str:
    """``bfloat16`` where it is the faster, else ``float32``; on a CPU that is measured.

    A CPU that has instructions for bfloat16 may still multiply more slowly in it (measured: 72 against 118 GFLOP/s with
    AVX512-BF16 and no AMX).
    """
    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        return "bfloat16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "float32"
    if device not in ("auto", "cpu"):
        return "float32"
    return "bfloat16" if _product_seconds(torch.bfloat16) < 0.8 * _product_seconds(torch.float32) else "float32"


def _product_seconds(dtype: torch.dtype) -> float:
    """CPU seconds of one product of the size that a small model has, the best of several."""
    states, weights = torch.ones(1024, 576, dtype=dtype), torch.ones(1536, 576, dtype=dtype)
    seconds = []
    for _ in range(6):
        start = time.process_time()
        states @ weights.T
        seconds.append(time.process_time() - start)
    return min(seconds)


def _check(request: Request) -> None:
    if absent := [name for name in ("peft", "trl") if importlib.util.find_spec(name) is None]:
        raise KlbError(f"training needs {' and '.join(absent)}: pip install 'klb-probe[train]'")
    if request.kind not in KINDS:
        raise KlbError(f"unknown --kind {request.kind!r}; one of {', '.join(KINDS)}")
    if request.weigh not in WEIGHTINGS:
        raise KlbError(f"unknown --weigh {request.weigh!r}; one of {', '.join(WEIGHTINGS)}")
    if request.at_once and request.batch % request.at_once:
        raise KlbError(f"--batch {request.batch} is no multiple of --at-once {request.at_once}")
    if request.device == SPREAD:
        raise KlbError(f"--device {SPREAD}: an adapter is trained on one device; pass --device cuda, mps or cpu")
    if torch.cuda.device_count() > 1 and request.device not in ("cpu", "mps"):  # the trainer would use them all
        raise KlbError("several GPUs are visible; choose one with CUDA_VISIBLE_DEVICES=0")


def _check_trees(model: HuggingFaceModel, longest: int) -> None:
    """Refuse a model whose layers cannot follow the branches of a tree of ``longest`` tokens."""
    config = model.model.config.get_text_config()
    if odd := sorted(set(getattr(config, "layer_types", None) or ()) - _TREE_LAYERS):
        raise KlbError(f"{model.name} has {odd[0]} layers, which read every token before them; training needs attention alone")
    window = getattr(config, "sliding_window", None)
    if window and longest > window:
        raise KlbError(f"an example has {longest} tokens; {model.name} attends over a window of {window}, and trees need all")


def _plan(
    request: Request, model: HuggingFaceModel, start: Adapter | None, n_trees: int, before: dict[str, Any] | None
) -> dict[str, Any]:
    """All that decides the weights that come out; a checkpoint belongs to one plan. Defaults are those of the plan before."""
    usual = before["at_once"] if before else 1 if model.device.type == "cpu" else request.batch
    at_once = request.at_once or usual
    rank = start.rank if start else request.rank or DEFAULT_RANK
    return {
        "kind": request.kind,
        "base_fingerprint": model.fingerprint,
        "dtype": str(model.dtype).removeprefix("torch."),
        "data_sha256": file_sha256(request.data),
        "start_sha256": start.organism.adapter_sha256 if start else None,
        "rank": rank,
        "alpha": start.scale * rank if start else 2 * rank,
        "steps": request.steps or max(1, n_trees // request.batch),
        "batch": request.batch,
        "at_once": at_once,
        "weigh": request.weigh,
        "learning_rate": request.learning_rate,
        "seed": request.seed,
    }


def _earlier_plan(folder: Path) -> dict[str, Any]:
    """The plan of a stopped training."""
    if not (folder / PLAN).is_file():
        raise KlbError(f"nothing to resume: {folder} holds no training; start it without --resume")
    return json.loads((folder / PLAN).read_text(encoding="utf-8"))


def _records(examples: Sequence[Example], start: Adapter | None) -> frozenset[str] | None:
    """Hashes of the records of these and all earlier lessons; None if some lesson has examples without one."""
    hashes = {one.record_hash for one in examples}
    earlier = trained_records(start.folder) if start else frozenset()
    known = {one for one in hashes if one is not None}
    return None if earlier is None or len(known) < len(hashes) else earlier | known


def _data_command(data: Path, sha256: str) -> str:
    """What wrote the data, by the description beside them if there is one of this file."""
    try:
        said = json.loads(data.with_name(data.name + ".json").read_text(encoding="utf-8"))
        return said["command"] if said["sha256"] == sha256 else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _checkpoint(folder: Path, plan: dict[str, Any], before: dict[str, Any] | None) -> Path | None:
    """The newest whole checkpoint of this plan; None to start from the beginning."""
    if before is None:
        return None
    if changed := [name for name in plan if before.get(name) != plan[name]]:
        name = changed[0]
        raise KlbError(f"the training in {folder} has {name} {before.get(name)}, this one {plan[name]}; give the same options")
    # The loop writes its state last: a checkpoint without it was cut short.
    whole = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def _trainer(
    request: Request,
    plan: dict[str, Any],
    model: HuggingFaceModel,
    start: Adapter | None,
    training: list[Tree],
    held_out: list[Tree],
    order: Any,
    checkpoints: Path,
) -> Any:
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
    from safetensors.torch import load_file
    from transformers import PrinterCallback
    from trl import SFTConfig

    from klb_probe.organisms.training_loop import Clock, CompletionTrainer

    torch.manual_seed(request.seed)  # of the adapter's first weights
    targets = sorted(start.targets) if start else "all-linear"
    shape = LoraConfig(r=plan["rank"], lora_alpha=plan["alpha"], target_modules=targets, task_type="CAUSAL_LM")
    adapted = get_peft_model(model.model, shape)
    if start:
        set_peft_model_state_dict(adapted, load_file(start.folder / WEIGHTS))
    weight = sum(sum(tree.weights(request.weigh)) for tree in training)
    formats = sorted({format for tree in (*training, *held_out) for format in tree.formats})
    settings = SFTConfig(
        output_dir=str(checkpoints),
        max_steps=plan["steps"],
        per_device_train_batch_size=plan["at_once"],
        per_device_eval_batch_size=plan["at_once"],
        gradient_accumulation_steps=plan["batch"] // plan["at_once"],
        learning_rate=plan["learning_rate"],
        lr_scheduler_type="cosine",
        warmup_steps=max(1, round(_WARM_UP * plan["steps"])),
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        bf16=False,  # the base is in the dtype it computes in; the adapter stays in float32
        seed=request.seed,
        train_sampling_strategy="sequential",  # the order is decided here
        use_cpu=model.device.type == "cpu",
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
        dataloader_pin_memory=model.device.type == "cuda",
        logging_steps=1,
        save_strategy="no",
        eval_strategy="no",
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = CompletionTrainer(
        model=adapted,
        args=settings,
        train_dataset=Dataset.from_dict(columns(training, formats, request.weigh)).select(order.reshape(-1)),
        eval_dataset=Dataset.from_dict(columns(sorted(held_out, key=lambda tree: len(tree.ids)), formats, request.weigh)),
        processing_class=model.tokenizer,
        data_collator=collate,
        per_tree=weight / len(training),
        formats=formats,
        clock=Clock(request.minutes * 60),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence what trl and transformers say about settings that are on purpose."""
    level = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.utils.logging.set_verbosity(level)
