"""Random graphs of operators that the rules know."""

from __future__ import annotations

import random

from tests.coarsen.helpers import make
from weft.model.graph import Graph

KINDS = ("aten.conv2d", "aten.batch_norm", "aten.relu", "aten.add", "aten.add", "aten.mul", "aten.matmul",
         "aten.softmax", "aten.layer_norm", "aten.view", "aten.view", "aten.cat", "aten.contiguous", "aten.mean",
         "aten.embedding", "aten.max_pool2d")


def random_graph(seed: int, num_ops: int) -> Graph:
    """Return a graph with mostly short edges, some constants, some parameters, and some results of its middle."""
    rng = random.Random(seed)
    rows: list[tuple[str, str, str]] = []
    for op in range(num_ops):
        if rng.random() < 0.08:
            rows.append((f"o{op}", "aten.arange", ""))
            continue
        kind = rng.choice(KINDS)
        count = 1 if kind == "aten.view" else rng.choice((1, 1, 2, 3))
        near = [f"o{max(0, op - rng.choice((1, 1, 1, 2, 5, 20)))}" for _ in range(count)] if op else ["x"]
        reads = dict.fromkeys([*near, *([f"w{op}"] if rng.random() < 0.3 and kind != "aten.view" else [])])
        rows.append((f"o{op}", kind, " ".join(reads)))
    outputs = dict.fromkeys([*(f"o{rng.randrange(num_ops)}" for _ in range(rng.choice((0, 0, 1, 2)))),
                             f"o{num_ops - 1}"])
    sizes = {f"o{op}": rng.choice((4, 40, 400)) for op in range(num_ops)}
    return make(*rows, outputs=tuple(outputs), sizes=sizes)
