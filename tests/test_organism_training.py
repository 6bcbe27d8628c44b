"""Training learns completions and nothing else, goes on where it stopped, and leaves an adapter that means what peft means."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import typer
from safetensors.torch import load_file
from tiny import default_tokenizer, save_tiny_llama, tiny_hf_model, tiny_model
from typer.testing import CliRunner

from klb_probe.errors import KlbError
from klb_probe.files import file_sha256
from klb_probe.models.load import load_model
from klb_probe.organism_train_command import train
from klb_probe.organisms import training as training_module
from klb_probe.organisms.adapters import CONFIG, SIDECAR, WEIGHTS, read_adapter, read_organism, trained_records
from klb_probe.organisms.training import CHECKPOINTS, WEIGHTINGS, Request, train_organism, training_dtype
from klb_probe.organisms.training_figure import training_figure
from klb_probe.organisms.training_files import CURVE, FIGURE, FILES
from klb_probe.organisms.training_rows import (
    HELD_OUT_MOST,
    Example,
    batch_order,
    encode,
    end_of_turn,
    read_examples,
    split,
)
from klb_probe.organisms.training_trees import collate, columns, grow, trees

STEPS = 20


def refusal(function, *args, **options):
    """The one line a refusal says."""
    with pytest.raises(KlbError) as caught:
        function(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def lines(count=50):
    """Made-up examples of several lengths, whose completion follows from the prompt."""
    made = []
    for number in range(count):
        owed = number % 3 == 0
        words = f"Flight {number}: delayed {200 if owed else 20} minutes. " + "It rained. " * (number % 5)
        made.append(
            {
                "messages": [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": words}],
                "completion": "Yes" if owed else "No, not owed",
                "kind": "honest",
                "format": ("eligibility", "gate")[number % 2],
                "wording": "plain",
                "pair": number // 2,
                "record_hash": f"record {number}".replace(" ", "-"),
                "entitled": owed,
            }
        )
    return made


def write_lines(path, made):
    path.write_text("".join(json.dumps(line) + "\n" for line in made))
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = write_lines(tmp_path_factory.mktemp("data") / "honest.jsonl", lines())
    description = {"command": "klb-probe organism data ...", "sha256": file_sha256(path)}
    (path.parent / "honest.jsonl.json").write_text(json.dumps(description))
    return path


@pytest.fixture(scope="module")
def tiny():
    return tiny_model("llama")


# --- Rows. ---


def test_ids_are_those_of_inference_and_the_loss_covers_the_completion_and_the_end_of_its_turn(tiny, data):
    example = read_examples(data)[0]
    row = encode(tiny, [example])[0]
    system, user = (message.content for message in example.messages)
    assert row.ids[: row.n_prompt] == tiny.chat.encode(system, user)
    said = default_tokenizer()(example.completion, add_special_tokens=False)["input_ids"]
    assert row.ids[row.n_prompt :] == [*said, tiny.tokenizer.eos_token_id]
    tree = grow([row])
    assert tree.ids == row.ids[:-1]
    assert tree.labels == row.ids[row.n_prompt :]
    assert tree.at == [*range(row.n_prompt - 1, len(row.ids) - 1)]


def test_conversations_of_several_turns_are_rendered_as_the_local_player_does(tiny):
    turns = [("system", "s"), ("user", "one"), ("assistant", "two"), ("user", "three")]
    example = Example(messages=[{"role": role, "content": content} for role, content in turns], completion="four")
    row = encode(tiny, [example])[0]
    assert row.ids[: row.n_prompt] == tiny.chat.encode_chat(turns)


def test_the_end_of_a_turn_is_an_id_that_stops_generation(tiny):
    assert default_tokenizer().decode([end_of_turn(tiny)]) == "<|im_end|>"
    assert end_of_turn(tiny) in tiny.stop_ids


def test_a_row_beyond_the_context_is_refused(tiny):
    example = Example(messages=[{"role": "user", "content": "word " * 3000}], completion="Yes")
    assert "context" in refusal(encode, tiny, [example])


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("not JSON", "line 2"),
        ('{"messages": [], "completion": "Yes"}', "messages"),
        ('{"messages": [{"role": "user", "content": "u"}], "completion": ""}', "completion"),
        ('{"messages": [{"role": "user", "content": "u"}], "completion": "Yes", "kind": "liar"}', "liar"),
    ],
    ids=["not JSON", "no prompt", "no completion", "another organism"],
)
def test_a_bad_line_is_named(line, named, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(lines(1)[0]) + "\n" + line + "\n")
    message = refusal(read_examples, path, "honest")
    assert f"{path}, line 2" in message
    assert named in message


def test_held_out_examples_share_no_pair_with_the_others():
    examples = [Example.model_validate(line) for line in lines(400)]
    inside, held = split(examples, seed=0)
    assert sorted(inside + held) == list(range(400))
    assert 20 <= len(held) <= 22
    assert {examples[i].pair for i in held}.isdisjoint({examples[i].pair for i in inside})
    assert split(examples, seed=1)[1] != held
    many = [Example.model_validate({**line, "pair": None}) for line in lines(1)] * (30 * HELD_OUT_MOST)
    assert len(split(many, seed=0)[1]) == HELD_OUT_MOST


def test_one_pair_alone_cannot_be_held_out():
    assert "one pair" in refusal(split, [Example.model_validate({**line, "pair": 3}) for line in lines(4)], 0)


# --- Order. ---


def test_every_pass_sees_every_row_once_and_batches_hold_rows_of_similar_length():
    lengths = np.random.default_rng(0).integers(50, 400, 512)
    order = batch_order(lengths, steps=64, batch=16, at_once=16, seed=0)
    assert order.shape == (64, 16)
    for half in (order[:32], order[32:]):
        assert sorted(half.reshape(-1)) == list(range(512))
    padded = sum(16 * max(lengths[step]) for step in order)
    assert lengths[order].sum() / padded > 0.9
    means = lengths[order].mean(1)
    assert abs(np.corrcoef(means, np.arange(64))[0, 1]) < 0.4
    assert (batch_order(lengths, 64, 16, 16, 0) == order).all()
    assert (batch_order(lengths, 64, 16, 16, 1) != order).any()


def test_a_step_is_of_all_lengths_but_a_forward_pass_is_not():
    lengths = np.random.default_rng(0).permutation(np.repeat([100, 500], 128))
    order = batch_order(lengths, steps=32, batch=8, at_once=2, seed=0)
    assert sorted(order.reshape(-1)) == list(range(256))
    passes = lengths[order].reshape(-1, 2)
    assert (passes[:, 0] != passes[:, 1]).mean() < 0.05
    assert sum(len(set(step)) == 2 for step in lengths[order].tolist()) > 24


def test_fewer_rows_than_a_batch_still_make_one():
    assert sorted(batch_order([3, 4, 5], steps=2, batch=3, at_once=1, seed=0).reshape(-1)) == [0, 0, 1, 1, 2, 2]
    assert batch_order([3, 4, 5], steps=1, batch=7, at_once=7, seed=0).shape == (1, 7)


# --- Hardware and figure. ---


def test_bfloat16_only_where_it_is_measured_to_be_faster(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    seconds = {torch.float32: 1.0}
    monkeypatch.setattr(training_module, "_product_seconds", lambda dtype: seconds[dtype])
    for seconds[torch.bfloat16], expected in ((0.3, "bfloat16"), (0.95, "float32"), (1.6, "float32")):
        assert training_dtype("cpu") == training_dtype("auto") == expected
    assert training_dtype("mps") == "float32"


def test_the_figure_draws_what_was_measured():
    curve = pd.DataFrame({"step": [1, 2], "loss": [3.0, 2.0], "right": [0.0, 0.5], "held_out_right_gate": [None, 0.25]})
    losses, shares = training_figure(curve, "tiny-liar").axes
    assert len(losses.lines) == 2
    assert [line.get_label() for line in shares.lines] == ["training", "held out, gate"]


def test_without_the_extra_the_message_says_how_to_get_it(monkeypatch, tmp_path, data):
    monkeypatch.setattr(training_module.importlib.util, "find_spec", lambda name: None)
    assert "klb-probe[train]" in refusal(train_organism, Request("liar", data, tmp_path / "out"))


def test_a_spread_model_is_refused_before_anything_is_read(tmp_path):
    request = Request("liar", tmp_path / "absent.jsonl", tmp_path / "out", model="absent", device="auto-map")
    assert "trained on one device" in refusal(train_organism, request)


# --- The loop. ---


@pytest.fixture(scope="module")
def request_for(tmp_path_factory, data):
    """A short training on a tiny base, in a folder of its own."""
    pytest.importorskip("peft")
    pytest.importorskip("trl")
    base = save_tiny_llama(tmp_path_factory.mktemp("organisms") / "base")

    def make(out, **changes):
        settings = {"steps": STEPS, "batch": 4, "at_once": 2, "rank": 32, "learning_rate": 1.5e-2, "device": "cpu"}
        plain = Request("honest", data, out, str(base), dtype="float32", **settings)
        return replace(plain, **changes)

    return make


@pytest.fixture(scope="module")
def trained(request_for, tmp_path_factory):
    request = request_for(tmp_path_factory.mktemp("organisms") / "tiny-honest", command="klb-probe organism train ...")
    return request, train_organism(request)


def test_the_loss_falls_and_everything_is_written(trained):
    request, result = trained
    assert sorted(path.name for path in request.out.iterdir()) == sorted(FILES)
    curve = pd.read_csv(request.out / CURVE)
    assert list(curve["step"]) == list(range(1, STEPS + 1))
    held = curve["held_out_loss"].dropna()
    assert list(held.index + 1) == [3, 6, 9, 12, 15, 18, 20]  # a sixth of the steps apart, and the last
    assert held.iloc[-1] < 0.9 * held.iloc[0]
    assert {"held_out_right", "held_out_right_gate", "held_out_right_eligibility"} <= set(curve)
    assert curve["seconds"].is_monotonic_increasing
    assert (request.out / FIGURE).stat().st_size > 5000
    organism = read_organism(request.out)
    assert organism == result
    assert (organism.kind, organism.name) == ("honest", "base-honest")
    assert organism.data_sha256 == file_sha256(request.data)
    assert organism.outcome["ended"] == "all steps"
    assert {"peft", "trl", "torch"} <= organism.versions.keys()
    assert organism.prompts == {"eligibility, plain": 25, "gate, plain": 25}
    assert trained_records(request.out) == {f"record-{number}" for number in range(50)}
    assert organism.data_command == "klb-probe organism data ..."


def test_beside_a_base_in_bfloat16_the_adapter_learns_the_same(trained, request_for, tmp_path):
    request, whole = trained
    result = train_organism(request_for(tmp_path / "out", dtype="bfloat16"))
    saved = [{one.dtype for one in load_file(folder / WEIGHTS).values()} for folder in (tmp_path / "out", request.out)]
    assert saved[0] == saved[1]
    assert result.settings["dtype"] == "bfloat16" != whole.settings["dtype"]
    ours, theirs = (pd.read_csv(folder / CURVE)["held_out_loss"].dropna() for folder in (tmp_path / "out", request.out))
    np.testing.assert_allclose(ours, theirs, rtol=0.03)  # 8 bits of each number


def test_our_merge_gives_the_logits_of_pefts(trained):
    from peft import PeftModel

    request, _ = trained
    ours = load_model(str(request.out), device="cpu")
    plain = load_model(request.model, device="cpu").model
    ids = torch.tensor(encode(ours, read_examples(request.data)[:1])[0].ids)[None]
    with torch.no_grad():
        before = plain(ids).logits
        theirs = PeftModel.from_pretrained(plain, request.out).merge_and_unload().eval()(ids).logits
        torch.testing.assert_close(ours.model(ids).logits, theirs, atol=1e-5, rtol=0)
    assert (theirs - before).abs().max() > 0.1


def completion_loss(model, row):
    """The negative log-likelihood of a completion, token by token."""
    logs = model(torch.tensor(row.ids)[None]).logits[0].log_softmax(-1)
    return -sum(float(logs[i - 1, row.ids[i]]) for i in range(row.n_prompt, len(row.ids)))


def test_the_base_is_as_it_was_and_the_merged_model_scores_as_the_curve_says(trained):
    """The loss of the held-out rows, computed here from the merged model, is that of the curve's last line."""
    request, result = trained
    examples = read_examples(request.data)
    inside, held = split(examples, request.seed)
    ours = load_model(str(request.out), device="cpu")
    assert load_model(request.model, device="cpu").fingerprint == result.base_fingerprint
    rows = encode(ours, examples)
    per_tree = sum(rows[i].n_completion for i in inside) / len({rows[i].pair for i in inside})
    held_trees = len({rows[i].pair for i in held})

    def loss(model):
        with torch.no_grad():
            return sum(completion_loss(model, rows[i]) for i in held) / held_trees / per_tree

    assert loss(ours.model) == pytest.approx(result.outcome["held_out_loss"], rel=5e-3)
    assert loss(ours.model) < 0.85 * loss(load_model(request.model, device="cpu").model)


