"""What it takes to keep fewer bytes for the backward: chosen tensors against whole layers and against attention alone.

For each model as one stage on one device, five budgets between the least and the most that it can keep of a micro-batch,
and the bytes that are kept where exactly attention runs again: extra seconds of the backward, as a part of the forward,

    Weft        ``weft.search.recompute``
    layers      as many whole layers as the budget asks for run again, of which only what enters them is kept
    attention   the attention of as many layers as the budget asks for; none where that is not enough
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass

import numpy as np

from weft.cluster import read_cluster
from weft.cost.costs import estimate_costs
from weft.model.graph import Graph
from weft.model.source import resolve_model
from weft.model.trace import trace
from weft.search.recompute.choose import Chooser
from weft.search.recompute.options import Option, option_of
from weft.search.recompute.pieces import PlacedPiece, pieces_of
from weft.search.recompute.stages import attention_ops

MODELS = ("gpt2", "llama-3-8b", "t5-base", "bert-large", "vit-base", "resnet-50")
SHARES = (0.05, 0.25, 0.5, 0.75, 0.9)
BATCH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model and budget; seconds are parts of the forward's."""

    model: str
    share: float
    extra: float
    bound: float
    gap: float
    layers: float | None
    attention: float | None
    cpu_s: float


def rows_of(model: str) -> list[Row]:
    """Return the rows of a model."""
    graph = trace(resolve_model(model, mode="training", batch=BATCH), batch=BATCH, batch_dims=True).graph
    cluster = read_cluster("1 x A100-80GB")
    seconds = estimate_costs(graph, cluster).op_seconds("F", 1.0)[:, 0]
    begin = time.process_time()
    placed = pieces_of(graph, np.arange(graph.num_ops), seconds=seconds, fraction=1.0)
    chooser, rows = Chooser([item.piece for item in placed]), []
    whole = [option_of(item.piece, item.piece.may_repeat) for item in placed]
    selective = _attention_of(graph, placed)
    span = chooser.most_bytes - chooser.least_bytes
    own = (sum(item.kept_bytes for item in selective) - chooser.least_bytes) / span
    for share in (*SHARES, *((own,) if any(option.extra_s for option in selective) else ())):
        budget = chooser.least_bytes + share * span
        found = chooser(budget)
        total = float(seconds.sum())
        simple = [_greedy(placed, options, budget) for options in (whole, selective)]
        rows.append(Row(model=model, share=share, extra=found.extra_s / total, bound=found.bound_s / total, gap=found.gap,
                        layers=None if simple[0] is None else simple[0] / total,
                        attention=None if simple[1] is None else simple[1] / total,
                        cpu_s=time.process_time() - begin))
        begin = time.process_time()
    return rows


def _attention_of(graph: Graph, placed: list[PlacedPiece]) -> list[Option]:
    chosen = set(attention_ops(graph, np.arange(graph.num_ops)).tolist())
    return [option_of(item.piece, tuple(op in chosen and may for op, may in zip(
        item.ops, item.piece.may_repeat, strict=True))) for item in placed]


def _greedy(placed: list[PlacedPiece], options: list[Option], budget: float) -> float | None:
    """Return the extra seconds where pieces take these options, the cheapest by byte first, until the budget holds."""
    kept, seconds = sum(item.piece.total_bytes for item in placed), 0.0
    saves = sorted(((option.extra_s / (item.piece.total_bytes - option.kept_bytes), item.piece.total_bytes
                     - option.kept_bytes, option.extra_s) for item, option in zip(placed, options, strict=True)
                    if item.piece.total_bytes > option.kept_bytes), key=lambda row: row[0])
    for _, num_bytes, extra_s in saves:
        if kept <= budget:
            break
        kept, seconds = kept - num_bytes, seconds + extra_s
    return seconds if kept <= budget * (1 + 1e-9) else None


def _text(value: float | None) -> str:
    return "not enough" if value is None else f"{100 * value:.2f} %"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("models", nargs="*", default=MODELS)
    given = parser.parse_args()
    rows = [row for model in given.models for row in rows_of(model)]
    for row in rows:
        for name, other in (("layers", row.layers), ("attention", row.attention)):
            assert other is None or row.extra <= other * (1 + 1e-6) + 1e-12, f"{row.model}: {name} take less"
        assert row.gap <= 0.02 or row.extra < 1e-4, f"{row.model} {row.share}: gap {row.gap}"
    if given.json:
        print(json.dumps([{key: getattr(row, key) for key in Row.__slots__} for row in rows]))
        return
    print("| model | budget | whole layers | attention only | Weft | bound | gap | CPU-s |\n|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(f"| {row.model} | {100 * row.share:.1f} % | {_text(row.layers)} | {_text(row.attention)} | "
              f"{_text(row.extra)} | {_text(row.bound)} | {100 * row.gap:.2f} % | {row.cpu_s:.1f} |")


if __name__ == "__main__":
    main()
