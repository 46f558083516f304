"""A plan and the comparison of strategies in the terminal. ``*_table`` return plain text, ``print_*`` draw it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Final

from weft.base.units import format_bytes
from weft.plan.memory import CATEGORIES
from weft.plan.plan import Plan
from weft.plan.step_rates import StepRates
from weft.show import facts
from weft.show.chart import counted
from weft.show.drawing import print_chart
from weft.show.facts import DeviceFacts, StrategyFacts
from weft.show.names import grouped, short_list
from weft.show.tables import (
    MAX_DEVICE_ROWS,
    UNKNOWN,
    TextTable,
    make_console,
    make_table,
    per_second,
    percent,
    print_tables,
    seconds,
)
from weft.show.timeline_chart import timeline_chart
from weft.simulate.timeline import Timeline

NARROW: Final = 100
"""Below this width the comparison of strategies leaves columns out."""
WIDE: Final = 130
"""From this width on, a device's time and memory are in one table."""
MAX_TRIED: Final = 20
CHART_ROWS: Final = 16


def plan_tables(plan: Plan, timelines: Sequence[Timeline]) -> list[TextTable]:
    """Return the plan's summary, its stages, and its gradient exchanges if there are any."""
    program, shown = facts.program_of(timelines), facts.pick(timelines, "predicted") or timelines[0]
    exchanges = facts.exchange_facts(program, shown)
    return [plan_table(facts.plan_facts(plan, timelines)), stages_table(facts.stage_facts(program, shown)),
            *([exchanges_table(exchanges)] if exchanges else ())]


def plan_table(item: facts.PlanFacts) -> TextTable:
    """Return the plan as rows of (what, value)."""
    plan = item.plan
    devices, num_all = str(item.num_devices), len(plan.cluster.devices)
    rows = (
        ("model", model_text(plan)),
        ("batch", batch_text(plan)),
        ("devices", devices if item.num_devices == num_all else f"{devices} of {num_all}"),
        ("stages", str(len(plan.stages))),
        ("strategy", plan.search.by or UNKNOWN),
        ("predicted step", f"{seconds(item.step_time_s)}, {per_second(item.samples_per_s)} samples"
         if item.step_time_s is not None else UNKNOWN),
        ("measured step", f"{seconds(item.measured_s)}, {percent(item.measured_difference, signed=True)} against the "
                          "prediction" if item.measured_s is not None else ""),
        ("bound", bound_text(item)),
        ("bubble", percent(item.bubble) if item.bubble is not None else ""),
        ("status", plan.search.status))
    return TextTable(header=("plan", ""), rows=tuple(row for row in rows if row[1]))


def model_text(plan: Plan) -> str:
    """Return the model in words."""
    return f"{plan.model.name} ({plan.model.mode}, {how_text(plan)})"


def how_text(plan: Plan) -> str:
    """Return the precision, and whether stages are compiled, in words."""
    return f"{plan.model.dtype}, compiled" if plan.compiled else plan.model.dtype


def batch_text(plan: Plan) -> str:
    """Return the batch and its division in words."""
    batch, count = plan.model.batch, plan.microbatches
    return f"{batch} in {counted(count, 'micro-batch')} of {batch // count}"


def bound_text(item: facts.PlanFacts) -> str:
    """Return the bound and the gap to it in words."""
    if item.bound_s is None:
        return "none known"
    return f"{seconds(item.bound_s)} (gap {percent(item.gap)})"


def stages_table(rows: Sequence[facts.StageFacts]) -> TextTable:
    """Return the stages, one row for replicas that are alike."""
    return make_table("Stages", ("stage", "modules", "#ops", "devices", "#share", "#parameters", "#F", "#B"), (
        (row.name, stage_modules(row), str(row.num_ops), stage_devices(row), share_text(row),
         format_bytes(row.parameter_bytes), seconds(row.forward_s), seconds(row.backward_s)) for row in rows))


def stage_modules(row: facts.StageFacts) -> str:
    """Return a stage's modules, with what is special about the stage."""
    notes = [f"keeps {row.num_saved} tensors" if row.num_saved else "recomputed"] if row.recompute else []
    notes += [row.in_pieces] * bool(row.in_pieces)
    if row.microbatches is not None:
        notes.append("micro-batches " + short_list(map(str, row.microbatches)))
    return (row.modules or UNKNOWN) + (f" ({', '.join(notes)})" if notes else "")


