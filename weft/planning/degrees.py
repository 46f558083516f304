"""Degrees by hand against the batch, the cluster and the model: what follows from them, and what cannot be.

    options, cluster -> settle_degrees -> options with what follows   tp 8, pp 16 on 2,048 devices: dp 16
    options, graph   -> check_model_degrees                           tp 3 for 32 heads: refused, with what works

On equal hosts the sizes of the axes multiply to the number of devices, and two of them give the third. Where hosts
differ, stages may be on devices in many ways: there the sizes only must not be too many.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from weft.base.errors import InputError
from weft.cluster.cluster import Cluster
from weft.model.graph import Graph
from weft.search.common.degrees import Degrees
from weft.search.common.problem import PlanOptions, divisors
from weft.search.deploy.splits import tp_groups_by_degree
from weft.search.joint.baselines import STRATEGIES, admits

AXES: Final = ("tp", "cp", "pp", "dp")
"""What devices multiply to; the devices of ``ep`` are those of ``tp``."""


def settle_degrees(options: PlanOptions, cluster: Cluster, *, on_all: bool = True) -> PlanOptions:
    """Return the options with what follows from the degrees; raise ``InputError`` for what cannot be on the cluster.

    The plan is for all devices unless told that some may do.
    """
    degrees, even = options.degrees, is_even(cluster)
    if not degrees:
        return options
    _check_together(options)
    if (degrees.ep or 1) > 1:
        degrees = replace(degrees, tp=degrees.ep)
    _check_tp(degrees, cluster)
    degrees = _from_batch(degrees, options)
    degrees = _with_all_devices(degrees, cluster) if even and on_all else _few_enough(degrees, cluster)
    _check_pieces(degrees, cluster)
    microbatches = options.microbatches
    if microbatches is None and degrees.microbatch_size is not None and degrees.dp is not None:
        _check_divides(degrees, options)
        microbatches = options.batch // (degrees.microbatch_size * degrees.dp)
    options = replace(options, degrees=degrees, microbatches=microbatches,
                      recompute=degrees.recompute == "full" or (options.recompute and degrees.recompute is None),
                      optimizer=replace(options.optimizer, sharded=options.optimizer.sharded or degrees.zero == 1))
    _check_divides(degrees, options, is_even=even)
    return options


def check_model_degrees(options: PlanOptions, graph: Graph) -> None:
    """Raise ``InputError`` where the model cannot be divided as asked."""
    degrees = options.degrees
    heads = None if (degrees.ep or 1) > 1 else min_heads(graph)
    if degrees.tp is not None and heads is not None and heads % degrees.tp:
        works = (size for size in divisors(heads) if size & (size - 1) == 0)
        raise InputError(f"--tp {degrees.tp} does not divide the {heads} attention heads of {graph.name!r}: try "
                         f"{near(degrees.tp, works)}")
    num_stages = (degrees.pp or 1) * (degrees.interleave or 1)
    if num_stages > graph.num_ops:
        raise InputError(f"{graph.name!r} has {graph.num_ops} operators, too few for {num_stages} stages: try --pp "
                         f"{max(1, graph.num_ops // (degrees.interleave or 1))}")


def check_searches(options: PlanOptions, cluster: Cluster, *, strategies: Sequence[str] | None,
                   placements: Sequence[str] = (), deploy: bool | None = None) -> None:
    """Raise ``InputError`` where a search was asked for by name that cannot follow the degrees."""
    degrees, flags = options.degrees, " ".join(options.degrees.flags())
    for name in strategies or ():
        if name in STRATEGIES and not admits(degrees, name, cluster.num_devices):
            raise InputError(f"--strategy {name} makes no plans with {flags} on {cluster.num_devices} devices: leave "
                             "one of them out")
    for name, is_asked in ((f"--placement {' '.join(placements)}", bool(placements)), ("--deploy", deploy)):
        if is_asked and degrees.fixes_layout:
            raise InputError(f"{name} chooses itself which stages are where, so {flags} cannot be fixed: leave one of "
                             "them out")


def samples_on_replica(options: PlanOptions) -> int | None:
    """Return the samples of a micro-batch on one replica, if the options say how many there are."""
    if options.microbatches is None:
        return None
    size, dp = options.batch // options.microbatches, options.degrees.dp or 1
    return size // dp if size % dp == 0 else size


def is_even(cluster: Cluster) -> bool:
    """Return whether all hosts have equally many devices of one kind."""
    groups = cluster.groups_by_host_and_kind()
    return len({(cluster.devices[group[0]].kind, len(group)) for group in groups}) == 1


def near(value: int, works: Iterable[int]) -> str:
    """Return the numbers that work next below and above: ``4 or 8``."""
    known = sorted(works)
    below, above = [size for size in known if size <= value][-1:], [size for size in known if size > value][:1]
    return " or ".join(map(str, below + above)) or "another one"


def min_heads(graph: Graph) -> int | None:
    """Return the heads of the attention operators, the fewest of any; None where there are none."""
    found = {graph.tensor_shapes[int(graph.op_inputs(op)[0])] for op, kind in enumerate(graph.op_kinds)
             if "scaled_dot_product" in kind}
    return min((int(shape[-3]) for shape in found if len(shape) >= 3), default=None)


def _check_together(options: PlanOptions) -> None:
    """Raise ``InputError`` for options that contradict each other."""
    degrees = options.degrees
    if options.mode == "inference":
        late = {"--zero": degrees.zero, "--recompute": degrees.recompute not in (None, "none") or None,
                "--interleave": degrees.interleave if degrees.interleave != 1 else None}
        for name, value in late.items():
            if value:
                raise InputError(f"{name} is for training, and this is inference: leave it out")
    if degrees.ep is not None and degrees.ep > 1 and degrees.tp not in (None, degrees.ep):
        raise InputError(f"--ep {degrees.ep} divides experts over the devices of a tp group, and --tp {degrees.tp} "
                         "says how many these are: make them equal, or leave --tp out")
    if degrees.zero == 0 and degrees.zero_group is not None:
        raise InputError("--zero-group says who divides what --zero 0 keeps whole: leave one of them out")
    if options.whole_parameters:
        late = {"--zero": degrees.zero, "--tp": degrees.tp if degrees.tp != 1 else None}
        for name, value in late.items():
            if value:
                raise InputError(f"{name} {value} divides parameters, but this optimizer needs them whole: leave it "
                                 "out, or use another optimizer")
    if degrees.pp == 1 and (degrees.interleave or 1) > 1:
        raise InputError(f"--interleave {degrees.interleave} needs a pipeline, and --pp 1 is none: leave out one of "
                         "them")


def _check_pieces(degrees: Degrees, cluster: Cluster) -> None:
    """Raise ``InputError`` where nobody could have the pieces that are asked for."""
    if (degrees.zero or 0) > 0 and degrees.dp == 1 and (degrees.cp or 1) == 1:
        raise InputError(f"--zero {degrees.zero} keeps pieces on replicas, and there is one of each stage (--dp 1): "
                         "leave it out, or have more replicas")
    for name, size in (("--cp", degrees.cp), ("--interleave", degrees.interleave)):
        if (degrees.zero or 0) > 1 and (size or 1) > 1:
            raise InputError(f"--zero {degrees.zero} is not planned together with {name} {size}: leave one of them "
                             "out, or ask for --zero 1")
    hosts = len({device.host for device in cluster.devices})
    if degrees.zero_group == "host" and hosts == 1:
        raise InputError("--zero-group host is for replicas on several hosts, and the cluster has one: leave it out")


def _check_tp(degrees: Degrees, cluster: Cluster) -> None:
    groups = cluster.groups_by_host_and_kind()
    works = [1, *(degree for degree, _ in tp_groups_by_degree(groups))]
    if is_even(cluster):
        works = [degree for degree in works if len(groups[0]) % degree == 0]
    if degrees.tp is not None and degrees.tp not in works:
        most = max(map(len, groups))
        name = "--tp" if (degrees.ep or 1) == 1 else "--ep"
        raise InputError(f"{name} {degrees.tp} devices of one host cannot divide operators: hosts have up to {most} of "
                         f"a kind, and tp groups are powers of two. Try {near(degrees.tp, works)}")


def _from_batch(degrees: Degrees, options: PlanOptions) -> Degrees:
    """Return the degrees with ``dp``, where batch, number and size of micro-batches say it."""
    size, number, batch = degrees.microbatch_size, options.microbatches, options.batch
    if size is not None and batch % (size * (number or 1)):
        raise InputError(f"a batch of {batch} is not made of micro-batches of {size}"
                         + (f" in {number} turns" if number else "")
                         + f": try --microbatch-size {near(size, divisors(batch // (number or 1)))}")
    if size is None or number is None:
        return degrees
    dp = batch // (size * number)
    if degrees.dp not in (None, dp):
        raise InputError(f"--microbatches {number} of --microbatch-size {size} on --dp {degrees.dp} replicas are "
                         f"{number * size * (degrees.dp or 1)} samples, not the batch of {batch}: leave one of them "
                         f"out, or try --dp {dp}")
    return replace(degrees, dp=dp)


def _with_all_devices(degrees: Degrees, cluster: Cluster) -> Degrees:
    """Return the degrees with the only one that is left open; they must multiply to the devices of equal hosts."""
    count, product = cluster.num_devices, _product(degrees)
    free = [name for name in ("pp", "dp", "tp") if getattr(degrees, name) is None]
    given = [name for name in AXES if getattr(degrees, name) is not None]
    if not given:
        return degrees
    if count % product or (not free and product != count):
        name = next(item for item in ("dp", "pp", "tp", "cp") if item in given)
        others = product // getattr(degrees, name)
        works = [size for size in divisors(count) if count % (others * size) == 0 and (free or others * size == count)]
        hint = f"try --{name} {near(getattr(degrees, name), works)}" if works else "try smaller ones"
        raise InputError(f"{_words(degrees, given)} {'is' if len(given) == 1 else 'are'} {product} devices, and the "
                         f"cluster has {count}: {hint}")
    if len(free) > 1 or not free:
        return degrees
    size = count // product
    found = replace(degrees, **{free[0]: size})  # type: ignore[arg-type]
    if free[0] == "tp":
        _check_tp(found, cluster)
    if free[0] == "pp" and size == 1 and (degrees.interleave or 1) > 1:
        raise InputError(f"--interleave {degrees.interleave} needs a pipeline, but {_words(degrees, given)} leave none "
                         f"on {count} devices: leave it out, or make them smaller")
    return found


def _few_enough(degrees: Degrees, cluster: Cluster) -> Degrees:
    product, count = _product(degrees), cluster.num_devices
    if product > count:
        given = [name for name in AXES if getattr(degrees, name) is not None]
        raise InputError(f"{_words(degrees, given)} are {product} devices, and the cluster has {count}: try smaller "
                         "ones")
    return degrees


def _check_divides(degrees: Degrees, options: PlanOptions, *, is_even: bool = True) -> None:
    """Raise ``InputError`` where the batch or its micro-batches cannot be divided as asked."""
    batch, dp, size = options.batch, degrees.dp or 1, degrees.microbatch_size or 1
    if batch % (dp * size) and (is_even or size > 1):
        raise InputError(f"--dp {dp} replicas{f' with micro-batches of {size}' if size > 1 else ''} do not divide a "
                         f"batch of {batch}: try --batch {near(batch, _multiples(dp * size, batch))}")
    if options.microbatches is not None:
        part = batch // options.microbatches
        if part < dp or (is_even and part % dp):
            works = [number for number in divisors(batch) if (batch // number) % dp == 0]
            raise InputError(f"each of {options.microbatches} micro-batches has {part} samples, which --dp {dp} "
                             f"replicas cannot share evenly: try --microbatches {near(options.microbatches, works)}")
    if (degrees.interleave or 1) > 1 and degrees.pp is not None:
        fits = [number for number in divisors(batch) if number % degrees.pp == 0 and batch // number >= dp]
        if options.microbatches is not None and options.microbatches % degrees.pp:
            raise InputError(f"--interleave {degrees.interleave} needs a number of micro-batches that --pp "
                             f"{degrees.pp} divides, not {options.microbatches}: "
                             + (f"try --microbatches {near(options.microbatches, fits)}" if fits else
                                f"try --batch {near(batch, _multiples(degrees.pp * dp, batch))}"))
        if not fits:
            raise InputError(f"--interleave {degrees.interleave} needs a number of micro-batches that --pp "
                             f"{degrees.pp} divides, with a sample for each of {dp} replicas, and a batch of {batch} "
                             f"has none: try --batch {near(batch, _multiples(degrees.pp * dp, batch))}")


def _multiples(step: int, value: int) -> list[int]:
    """Return the multiples of ``step`` next to a value, from ``step`` on."""
    return sorted({max(step, value // step * step), -(-value // step) * step})


def _product(degrees: Degrees) -> int:
    return math.prod(getattr(degrees, name) or 1 for name in AXES)


def _words(degrees: Degrees, names: Iterable[str]) -> str:
    """Return the sizes of some axes: ``--tp 8 x --pp 16``."""
    return " x ".join(f"--{name} {getattr(degrees, name)}" for name in names)
