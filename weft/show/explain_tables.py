"""Explanations and fits, for the terminal and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from weft.base.units import format_bytes, format_time
from weft.explain.explanation import SAME, Explanation, memory_sentence, sentence
from weft.explain.relax import Relaxation
from weft.planning.compare import Candidate
from weft.planning.fit import Fit, FitCandidate, Use, describe
from weft.show.facts import mean_parts, strategy_facts
from weft.show.names import printable
from weft.show.plan_tables import print_comparison, rates_json, rates_text
from weft.show.tables import MAX_DEVICE_ROWS, UNKNOWN, TextTable, make_table, percent, print_tables, seconds

KINDS: Final = {"compute": "computing", "optimizer": "optimizer", "transfer": "between stages", "exchange": "gradients",
                "latency": "latency"}
MAX_PATH_ROWS: Final = 12
MAX_LINKS: Final = 5


def print_explanation(item: Explanation) -> None:
    """Print what bounds the step, what devices wait for, and what would help."""
    print(printable(sentence(item)))
    busy = percent(item.busiest.busy_s / (item.path.step_time_s or 1.0))
    print(printable(f"{item.busiest.device} is busiest: it computes for {busy} of the step."))
    print(printable(memory_sentence(item)))
    if words := rates_text(item.rates):
        print(f"That is {words}.")
    if item.has_tp_groups:
        print("Devices divide operators: what they exchange for that counts as computing, and not for the links.")
    idle = sum(not row.busy_s for row in item.waits)
    if idle:
        print(f"{idle} of {len(item.waits)} devices have no work.")
    print()
    links = [links_table(item)] if item.links else []
    print_tables(path_table(item), waits_table(item), memory_table(item), *links)
    if item.comparison is not None:
        print_comparison(strategy_facts(item.comparison))
        print(*map(printable, comparison_lines(item)), "", sep="\n")
    if item.changes:
        print_tables(changes_table(item))


def path_table(item: Explanation) -> TextTable:
    """Return the critical path by kind and place; small rest in one row."""
    whole = item.path.step_time_s or 1.0
    shares = item.path.shares
    shown = shares if len(shares) <= MAX_PATH_ROWS else shares[: MAX_PATH_ROWS - 1]
    rows = [(KINDS[share.kind], share.where, seconds(share.seconds), percent(share.seconds / whole)) for share in shown]
    if len(shown) < len(shares):
        rest = sum(share.seconds for share in shares[len(shown):])
        rows.append((f"{len(shares) - len(shown)} more", "", seconds(rest), percent(rest / whole)))
    return make_table("Critical path", ("what", "where", "#time", "#part"), rows)


def waits_table(item: Explanation) -> TextTable:
    """Return where each device's time goes; those without work are left out."""
    whole = item.path.step_time_s or 1.0
    rows = []
    for row in (row for row in item.waits if row.busy_s):
        reason, longest_s = row.longest
        parts = (row.busy_s, row.fill_s, sum(row.for_others_s.values()), sum(row.exposed_s.values()), row.drain_s)
        rows.append((row.device, *(percent(value / whole) for value in parts),
                     f"{reason} ({seconds(longest_s)})" if longest_s > 0 else UNKNOWN))
    return make_table("What each device waits for", limit=MAX_DEVICE_ROWS, cells=rows, header=(
        "device", "#busy", "#first work", "#others", "#messages", "#the end", "#most for"))


def memory_table(item: Explanation) -> TextTable:
    """Return what each device holds, and what is left; those that hold nothing are left out."""
    rows = [(row.device, format_bytes(row.peak_bytes), row.largest, *(
        [UNKNOWN] * 3 if row.capacity_bytes is None else
        [format_bytes(row.capacity_bytes), format_bytes(row.capacity_bytes - row.peak_bytes), percent(row.used)]))
            for row in item.memory if row.peak_bytes]
    header = ("device", "#peak", "#mainly", "#capacity", "#left", "#used")
    return make_table("Memory", header, rows, limit=MAX_DEVICE_ROWS)


def links_table(item: Explanation) -> TextTable:
    """Return the busiest links."""
    whole = item.path.step_time_s or 1.0
    return make_table("Busiest links", ("link", "#busy", "#of the step"), (
        (name, seconds(value), percent(value / whole)) for name, value in list(item.links.items())[:MAX_LINKS]))


def comparison_lines(item: Explanation) -> list[str]:
    """Return sentences about faster and second best plans."""
    lines, step_s = [], item.timeline.step_time_s
    if item.comparison is not None and not item.comparison.is_complete:
        lines.append("Planning again was ended early: gains below may be those of searching longer.")
    if item.faster is not None:
        faster_s = item.faster.step_time_s
        lines.append(f"Planning again found a faster plan: {item.faster.strategy}, {format_time(faster_s)} "
                     f"({percent(1 - faster_s / step_s)} less). Gains below are against that one.")
    if item.second is not None:
        lines.append(f"Second best is {item.second.strategy}: {format_time(item.second.step_time_s)}, it loses "
                     f"{percent(item.second.step_time_s / step_s - 1)}{_why(item, item.second)}.")
    if item.faster_elsewhere_s is not None:
        lines.append(f"A plan found for one of the changes below takes {format_time(item.faster_elsewhere_s)} on the "
                     "cluster as it is: gains are against that one. Plan with more time.")
    return lines


