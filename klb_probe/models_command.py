"""``klb-probe models``: can this model be read here, and what will it need?"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from klb_probe.options import Device, Dtype, Hooks, Quantise, Revision

MODELS_EXAMPLE = "Example: klb-probe models check smollm2-135m --no-weights --tokens 2048 --batch 16"
models_app = typer.Typer(
    epilog=MODELS_EXAMPLE,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Models: what is found in them, how they are spoken to, what they need.",
)


@models_app.command("check", epilog=MODELS_EXAMPLE)
def check(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Alias, hub id (owner/name), model folder, or .gguf file.")],
    tokens: Annotated[int, typer.Option(help="Length of a prompt, for the memory estimate.", min=1)] = 1024,
    batch: Annotated[int, typer.Option(help="Prompts in one forward pass, for the memory estimate.", min=1)] = 8,
    weights: Annotated[bool, typer.Option("--weights/--no-weights", help="Also load the model and run its self-check.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantise: Quantise = None,
    revision: Revision = None,
    hooks: Hooks = None,
) -> None:
    """The resolved hook map, chat template, thinking and memory of a model; then, with its weights, the self-check.

    All but the last needs the config and the tokenizer alone. Exit code 2 where the model cannot be read, and why.
    """
    import torch

    from klb_probe.model_facts import chat_facts, loaded_facts, map_facts, memory_facts
    from klb_probe.models.load import SPREAD, load_chat, load_config, load_model, planned

    place, wanted = planned(model, device, dtype)
    config = load_config(model, revision)
    facts: dict[str, Any] = {"model": model, "map": map_facts(config, hooks or ())}
    facts["chat"] = chat_facts(load_chat(model, revision))
    planned_type = wanted if isinstance(wanted, torch.dtype) else config.dtype or torch.float32
    where = None if device == SPREAD else place
    facts["memory"] = memory_facts(config, planned_type, where, tokens=tokens, batch=batch, quantise=quantise)
    if not as_json:
        for line in _about(facts):
            typer.echo(line)
    if weights:
        loaded = load_model(model, device=device, dtype=dtype, quantise=quantise, revision=revision, hooks=hooks or ())
        facts["loaded"] = loaded_facts(loaded)
    if as_json:
        typer.echo(json.dumps(facts, indent=2, ensure_ascii=False))
    elif weights:
        for line in _loaded(facts["loaded"]):
            typer.echo(line)


def _about(facts: dict[str, Any]) -> list[str]:
    found, chat, memory = facts["map"], facts["chat"], facts["memory"]
    norm = found["norm"]
    capped = f", soft-cap {found['softcap']:g}" if found["softcap"] else ""
    scaled = f", times {found['scale']:.6g}" if found["scale"] != 1 else ""
    head = f"{'tied' if found['tied'] else 'untied'}{', with bias' if found['head_bias'] else ''}{scaled}{capped}"
    gain = "1 + weight" if norm["gain"] == "one_plus" else "weight"
    spread = memory["device"] == "auto-map"
    place = "all devices together" if spread else memory["device"]
    free = "free memory unknown" if memory["free"] is None else f"{_gb(memory['free'])} free on {place}"
    too_large = ": some weights will be read from disk" if spread else ": it will not fit"
    if memory["comes_quantised"]:
        too_large = f": less in fact, the checkpoint comes in {memory['comes_quantised']}"
    fits = "" if memory["free"] is None or memory["peak"] <= memory["free"] else too_large
    stored = f"{memory['quantised']}, the rest {memory['dtype']}" if memory["quantised"] else memory["dtype"]
    before_text = "".join(chat["before_plain_text"]) or "nothing"
    return [
        f"model      {facts['model']}: {found['class']} ({found['model_type']}), hook map {found['family']}",
        f"blocks     {found['blocks']}: {found['n_layers']} layers of width {found['d_model']}",
        f"norm       {found['final_norm']}: {norm['kind']}, gain {gain}, eps {norm['eps']:g}",
        f"head       {found['unembed']}: {found['vocab_size']} tokens, {head}",
        f"context    {found['context_length'] or 'not said'} tokens",
        f"chat       {chat['style']}",
        f"BOS        {_bos(chat)}; before plain text: {before_text}",
        f"thinking   {chat['thinking']}",
        f"answer     after {' '.join(map(repr, chat['before_answer']))}, starts with {chat['answer_prefix']!r}",
        f"contrast   {chat['contrast']}",
        f"memory     {_gb(memory['weights'])} of weights ({_millions(memory['parameters'])} parameters in {stored})",
        f"           {_gb(memory['key_values'])} of keys and values, {_gb(memory['working'])} in a forward pass of "
        f"{memory['batch']} prompts of {memory['tokens']} tokens",
        f"           {_gb(memory['margin_lens'])} margin lens; a full lens is {_gb(memory['full_lens'])} on disk",
        f"           {_gb(memory['peak'])} at most, {free}{fits}",
    ]


def _loaded(facts: dict[str, Any]) -> list[str]:
    stops = ", ".join(f"{token} {text!r}" for token, text in facts["stop_ids"].items()) or "none"
    prefixes = "keys and values of every position" if facts["keeps_every_position"] else "whole: some layers are recurrent"
    return [
        f"stop ids   {stops}",
        f"prefixes   kept as {prefixes}",
        f"self-check last block and own logits differ by {facts['self_check_error']:.1e} of the largest logit",
    ]


def _bos(chat: dict[str, Any]) -> str:
    if chat["bos"] is None:
        return "none"
    return f"{chat['bos']}, {'first' if chat['bos_in_prompt'] else 'not'} in a prompt"


def _millions(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.2f} million"


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.2f} MB"