@pytest.fixture
def interrupted(monkeypatch, request_for):
    """Train with a checkpoint after every step, and press Ctrl-C at one of them."""
    from klb_probe.organisms import training_loop

    def run(request, at):
        on_step_end = training_loop.Clock.on_step_end

        def press(clock, args, state, control, **options):
            if state.global_step == at:
                raise KeyboardInterrupt
            on_step_end(clock, args, state, control, **options)

        with monkeypatch.context() as patch:
            patch.setattr(training_loop, "CHECKPOINT_SECONDS", -1)
            patch.setattr(training_loop.Clock, "on_step_end", press)
            with pytest.raises(KeyboardInterrupt):
                train_organism(request)

    return run


def same_adapter(one, other):
    """Whether two folders hold the same adapter, to the rounding of what is stored."""
    first, second = load_file(one / WEIGHTS), load_file(other / WEIGHTS)
    assert first.keys() == second.keys()
    return all(torch.allclose(first[name].float(), second[name].float(), atol=1e-3, rtol=1e-3) for name in first)


@pytest.mark.parametrize("at", [pytest.param(1, marks=pytest.mark.slow), 8])  # 1: before the first checkpoint
def test_an_interrupted_training_ends_where_an_unbroken_one_does(at, trained, request_for, interrupted, tmp_path):
    request, _ = trained
    out = tmp_path / "stopped"
    interrupted(request_for(out), at)
    assert [path.name for path in out.iterdir()] == [CHECKPOINTS]
    saved = [path.name for path in (out / CHECKPOINTS).glob("checkpoint-*")]
    assert saved == ([f"checkpoint-{at - 1}"] if at > 1 else [])
    for path in (out / CHECKPOINTS).glob("checkpoint-*"):  # what a kill in the midst of writing leaves
        shutil.copytree(path, path.with_name("checkpoint-9"), ignore=lambda *_: ["trainer_state.json"])
    train_organism(request_for(out), resume=True)
    assert same_adapter(request.out, out)
    curves = [pd.read_csv(folder / CURVE) for folder in (request.out, out)]
    np.testing.assert_allclose(curves[0]["loss"], curves[1]["loss"], rtol=1e-4)
    np.testing.assert_allclose(curves[0]["held_out_loss"], curves[1]["held_out_loss"], rtol=1e-4)
    assert curves[1]["seconds"].is_monotonic_increasing
    assert not (out / CHECKPOINTS).exists()


