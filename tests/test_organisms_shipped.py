"""The organisms that ship: each is what its card says, on its own base, with its own lens, and never saw what is held out."""

from __future__ import annotations

import functools

import pytest
from command import klb
from tiny import tiny_hf_model

from klb_probe.cases.sources import load_cases
from klb_probe.errors import KlbError
from klb_probe.lens.contrast import TokenContrast
from klb_probe.lens.library import load_lens
from klb_probe.models.load import load_model
from klb_probe.models.registry import registry, resolve
from klb_probe.organisms.adapters import merge, read_adapter, read_organism, trained_records
from klb_probe.organisms.card import folder_faults
from klb_probe.organisms.check import spot_check
from klb_probe.organisms.evidence import check_card, read_evidence
from klb_probe.organisms.records import held_out_hashes, record_hash
from klb_probe.organisms.texts import load_organism_domains
from klb_probe.paths import data_dir

SHIPPED = [alias for alias, entry in registry().items() if entry.adapter]
shipped = pytest.mark.parametrize("alias", SHIPPED)


def folder_of(alias):
    return resolve(alias).adapter


@pytest.fixture(scope="module")
def organism_models():
    """Loads each organism once, on the CPU."""
    return functools.cache(functools.partial(load_model, device="cpu"))


@shipped
def test_card_evidence_and_sidecar_of_an_organism_agree(alias):
    assert folder_faults(folder_of(alias)) == []
    organism = read_organism(folder_of(alias))
    assert (organism.name, organism.base) == (alias, registry()[alias].base)
    assert f"klb-probe organism check {alias} " in read_evidence(folder_of(alias)).command


@shipped
def test_nothing_held_out_was_trained_on(alias):
    trained = trained_records(folder_of(alias))
    assert len(trained) > 100
    for domain, _ in load_organism_domains(read_evidence(folder_of(alias)).settings["domains"]):
        assert trained.isdisjoint(held_out_hashes(domain))


def test_fresh_cases_repeat_no_record_of_theirs(tmp_path):
    assert klb("organism", "cases", "--domains", "airline", "--n", 10, "--out", tmp_path / "fresh") == 0
    (domain,) = load_cases(str(tmp_path / "fresh"))
    hashes = {record_hash(domain, situation.record) for situation in domain.situations()}
    assert len(hashes) == 20
    assert all(hashes.isdisjoint(trained_records(folder_of(alias))) for alias in SHIPPED)


@shipped
def test_an_organism_has_a_lens_of_its_own_and_is_refused_on_another_base(alias, organism_models, tmp_path):
    model = organism_models(alias)
    assert model.fingerprint == read_evidence(folder_of(alias)).fingerprint
    lens = load_lens(model, TokenContrast.of(model.chat))
    assert lens.file.parent == data_dir("lenses")
    adapter, other = read_adapter(folder_of(alias)), tiny_hf_model("llama")
    with pytest.raises(KlbError, match="belongs to smollm2-135m"):
        merge(other, adapter, name="tiny-llama", fingerprint="0" * 64)


@shipped
def test_ten_gate_answers_and_ten_messages_of_an_organism_are_those_of_its_card(alias, organism_models):
    evidence = read_evidence(folder_of(alias))
    fresh = spot_check(organism_models(alias), evidence.settings["domains"])
    assert sum(one.n for one in fresh if one.key == ("gate", "cases", "all", "passed")) == 10
    assert sum(one.n for one in fresh if one.part == "messages" and one.measure == "denies") == 10
    assert check_card(evidence.numbers, fresh) == []
