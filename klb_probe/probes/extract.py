"""From sites to residuals in the store, each text read once and each shared start of texts computed once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from klb_probe.models.prefix import prefill
from klb_probe.models.residual_model import ResidualModel
from klb_probe.outputs import check_writable
from klb_probe.probes.site import Site
from klb_probe.probes.store import ResidualStore


@dataclass(frozen=True)
class _Pass:
    """Sites that one forward pass over the longest of them reads."""

    sites: list[Site]

    @property
    def ids(self) -> tuple[int, ...]:
        return self.sites[0].ids

    @property
    def positions(self) -> list[int]:
        """All that are read."""
        return sorted({position for site in self.sites for position in site.positions})


def extract(
    model: ResidualModel,
    sites: Sequence[Site],
    store: ResidualStore,
    *,
    batch_size: int = 8,
    on_site: Callable[[Site], object] = lambda _: None,
) -> None:
    """Read the residuals of all layers at the sites that the store lacks.

    What has been read is in the store even if this is interrupted; the memory taken does not grow with the number of sites
    beyond their ids.

    Raises KlbError before anything is read, if there is something to read and the store cannot be written.

    Args:
        model: The model.
        sites: Where to read; the same site may be there several times.
        store: The model's store.
        batch_size: Most texts in one forward pass.
        on_site: Called with each site that was read.
    """
    todo = list({sites[index].key: sites[index] for index in store.missing(sites)}.values())
    if not todo:
        return
    check_writable(store.folder)
    passes = list(_passes(todo))
    ids, positions = [one.ids for one in passes], [one.positions for one in passes]
    with store:
        for indices, capture in prefill(model, ids, range(model.n_layers), (), positions=positions, batch_size=batch_size):
            for row, index in enumerate(indices):
                column = {position: number for number, position in enumerate(positions[index])}
                for site in passes[index].sites:
                    columns = [column[position] for position in site.positions]
                    residual = capture.residuals[:, row, columns].float().mean(1)
                    store.add([site.key], residual[:, None])
                    on_site(site)


def _passes(sites: Sequence[Site]) -> Iterator[_Pass]:
    """Each site with the shortest text that goes on from it: sorted, a text comes right before those that start with it."""
    current: _Pass | None = None
    for site in sorted(sites, key=lambda site: site.ids, reverse=True):
        if current is not None and current.ids[: len(site.ids)] == site.ids:
            current.sites.append(site)
            continue
        if current is not None:
            yield current
        current = _Pass([site])
    if current is not None:
        yield current
