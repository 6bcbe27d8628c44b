"""``klb-probe models check``: what is found in a model, how it is spoken to, what it needs; and thoughts kept empty."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch
import transformers as hf
from command import klb
from test_architectures import WRAPPERS, raw
from test_chat import CHATML, REASONING, byte_level
from tiny import default_tokenizer, save_tiny_llama, tiny_hf_model

from klb_probe.errors import KlbError
from klb_probe.models import memory
from klb_probe.models.chat import probe_chat_format
from klb_probe.models.load import load_model

# --- The command. ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


def save(model, folder, tokenizer=None):
    model.save_pretrained(folder)
    (tokenizer or default_tokenizer()).save_pretrained(folder)
    return folder


def checked(capsys, *arguments):
    """What ``--json`` prints."""
    assert klb("models", "check", *arguments, "--json", "--device", "cpu") == 0
    return json.loads(capsys.readouterr().out)


def test_the_map_the_template_and_the_self_check_are_printed(folder, capsys):
    assert klb("models", "check", folder, "--device", "cpu", "--tokens", 64, "--batch", 2) == 0
    said = capsys.readouterr().out
    labels = [line.split()[0] for line in said.splitlines() if not line.startswith(" ")]
    expected = "model blocks norm head context chat BOS thinking answer contrast memory stop prefixes self-check"
    assert labels == expected.split()
    assert all(
        part in said
        for part in (
            "LlamaForCausalLM (llama), hook map llama",
            "model.layers: 4 layers of width 16",
            "rms, gain weight, eps 1e-06",
            "49152 tokens, untied",
            "2048 tokens",
            "2 prompts of 64 tokens",
            "2 '<|im_end|>'",
        )
    )


def test_facts_are_those_of_the_loaded_model(folder, capsys):
    facts, model = checked(capsys, folder), load_model(str(folder), device="cpu")
    assert facts["map"]["n_layers"] == model.n_layers
    assert facts["map"]["blocks"] == model.layout.paths["blocks"]
    assert facts["map"]["context_length"] == model.context_length
    assert facts["loaded"]["self_check_error"] == pytest.approx(model.self_check_error)
    assert {int(token) for token in facts["loaded"]["stop_ids"]} == model.stop_ids
    assert facts["chat"]["style"] == model.chat.style
    shown = [model.tokenizer.decode([token]) for token in model.chat.encode("s", "u")[-6:]]
    assert facts["chat"]["before_answer"] == shown
    weights = sum(tensor.nbytes for tensor in safetensors.torch.load_file(folder / "model.safetensors").values())
    assert facts["memory"]["weights"] == weights


def test_without_weights_none_are_needed(folder, tmp_path, capsys):
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    alone = checked(capsys, tmp_path, "--no-weights", "--dtype", "bfloat16")
    assert "loaded" not in alone
    whole = checked(capsys, folder, "--no-weights")
    assert alone["map"] == whole["map"]
    assert alone["memory"]["dtype"] == "bfloat16"
    assert 2 * alone["memory"]["weights"] == whole["memory"]["weights"]
    assert klb("models", "check", tmp_path) == 2


def test_quantised_weights_and_all_devices_together_are_counted(folder, capsys, monkeypatch):
    free = {"cuda": 300_000, "cpu": 100_000}
    monkeypatch.setattr(memory, "free_memory", lambda place: free[place.type])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    whole = checked(capsys, folder, "--no-weights")["memory"]
    small = checked(capsys, folder, "--no-weights", "--quantise", "8bit")["memory"]
    assert (whole["quantised"], small["quantised"]) == (None, "8bit")
    linear, rows = 4 * (2 * 16 * 16 + 2 * 8 * 16 + 3 * 16 * 24), 4 * (2 * 16 + 2 * 8 + 2 * 24 + 16)
    assert whole["weights"] - small["weights"] == 3 * linear - 4 * rows
    assert klb("models", "check", folder, "--no-weights", "--quantise", "4bit", "--device", "auto-map") == 0
    said = capsys.readouterr().out
    assert "parameters in 4bit, the rest float32" in said
    assert "0.70 MB free on all devices together: some weights will be read from disk" in said
    assert klb("models", "check", folder, "--no-weights", "--quantise", "2bit") == 2
    assert capsys.readouterr().err == "error: unknown --quantise '2bit'; one of 4bit, 8bit\n"


def test_what_a_family_does_with_its_logits_is_printed(tmp_path, capsys):
    save(tiny_hf_model("gemma2"), tmp_path / "gemma2")
    assert klb("models", "check", tmp_path / "gemma2", "--no-weights") == 0
    assert "tied, soft-cap 3" in (said := capsys.readouterr().out)
    assert "gain 1 + weight" in said
    save(raw("granite"), tmp_path / "granite", byte_level())
    facts = checked(capsys, tmp_path / "granite", "--no-weights")
    assert facts["map"]["scale"] == pytest.approx(1 / 3)
    assert facts["chat"]["style"] == "plain text"


def test_a_wrapper_is_loaded_by_name_and_its_text_model_read(tmp_path, capsys):
    save(raw("llava"), tmp_path, byte_level())
    assert isinstance(WRAPPERS["llava"](), hf.LlavaConfig)
    facts = checked(capsys, tmp_path)
    assert facts["map"]["class"] == "LlavaForConditionalGeneration"
    assert facts["map"]["blocks"] == "model.language_model.layers"
    assert facts["loaded"]["self_check_error"] < 1e-5


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: hf.T5Config(architectures=["T5ForConditionalGeneration"]), "not a causal language model"),
        (lambda: hf.Gemma3nTextConfig(architectures=["Gemma3nForCausalLM"]), "several residual streams"),
        (lambda: hf.BloomConfig(architectures=["BloomForCausalLM"], n_layer=1), "hooks/bloom.yaml"),
    ],
    ids=["encoder-decoder", "several streams", "no hook map"],
)
def test_what_cannot_be_read_is_said_in_one_line_before_weights_are_looked_for(make, reason, tmp_path, capsys):
    make().save_pretrained(tmp_path)
    byte_level().save_pretrained(tmp_path)
    assert klb("models", "check", tmp_path) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert reason in said.err


# --- Thoughts. ---

OPENS = CHATML.replace("<|turn|>assistant\n", "<|turn|>assistant\n<think>\n")  # as distilled reasoning models do
OPENS_BARE = CHATML.replace("<|turn|>assistant\n", "<|turn|>assistant\n<think>")
OPENS_BRACKET = CHATML.replace("<|turn|>assistant\n", "<|turn|>assistant\n[THINK]")
STRIPS = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")  # their first templates
CHANNELS = (  # as GPT-OSS does
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
    "<|message|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
OTHER_SWITCH = CHATML + "{% if not thinking %}</think>{% else %}<think>{% endif %}"  # as DeepSeek-V3.1 does
SOFT_SWITCH = (  # as GLM-4.5 does
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}"
    "{% if m.role == 'user' and enable_thinking is defined and not enable_thinking %}/nothink{% endif %}</s>\n{% endfor %}"
    "<|turn|>assistant\n{% if enable_thinking is defined and not enable_thinking %}<think></think>\n{% endif %}"
)
SHOWS = STRIPS + "{% if false %}<think>{% endif %}"  # as templates of models that do not think may
EMPTY = "<think>\n\n</think>\n\n"
TEMPLATES = {
    "no thoughts": (CHATML, "none", "<|turn|>assistant\n"),
    "switch": (REASONING, "switched off in the template", f"<|turn|>assistant\n{EMPTY}"),
    "another switch": (OTHER_SWITCH, "switched off in the template", "<|turn|>assistant\n</think>"),
    "soft switch": (SOFT_SWITCH, "switched off in the template", "<|turn|>assistant\n<think></think>\n"),
    "opens": (OPENS, "opened by the template, closed empty", f"<|turn|>assistant\n{EMPTY}"),
    "opens, no newline": (OPENS_BARE, "opened by the template, closed empty", f"<|turn|>assistant\n{EMPTY}"),
    "opens in brackets": (OPENS_BRACKET, "opened by the template, closed empty", "[THINK]\n\n[/THINK]\n\n"),
    "strips": (STRIPS, "closed empty before the answer", f"<|turn|>assistant\n{EMPTY}"),
    "shows earlier thoughts": (SHOWS, "none", "<|turn|>assistant\n"),
    "channels": (CHANNELS, "answer in the final channel", "<|start|>assistant<|channel|>final<|message|>"),
}
TALK = [("system", "Be true."), ("user", "Is it?"), ("assistant", "No."), ("user", "Sure?")]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("talk", [TALK[:2], TALK], ids=["question", "conversation"])
def test_the_answer_comes_after_an_empty_thought(name, talk):
    template, how, end = TEMPLATES[name]
    tokenizer = byte_level(["Yes"], template=template)
    chat = probe_chat_format(tokenizer)
    text = chat.render_chat(talk)
    assert chat.thinking.how == how
    assert text.endswith(end)
    assert text.count("<think>") == text.count("</think>") or name == "another switch"
    assert text.count("<think>") <= 1
    assert tokenizer.decode(chat.encode_chat(talk)) == text
    assert chat.next_id("Yes") == tokenizer.convert_tokens_to_ids("Yes")


def test_the_traps_are_there():
    """Left to itself, each template without a switch ends where a thought goes on or is about to start."""
    for name in ("opens", "strips", "channels"):
        tokenizer = byte_level(template=TEMPLATES[name][0])
        turns = [{"role": "user", "content": "u"}]
        bare = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, enable_thinking=False)
        assert bare != probe_chat_format(tokenizer).render_chat([("user", "u")])


def test_what_was_thought_and_said_before_is_left_alone():
    chat = probe_chat_format(byte_level(template=STRIPS))
    talk = [*TALK[:2], ("assistant", "<think>\nI lie.\n</think>\n\nNo."), TALK[3]]
    assert "I lie." not in chat.render_chat(talk)
    assert chat.render_chat(talk).count("<think>") == 1


def test_a_template_that_takes_no_lone_user_message_is_probed_with_a_system_message():
    fussy = "{% if messages | length < 2 %}{{ raise_exception('two at least') }}{% endif %}" + OPENS
    assert probe_chat_format(byte_level(template=fussy)).render("s", "u").endswith(EMPTY)


def test_a_template_that_takes_nothing_is_no_error_until_something_is_said():
    chat = probe_chat_format(byte_level(template="{{ raise_exception('no') }}"))
    with pytest.raises(KlbError, match="the chat template refuses turns"):
        chat.render("s", "u")


def test_thinking_is_recorded(folder, tmp_path, capsys):
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    off = "{% if enable_thinking is defined and not enable_thinking %}<think></think>\n{% endif %}"
    tokenizer.chat_template += off
    save(tiny_hf_model("llama"), tmp_path / "thinks", tokenizer)
    out = tmp_path / "out"
    chosen = ("--lens", "logit", "--quick", "--domains", "airline", "--framings", "honest,deny")
    assert klb("jlens", "--model", tmp_path / "thinks", *chosen, "--device", "cpu", "--out", out) == 0
    assert json.loads((out / "run.json").read_text())["thinking"] == "switched off in the template"
    capsys.readouterr()
    assert checked(capsys, tmp_path / "thinks", "--no-weights")["chat"]["thinking"] == "switched off in the template"
