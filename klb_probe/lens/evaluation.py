"""Does a full Jacobian lens read what the model has on its mind on the way to an answer?

Multi-step items have a known intermediate ("the capital of the country the Eiffel Tower stands in": France). A lens is
scored by the rank of the intermediate among all tokens at the last prompt token, by layer: pass@k, and the area under
pass@k over log k (FIELD.md B.4). It stands beside the logit lens (identity transport) and a random transport of the same
singular values. Next-token KL is described, never a gate: the lens is meant to show what is not said yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor

from klb_probe.errors import KlbError
from klb_probe.models.chat import encode_text
from klb_probe.models.residual_model import ResidualModel

if TYPE_CHECKING:
    from rich.table import Table

    from klb_probe.lens.jacobian import JacobianLens

KS = (1, 5, 10, 50)
LENSES = ("jacobian", "logit", "random transport")
_LEVEL, _DRAWS = 0.95, 10_000


class Item(BaseModel):
    """One multi-step prompt.

    Attributes:
        id: Its name.
        kind: ``multi_hop``, ``arithmetic`` or ``translation``; scored together, listed apart in ranks.csv.
        prompt: Text up to where the answer starts.
        intermediates: Words for the step in between, any of which counts.
        answer: What follows; for readers, not scored.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    kind: str
    prompt: str = Field(min_length=1)
    intermediates: tuple[str, ...] = Field(min_length=1)
    answer: str


@dataclass(frozen=True)
class TokenItem:
    """An item on a model's tokenizer: prompt ids, and the single-token ids of its intermediates."""

    item: Item
    ids: tuple[int, ...]
    intermediates: tuple[int, ...]


