"""``make bench``: what our work costs against what it replaces, measured side by side in one run on the default model.

Every row times both sides on the same ids, layers and positions in this process (load and --help in fresh ones), and prints
their ratio next to the project's target. Nothing is asserted here; ratios on a busy machine mean little.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from against_transformer_lens import SKIP_FIRST, Fitted, bench_against_transformer_lens, bridge_over
from rich.console import Console
from rich.table import Table
from scipy.stats import pearsonr
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from timing import ratio, timed
from transformer_lens.tools.analysis.jacobian_lens import JacobianLens

from klb_probe.cases.load import load_domains
from klb_probe.cases.scenarios import eligibility_scenarios
from klb_probe.dialogue.local import LocalPlayer
from klb_probe.dialogue.player import Message, Request, Scene
from klb_probe.lens.contrast import TokenContrast
from klb_probe.lens.corpus import sampled_corpus
from klb_probe.lens.fitting import FitOptions, cotangent_rows
from klb_probe.lens.library import load_lens
from klb_probe.lens.vjp import graph_start, prompt_rows
from klb_probe.models.huggingface import HuggingFaceModel
from klb_probe.models.load import load_model
from klb_probe.probes.data import load_probe_data
from klb_probe.probes.estimators import ESTIMATORS
from klb_probe.probes.questions import owed
from klb_probe.signals.margins import DEFAULT_FRAMINGS, prepare
from klb_probe.signals.readout import read_prompts


def bench_load(table: Table) -> None:
    """First load (GGUF dequantised) against the second (safetensors cache), each in a fresh process."""
    code = "import time, klb_probe.models.load as l; s = time.perf_counter(); l.load_model(); print(time.perf_counter() - s)"
    with tempfile.TemporaryDirectory() as cache:
        seconds = [
            float(subprocess.check_output([sys.executable, "-c", code], env={**os.environ, "KLB_PROBE_CACHE": cache}))
            for _ in range(2)
        ]
    table.add_row("second load", "first load", f"{seconds[1]:.1f} s", f"{seconds[0]:.1f} s", ratio(seconds), "<= 3 s")


def bench_help(table: Table) -> None:
    """``--help`` must not wait for torch."""
    command = [sys.executable, "-m", "klb_probe.jlens", "--help"]
    seconds = min(timed(lambda: subprocess.run(command, capture_output=True, check=True))[0] for _ in range(3))
    table.add_row("--help", "", f"{seconds:.2f} s", "", "", "<= 0.7 s")


def bench_fit(table: Table, model: HuggingFaceModel, contrast: TokenContrast, tokens: int) -> Fitted:
    """Margin rows against all rows of the same prompt and layers; their readouts compared. Returns what was fitted."""
    ids = sampled_corpus(model, n=1, max_tokens=tokens).prompts[0]
    last, layers = model.n_layers - 1, list(range(model.n_layers - 1))
    readout = model.token_readout(contrast.token_ids)
    rows = cotangent_rows(readout, FitOptions())
    options = {"target_layer": last, "skip_first": SKIP_FIRST}
    options["start"] = graph_start(model, ids, layers, **options)
    ours, targeted = timed(lambda: prompt_rows(model, ids, rows, layers, **options, batch=17))
    eye = torch.eye(model.d_model)
    theirs, full = timed(lambda: prompt_rows(model, ids, eye, layers, **options, batch=8))
    prompts = [list(ids[: 20 + i]) for i in range(64)]
    exact, sketched = [], []
    n = len(contrast.token_ids)
    for prompt in prompts:
        for layer, residual in enumerate(model.residuals([prompt], layers, [-1])[:, 0, 0]):
            exact.append(contrast.margin(readout.logits(full[layer] @ residual)))
            square = (targeted[layer, n:] @ residual).square().sum() / model.d_model
            sketched.append(contrast.margin(readout.from_products(targeted[layer, :n] @ residual, square)))
    exact_all, sketched_all = torch.stack(exact), torch.stack(sketched)
    agree = (exact_all.sign() == sketched_all.sign()).float().mean()
    table.add_row(
        f"margin lens fit, k=32, a prompt of {tokens} tokens",
        "full Jacobian fit, same layers",
        f"{ours:.1f} s",
        f"{theirs:.1f} s",
        f"{theirs / ours:.1f}x faster",
        ">= 15x",
    )
    correlation = pearsonr(exact_all.numpy(), sketched_all.numpy()).statistic
    table.add_row(
        f"  its readouts (n = {len(exact)})", "", f"sign {agree:.2%}", f"r = {correlation:.4f}", "", "100 %, r >= 0.99"
    )
    parameters = sum(p.numel() for name, p in model.model.named_parameters() if "layers." in name)
    # A backward row costs two FLOPs a block parameter and position that is in the graph (activations only).
    rate = 2 * parameters * (tokens - 17) * model.d_model / theirs / 1e9
    peak = matmul_rate()
    table.add_row(
        "  its rate", "fp32 matmul here", f"{rate:.0f} GFLOP/s", f"{peak:.0f} GFLOP/s", f"{rate / peak:.0%} of it", ""
    )
    return Fitted(ids, ours, theirs, full)


def matmul_rate(size: int = 2048) -> float:
    """GFLOP/s of a square fp32 matrix product, best of five."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    return 2 * size**3 / min(timed(lambda: a @ b)[0] for _ in range(5)) / 1e9


