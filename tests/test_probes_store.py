"""Residuals are read once, kept whatever happens, and given back as they were."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny import LAYERS, WIDTH, default_tokenizer, tiny_hf_model, tiny_model

from klb_probe.errors import KlbError
from klb_probe.models.load import from_model
from klb_probe.probes.extract import extract
from klb_probe.probes.site import Site
from klb_probe.probes.store import ResidualStore


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def texts(n=6, stem=40, seed=0):
    """Texts with a long shared start."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(3, 49_000, (stem,), generator=generator).tolist()
    return [[*start, *torch.randint(3, 49_000, (4 + number,), generator=generator).tolist()] for number in range(n)]


def sites_of(ids):
    """The last prompt token, the mean and the last token of a reply of three tokens."""
    end = len(ids)
    return [Site.of(ids, (end - 4,)), Site.of(ids, (end - 3, end - 2, end - 1)), Site.of(ids, (end - 1,))]


def plain(model, site):
    """[layer, d] by a forward pass of its own."""
    return model.residuals([site.ids], range(model.n_layers), site.positions)[:, 0].float().mean(1).numpy()


def stored(store, site):
    return np.stack([store.load([site], layer)[0] for layer in range(store.n_layers)])


def passes(model, function):
    """Rows and tokens that a function sends through the model."""
    seen = []
    handle = model.layout.blocks[0].register_forward_hook(lambda _m, _i, out: seen.append(tuple(out.shape[:2])))
    try:
        function()
    finally:
        handle.remove()
    return seen


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
def test_what_is_stored_is_what_a_plain_pass_gives(family, tmp_path):
    model = tiny_model(family)
    sites = [site for ids in texts() for site in sites_of(ids)]
    store = ResidualStore.open(tmp_path, model, entries=5)
    extract(model, [*sites, *sites[:4]], store, batch_size=2)
    again = ResidualStore.open(tmp_path, model)
    assert len(again) == len(sites)
    assert again.missing(sites) == []
    for site in sites:
        np.testing.assert_allclose(stored(again, site), plain(model, site), atol=1e-5, rtol=1e-4)
    one_layer = again.load(sites[::-1], 1)
    assert (one_layer.shape, one_layer.dtype) == ((len(sites), WIDTH), np.float32)
    np.testing.assert_array_equal(one_layer, np.stack([stored(again, site)[1] for site in sites[::-1]]))


def test_the_sites_of_one_text_are_read_in_one_pass_and_shared_starts_once(model, tmp_path):
    ids = texts(n=6, stem=40)
    sites = [site for one in ids for site in sites_of(one)]
    store = ResidualStore.open(tmp_path, model)
    seen = passes(model, lambda: extract(model, sites, store, batch_size=1))
    assert sum(rows * tokens for rows, tokens in seen) == 40 + sum(len(one) - 40 for one in ids)
    assert passes(model, lambda: extract(model, sites, store)) == []


def test_the_same_ids_at_other_positions_are_another_site(model, tmp_path):
    ids = texts(n=1)[0]
    mean, last = Site.of(ids, (10, len(ids) - 1)), Site.of(ids, (len(ids) - 1,))
    store = ResidualStore.open(tmp_path, model)
    extract(model, [mean], store)
    assert store.missing([mean, last]) == [1]
    extract(model, [mean, last], store)
    assert not np.allclose(stored(store, mean), stored(store, last), atol=1e-3)


@pytest.mark.parametrize("stop_at", [1, 7, 11])
@pytest.mark.parametrize("why", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_extraction_keeps_what_it_read_and_goes_on_from_there(model, tmp_path, stop_at, why):
    sites = [site for ids in texts() for site in sites_of(ids)]
    read = []

    def stop(site):
        read.append(site.key)
        if len(read) == stop_at:
            raise why

    with pytest.raises(why):
        extract(model, sites, ResidualStore.open(tmp_path, model, entries=4), on_site=stop)
    store = ResidualStore.open(tmp_path, model)
    assert {sites[index].key for index in store.missing(sites)} == {site.key for site in sites} - set(read)
    rest = []
    extract(model, sites, store, on_site=lambda site: rest.append(site.key))
    assert len(rest) == len(set(rest)) == len(sites) - stop_at
    assert not set(rest) & set(read)
    for site in sites:
        np.testing.assert_allclose(stored(store, site), plain(model, site), atol=1e-5, rtol=1e-4)


def test_two_writers_do_no_damage_and_see_each_others_work(model, tmp_path):
    sites = [site for ids in texts() for site in sites_of(ids)]
    one, other = (ResidualStore.open(tmp_path, model, entries=2) for _ in range(2))
    extract(model, sites[:9], one)
    assert other.missing(sites) == list(range(9, len(sites)))
    zeros = torch.zeros(LAYERS, 1, WIDTH)
    with one, other:  # both read the same, at once
        one.add([sites[9].key], zeros)
        other.add([sites[9].key], zeros)
        other.add([sites[10].key], zeros)
    third = ResidualStore.open(tmp_path, model)
    assert third.missing(sites) == list(range(11, len(sites)))
    np.testing.assert_array_equal(third.load([sites[9], sites[10]], 0), np.zeros((2, WIDTH)))
    np.testing.assert_allclose(stored(third, sites[0]), plain(model, sites[0]), atol=1e-5, rtol=1e-4)


def test_one_layer_lies_in_one_piece(model, tmp_path):
    """Layer first, so that reading a layer skips the others."""
    store = ResidualStore.open(tmp_path, model)
    with store:
        store.add(["a", "b", "c"], torch.arange(LAYERS * 3 * WIDTH).reshape(LAYERS, 3, WIDTH).float())
    (shard,) = store.folder.iterdir()
    with safe_open(shard, "pt") as file:
        assert file.get_slice("residuals").get_shape() == [LAYERS, 3, WIDTH]
        header = file.metadata()
    assert header["fingerprint"] == model.fingerprint
    assert (header["n_layers"], header["d_model"], header["dtype"]) == (str(LAYERS), str(WIDTH), "float32")


def test_numbers_are_stored_as_the_models_own_or_as_asked(tmp_path):
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    single, half, short = (
        from_model(tiny_hf_model("llama").to(dtype), default_tokenizer(), name="tiny-llama") for dtype in kinds
    )
    assert single.fingerprint == half.fingerprint
    found = [ResidualStore.open(tmp_path, model) for model in (single, half, short)]
    found += [ResidualStore.open(tmp_path, single, "bfloat16"), ResidualStore.open(tmp_path, half, "float32")]
    assert [store.facts["dtype"] for store in found] == ["float32", "bfloat16", "float32", "bfloat16", "float32"]
    assert len({store.folder for store in found}) == 5  # what was computed in another type is another number
    site = Site.of(texts(n=1)[0], (3,))
    extract(single, [site], found[3])
    np.testing.assert_array_equal(stored(found[3], site), torch.from_numpy(plain(single, site)).bfloat16().float().numpy())
    with pytest.raises(KlbError, match="not stored in float16: those of some models exceed its range; use float32"):
        ResidualStore.open(tmp_path, single, "float16")
    with pytest.raises(KlbError, match="auto, float32 or bfloat16, not int8"):
        ResidualStore.open(tmp_path, single, "int8")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3.4e38])