def stage_devices(row: facts.StageFacts) -> str:
    """Return the devices of a row's replicas: ``a0``, ``a0 + a1`` for a joint replica, ``a0 - a7`` for many alike."""
    if all(len(devices) == 1 for devices in row.replicas):
        return short_list(devices[0] for devices in row.replicas)
    shown = [" + ".join(devices) if len(devices) <= 4 else short_list(devices) for devices in row.replicas]
    mesh = " x ".join(f"{axis} {size}" for axis, size in row.mesh.items())
    text = ", ".join(shown[:4]) + (f", {len(shown) - 4} more" if len(shown) > 4 else "")
    return f"{text} ({mesh})" if mesh else text


def share_text(row: facts.StageFacts) -> str:
    """Return the batch share of each of the row's replicas."""
    share = percent(row.share).replace(".0 %", " %")
    return share if len(row.replicas) == 1 else f"{len(row.replicas)} x {share}"


def exchanges_table(rows: Sequence[facts.ExchangeFacts]) -> TextTable:
    """Return the gradient exchanges."""
    return make_table("Gradient exchanges", ("method", "parameters", "#bytes", "devices", "#time"), (
        (row.how, f"{len(row.parameters)}: {short_list(row.parameters, limit=3)}", format_bytes(row.num_bytes),
         short_list(row.devices), seconds(row.time_s)) for row in rows))


def devices_table(rows: Sequence[DeviceFacts], *, title: str = "Devices", limit: int = MAX_DEVICE_ROWS) -> TextTable:
    """Return where each device's time and memory go; memory is at the device's peak. Rows beyond ``limit`` are cut."""
    time, memory = times_table(rows, limit=limit), memory_table(rows, limit=limit)
    return TextTable(title=title, header=time.header + memory.header[1:],
                     rows=tuple(left + right[1:] for left, right in zip(time.rows, memory.rows, strict=True)),
                     numeric=frozenset(range(1, len(time.header) + len(memory.header) - 1)))


def times_table(rows: Sequence[DeviceFacts], *, title: str = "Time", limit: int = MAX_DEVICE_ROWS) -> TextTable:
    """Return where each device's time goes."""
    cells = [(row.device, *map(percent, row.shares.values()), seconds(row.idle_s)) for row in rows]
    return make_table(title, ("device", "#busy", "#exposed comm", "#bubble", "#idle"), cells, limit=limit)


def memory_table(rows: Sequence[DeviceFacts], *, title: str = "Memory", limit: int = MAX_DEVICE_ROWS) -> TextTable:
    """Return what each device holds at its peak, by category, against its capacity."""
    categories = [name for name in CATEGORIES if any(row.peak_memory.get(name) for row in rows)]
    cells = [(row.device, *(format_bytes(row.peak_memory.get(name, 0)) for name in categories),
              format_bytes(row.peak_bytes), percent(row.capacity_used),
              UNKNOWN if row.capacity_bytes is None else format_bytes(row.capacity_bytes)) for row in rows]
    header = ("device", *(f"#{name}" for name in (*categories, "peak", "used", "capacity")))
    return make_table(title, header, cells, limit=limit)


def strategies_table(rows: Sequence[StrategyFacts], *, is_narrow: bool = False) -> TextTable:
    """Return the comparison of strategies: the chosen one is marked, reasons why there is no plan are notes.

    In a narrow one the bounds are below the table, and numbers of micro-batches left out.
    """
    cells = (
        (("* " if row.is_chosen else "  ") + row.strategy, seconds(row.step_time_s), per_second(row.samples_per_s),
         UNKNOWN if row.microbatches is None else str(row.microbatches), peak_text(row), percent(row.bubble),
         seconds(row.bound_s), row.status) for row in rows)
    header = ("strategy", "#step", "#samples", "#mb", "peak per device", "#bubble", "#bound", "status")
    shown = itemgetter(*(index for index, name in enumerate(header) if not (is_narrow and name in ("#mb", "#bound"))))
    notes = [f"{row.strategy}: {row.reason}" for row in rows if row.reason]
    if is_narrow:
        bounds = dict.fromkeys(seconds(row.bound_s) for row in rows if row.bound_s is not None)
        notes.append(f"bound: {', '.join(bounds) or UNKNOWN}")
    return make_table("Strategies", shown(header), map(shown, cells), notes=notes,
                      marked=(row.is_chosen for row in rows))


def peak_text(row: StrategyFacts) -> str:
    """Return the range of the peaks of all devices that hold something: ``2.016 - 2.297 GiB``."""
    peaks = sorted(value for value in (row.peak_bytes or {}).values() if value > 0)
    if not peaks:
        return UNKNOWN
    low, high = format_bytes(peaks[0]), format_bytes(peaks[-1])
    if low == high:
        return high
    return f"{low.removesuffix(high[high.index(' '):])} - {high}"