def _why(item: Explanation, other: Candidate) -> str:
    """Return what a slower plan loses its time with: what grows most, over all devices."""
    if other.timeline is None:
        return ""
    words = ("computing", "waiting for messages", "idle devices")
    theirs, ours = mean_parts(other.timeline).values(), mean_parts(item.timeline).values()
    growth = {word: their - our for word, their, our in zip(words, theirs, ours, strict=True)}
    most = max(growth, key=growth.__getitem__)
    return f", mostly with {most}" if growth[most] > 0 else ""


def changes_table(item: Explanation) -> TextTable:
    """Return what would help."""
    rows = ((row.name, seconds(row.step_time_s), percent(row.gain),
             row.strategy or (UNKNOWN if row.gain is None else "the plan as it is" if row.gain > SAME
                              else "no better plan")) for row in item.changes)
    return make_table("What would help (planned again)", ("change", "#step", "#saves", "strategy"), rows,
                      notes=(f"{row.name}: {row.note}" for row in item.changes if row.note))


def explanation_json(item: Explanation) -> dict[str, Any]:
    """Return the explanation as plain JSON values."""
    return {
        "status": "explained", "summary": sentence(item), "step_time": item.path.step_time_s,
        "strategy": item.plan.search.by, "binding": item.path.binding, **rates_json(item.rates),
        "path": [{"what": share.kind, "where": share.where, "seconds": share.seconds} for share in item.path.shares],
        "devices": [{"device": row.device, "busy": row.busy_s, "first_work": row.fill_s, "others": row.for_others_s,
                     "messages": row.exposed_s, "end": row.drain_s} for row in item.waits],
        "memory": [{"device": row.device, "peak": row.peak_bytes, "capacity": row.capacity_bytes,
                    "mainly": row.largest} for row in item.memory],
        "links": item.links,
        "faster": _candidate_json(item.faster), "second": _candidate_json(item.second),
        "strategies": [] if item.comparison is None else [
            {"strategy": row.strategy, "step_time": row.step_time_s if row.plan is not None else None,
             "reason": row.reason} for row in item.comparison.candidates],
        "changes": [{"change": row.name, "step_time": row.step_time_s, "gain": row.gain, "strategy": row.strategy,
                     "note": row.note} for row in item.changes]}


def _candidate_json(item: Candidate | None) -> dict[str, Any] | None:
    return None if item is None else {"strategy": item.strategy, "step_time": item.step_time_s}


def print_relaxations(reason: str, rows: Sequence[Relaxation]) -> None:
    """Print why nothing fits and the smallest changes that help."""
    print(printable(f"Nothing fits as asked: {reason.splitlines()[-1]}"))
    print()
    print_tables(make_table(
        "Each of these is enough (planned)", ("change", "options of weft plan", "#step", "strategy"),
        ((row.change, row.options or UNKNOWN, seconds(row.best.step_time_s), row.best.strategy) for row in rows)))


def relaxations_json(reason: str, rows: Sequence[Relaxation]) -> dict[str, Any]:
    """Return the changes as plain JSON values."""
    return {"status": "infeasible", "reason": reason,
            "relaxations": [{"kind": row.kind, "change": row.change, "options": row.options,
                             "step_time": row.best.step_time_s, "strategy": row.best.strategy} for row in rows]}


def print_fit(item: Fit, command: str) -> None:
    """Print what fits, the margins of the recommended way, and how to plan it."""
    rows = ((("* " if row is item.recommended else "  ") + describe(row.setting), row.fullest.device,
             format_bytes(row.fullest.peak_bytes), *_margin(row.fullest), seconds(row.rough_s),
             "yes" if row.fits else "no") for row in item.candidates)
    header = ("how", "fullest device", "#peak", "#left", "#part", "#step, roughly", "fits")
    tables = [make_table("Fit", header, rows, marked=(row is item.recommended for row in item.candidates))]
    if item.recommended is not None:
        cells = [(use.device, format_bytes(use.peak_bytes), *_margin(use)) for use in item.recommended.uses]
        tables.append(make_table("Memory of each device", ("device", "#peak", "#left", "#part"), cells,
                                 limit=MAX_DEVICE_ROWS))
    print_tables(*tables)
    if item.recommended is not None:
        print(command)


def _margin(use: Use) -> tuple[str, str]:
    if use.capacity_bytes is None:
        return "no limit", UNKNOWN
    return format_bytes(use.margin_bytes), percent(use.margin_bytes / use.capacity_bytes)


def fit_json(item: Fit, command: str | None) -> dict[str, Any]:
    """Return what fits as plain JSON values."""
    return {"fits": item.recommended is not None, "command": command,
            "recommended": None if item.recommended is None else _fit_row(item.recommended),
            "nearest": _fit_row(item.nearest), "candidates": [_fit_row(row) for row in item.candidates]}


def _fit_row(row: FitCandidate) -> dict[str, Any]:
    setting = row.setting
    return {"strategy": setting.strategy, "microbatches": setting.microbatches, "recompute": setting.recompute,
            "sharded": setting.sharded, "tensor": setting.degree, "fits": row.fits,
            "rough_step_time": row.rough_s if math.isfinite(row.rough_s) else None,
            "devices": [{"device": use.device, "peak": use.peak_bytes, "capacity": use.capacity_bytes,
                         "margin": None if use.capacity_bytes is None else int(use.margin_bytes)}
                        for use in row.uses]}
