"""Seeded faults in programs, and what the checker makes of them.

    python benchmarks/bench_checker.py [--json] [--seeds 40] [--small 1000]

In 17 small programs of every kind (1F1B, GPipe, interleaved, V map, opposite pipelines, skip connections, uneven data
parallelism, tied parameters, split backward, unaligned replicas, stages on several devices, ...) rows are dropped,
doubled, swapped, moved and retargeted. Each faulty program is also played through every interleaving of its ranks by an
executor that shares no code with the checker (``tests/plan/explore.py``). ``accepted`` are faults that do no harm, such
as two neighbours swapped that do not depend on each other: the play must accept them too. Then the checker's verdict
on deadlocks is compared with that exploration on random programs with their messages in another order, and its CPU
time is taken on large programs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.plan.bases import BASES, base  # noqa: E402
from tests.plan.explore import ways_to_block, works  # noqa: E402
from tests.plan.faults import FAULTS, seed_fault  # noqa: E402
from tests.plan.generate import random_plan  # noqa: E402
from tests.worlds import pipeline  # noqa: E402
from weft.base.errors import PlanError  # noqa: E402
from weft.plan.check import check_program, rendezvous_problems  # noqa: E402
from weft.plan.lower import lower  # noqa: E402
from weft.plan.program import Program  # noqa: E402


def is_accepted(program: Program) -> bool:
    try:
        check_program(program)
    except PlanError:
        return False
    return True


def seeded_faults(num_seeds: int) -> dict[str, dict[str, int]]:
    """Return counts by kind of fault: seeded, rejected, accepted, and agreeing with the play."""
    table: dict[str, dict[str, int]] = {}
    for kind in FAULTS:
        row = Counter({"seeded": 0, "rejected": 0, "accepted": 0, "agree": 0})
        for name in BASES:
            for seed in range(num_seeds):
                program = seed_fault(base(name), kind, Random(f"{name} {kind} {seed}"))
                if program is not None:
                    accepted = is_accepted(program)
                    row["seeded"] += 1
                    row["accepted" if accepted else "rejected"] += 1
                    row["agree"] += accepted == works(program)
        table[kind] = dict(row)
    return table


def exploration(count: int) -> dict[str, int]:
    """Return how often the verdict on deadlocks equals the exploration of all interleavings."""
    result = Counter({"programs": 0, "blocked": 0, "agree": 0})
    seed = 0
    while result["programs"] < count:
        rng = Random(seed)
        seed += 1
        graph, _, plan = random_plan(rng, num_ops=rng.randint(2, 5), num_devices=rng.randint(2, 3),
                                     microbatches=rng.randint(1, 2))
        program = lower(plan, graph)
        if rng.random() < 0.85:
            program = seed_fault(program, rng.choice(["messages permuted", "neighbours swapped", "moved", "other direction"]),
                                 rng)
        if program is not None and program.channels and program.num_instructions <= 40:
            blocked = bool(ways_to_block(program, max_states=1_000_000))
            result["programs"] += 1
            result["blocked"] += blocked
            result["agree"] += blocked == bool(rendezvous_problems(program))
    return dict(result)


def speed() -> list[dict[str, Any]]:
    """Return CPU time of the checker, and of the lowering before it, per 1,000 instructions of 1F1B programs."""
    rows = []
    for num_devices, num_microbatches in ((8, 32), (32, 128), (128, 256)):
        graph, plan = pipeline("1f1b", num_devices, num_microbatches)
        start = time.process_time()
        program = lower(plan, graph)
        lowered = time.process_time()
        check_program(program)
        thousands = program.num_instructions / 1000
        rows.append({"devices": num_devices, "microbatches": num_microbatches, "instructions": program.num_instructions,
                     "check_ms_per_1000": (time.process_time() - lowered) * 1e3 / thousands,
                     "lower_ms_per_1000": (lowered - start) * 1e3 / thousands})
    return rows


def show(result: dict[str, Any]) -> None:
    print(f"{'fault':22}{'seeded':>8}{'rejected':>10}{'accepted':>10}{'agree':>8}")
    rows = result["faults"] | {"all": result["total"]}
    for kind, row in rows.items():
        print(f"{kind:22}{row['seeded']:8}{row['rejected']:10}{row['accepted']:10}{row['agree']:8}")
    found = result["exploration"]
    print(f"\ndeadlock verdict against all interleavings: {found['agree']} of {found['programs']} agree "
          f"({found['blocked']} block)")
    for row in result["speed"]:
        print(f"{row['instructions']:8} instructions on {row['devices']} devices: check {row['check_ms_per_1000']:.1f} ms, "
              f"lower {row['lower_ms_per_1000']:.1f} ms CPU per 1,000")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--seeds", type=int, default=40, help="faults of each kind in each program")
    parser.add_argument("--small", type=int, default=1000, help="random small programs to explore")
    args = parser.parse_args()
    faults = seeded_faults(args.seeds)
    total = {key: sum(row[key] for row in faults.values()) for key in ("seeded", "rejected", "accepted", "agree")}
    result = {"faults": faults, "total": total, "exploration": exploration(args.small), "speed": speed()}
    if args.json:
        print(json.dumps(result))
    else:
        show(result)


if __name__ == "__main__":
    main()
