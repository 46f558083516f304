"""What ``weft place --format dnn-partitioning`` prints: a summary, and every device. Numbers have no units."""

from __future__ import annotations

from typing import IO

import numpy as np

from weft.base.units import format_bytes
from weft.search.place.partition.problem import PartitionResult
from weft.show.drawing import number
from weft.show.tables import MAX_DEVICE_ROWS, UNKNOWN, TextTable, cut_table, percent, print_text_table


def print_partition(result: PartitionResult, *, width: int | None = None, file: IO[str] | None = None) -> None:
    """Print the split."""
    print_text_table(partition_summary(result), file, width)
    print_text_table(partition_devices(result), file, width)


def partition_summary(result: PartitionResult) -> TextTable:
    """Return the result as rows of (what, value)."""
    problem = result.problem
    name = "latency" if result.objective == "latency" else "largest load"
    status = result.status + (", contiguous" if result.contiguous else "") + (
        ", interrupted" if result.is_interrupted else "")
    devices = f"{problem.num_accelerators} accelerators, " + (
        "any number of CPUs" if result.objective == "latency" else f"{problem.num_cpus} CPUs")
    return TextTable(header=("split", problem.name), rows=(
        (name, f"{number(result.value)} (bound {number(result.bound)}, gap {percent(result.gap)})"),
        ("status", status),
        ("nodes", f"{problem.num_nodes:,} in {problem.num_units:,} units that share a device"),
        ("devices", devices),
        ("search", f"{result.seconds:.3g} CPU seconds")))


def partition_devices(result: PartitionResult, *, limit: int = MAX_DEVICE_ROWS) -> TextTable:
    """Return nodes, load and memory of every device; for latency, when its set of nodes runs."""
    problem, figures = result.problem, result.figures
    is_latency = result.objective == "latency"
    cells = []
    for index, name in enumerate(result.device_names):
        nodes = np.flatnonzero(result.device == index)
        is_accelerator = index < problem.num_accelerators
        is_timed = is_accelerator or not is_latency
        share = figures.loads[index] / result.value if result.value > 0 else 0.0
        used = format_bytes(figures.used[index]) if is_accelerator else ""
        memory = f"{used} of {format_bytes(problem.capacity)}" if is_accelerator else "no limit"
        row = [name, f"{len(nodes):,}", number(figures.loads[index]) if is_timed else UNKNOWN,
               percent(share) if is_timed else UNKNOWN, memory]
        if is_latency:
            has_span = is_accelerator and len(nodes) > 0
            row += [number(figures.start_s[nodes[0]]), number(figures.end_s[nodes[0]])] if has_span else [UNKNOWN] * 2
        cells.append(tuple(row))
    header = ("device", "nodes", "load", "share", "memory", *(("start", "end") if is_latency else ()))
    return cut_table("Devices", header, cells, limit)
