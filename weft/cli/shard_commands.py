"""``weft shard``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.base.errors import InputError
from weft.cli.common import (
    BEST_SO_FAR,
    MAX_SEED,
    JsonOption,
    QuietOption,
    check_outputs,
    check_time_limit,
    end_interrupted,
    is_zoo_name,
    print_json,
    reporter,
)

if TYPE_CHECKING:
    from weft.search.strategies.solve import ShardSolution
    from weft.search.strategies.strategy_graph import StrategyGraph


def shard(
    problem: Annotated[str, typer.Argument(
        metavar="MODEL", help="A name from `weft models` or path/to/file.py:function; without CLUSTER a strategy graph "
        "(contest format).")],
    cluster: Annotated[str | None, typer.Argument(
        metavar="CLUSTER", help="A cluster file, or a text such as '8 x H100-80GB'.")] = None,
    mesh: Annotated[str | None, typer.Option(help="Shape of the mesh, such as 2x4; the best one if absent.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples in one step; the model's default if absent.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float64, float32, bf16 or fp16; the model's if absent.")] = None,
    mode: Annotated[str | None, typer.Option(help="training (default) or inference.")] = None,
    memory: Annotated[str | None, typer.Option(
        help="What a device may hold, such as 40GiB, or none; the smallest device's if absent.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="none, sgd, adam or adamw (default).")] = None,
    compare: Annotated[bool, typer.Option(
        "--compare", help="Compare with data parallel, ZeRO, Megatron and others.")] = False,
    export: Annotated[str | None, typer.Option(
        help="Print (or write to --out) settings for another tool instead: parallelize-module or torchtitan.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the result (JSON) here.")] = None,
    plan: Annotated[Path | None, typer.Option(
        help="Write a plan of one sharded stage here, for `weft run`.")] = None,
    time_limit: Annotated[float | None, typer.Option(
        help="Seconds for all of it but imports and tracing; the best found by then is the result.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed of the search of a strategy graph.")] = 0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Split a model's tensors over devices for the fastest step; or solve a strategy graph of the contest's kind."""
    check_time_limit(time_limit)
    check_outputs({"--out": out, "--plan": plan}, (problem, cluster))
    if cluster is not None:
        from weft.cli.shard_model import ModelOptions, shard_model_command

        shard_model_command(problem, cluster, ModelOptions(
            mesh=mesh, batch=batch, dtype=dtype, mode=mode, memory=memory, optimizer=optimizer, compare=compare,
            export=export, out=out, plan=plan, time_limit=time_limit, as_json=as_json, report=reporter(quiet)))
        return
    _refuse_given({"--mesh": mesh, "--batch": batch, "--dtype": dtype, "--mode": mode, "--memory": memory,
                   "--optimizer": optimizer, "--compare": compare or None, "--export": export, "--out": out,
                   "--plan": plan})
    imports = time.perf_counter()
    from weft.search.strategies import search, strategy_graph  # noqa: F401  they are not to count against the limit

    import_s, begin = time.perf_counter() - imports, time.monotonic()
    graph = read_problem(_problem_path(problem))
    solution = solve_problem(graph, begin=begin, time_limit=time_limit, seed=seed, quiet=quiet)
    if as_json:
        times = {} if time_limit is None else {"import_seconds": import_s}
        print_json({**solution.to_json(), **times})
    else:
        _print_solution(graph, solution)
    if solution.is_interrupted:
        end_interrupted(BEST_SO_FAR)


def _refuse_given(given: dict[str, object]) -> None:
    named = [name for name, value in given.items() if value is not None]
    if named:
        raise InputError(f"a strategy graph takes no {' or '.join(named)}: that is for a model, which needs a CLUSTER "
                         "after it")


def _problem_path(text: str) -> Path:
    """Return the file; refuse what looks like a model without its cluster."""
    if not Path(text).exists() and (is_zoo_name(text) or ".py:" in text):
        raise InputError(f"{text!r} is a model, so CLUSTER is missing: give a cluster file or a text such as "
                         "'8 x H100-80GB' after it")
    return Path(text)


def read_problem(path: Path) -> StrategyGraph:
    """Return the strategy graph in the file."""
    from weft.search.strategies.strategy_graph import load_strategy_graph

    return load_strategy_graph(path)


def solve_problem(graph: StrategyGraph, *, begin: float, time_limit: float | None, seed: int,
                  quiet: bool) -> ShardSolution:
    """Return the solution of a graph; the time limit counts from ``begin``, so that reading the file is in it."""
    from weft.search.strategies.solve import solve

    report = reporter(quiet)
    report(f"{graph.num_nodes} nodes, {len(graph.edges)} edges, "
           + ("no usage limit" if graph.usage_limit is None else f"usage limit {graph.usage_limit}"))
    left = None if time_limit is None else max(time_limit - (time.monotonic() - begin), 0.0)
    return solve(graph, time_limit=left, seed=seed, progress=report)


def _print_solution(graph: StrategyGraph, solution: ShardSolution) -> None:
    from weft.show.sharding_tables import print_strategies

    print_strategies(graph, solution)