def load_items(path: Path | None = None) -> list[Item]:
    """Items of a YAML file (the project's by default)."""
    path = path or Path(__file__).with_name("eval_items.yaml")
    try:
        items = TypeAdapter(list[Item]).validate_python(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise KlbError(f"cannot read items {path}: {getattr(error, 'strerror', None) or str(error).splitlines()[0]}") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise KlbError(f"items {path}: {'.'.join(map(str, first['loc'])) or 'file'}: {first['msg']}") from None
    if twice := [name for name, count in Counter(item.id for item in items).items() if count > 1]:
        raise KlbError(f"items {path}: id given twice: {twice[0]}")
    return items


def usable_items(model: ResidualModel, items: Sequence[Item]) -> tuple[list[TokenItem], dict[str, int]]:
    """Items with an intermediate that is one token (with or without a leading space), and how many others, by kind."""
    usable: list[TokenItem] = []
    skipped: Counter[str] = Counter()
    for item in items:
        forms = [encode_text(model.tokenizer, space + word, "never") for word in item.intermediates for space in (" ", "")]
        single = tuple(dict.fromkeys(form[0] for form in forms if len(form) == 1))
        if single:
            usable.append(TokenItem(item, tuple(encode_text(model.tokenizer, item.prompt, "auto")), single))
        else:
            skipped[item.kind] += 1
    if len(usable) < 4:
        raise KlbError(f"only {len(usable)} items have a single-token intermediate on {model.name}: too few to score")
    return usable, dict(skipped)


@dataclass(frozen=True)
class Evaluation:
    """Ranks of intermediates.

    Attributes:
        items: The items.
        layers: Source layers, ascending.
        ranks: ``[lens, layer, item]``, 1 for the top token, in the order of :data:`LENSES`.
        kl: ``[lens, layer]``, mean KL(model's next token || lens) in nats; a description.
        half: Which half each item is in ``[item]``, boolean, balanced within kinds.
        vocabulary: Tokens ranked.
    """

    items: Sequence[TokenItem]
    layers: tuple[int, ...]
    ranks: np.ndarray
    kl: np.ndarray
    half: np.ndarray
    vocabulary: int

    def chosen(self, lens: int) -> np.ndarray:
        """Index of the layer each item is scored at ``[item]``: the best on the half the item is NOT in."""
        areas = rank_area(self.ranks[lens])
        best = {half: int(areas[:, self.half != half].mean(1).argmax()) for half in (False, True)}
        return np.where(self.half, best[True], best[False])

    def scores(self, *, seed: int = 0) -> pd.DataFrame:
        """Columns: lens, at, layers, metric, value, low, high, minus_jacobian, minus_low, minus_high, n.

        ``at`` says whose layers: each lens's own choice, or the Jacobian lens's. Intervals: 95 % bootstrap over items, for
        the value and for its difference from the Jacobian lens's.
        """
        rng = np.random.default_rng(seed)
        n = len(self.items)
        draws = rng.multinomial(n, np.full(n, 1 / n), size=_DRAWS)  # how often each item is drawn
        choice = [self.chosen(lens) for lens in range(len(LENSES))]
        everything = np.arange(n)
        reference = _metrics(self.ranks[0, choice[0], everything])
        rows = []
        for at in ("own best layer", "the Jacobian lens's layer"):
            for number, lens in enumerate(LENSES):
                index = choice[number] if at == "own best layer" else choice[0]
                if number == 0 and at != "own best layer":
                    continue
                used = "/".join(str(self.layers[i]) for i in dict.fromkeys(index[np.argsort(self.half, kind="stable")]))
                for metric, values in _metrics(self.ranks[number, index, everything]).items():
                    difference = values - reference[metric]
                    row = (values.mean(), *_interval(draws, values), difference.mean(), *_interval(draws, difference))
                    rows.append((lens, at, used, metric, *row, n))
        names = ["value", "low", "high", "minus_jacobian", "minus_low", "minus_high", "n"]
        return pd.DataFrame(rows, columns=["lens", "at", "layers", "metric", *names])

    def ranks_frame(self) -> pd.DataFrame:
        """Tidy: item, kind, half, lens, layer, rank, area; and the mean KL of the lens at the layer."""
        n_lenses, n_layers, n_items = self.ranks.shape
        return pd.DataFrame(
            {
                "item": np.tile([one.item.id for one in self.items], n_lenses * n_layers),
                "kind": np.tile([one.item.kind for one in self.items], n_lenses * n_layers),
                "half": np.tile(np.where(self.half, "b", "a"), n_lenses * n_layers),
                "lens": np.repeat(LENSES, n_layers * n_items),
                "layer": np.tile(np.repeat(self.layers, n_items), n_lenses),
                "rank": self.ranks.reshape(-1),
                "area": rank_area(self.ranks).reshape(-1),
                "kl_all_items": np.repeat(self.kl.reshape(-1), n_items),
            }
        )

    def table(self, scores: pd.DataFrame) -> Table:
        """One line a lens and choice of layer."""
        from rich.table import Table

        title = f"Known intermediates at the last prompt token: n = {len(self.items)} items, {self.vocabulary} tokens ranked"
        table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
        metrics = list(dict.fromkeys(scores["metric"]))
        for header in ("lens", "layer", *metrics, "next-token\nKL, nats"):
            table.add_column(header, no_wrap=True)
        for (lens, at, layers), rows in scores.groupby(["lens", "at", "layers"], sort=False):
            cells = [f"{row.value:.2f}\n[{row.low:.2f}, {row.high:.2f}]" for row in rows.itertuples()]
            at_layers = [self.layers.index(int(layer)) for layer in layers.split("/")]
            kl = self.kl[LENSES.index(lens), at_layers].mean()
            shown = layers if at == "own best layer" else f"{layers}\n(jacobian's)"
            table.add_row(lens, shown, *cells, f"{kl:.1f}")
        return table

    def reading(self, scores: pd.DataFrame) -> str:
        """One sentence of the numbers, chosen without regard to their size."""
        area = scores[(scores["metric"] == "AUC") & (scores["at"] == "own best layer")].set_index("lens")
        parts = []
        for lens in LENSES[1:]:
            row = -area.loc[lens, ["minus_jacobian", "minus_high", "minus_low"]].astype(float)
            value, low, high = row.iloc[0], row.iloc[1], row.iloc[2]
            parts.append(f"{value:+.2f} [{low:+.2f}, {high:+.2f}] against {lens}")
        return (
            f"Jacobian lens's AUC over log k (1 to {KS[-1]}), each lens at the layer best on the other half of the items: "
            f"{'; '.join(parts)} (95 % bootstrap over items). KL describes; it is no gate."
        )


def rank_area(ranks: np.ndarray) -> np.ndarray:
    """Area under pass@k over log k from 1 to 50, normalised: 1 for rank 1, 0 from rank 50 on."""
    return np.clip(1 - np.log(ranks) / np.log(KS[-1]), 0, None)


def evaluate_lens(
    model: ResidualModel,
    lens: JacobianLens,
    items: Sequence[TokenItem],
    *,
    seed: int = 0,
    on_layer: Callable[[], Any] = lambda: None,
) -> Evaluation:
    """Rank every item's intermediates under three transports at every source layer, one layer at a time.

    Args:
        model: The model.
        lens: A full lens of it.
        items: See :func:`usable_items`.
        seed: Of the halves and of the random transport.
        on_layer: Called after each layer.
    """
    lens, layers = lens.for_model(model), tuple(lens.source_layers)
    # One prompt at a time: their lengths differ, and they are short.
    wanted = [*layers, model.n_layers - 1]
    residuals = torch.cat([model.residuals([one.ids], wanted, [-1])[:, :, 0] for one in items], dim=1)  # [layer, item, d]
    own = _log_probabilities(model, residuals[-1])
    ranks = np.zeros((len(LENSES), len(layers), len(items)), dtype=int)
    kl = np.zeros((len(LENSES), len(layers)))
    for index, layer in enumerate(layers):
        hidden = residuals[index].float()
        left, right = random_rotations(model.d_model, seed + layer, hidden.device)
        # left @ J @ right has J's singular values and none of its directions.
        transported = (lens.transport(hidden, layer), hidden, lens.transport(hidden @ right.T, layer).to(hidden) @ left.T)
        for number, one in enumerate(transported):
            read = _log_probabilities(model, one)
            ranks[number, index] = [_rank(row, item.intermediates) for row, item in zip(read, items, strict=True)]
            kl[number, index] = float((own.exp() * (own - read)).sum(-1).mean())
        on_layer()
    return Evaluation(items, layers, ranks, kl, _halves(items, seed), own.shape[-1])


def random_rotations(d_model: int, seed: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Two orthogonal matrices, uniformly random."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        q, r = torch.linalg.qr(torch.randn(d_model, d_model, generator=generator))
        return (q * r.diagonal().sign()).to(device)  # signs make the distribution uniform

    return draw(), draw()


def _log_probabilities(model: ResidualModel, residual: Tensor) -> Tensor:
    """``[item, token]``, float32 on the CPU, over the tokenizer's tokens alone."""
    logits = model.unembed(model.final_norm(residual.to(model.device, model.dtype)))
    if not torch.isfinite(logits).all():  # NaN would rank first
        raise KlbError(f"{model.name}: lens logits are not finite in {model.dtype}; load it with --dtype bfloat16")
    return logits[..., : len(model.tokenizer)].float().log_softmax(-1).cpu()  # beyond lie the head's padded rows


def _rank(row: Tensor, tokens: Sequence[int]) -> int:
    """Rank of the best of some tokens; ties count against it."""
    best = row[list(tokens)].max()
    return int((row >= best).sum()) - sum(int(row[token] == best) for token in tokens) + 1


def _halves(items: Sequence[TokenItem], seed: int) -> np.ndarray:
    """A random half of the items of each kind; kinds of odd size take turns in which half is larger."""
    rng = np.random.default_rng(seed)
    half = np.zeros(len(items), dtype=bool)
    kinds = np.array([one.item.kind for one in items])
    for turn, kind in enumerate(dict.fromkeys(kinds)):
        members = rng.permutation(np.flatnonzero(kinds == kind))
        half[members[: (len(members) + turn % 2) // 2]] = True
    return half


def _metrics(ranks: np.ndarray) -> dict[str, np.ndarray]:
    return {**{f"pass@{k}": (ranks <= k).astype(float) for k in KS}, "AUC": rank_area(ranks)}


def _interval(draws: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    tail = (1 - _LEVEL) / 2
    low, high = np.quantile(draws @ values / len(values), [tail, 1 - tail])
    return float(low), float(high)
