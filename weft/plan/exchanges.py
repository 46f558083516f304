"""Gradient exchanges by other methods than all-reduce: what must hold of them, and plans that use factors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from weft.model.graph import Graph
from weft.plan.factors import LINEAR_KINDS, Factors, find_factors
from weft.plan.plan import GradientExchange, Plan


def exchange_problems(plan: Plan, graph: Graph, exchange: GradientExchange, path: str) -> Iterator[str]:
    """Yield what is wrong with the method of an exchange whose parameters and devices exist."""
    if exchange.groups and exchange.method != "hierarchical":
        yield f"{path}.groups is for the method 'hierarchical', not for {exchange.method!r}: leave it out"
    if exchange.server is not None and exchange.method != "parameter_server":
        yield f"{path}.server is for the method 'parameter_server', not for {exchange.method!r}: leave it out"
    if exchange.method == "hierarchical":
        yield from _group_problems(exchange, path)
    if exchange.method == "parameter_server" and exchange.server not in exchange.devices:
        given = "is missing" if exchange.server is None else f"{exchange.server!r} is not one of its devices"
        yield f"{path}.server {given}: name one of {', '.join(exchange.devices)}"
    if exchange.method == "sufficient_factors":
        yield from _factor_problems(plan, graph, exchange, path)


def _group_problems(exchange: GradientExchange, path: str) -> Iterator[str]:
    if any(not group for group in exchange.groups):
        yield f"{path}.groups has an empty group"
    count = Counter(device for group in exchange.groups for device in group)
    for device in exchange.devices:
        if count[device] != 1:
            what = "is in no group" if count[device] == 0 else f"is in them {count[device]} times"
            yield f"{path}.groups: {device!r} {what}; the groups divide the exchange's devices, each in one of them"
    for device in count:
        if device not in exchange.devices:
            yield f"{path}.groups: {device!r} is not one of the exchange's devices"


def _factor_problems(plan: Plan, graph: Graph, exchange: GradientExchange, path: str) -> Iterator[str]:
    tensors = [graph.tensor_index[name] for name in exchange.parameters]
    factors = find_factors(graph, tensors)
    made = {use.weight for use in factors.uses} | {use.bias for use in factors.uses}
    for position, (tensor, name) in enumerate(zip(tensors, exchange.parameters, strict=True)):
        if tensor not in made:
            yield f"{path}.parameters[{position}]: {_why_not(graph, tensor, name)}"
    dtypes = sorted({graph.tensor_dtypes[tensor] for tensor in tensors})
    if len(dtypes) > 1:
        yield f"{path}.parameters have the dtypes {', '.join(dtypes)}: exchange factors of each dtype by themselves"
    read = {use.op for use in factors.uses}
    for index, stage in enumerate(plan.stages):
        inside = {graph.op_index[name] for name in stage.ops}
        if inside & read:
            if any(len(replica.devices) > 1 for replica in stage.replicas):
                yield (f"{path}: stages[{index}] ({stage.name!r}) has replicas of several devices; sufficient_factors "
                       "needs replicas of one device each: use all_reduce")
            yield from _transpose_problems(graph, factors, inside, f"{path}: stages[{index}] ({stage.name!r})")


def _why_not(graph: Graph, tensor: int, name: str) -> str:
    readers = graph.consumer_op[graph.inputs == tensor].tolist()
    kinds = list(dict.fromkeys(graph.op_kinds[op] for op in readers))
    is_bias = len(graph.tensor_shapes[tensor]) == 1 and any(kind in LINEAR_KINDS for kind in kinds)
    if is_bias:
        return f"{name!r} is a bias; the weight that belongs to it must be in the same exchange of sufficient_factors"
    return (f"{name!r} is not the weight or bias of a linear operator (it is read by {', '.join(kinds[:3])}), so its "
            "gradient has no factors: use all_reduce")


def _transpose_problems(graph: Graph, factors: Factors, inside: set[int], where: str) -> Iterator[str]:
    for use in factors.uses:
        if use.transpose is not None and use.op in inside and use.transpose not in inside:
            yield (f"{where} holds {graph.op_names[use.op]!r} but not {graph.op_names[use.transpose]!r}, which "
                   "transposes its weight: put both into one stage")


def with_sufficient_factors(plan: Plan, graph: Graph, *, only: Callable[[str], bool] = lambda name: True) -> Plan:
    """Return the plan with factors exchanged for the weights of linear operators that ``only`` accepts by name.

    Their biases go with them, also from other exchanges among the same devices; what else was exchanged together with
    them stays as it was.
    """
    homes: dict[tuple[str, tuple[str, ...]], int] = {}
    """The exchange by factors that a parameter goes to, by its name and devices."""
    for devices in dict.fromkeys(item.devices for item in plan.gradients):
        place_of = {graph.tensor_index[name]: place for place, item in enumerate(plan.gradients)
                    if item.devices == devices for name in item.parameters}
        wanted = [tensor for tensor in place_of
                  if len(graph.tensor_shapes[tensor]) < 2 or only(graph.tensor_names[tensor])]
        for use in find_factors(graph, wanted).uses:
            for tensor in (use.weight, use.bias):
                if tensor is not None:
                    homes.setdefault((graph.tensor_names[tensor], devices), place_of[use.weight])
    exchanges: list[GradientExchange] = []
    for place, item in enumerate(plan.gradients):
        chosen = tuple(name for (name, devices), home in homes.items() if home == place and devices == item.devices)
        rest = tuple(name for name in item.parameters if (name, item.devices) not in homes)
        if chosen:
            exchanges.append(GradientExchange(parameters=chosen, method="sufficient_factors", devices=item.devices))
        if rest:
            exchanges.append(replace(item, parameters=rest))
    return replace(plan, gradients=tuple(exchanges))