def print_comparison(rows: Sequence[StrategyFacts], *, width: int | None = None) -> None:
    """Draw the comparison of strategies."""
    print_tables(strategies_table(rows, is_narrow=make_console(width).width < NARROW), width=width)


def rates_text(rates: StepRates) -> str:
    """Return tokens per second and MFU in words, as far as they are known; nothing where neither is."""
    words = []
    if rates.tokens_per_s is not None and rates.tokens_per_s_per_device is not None:
        words += [f"{per_second(rates.tokens_per_s).removesuffix('/s')} tokens/s",
                  f"{per_second(rates.tokens_per_s_per_device).removesuffix('/s')} tokens/s per device"]
    return ", ".join([*words, *([] if rates.mfu is None else [f"MFU {percent(rates.mfu)}"])])


def rates_json(rates: StepRates) -> dict[str, float | None]:
    """Return what a step comes to as plain JSON values."""
    return {"tokens_per_s": rates.tokens_per_s, "tokens_per_s_per_device": rates.tokens_per_s_per_device,
            "mfu": rates.mfu}


def print_timeline(timeline: Timeline, *, width: int | None = None) -> None:
    """Draw where each device's time and memory go."""
    known = None if timeline.program is None else facts.capacities_of(facts.plan_cluster(timeline.program.plan))
    title = f"{timeline.kind.capitalize()} step: {seconds(timeline.step_time_s)}, bubble {percent(timeline.bubble)}"
    rows = facts.device_facts(timeline, known)
    tables = [devices_table(rows, title=title)] if make_console(width).width >= WIDE else [
        times_table(rows, title=title), memory_table(rows, title="Memory at each device's peak")]
    print_tables(*tables, width=width)


def print_plan(plan: Plan, timelines: Sequence[Timeline], *, width: int | None = None) -> None:
    """Draw the whole plan: summary, stages, gradient exchanges, and for each timeline its devices and Gantt chart."""
    print_tables(*plan_tables(plan, timelines), width=width)
    for timeline in timelines:
        known = replace(timeline, program=facts.program_of(timelines))
        print_timeline(known, width=width)
        print_chart(timeline_chart(known), width=width, max_rows=CHART_ROWS)


# ---- what the joint search tried


def tried_tables(rows: Sequence[facts.TriedFacts], *, limit: int = MAX_TRIED) -> Iterator[TextTable]:
    """Yield the best settings, then how many were left out for which reason."""
    known = sorted((row for row in rows if row.estimate_s is not None), key=_time)
    if known:
        best = min((row.step_time_s for row in known if row.step_time_s is not None), default=_time(known[0]))
        cells = tuple((row.setting, seconds(row.estimate_s), seconds(row.step_time_s), _why(row, best))
                      for row in known[:limit])
        more = len(known) - len(cells)
        yield make_table("Tried", ("setting", "#estimate", "#simulated", "why not"), cells,
                         notes=[f"and {more} more that were estimated"] if more else ())
    left_out = grouped((row for row in rows if row.estimate_s is None), _kind)
    if left_out:
        yield make_table("Left out", ("reason", "#settings", "such as"), (
            (_kind(items[0]), str(len(items)), f"{items[0].setting}: {_reason(items[0])}")
            for items in sorted(left_out, key=lambda items: (-len(items), _kind(items[0])))))


def _time(row: facts.TriedFacts) -> float:
    """Return what a setting came to: as simulated, or else as estimated."""
    assert row.estimate_s is not None
    return row.estimate_s if row.step_time_s is None else row.step_time_s


def _why(row: facts.TriedFacts, best_s: float) -> str:
    if row.reason:
        return row.reason
    loss = percent(_time(row) / best_s - 1, signed=True) if best_s > 0 else ""
    if row.step_time_s is None:
        return f"{loss}, not simulated"
    return "the best" if row.step_time_s <= best_s else loss


def _kind(row: facts.TriedFacts) -> str:
    """Return a reason without its figures."""
    return re.split(r"[:0-9]", _reason(row), maxsplit=1)[0].strip() or "no reason given"


def _reason(row: facts.TriedFacts) -> str:
    return row.reason.removeprefix(f"{row.setting}: ")


def print_tried(strategies: Sequence[StrategyFacts]) -> None:
    """Draw the tables of every strategy that kept what it tried."""
    for strategy in strategies:
        print_tables(*tried_tables(strategy.tried))