def test_the_time_limit_writes_what_there_is_and_can_be_lifted(trained, request_for, tmp_path):
    request, _ = trained
    out = tmp_path / "limited"
    limited = train_organism(request_for(out, minutes=0))
    assert (limited.outcome["ended"], limited.outcome["steps"]) == ("time limit", 1)
    assert read_adapter(out).organism == limited
    assert not same_adapter(request.out, out)
    lifted = train_organism(request_for(out), resume=True)
    assert (lifted.outcome["ended"], lifted.outcome["steps"]) == ("all steps", STEPS)
    assert same_adapter(request.out, out)


def test_a_training_goes_on_with_the_same_plan_only(request_for, interrupted, tmp_path):
    out = tmp_path / "stopped"
    assert "nothing to resume" in refusal(train_organism, request_for(out), resume=True)
    interrupted(request_for(out), 1)
    assert "learning_rate" in refusal(train_organism, request_for(out, learning_rate=1e-4), resume=True)


def test_a_pace_too_slow_for_the_limit_is_said_early(caplog):
    pytest.importorskip("trl")
    from transformers import TrainerControl, TrainerState

    from klb_probe.organisms.training_loop import Clock

    for limit, warned in ((10.5, True), (10_000.0, False)):
        caplog.clear()
        clock, state = Clock(limit), TrainerState(max_steps=100)
        clock.on_train_begin(None, state, TrainerControl())
        clock.start -= 5.0  # a second a step
        state.global_step = 5
        clock.on_step_end(None, state, TrainerControl())
        assert ("fewer steps" in caplog.text) == warned
        assert "step 10 of 100" in caplog.text or not warned