def bench_readout(table: Table, model: HuggingFaceModel, contrast: TokenContrast, n: int) -> list[Sequence[int]]:
    """All-layer readout of the quick scenarios against bare forward passes and against TransformerLens's lens readout.

    Returns the ``n`` prompts that were timed one by one.
    """
    lens = load_lens(model, contrast)
    margins, lenses = prepare(model, lens, eligibility_scenarios(load_domains(), DEFAULT_FRAMINGS, quick=True))
    total = len(margins.ids)
    ours, _ = timed(lambda: read_prompts(model, lenses, margins.ids, margins.readouts))
    sample = margins.ids[:: max(1, total // n)]
    bare_all = one_by_one(model, sample) * total
    name = f"eligibility readout, all layers, {total} prompts"
    table.add_row(
        name,
        f"forward passes alone ({len(sample)} timed)",
        f"{ours:.0f} s",
        f"{bare_all:.0f} s",
        f"{ours / bare_all:.2f}x the time",
        "<= 0.5x",
    )
    bridge = bridge_over(model)
    # What the matrices hold does not change what a readout costs.
    layers = range(model.n_layers - 1)
    theirs = JacobianLens({layer: torch.eye(model.d_model) for layer in layers}, n_prompts=1, d_model=model.d_model)
    peer, _ = timed(lambda: [theirs.readout(bridge, torch.tensor([ids]), positions=[-1]) for ids in sample])
    peer_all = peer / len(sample) * total
    table.add_row(
        name,
        f"TransformerLens lens readout ({len(sample)} timed)",
        f"{ours:.0f} s",
        f"{peer_all:.0f} s",
        f"{peer_all / ours:.1f}x faster",
        ">= 2.5x",
    )
    return sample


def one_by_one(model: HuggingFaceModel, prompts: Sequence[Sequence[int]]) -> float:
    """Seconds a prompt of bare forward passes."""

    def forwards() -> None:
        for ids in prompts:
            with torch.no_grad():
                model.model(torch.tensor([list(ids)]), use_cache=False, logits_to_keep=1)

    return timed(forwards)[0] / len(prompts)


def bench_probes(table: Table, model: HuggingFaceModel, n: int) -> None:
    """Residuals of every case and twin under two framings to disk, all layers; one layer's logistic probes on them."""
    with tempfile.TemporaryDirectory() as store:
        seconds, data = timed(lambda: load_probe_data(model, framings=("honest", "deny"), store=Path(store)))
        ids = [site.ids for site in data.sites["answer"]]
        bare = one_by_one(model, ids[:: max(1, len(ids) // n)]) * len(ids)
        against = f"forward passes alone ({n} timed)"
        name = f"residuals of {len(ids)} prompts, all layers, to disk"
        table.add_row(name, against, f"{seconds:.0f} s", f"{bare:.0f} s", f"{seconds / bare:.2f}x the time", "<= 300 s")
        population = owed(data.rows, "deny")
        features, labels = data.residuals("answer", model.n_layers // 2)[population.rows], population.labels
    logistic = ESTIMATORS["logistic"]
    ours = min(timed(lambda: logistic.fit(features, labels))[0] for _ in range(5))
    scaled = StandardScaler().fit_transform(features)

    def sklearn_path() -> None:
        for strength in logistic.settings:
            LogisticRegression(C=strength, tol=1e-6, max_iter=1000).fit(scaled, labels)

    theirs = min(timed(sklearn_path)[0] for _ in range(5))
    name = f"logistic probes, {len(logistic.settings)} strengths, {features.shape[0]} x {features.shape[1]}"
    times = f"{1e3 * ours:.0f} ms", f"{1e3 * theirs:.0f} ms"
    table.add_row(name, "scikit-learn, the same strengths", *times, ratio([theirs, ours]), "")


def bench_dialogue(table: Table, model: HuggingFaceModel, n_turns: int = 10, words: int = 16) -> None:
    """Eight growing conversations under one policy, against reading each of them whole at every turn."""
    domains = load_domains()
    system = " ".join(clause.text for domain in domains[:4] for clause in domain.policy.clauses)
    cases = domains[0].cases[:8]
    talks = [[Message("system", system)] for _ in cases]
    keeping, forgetting = LocalPlayer(model), LocalPlayer(model, max_kept_tokens=0)
    seconds = 0.0
    for turn in range(n_turns):
        for talk, case in zip(talks, cases, strict=True):
            talk.append(Message("user", f"Turn {turn}: {case.opening}"))
        requests = [
            Request("customer", tuple(talk), case.id, case.id, 0.7, words, Scene(domains[0], case, "control"))
            for talk, case in zip(talks, cases, strict=True)
        ]
        spent, replies = timed(lambda requests=requests: keeping.reply(requests))
        seconds += spent
        if turn == n_turns // 2:  # the turn of middle length stands for all
            whole, _ = timed(lambda requests=requests: forgetting.reply(requests))
            one = replies[0]
            alone, _ = timed(
                lambda one=one: model.generate([one.prompt_ids], len(one.ids), temperature=0.7, seed=0, stop=False)
            )
        for talk, reply in zip(talks, replies, strict=True):
            talk.append(Message("assistant", reply.text))
    longest = max(reply.prompt_tokens for reply in replies)
    name = f"dialogue turns, local agent, {n_turns} growing turns x {len(cases)} conversations, up to {longest} tokens"
    for against, theirs in [
        ("re-encoding the whole conversation each turn, transformers generate (1 timed)", alone * len(cases) * n_turns),
        ("the same in batches of 8, our own player (8 timed)", whole * n_turns),
    ]:
        faster = f"{theirs / seconds:.1f}x faster"
        table.add_row(name, against, f"{seconds:.0f} s", f"{theirs:.0f} s", faster, ">= 3x")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=128, help="prompt length of the fit rows")
    parser.add_argument("--sample", type=int, default=24, help="prompts timed one by one")
    arguments = parser.parse_args()
    table = Table("work", "against", "ours", "theirs", "ratio", "target")
    bench_help(table)
    bench_load(table)
    model = load_model(device="cpu")
    contrast = TokenContrast.of(model.chat)
    bench_dialogue(table, model)
    sample = bench_readout(table, model, contrast, arguments.sample)
    bench_probes(table, model, arguments.sample)
    fitted = bench_fit(table, model, contrast, arguments.tokens)
    bench_against_transformer_lens(table, model, contrast, fitted, sample)
    console = Console(width=150)
    console.print(table)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    console.print(
        f"{Path(sys.executable).name}, {torch.get_num_threads()} threads, fp32; peak memory of all rows {peak:.2f} GiB"
    )


if __name__ == "__main__":
    main()
