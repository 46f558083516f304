"""Random models x clusters x kinds of plans, executed in double precision and compared with one process.

    python -m benchmarks.bench_random_plans [--plans 200] [--seed 0] [--only KIND] [--per-model 5] [--scale 1] [--json]

Each plan takes one step on forked processes. Loss, outputs, every gradient, parameters after the step and buffers must
equal those of one process to 1e-10; a second step is measured by the memory meter, and must keep within what the
account promises, or the parts of the difference must be found: the workspace of the operator that ran when most was
held, which that operator gave back when it ended, and what an optimizer counts with. ``--scale`` makes places, channels
and words of all models so many times as many: what does not grow with the model is then little. One plan of each kind is run again with a fault, which the same comparison must find. The exit code
is 1 if anything differs, breaks or takes more memory than promised without a known reason, or if a fault goes unseen.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

from benchmarks.random_compare import differences
from benchmarks.random_memory import FullTracer, compare_peaks
from benchmarks.random_models import DrawnModel, draw_model
from benchmarks.random_plans import KINDS, World, draw_plan
from benchmarks.random_ranks import COMPILING_S, FAULTS, LIMIT_S, Ranks
from weft.base.errors import WeftError
from weft.cli.common import has_unaligned_replicas
from weft.plan.plan import Plan
from weft.plan.program import Program
from weft.run.prepare import Tracer, lower_to_run


@dataclass(kw_only=True)
class Case:
    """One plan, and what came of it."""

    model: int
    features: tuple[str, ...]
    kind: str
    num_devices: int
    result: str = "equal"
    """``equal``, ``refused``, ``announced`` (batch norm over parts that one process cannot be given), ``broken`` or
    ``different``."""
    words: list[str] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    """Measured over promised peak memory, for each rank."""
    above: list[str] = field(default_factory=list)
    """Where more was measured than promised, and why."""
    below: list[str] = field(default_factory=list)
    """Where far less was measured, and of what more was promised."""
    unexplained: int = 0
    """On so many ranks nobody knows why."""
    control: str = ""
    """The fault that was tried, and whether it was seen."""


def run_cases(num_plans: int, seed: int, *, only: str | None = None, per_model: int = 5, scale: int = 1,
              compiled: bool = False) -> Iterator[Case]:
    """Yield so many cases; every plan of a model runs on the same processes."""
    rng, made, controlled = random.Random(seed), 0, set[str]()
    while made < num_plans:
        model_seed, num_devices = rng.randrange(1 << 20), rng.choice([1, 2, 2, 3, 4])
        mode = KINDS[only].mode if only else rng.choice(["training"] * 5 + ["inference"])
        names = [name for name, kind in KINDS.items() if kind.least <= num_devices <= kind.most and kind.mode == mode
                 and only in (None, name)]
        if names:
            kinds = rng.sample(names, k=min(per_model, len(names), num_plans - made))
            made += len(kinds)
            yield from _run_model(draw_model(model_seed, mode, scale), num_devices, kinds, controlled, compiled)


def _run_model(model: DrawnModel, num_devices: int, kinds: Sequence[str], controlled: set[str],
               compiled: bool) -> Iterator[Case]:
    tracer = FullTracer(model.source)
    world = World(model=model, tracer=tracer, num_devices=num_devices, rng=random.Random(model.seed))
    cases = [Case(model=model.seed, features=model.features, kind=kind, num_devices=num_devices) for kind in kinds]
    ready = [(case, *made) for case in cases if (made := _make(world, case, compiled)) is not None]
    while ready:  # again with other ranks, where some were lost
        with Ranks(tracer, num_devices, limit_s=COMPILING_S if compiled else LIMIT_S) as ranks:
            alive = True
            while alive and ready:
                case, plan, program = ready.pop(0)
                alive = _judge(case, model, plan, program, ranks, tracer)
                if alive and case.result == "equal" and case.kind not in controlled:
                    alive = _control(case, model, plan, program, ranks, tracer)
                    controlled.add(case.kind)
    yield from cases


def _make(world: World, case: Case, compiled: bool) -> tuple[Plan, Program] | None:
    """Return the plan and its program, with all that ranks need traced; None where Weft refuses, which is noted."""
    try:
        plan = replace(draw_plan(world, case.kind), compiled=compiled)
        program = lower_to_run(plan, world.tracer)
        for number in {item.num_samples for item in program.instances}:
            world.tracer.trace(number)
    except WeftError as problem:
        case.result, case.words = "refused", [f"{type(problem).__name__}: {problem}"]
        return None
    return plan, program


def _judge(case: Case, model: DrawnModel, plan: Plan, program: Program, ranks: Ranks, tracer: Tracer) -> bool:
    """Run the plan and note what came of it; return whether the ranks can go on."""
    outcomes = ranks.run(plan)
    errors = [f"rank {rank}: {item.error}" for rank, item in enumerate(outcomes) if item.error]
    if errors:
        is_refused = any(item.error.startswith("PlanError: ") for item in outcomes)  # the others then lose that rank
        case.result, case.words = "refused" if is_refused else "broken", errors
        return False
    case.words = differences(model, program, outcomes, tracer)
    case.result = "different" if case.words else "equal"
    if case.words and has_unaligned_replicas(plan) and any("batch norm" in note for note in program.graph.warnings):
        case.result = "announced"  # statistics of parts that no single process is given: the plan's notes say so
    found = compare_peaks(program, outcomes)
    case.ratios, case.above, case.below, case.unexplained = found.ratios, found.above, found.below, found.unexplained
    return True


def _control(case: Case, model: DrawnModel, plan: Plan, program: Program, ranks: Ranks, tracer: Tracer) -> bool:
    """Run an equal plan again with a fault; it must differ. Return whether the ranks can go on."""
    for fault in (FAULTS if program.plan.model.mode == "training" else FAULTS[:1]):
        outcomes = ranks.run(plan, fault)
        if any(item.error for item in outcomes):
            case.control = f"{fault}: broke the run, which is seen"
            return False
        if any(item.was_damaged for item in outcomes):
            seen = bool(differences(model, program, outcomes, tracer))
            case.control += f"{fault}: {'seen' if seen else 'NOT SEEN'}; "
    return True


# ---- what is printed --------------------------------------------------------------------------------------------------


def show(cases: Sequence[Case]) -> None:
    """Print the tables and everything that is not as it should be."""
    results = ("equal", "refused", "announced", "different", "broken")
    groups: dict[str, dict[str, list[Case]]] = {"kind of plan": defaultdict(list), "feature": defaultdict(list)}
    for case in cases:
        groups["kind of plan"][case.kind].append(case)
        for feature in case.features:
            groups["feature"][feature].append(case)
    for title, rows in groups.items():
        print(f"{title:<26} {'plans':>6} " + " ".join(f"{name:>9}" for name in results) + "   measured/promised memory")
        for name, members in sorted(rows.items()):
            counts = Counter(item.result for item in members)
            print(f"{name:<26} {len(members):>6} " + " ".join(f"{counts[item]:>9}" for item in results)
                  + f"   {_spread([ratio for item in members for ratio in item.ratios])}")
        print()
    for result in results[1:]:
        for words, count in Counter(item.words[0] for item in cases if item.result == result).most_common():
            example = next(item for item in cases if item.result == result and item.words[0] == words)
            print(f"{result} {count} x: {words[:400]}\n    e.g. {example.kind}, model {example.model} {example.features}")
    for case in cases:
        for line in case.above:
            print(f"above its account: {case.kind}, model {case.model}, {case.num_devices} devices: {line}")
        for line in case.below:
            print(f"far below its account: {case.kind}, model {case.model}, {case.num_devices} devices: {line}")
        if "NOT SEEN" in case.control:
            print(f"FAULT NOT SEEN: {case.kind}, model {case.model}: {case.control}")


def _spread(ratios: Sequence[float]) -> str:
    return "" if not ratios else f"{min(ratios):.3f} / {statistics.median(ratios):.3f} / {max(ratios):.3f}"


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description="Random models and plans, executed and compared with one process.")
    parser.add_argument("--plans", type=int, default=200, help="how many plans (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="what is drawn")
    parser.add_argument("--only", choices=tuple(KINDS), help="plans of this kind alone")
    parser.add_argument("--per-model", type=int, default=5, help="plans of each model (default 5)")
    parser.add_argument("--scale", type=int, default=1, help="how many times as large the models are (default 1)")
    parser.add_argument("--compiled", action="store_true", help="stages run as compiled graphs (a minute a model)")
    parser.add_argument("--json", action="store_true", help="print the cases as JSON")
    args = parser.parse_args()
    before = time.process_time()
    cases = []
    for case in run_cases(args.plans, args.seed, only=args.only, per_model=args.per_model, scale=args.scale,
                          compiled=args.compiled):
        cases.append(case)
        print(f"{len(cases):>4} {case.kind:<26} {case.result}", file=sys.stderr, flush=True)
    if args.json:
        print(json.dumps([asdict(case) for case in cases], indent=1))
    else:
        show(cases)
    controls = Counter(word for case in cases for word in ("seen", "NOT SEEN") if f": {word};" in case.control)
    counts, above = Counter(case.result for case in cases), sum(bool(case.above) for case in cases)
    unexplained = sum(bool(case.unexplained) for case in cases)
    ratios = [ratio for case in cases for ratio in case.ratios]
    cpu = time.process_time() - before + sum(os.times()[2:4])
    print(f"{len(cases)} plans: {dict(counts)}; faults seen in {controls['seen']} controls, not seen in "
          f"{controls['NOT SEEN']}; memory measured/promised {_spread(ratios)} (min / median / max), {above} plans "
          f"above, {unexplained} of them unexplained; {cpu:.0f} CPU seconds", file=sys.stderr if args.json else sys.stdout)
    return 1 if counts["different"] or counts["broken"] or controls["NOT SEEN"] or unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