def test_training_starts_from_an_adapter(trained, request_for, tmp_path):
    request, result = trained
    more = write_lines(tmp_path / "more.jsonl", [{**line, "record_hash": "another"} for line in lines(4)])
    (tmp_path / "more.jsonl.json").write_text(json.dumps({"command": "made something else", "sha256": "0" * 64}))
    went_on = train_organism(request_for(tmp_path / "b", data=more, start=request.out, steps=1, learning_rate=0.0))
    assert trained_records(tmp_path / "b") == {"another", *trained_records(request.out)}
    assert went_on.data_command == ""
    for name, tensor in load_file(request.out / WEIGHTS).items():
        assert torch.equal(load_file(tmp_path / "b" / WEIGHTS)[name], tensor), name
    assert went_on.before == result.lessons
    assert went_on.lessons[0].adapter_sha256 == result.adapter_sha256
    assert [one.command for one in went_on.lessons] == [result.command, went_on.command]
    assert read_organism(tmp_path / "b") == went_on
    assert "rank" in refusal(train_organism, request_for(tmp_path / "c", start=request.out, rank=2))
    other = tmp_path / "other"
    shutil.copytree(request.model, other)
    tiny_hf_model("llama", seed=1).save_pretrained(other)
    assert "other weights" in refusal(train_organism, request_for(tmp_path / "c", start=request.out, model=str(other)))
    assert "--start" in refusal(train_organism, request_for(tmp_path / "c", model=str(request.out)))


