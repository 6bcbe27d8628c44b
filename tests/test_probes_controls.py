"""Controls know only what they should, learn from training rows only, and lens directions are the lens's own."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from tiny import LAYERS, WIDTH, tiny_hf_model, tiny_model

from klb_probe.cases.scenarios import WORDINGS
from klb_probe.lens.contrast import TokenContrast
from klb_probe.lens.jacobian import JacobianLens
from klb_probe.lens.margin import LogitLens
from klb_probe.models.load import from_model
from klb_probe.probes.controls import (
    bag_of_words_cross_fit,
    bag_of_words_scores,
    lengths,
    lens_margins,
    one_number,
    random_features,
    random_subspace,
    toward_owed,
)
from klb_probe.probes.lens_cosines import cosine, lens_cosines, lens_direction
from klb_probe.probes.population import Population

ONE_PAIR = TokenContrast(((("a", 11), ("b", 22)),))
TWO_PAIRS = TokenContrast(((("a", 11), ("b", 22)), (("c", 33), ("d", 44))))
SOURCES = (0, 2)  # not 1: a layer the margin lens does not read


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def margin_lens(model, contrast):
    generator = torch.Generator().manual_seed(5)
    matrices = {layer: torch.eye(WIDTH) + 0.4 * torch.randn(WIDTH, WIDTH, generator=generator) for layer in SOURCES}
    return JacobianLens(matrices, n_prompts=3, target_layer=LAYERS - 1).to_margin_lens(model, contrast, k=64)


# --- Random features and subspaces. ---


def prompts(n, length, *, vocabulary=40_000, seed=0):
    return np.random.default_rng(seed).integers(vocabulary, size=(n, length)).tolist()


def test_random_features_know_the_tokens_and_not_their_order():
    ids = [[5, 9, 9, 70_000], [9, 70_000, 5, 9], [5, 9, 70_000, 70_000], [5, 5, 9, 9, 9, 9, 70_000, 70_000]]
    features = random_features(ids, 64)
    assert features.shape == (4, 64)
    assert features.dtype == np.float32
    np.testing.assert_array_equal(features[0], features[1])
    np.testing.assert_allclose(features[0], features[3], atol=1e-6)  # twice the same tokens: the same mean
    assert np.abs(features[0] - features[2]).max() > 0.1


def test_random_features_are_the_mean_of_one_vector_a_token():
    ids = prompts(3, 20)
    alone = {token: random_features([[token]], 16)[0] for prompt in ids for token in prompt}
    expected = [np.mean([alone[token] for token in prompt], axis=0) for prompt in ids]
    np.testing.assert_allclose(random_features(ids, 16), expected, atol=1e-6)
    every = np.stack(list(alone.values()))
    assert abs(every.mean()) < 4 / every.size**0.5
    assert every.std() == pytest.approx(1, abs=0.1)


def test_random_features_depend_on_the_seed_and_not_on_the_other_prompts():
    ids = [prompt[: 10 + number] for number, prompt in enumerate(prompts(12, 40, vocabulary=60))]
    features = random_features(ids, 32, seed=1)
    np.testing.assert_array_equal(random_features(ids[::-1], 32, seed=1)[::-1], features)
    np.testing.assert_array_equal(random_features(ids[3:5], 32, seed=1), features[3:5])
    assert np.abs(random_features(ids, 32, seed=2) - features).max() > 0.1


def test_random_features_are_fast():
    ids = prompts(1000, 800, vocabulary=8000)
    started = time.perf_counter()
    random_features(ids, 576)
    assert time.perf_counter() - started < 10


def test_random_subspaces_are_orthonormal_and_uniform():
    projection = random_subspace(20, 7, seed=3)
    np.testing.assert_allclose(projection.T @ projection, np.eye(7), atol=1e-6)
    np.testing.assert_array_equal(projection, random_subspace(20, 7, seed=3))
    assert np.abs(projection - random_subspace(20, 7, seed=4)).max() > 0.1
    assert random_subspace(5).shape == (5, 5)
    # Of a Haar matrix every entry has mean 0 and variance 1 / width; without the sign fix the diagonal has not.
    mean = np.mean([random_subspace(4, 4, seed) for seed in range(2000)], axis=0)
    assert np.abs(mean).max() < 5 * 0.5 / 2000**0.5


def test_lengths_are_one_feature():
    np.testing.assert_array_equal(lengths([3, 700]), [[3], [700]])


# --- Bag of words. ---


@dataclass(frozen=True)
class Halves:
    name: str
    train: np.ndarray
    test: np.ndarray


def word_texts(n=80, *, told=True, seed=0):
    """Texts of random words, their labels, and two folds; if told, the label is a word of the text."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(n) % 2 == 0)
    texts = [" ".join(rng.choice([f"w{i}" for i in range(30)], 12)) for _ in range(n)]
    if told:
        texts = [f"{text} {'secretly' if label else 'openly'}" for text, label in zip(texts, labels, strict=True)]
    first = np.arange(n) < n // 2
    return texts, labels, [Halves("second", ~first, first), Halves("first", first, ~first)]


