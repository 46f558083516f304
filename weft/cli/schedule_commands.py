"""``weft schedule``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from weft.base.errors import InputError
from weft.base.files import write_atomic
from weft.cli import common, late

LEAST_S = 0.01
"""Seconds that the search has at least, however long reading took."""
WRITING_S = 2e-6
"""Seconds, about, that writing one start takes: they are taken off a time limit."""


def schedule(
    problem: Annotated[Path, typer.Argument(metavar="PROBLEM", help="A schedule problem file.")],
    microbatches: Annotated[int, typer.Option("--microbatches", "-n", help="How many micro-batches flow through.")],
    time_limit: Annotated[float | None, typer.Option(
        help="Seconds for all of it but imports; the best found by then is the result.")] = None,
    seed: common.SeedOption = 0,
    compare: Annotated[bool, typer.Option("--compare", help="Add the named schedules (GPipe, 1F1B, ...).")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Write a self-contained page with a chart here.")] = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="Write a picture here.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the result (JSON) here.")] = None,
    width: Annotated[int | None, typer.Option(help="Width of the chart; the terminal's if absent.")] = None,
    as_json: common.JsonOption = False,
    quiet: common.QuietOption = False,
) -> None:
    """Find the order in which micro-batches flow through blocks on devices: shortest, within the memory."""
    import_s, begin = late.import_seconds("search_schedule", "compare_named", "print_schedule"), time.monotonic()
    if microbatches < 1:
        raise InputError(f"--microbatches must be at least 1, not {microbatches}")
    common.check_time_limit(time_limit)
    common.check_width(width)
    common.check_outputs({"--html": html, "--svg": svg, "--out": out}, (problem,))
    item = late.load_problem(problem)
    report = common.reporter(quiet)
    writing_s = WRITING_S * microbatches * item.num_tasks
    left = None if time_limit is None else max(LEAST_S, time_limit - (time.monotonic() - begin) - writing_s)
    result = late.search_schedule(item, microbatches=microbatches, time_limit=left, seed=seed, progress=report)
    compared = late.compare_facts(result, late.compare_named(item, result.schedule.num_microbatches)) if compare else []
    value = result.to_json()
    if compared:
        value["named"] = [late.facts_json(row) for row in compared if not row.is_search]
    common.write_result(out, value, report)
    title = problem.name.removesuffix(".gz").removesuffix(".json")
    if html is not None:
        write_atomic(html, late.render_schedule_report(result, title=title, compared=compared))
    if svg is not None:
        write_atomic(svg, late.render_svg(late.schedule_chart(result, title)))
    common.print_result(as_json, lambda: value if time_limit is None else {**value, "import_seconds": import_s},
                        lambda: late.print_schedule(result, compared, width=width))
    common.end_if_interrupted(result.is_interrupted)