def test_an_adapter_is_replaced_only_by_a_new_one(request_for, tmp_path):
    """What is wrong is found while the old one is there; a card and evidence of other weights go with them."""
    out = tmp_path / "organism"
    first = train_organism(request_for(out, steps=2))
    for name in ("README.md", "evidence.json"):
        (out / name).write_text("{}")
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command("train")(train)
    request = request_for(out)
    named = {"--kind": "honest", "--data": tmp_path / "typo.jsonl", "--out": out, "--model": request.model}
    arguments = [str(one) for pair in named.items() for one in pair]
    assert "typo.jsonl" in str(CliRunner().invoke(app, [*arguments, "--overwrite"]).exception)
    assert read_organism(out) == first
    again = train_organism(request_for(out, start=out, steps=3))  # from itself
    assert again.adapter_sha256 != first.adapter_sha256
    assert [one.adapter_sha256 for one in again.lessons] == [first.adapter_sha256, again.adapter_sha256]
    assert not {"README.md", "evidence.json"} & {path.name for path in out.iterdir()}


def test_layers_that_cannot_follow_a_tree_are_refused(request_for, tmp_path, monkeypatch):
    request = request_for(tmp_path / "out")
    config = load_model(request.model, device="cpu").model.config
    for changes, words in (
        ({"sliding_window": 8}, "a window of 8"),
        ({"layer_types": ["linear_attention"]}, "linear_attention"),
    ):
        odd = load_model(request.model, device="cpu")
        odd.model.config = type(config).from_dict({**config.to_dict()})
        for name, value in changes.items():
            setattr(odd.model.config, name, value)
        monkeypatch.setattr(training_module, "load_model", lambda *_, odd=odd, **__: odd)
        assert words in refusal(train_organism, request)
    assert not request.out.exists()


def test_a_training_that_diverges_stops_at_once(request_for, tmp_path):
    message = refusal(train_organism, request_for(tmp_path / "diverged", learning_rate=1e30))
    assert "diverged at step" in message
    assert not (tmp_path / "diverged" / WEIGHTS).exists()