def everything(labels):
    return Population("all", np.arange(len(labels)), labels, np.full(len(labels), -1))


def test_a_bag_of_words_tells_a_label_that_is_a_word_and_nothing_else():
    texts, labels, folds = word_texts(400)
    scores, hard, fold = bag_of_words_cross_fit(texts, everything(labels), folds, labels)
    assert min(roc_auc_score(labels[fold == number], scores[fold == number]) for number in (0, 1)) > 0.99
    assert (hard == labels).mean() > 0.95
    texts, labels, folds = word_texts(400, told=False)
    scores, _, fold = bag_of_words_cross_fit(texts, everything(labels), folds, labels)
    aurocs = [roc_auc_score(labels[fold == number], scores[fold == number]) for number in (0, 1)]
    assert np.abs(np.mean(aurocs) - 0.5) < 4 * (201 / (12 * 100 * 100)) ** 0.5 / 2**0.5  # the null variance of a fold's AUROC


def test_a_bag_of_words_learns_from_training_rows_only():
    texts, labels, (fold, _) = word_texts()
    scores, hard = bag_of_words_scores(texts, labels, fold.train, fold.test)
    assert scores.shape == hard.shape == (fold.test.sum(),)
    np.testing.assert_array_equal(hard, scores > 0)
    # A word that only test rows have, wrong labels of test rows, and other test rows change nothing.
    changed = [f"{text} unheard" if test else text for text, test in zip(texts, fold.test, strict=True)]
    np.testing.assert_allclose(bag_of_words_scores(changed, labels, fold.train, fold.test)[0], scores, atol=1e-12)
    wrong = np.where(fold.test, ~labels, labels)
    np.testing.assert_array_equal(bag_of_words_scores(texts, wrong, fold.train, fold.test)[0], scores)
    few = fold.test & (np.arange(len(texts)) < 5)
    np.testing.assert_allclose(bag_of_words_scores(texts, labels, fold.train, few)[0], scores[:5], atol=1e-12)
    # The labels of training rows do change them.
    assert roc_auc_score(labels[fold.test], bag_of_words_scores(texts, ~labels, fold.train, fold.test)[0]) < 0.2


def test_a_bag_of_words_scores_every_test_row_by_the_population_s_training_rows():
    texts, labels, _ = word_texts(90)
    part = np.arange(90) % 3
    folds = [Halves("0", part == 1, part == 0), Halves("1", part == 0, part == 1)]  # rows of part 2 are in no fold
    rows = np.flatnonzero(np.arange(90) < 60)
    population = Population("first 60", rows, labels[rows], np.full(60, -1))
    scores, hard, fold = bag_of_words_cross_fit(texts, population, folds, labels[rows])
    np.testing.assert_array_equal(fold, np.where(part == 2, -1, part))
    np.testing.assert_array_equal(np.isnan(scores), part == 2)
    # Other rows' labels and texts are not learned from; their own scores are z-scores of the training negatives.
    for number, one in enumerate(folds):
        train = one.train & (np.arange(90) < 60)
        raw, above = bag_of_words_scores(texts, labels, train, np.ones(90, bool))
        negatives = raw[train & ~labels]
        assert len(negatives) > 5
        expected = (raw - negatives.mean()) / negatives.std()
        np.testing.assert_allclose(scores[fold == number], expected[fold == number], atol=1e-9)
        np.testing.assert_array_equal(hard[fold == number], above[fold == number])