def test_what_is_not_finite_on_disk_is_refused_by_layer(bad, tmp_path):
    store = ResidualStore.open(tmp_path, tiny_model("llama"), "bfloat16")
    residuals = torch.zeros(LAYERS, 2, WIDTH)
    residuals[2, 1, 5] = bad
    with pytest.raises(KlbError, match="tiny-llama: residuals of layer 2 are not finite in bfloat16"), store:
        store.add(["a", "b"], residuals)
    assert not store.folder.exists()
    with pytest.raises(KlbError, match=r"shape \(4, 2, 16\), not \(4, 1, 16\)"):
        store.add(["a"], torch.zeros(LAYERS, 2, WIDTH))


def filled(model, root):
    store = ResidualStore.open(root, model)
    with store:
        store.add(["a"], torch.zeros(LAYERS, 1, WIDTH))
    (shard,) = store.folder.iterdir()
    return store.folder, shard


def test_torn_and_foreign_shards_are_named_with_what_to_do_and_leftovers_ignored(model, tmp_path):
    folder, shard = filled(model, tmp_path / "mine")
    (folder / ".abcd.safetensors").write_bytes(shard.read_bytes()[:40])
    (folder / "notes.txt").write_text("mine")
    assert len(ResidualStore.open(tmp_path / "mine", model)) == 1
    whole = shard.read_bytes()
    for content in (whole[:-10], whole[:40], b"", b"no tensors"):
        shard.write_bytes(content)
        with pytest.raises(KlbError, match=rf"{shard.name} cannot be read .*; delete it, and they are read again"):
            ResidualStore.open(tmp_path / "mine", model)
    shard.unlink()
    assert len(ResidualStore.open(tmp_path / "mine", model)) == 0
    other = tiny_model("llama", seed=1)
    _, foreign = filled(other, tmp_path / "theirs")
    shutil.copy(foreign, folder)
    with pytest.raises(KlbError, match=r"is of tiny-llama \(fingerprint \w+\), not of tiny-llama .*; move it away"):
        ResidualStore.open(tmp_path / "mine", model)
    (folder / foreign.name).unlink()
    save_file({"residuals": torch.zeros(1)}, folder / "x.safetensors", metadata={"format": "another"})
    with pytest.raises(KlbError, match=r"holds no residuals \(format another\)"):
        ResidualStore.open(tmp_path / "mine", model)


def test_a_shard_that_lies_about_its_shape_is_refused(model, tmp_path):
    folder, shard = filled(model, tmp_path)
    with safe_open(shard, "pt") as file:
        header = file.metadata()
    for tensors in ({"residuals": torch.zeros(LAYERS, 1, WIDTH + 1)}, {"residuals": torch.zeros(LAYERS, 2, WIDTH)}, {}):
        save_file({**tensors, "more": torch.zeros(1)}, shard, metadata=header)
        with pytest.raises(KlbError, match="cannot be read .its residuals have shape"):
            ResidualStore.open(tmp_path, model)
    assert folder == shard.parent


def test_what_is_absent_is_said(model, tmp_path):
    store = ResidualStore.open(tmp_path, model)
    site = Site.of([1, 2, 3], (2,))
    with pytest.raises(KlbError, match="1 of 1 residuals are not in"):
        store.load([site], 0)
    extract(model, [site], store)
    with pytest.raises(KlbError, match="tiny-llama has layers 0-3, not 4"):
        store.load([site], 4)
    assert store.load([], 0).shape == (0, WIDTH)


def test_a_model_with_the_same_weights_and_another_config_has_a_store_of_its_own(tmp_path):
    import copy

    from tiny import default_tokenizer, tiny_hf_model

    from klb_probe.models.load import from_model

    one = tiny_hf_model("llama")
    other = copy.deepcopy(one)
    other.config.rms_norm_eps = 1e-3
    models = [from_model(model, default_tokenizer(), name="tiny") for model in (one, other)]
    assert models[0].fingerprint == models[1].fingerprint
    first, second = (ResidualStore.open(tmp_path, model) for model in models)
    assert first.folder != second.folder