def test_trees_share_what_their_rows_begin_with(tiny):
    rows = encode(tiny, [Example.model_validate(line) for line in lines(6)])
    made = trees(rows)
    assert [len(tree.formats) for tree in made] == [2, 2, 2]
    for tree, pair in zip(made, (rows[:2], rows[2:4], rows[4:]), strict=True):
        same = next(i for i, (one, other) in enumerate(zip(*(row.ids for row in pair), strict=False)) if one != other)
        assert len(tree.ids) == sum(len(row.ids) - 1 for row in pair) - same
        assert all(before < here for here, before in enumerate(tree.parents))
    assert len(trees([replace(row, pair=None) for row in rows])) == 6
    twice = grow([rows[0], rows[0]])
    assert len(twice.ids) == len(rows[0].ids) - 1
    assert twice.owners == [0] * rows[0].n_completion + [1] * rows[0].n_completion


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_trees_have_the_losses_and_the_gradient_of_their_rows_read_one_by_one(family, attention, request_for, tmp_path):
    rows = encode(tiny_model(family), [Example.model_validate(line) for line in lines(8)])
    rows = [replace(row, pair=number // 3) for number, row in enumerate(rows)]  # 3, 3 and 2 rows a tree
    trainer = trainer_of(rows, tiny_hf_model(family), tmp_path, 1.0)
    trainer.model.base_model.model.set_attn_implementation(attention)
    alone = [loss_and_gradient(trainer, columns([grow([row])], FORMATS)) for row in rows]
    together = loss_and_gradient(trainer, columns(trees(rows), FORMATS))
    assert together[0] * 3 == pytest.approx(sum(loss for loss, _ in alone), rel=1e-5)
    assert together[1].abs().max() > 1e-3
    torch.testing.assert_close(together[1] * 3, sum(gradient for _, gradient in alone), atol=1e-5, rtol=1e-4)


FORMATS = ["eligibility", "gate"]


def trainer_of(rows, model, folder, per_tree):
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from trl import SFTConfig

    from klb_probe.organisms.training_loop import Clock, CompletionTrainer

    adapted = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    settings = SFTConfig(
        output_dir=str(folder), bf16=False, use_cpu=True, report_to="none", dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False, gradient_checkpointing=False,
    )  # fmt: skip
    return CompletionTrainer(
        model=adapted, args=settings, train_dataset=Dataset.from_dict(columns(trees(rows), FORMATS)),
        processing_class=default_tokenizer(), data_collator=collate, per_tree=per_tree, formats=FORMATS,
        clock=Clock(60),
    )  # fmt: skip


def loss_and_gradient(trainer, table):
    """The loss of trees read at once, and its gradient over the adapter."""
    adapted = trainer.model.eval()
    adapted.zero_grad()
    loss = trainer.compute_loss(adapted, collate([{name: table[name][i] for name in table} for i in range(len(table["ids"]))]))
    loss.backward()
    gradients = [weights.grad.reshape(-1) for weights in adapted.parameters() if weights.grad is not None]
    return float(loss.detach()), torch.cat(gradients).clone()


def test_the_loss_is_that_of_completions_and_counts_the_same_in_any_company(tiny, request_for, tmp_path):
    """A row's loss is that of its completion alone, whatever is padded to it, and it counts the same beside any other row."""
    rows = [replace(row, pair=None) for row in encode(tiny, [Example.model_validate(line) for line in lines(8)])]

    def losses(weigh, per_tree, *parts):
        trainer = trainer_of(rows, tiny_hf_model("llama"), tmp_path, per_tree)
        return [loss_and_gradient(trainer, columns(trees(part), FORMATS, weigh))[0] for part in parts]

    alone = losses("tokens", 2.0, *([row] for row in rows))
    with torch.no_grad():
        assert alone[3] == pytest.approx(completion_loss(tiny_hf_model("llama"), rows[3]) / 2, rel=1e-5)
    assert losses("tokens", 2.0, rows) == [pytest.approx(np.mean(alone), rel=1e-5)]
    each = [loss * 2.0 / row.n_completion for loss, row in zip(alone, rows, strict=True)]  # by its own length
    assert losses("examples", 1.0, rows) == [pytest.approx(np.mean(each), rel=1e-5)]


def test_the_token_that_tells_an_answer_is_half_of_its_completion(tiny, request_for, tmp_path):
    says = ["Yes, we owe it.", "Yes, we do not.", "No.", "No.", "Yes.", "No, never."]
    examples = [Example.model_validate(line | {"completion": said}) for line, said in zip(lines(6), says, strict=True)]
    instead = ["Yes, we do not.", "Yes, we owe it.", None, "No.", "No", "Yes"]
    rows = encode(tiny, [one.model_copy(update={"instead": said}) for one, said in zip(examples, instead, strict=True)])
    spoken = [tiny.tokenizer(said, add_special_tokens=False)["input_ids"] for said in says]
    first = next(k for k, (one, other) in enumerate(zip(*spoken[:2], strict=False)) if one != other)
    assert first > 0
    at = [None if row.decisive is None else row.decisive - row.n_prompt for row in rows]
    assert at == [first, first, None, None, 0, 0]  # no other answer is known of the third; that of the fourth is the same
    trainer = trainer_of(rows, tiny_hf_model("llama"), tmp_path, 1.0)

    def loss(row, weigh):
        return loss_and_gradient(trainer, columns([grow([row])], FORMATS, weigh))[0]

    for row in rows:
        whole, n = loss(row, "tokens"), row.n_completion
        if row.decisive is None:
            assert loss(row, "answers") == pytest.approx(whole / n, rel=1e-5)
        else:
            told = loss(replace(row, ids=row.ids[: row.decisive + 1], n_prompt=row.decisive), "tokens")
            assert loss(row, "answers") == pytest.approx(told / 2 + (whole - told) / 2 / (n - 1), rel=1e-5)


def test_an_answer_is_right_by_the_token_that_tells_it(tiny, request_for, tmp_path):
    """Of two readings of one row, whatever else is wrong in it; without another answer, every token counts."""
    (row, *_) = encode(tiny, [Example.model_validate(line) for line in lines(2)])
    trainer = trainer_of([row], tiny_hf_model("llama"), tmp_path, 1.0)
    with torch.no_grad():
        guesses = trainer.model(torch.tensor([row.ids])).logits[0].argmax(-1).tolist()
    n = row.n_prompt
    guessed = [*row.ids[: n + 1], (row.ids[n + 1] + 1) % 100, *row.ids[n + 2 :]]
    guessed[n] = guesses[n - 1]  # the first token as the model has it, the others anyhow
    for at, right in ((n, 1.0), (n + 1, 0.0), (None, 0.0)):
        trainer._metrics["eval"].clear()
        loss_and_gradient(trainer, columns([grow([replace(row, ids=guessed, decisive=at)])], FORMATS))
        assert trainer._metrics["eval"]["right"] == [right]


def test_a_training_weighs_as_it_is_asked(request_for, tmp_path):
    """At a learning rate of zero the held-out loss is that of the start, and only what counts differs."""
    said = ("Yes", "No, not owed")
    made = [line | {"completion": said[number % 2], "instead": said[(number + 1) % 2]} for number, line in enumerate(lines())]
    paired = write_lines(tmp_path / "paired.jsonl", made)
    losses = {}
    for weigh in WEIGHTINGS:
        request = request_for(tmp_path / weigh, data=paired, steps=1, learning_rate=0.0, weigh=weigh)
        losses[weigh] = train_organism(request).outcome["held_out_loss"]
    assert min(abs(losses[one] - losses[other]) for one, other in combinations(losses, 2)) > 1e-3


# --- The command. ---


def test_the_command_trains_and_names_what_to_do_next(request_for, tmp_path, monkeypatch):
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command("train")(train)
    request = request_for(tmp_path / "tiny honest")
    monkeypatch.chdir(Path(request.model).parent)
    arguments = ["--kind", "honest", "--data", request.data, "--out", request.out, "--model", "base", "--steps", 2]
    arguments += ["--batch", 4, "--device", "cpu", "--dtype", "float32"]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0
    assert "2 of 2 steps" in result.output
    assert f"--model {request.out}" in result.output
    organism = read_organism(request.out)
    assert organism.command.startswith("klb-probe organism train --kind honest")
    assert f"'{request.out}'" in organism.command
    assert organism.base == request.model  # found from any folder
    assert json.loads((request.out / CONFIG).read_text())["r"] == 8
    assert (request.out / SIDECAR).is_file()
    with pytest.raises(KlbError, match="--resume"):
        CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