def test_a_fold_without_two_labels_or_words_has_no_scores():
    texts, labels, folds = word_texts()
    one_label = np.where(folds[0].train, True, labels)
    silent = [" " if train else text for text, train in zip(texts, folds[0].train, strict=True)]
    for said, known in ((texts, one_label), (silent, labels)):
        scores, hard, fold = bag_of_words_cross_fit(said, everything(known), folds, known)
        np.testing.assert_array_equal(fold, np.where(folds[0].test, -1, 1))
        np.testing.assert_array_equal(np.isnan(scores), folds[0].test)
        assert not hard[folds[0].test].any()


# --- One number. ---


def test_one_number_points_and_splits_by_the_training_rows():
    labels = np.array([True, True, False, False])
    (fit,) = one_number.fit(np.array([[1.0], [3], [7], [9]], dtype=np.float32), labels)
    np.testing.assert_array_equal(fit.direction, [-1])
    np.testing.assert_allclose(fit.score(np.array([[5.0], [2], [8]])), [0, 3, -3])
    (fit,) = one_number.fit(np.array([[7.0], [9], [1], [3]], dtype=np.float32), labels)
    np.testing.assert_array_equal(fit.direction, [1])
    np.testing.assert_allclose(fit.score(np.array([[5.0], [2], [8]])), [0, -3, 3])
    (tie,) = one_number.fit(np.full((4, 1), 6, dtype=np.float32), labels)
    np.testing.assert_array_equal(tie.direction, [1])
    np.testing.assert_allclose(tie.score(np.array([[6.0]])), [0])
    assert not one_number.needs_contrast
    assert len(one_number.settings) == 1


def test_an_unread_layer_has_no_score():
    (fit,) = one_number.fit(np.full((4, 1), np.nan, dtype=np.float32), np.array([True, True, False, False]))
    assert np.isnan(fit.score(np.zeros((2, 1)))).all()


# --- Lenses. ---


def test_lens_margins_are_the_lens_s_own_and_nan_where_it_reads_nothing(model):
    residuals = np.random.default_rng(0).standard_normal((6, WIDTH)).astype(np.float32)
    lens = margin_lens(model, TWO_PAIRS)
    for layer in (0, 2, 3):
        expected = lens.margin(torch.from_numpy(residuals), layer).numpy()
        np.testing.assert_allclose(lens_margins(lens, residuals, layer), expected, atol=1e-6)
        assert np.ptp(expected) > 0
    assert np.isnan(lens_margins(lens, residuals, 1)).all()
    assert np.isfinite(lens_margins(LogitLens.of(model, TWO_PAIRS), residuals, 1)).all()


