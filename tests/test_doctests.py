"""The examples in the docstrings of every exported name run, and give what they say."""

from __future__ import annotations

import doctest
import os
from pathlib import Path

import pytest
import transformers as hf

import klb_probe as klb
from klb_probe.probe_command import write_results
from klb_probe.versions import versions


@pytest.fixture(scope="module")
def names(smollm, tmp_path_factory):
    """What the examples start from (docs/python.md says so), in a folder of their own with a saved probe."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("doctests"))
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = hf.LlamaConfig(**sizes, vocab_size=49_152, max_position_embeddings=8192)
    small = klb.from_model(hf.LlamaForCausalLM(config).eval(), smollm.tokenizer, name="small")
    logit = klb.LogitLens.of(small, klb.TokenContrast.of(small.chat))
    options = klb.ProbeOptions(questions=("framing",), estimators=("mean_difference",), shuffles=1)
    found = klb.train_probes(small, logit, options, domains=["airline", "debt", "refund"], quick=True)
    write_results(Path("outputs/probe"), found, small, {"arguments": {"seed": 0}, "versions": versions()})
    yield {"klb": klb, "model": smollm, "lens": klb.load_lens(smollm), "small": small}
    os.chdir(before)


@pytest.mark.parametrize("name", klb.__all__)
def test_the_examples_of_a_name_run(name, names, capsys):
    tests = doctest.DocTestFinder().find(getattr(klb, name), name, globs=names)
    assert any(test.examples for test in tests), f"klb_probe.{name} has no example"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in tests:
        runner.run(test)
    assert runner.summarize().failed == 0, capsys.readouterr().out