def test_only_reversed_questions_are_turned():
    margins = np.array([1.0, 2, -3, np.nan])
    np.testing.assert_array_equal(toward_owed(margins, ["plain", "reversed", "reversed", "reversed"]), [1, -2, 3, np.nan])
    np.testing.assert_array_equal(toward_owed(margins, ["plain"] * 4), margins)
    assert WORDINGS == ("plain", "reversed")


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])  # RMSNorm, LayerNorm, a gain of 1 + weight and a soft-cap
@pytest.mark.parametrize("layer", [0, 2, 3])
def test_the_lens_direction_is_where_the_margin_rises_most(family, layer):
    """Where the numerator is zero, the margin's gradient is along the direction exactly, whatever the norm."""
    model = tiny_model(family)
    for lens in (margin_lens(model, ONE_PAIR), LogitLens.of(model, ONE_PAIR)):
        # The norm's bias would add a constant to the margin, which the soft-cap bends.
        lens.readout = replace(lens.readout, bias=torch.zeros(2))
        lens._identity = LogitLens(lens.contrast, lens.readout, torch.zeros(1, WIDTH))
        direction = torch.from_numpy(lens_direction(lens, layer))
        unit = direction / direction.norm()
        residual = torch.randn(WIDTH, generator=torch.Generator().manual_seed(1))
        residual = (residual - residual @ unit * unit).requires_grad_()
        margin = lens.margin(residual, layer)
        assert margin.abs() < 1e-5
        (gradient,) = torch.autograd.grad(margin, residual)
        assert cosine(gradient.numpy(), direction.numpy()) == pytest.approx(1, abs=1e-5)
        steps = torch.nn.functional.normalize(torch.randn(200, WIDTH, generator=torch.Generator().manual_seed(2)), dim=-1)
        rises = lens.margin((residual + 0.01 * torch.cat([unit[None], steps])).detach(), layer)
        assert rises.argmax() == 0
        assert rises[0] > 0


def test_directions_of_several_pairs_follow_the_reduction(model):
    residuals = torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(3))
    for reduction in ("mean", "first"):
        contrast = replace(TWO_PAIRS, reduction=reduction)
        for lens in (margin_lens(model, contrast), LogitLens.of(model, contrast)):
            numerators = residuals.numpy() @ lens_direction(lens, 2)
            biases = contrast.margin(lens.readout.bias)
            read = lens.margin(residuals, 2) - biases
            np.testing.assert_array_equal(np.sign(numerators), np.sign(read.numpy()))
    same = [lens_direction(LogitLens.of(model, replace(TWO_PAIRS, reduction=name)), 0) for name in ("mean", "max", "logsumexp")]
    np.testing.assert_array_equal(same[0], same[1])
    np.testing.assert_array_equal(same[0], same[2])


def test_a_vector_added_to_all_head_rows_leaves_the_direction(model):
    changed = tiny_hf_model("llama")
    with torch.no_grad():
        changed.get_output_embeddings().weight += 3 * torch.randn(WIDTH, generator=torch.Generator().manual_seed(4))
    other = from_model(changed, model.tokenizer, name="shifted")
    for make in (margin_lens, LogitLens.of):
        lens, shifted = make(model, TWO_PAIRS), make(other, TWO_PAIRS)
        assert (lens.readout.directions - shifted.readout.directions).abs().max() > 0.5
        for layer in (0, 3):
            np.testing.assert_allclose(lens_direction(shifted, layer), lens_direction(lens, layer), atol=1e-5)


def test_cosines_by_layer(model):
    lens = margin_lens(model, ONE_PAIR)
    layers = range(LAYERS)
    directions = np.stack([lens_direction(lens, layer) if lens.reads(layer) else np.ones(WIDTH) for layer in layers])
    np.testing.assert_allclose(lens_cosines(directions, layers, lens), [1, np.nan, 1, 1], atol=1e-6)
    np.testing.assert_allclose(lens_cosines(-2 * directions[2:], [2, 3], lens), [-1, -1], atol=1e-6)
    random = np.random.default_rng(0).standard_normal((LAYERS, WIDTH)).astype(np.float32)
    found = lens_cosines(random, layers, LogitLens.of(model, ONE_PAIR))
    assert (np.abs(found) < 1).all()
    # The logit lens reads every layer alike; the margin lens below its target does not.
    np.testing.assert_array_equal(lens_direction(LogitLens.of(model, ONE_PAIR), 0), lens_direction(lens, LAYERS - 1))
    assert cosine(lens_direction(lens, 0), lens_direction(lens, LAYERS - 1)) < 0.99


def test_a_cosine_without_a_direction_is_nan():
    assert np.isnan(cosine(np.zeros(3), np.ones(3)))
    assert np.isnan(cosine(np.array([np.nan, 1, 1]), np.ones(3)))
    assert cosine(np.array([1e-30, 0], dtype=np.float32), np.array([1e30, 1e30], dtype=np.float32)) == pytest.approx(0.5**0.5)
