"""Is this the model that a plan was made for? And if its operators have other names now, which are they?

Two versions of PyTorch or of a model's library write the same model as different lists of operators: a view more here,
a cast less there, and the numbers behind the names of all others shift. What must be the same is what the plan decides
about: the parameters (names, shapes, kinds of numbers), the inputs, the modules at which stages begin and end, and the
work of each stage. ``bind_plan`` is the one place where that is found out:

* where the digest of the operator list is the plan's, nothing needs to be done;
* else operators are matched module by module, in order, by what they are; one that is new goes to the stage of its
  neighbours in the module. Where it runs does not change results, and the plan is checked as any other;
* where devices divide a stage, a new operator is not divided, which is right wherever it is; but it must not read what
  the plan has in parts, which would be gathered for it, and nothing that is split may have vanished.

A plan that an earlier release has written names no parameters and no work; then only the rest can be compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import Final

import numpy as np

from weft.model.graph import I64, Graph, TensorRole
from weft.plan.plan import Plan, Sharding, Stage
from weft.plan.structure import raise_problems

TOLERANCE: Final = 0.01
"""How far the FLOPs and bytes of a stage may be from the plan's, as a part of them."""
MAX_PAIRS: Final = 250_000
"""At most so many pairs of operators of one module are compared, which takes a second."""
_FLOATS: Final = ("float64", "float32", "bfloat16", "float16")
_NUMBER: Final = re.compile(r"(_\d+)+$")
_Stages = tuple[int, ...]
"""The stages that hold an operator; several in opposite pipelines."""


def bind_plan(plan: Plan, graph: Graph) -> Plan:
    """Return the plan with the names that its operators have in ``graph``; ``PlanError`` if that is another model."""
    if plan.model.digest == graph.digest:
        return plan
    if _is_same_in_another_dtype(plan, graph):
        return replace(plan, model=replace(plan.model, digest=graph.digest))
    _raise_if(plan, graph, [*_model_problems(plan, graph)])
    matching = _match(plan, graph)
    stages = tuple(_rebuilt(stage, index, matching, graph) for index, stage in enumerate(plan.stages))
    problems = matching.problems + [text for stage in stages for text in _work_problems(stage, graph)]
    if problems and graph.batch == 1:
        problems.insert(0, "it was traced for one sample, and may have other operators for that than for several (a "
                           "plan whose ranks have two at a time may run)")
    _raise_if(plan, graph, problems)
    return replace(plan, model=replace(plan.model, digest=graph.digest), stages=stages)


def _raise_if(plan: Plan, graph: Graph, problems: Sequence[str]) -> None:
    """Raise ``PlanError`` if there are problems."""
    if not problems:
        return
    shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
    raise_problems("the plan", [
        f"model.digest is {plan.model.digest!r} but the model {graph.name!r} has {graph.digest!r}: the plan was made "
        f"for another model (or another version of it); plan again. What differs: {shown}"])


def _is_same_in_another_dtype(plan: Plan, graph: Graph) -> bool:
    """Return whether only the floating-point type differs, as where a plan is verified in float64."""
    others = (tuple(dtype if item in _FLOATS else item for item in graph.tensor_dtypes) for dtype in _FLOATS)
    return any(replace(graph, tensor_dtypes=dtypes).digest == plan.model.digest for dtypes in others)


# ---- parameters, inputs, work ---------------------------------------------------------------------------------------


def _model_problems(plan: Plan, graph: Graph) -> Iterator[str]:
    """Yield why the operators need not be looked at: other parameters or inputs, or nothing to go by."""
    known = {op for stage in plan.stages for op in stage.ops}
    if graph.given is not None:
        yield "a graph file's operators are known by name alone"
    elif not plan.model.parameters and not known ^ set(graph.op_names):
        yield "its operators have the plan's names, so their wiring or the shapes of its parameters differ"
    if plan.model.parameters:
        yield from _differences("parameter", plan.model.parameters, graph.parameter_texts, plan)
        yield from _differences("input", plan.model.inputs, graph.input_texts, plan)


def _differences(what: str, planned: Mapping[str, str], found: Mapping[str, str], plan: Plan) -> Iterator[str]:
    for name in (*planned, *(name for name in found if name not in planned)):
        before, now = planned.get(name), found.get(name)
        if before is None or now is None or _kind(before) != _kind(now):
            yield (f"{what} {name!r}{_stage_of(name, plan)} is {before or 'not there'} in the plan and "
                   f"{now or 'not there'} in the model")


def _kind(text: str) -> str:
    """Return the description of a tensor without the width of its floating-point numbers."""
    dtype, _, shape = text.partition(" ")
    kind = "float" if dtype in _FLOATS else "complex" if dtype.startswith("complex") else dtype
    return f"{kind} {shape}"


def _stage_of(name: str, plan: Plan) -> str:
    """Return the stage with operators of the module that a parameter belongs to, for people."""
    module = name.rpartition(".")[0]
    found = next((stage.name for stage in plan.stages for op in stage.ops if module and module_of(op) == module), "")
    return f" (stage {found})" if found else ""


def _work_problems(stage: Stage, graph: Graph) -> Iterator[str]:
    flops, written = stage_work(graph, [graph.op_index[op] for op in stage.ops])
    for what, planned, now in (("FLOPs", stage.flops, flops), ("bytes", stage.bytes, written)):
        if planned is not None and abs(now - planned) > TOLERANCE * min(planned, now):
            yield (f"stage {stage.name}: {now:.4g} {what} for a sample, {planned:.4g} in the plan "
                   f"({100 * (now / planned - 1) if planned else float('inf'):+.1f} %)")


def stage_work(graph: Graph, ops: Sequence[int] | I64) -> tuple[float, float]:
    """Return the FLOPs of the forward of a sample, and the bytes that it writes (floats as of 4 bytes)."""
    flops, written = graph.sample_work
    index = np.asarray(ops, dtype=np.int64)
    return float(flops[index].sum()), float(written[index].sum())


# ---- matching operators ---------------------------------------------------------------------------------------------


def module_of(op: str) -> str:
    """Return the module path in an operator's name.

    >>> module_of("layers.0.attn.view_1")
    'layers.0.attn'
    """
    return op.rpartition(".")[0]


def _what(op: str) -> str:
    return _NUMBER.sub("", op.rpartition(".")[2])


@dataclass(slots=True, kw_only=True)
class _Matching:
    """Which operator of the model is which of the plan."""

    stages: dict[str, _Stages] = field(default_factory=dict)
    """Stages by operator of the model."""
    new_name: dict[str, str] = field(default_factory=dict)
    """Operator of the model by operator of the plan."""
    problems: list[str] = field(default_factory=list)


def _match(plan: Plan, graph: Graph) -> _Matching:
    planned: dict[str, _Stages] = {}
    for index, stage in enumerate(plan.stages):
        for op in stage.ops:
            planned[op] = (*planned.get(op, ()), index)
    old, new = _by_module(planned), _by_module(graph.op_names)
    found = _Matching(problems=[*_boundary_problems(plan, new)])
    for module, ops in new.items():
        _match_module(old.get(module, []), ops, planned, found)
    for op in graph.op_names:
        if op not in found.stages:
            _place_new(op, old, new[module_of(op)], planned, graph, found)
    return found


def _by_module(ops: Sequence[str] | Mapping[str, _Stages]) -> dict[str, list[str]]:
    modules: dict[str, list[str]] = {}
    for op in ops:
        modules.setdefault(module_of(op), []).append(op)
    return modules


def _boundary_problems(plan: Plan, modules: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield the stages that begin or end in a module which the model does not have."""
    paths = {path for module in modules for path in _with_parents(module)}
    for stage in plan.stages:
        for word, op in (("begins", stage.ops[0]), ("ends", stage.ops[-1])) if stage.ops else ():
            if module_of(op) not in paths:
                yield f"stage {stage.name} {word} in module {module_of(op)!r}, which has no operators in the model"


def _with_parents(module: str) -> Iterator[str]:
    while module:
        yield module
        module = module.rpartition(".")[0]
    yield ""


def _match_module(old: Sequence[str], new: Sequence[str], planned: Mapping[str, _Stages], found: _Matching) -> None:
    """Match the operators of one module, in order, by what they are."""
    for first, begin, count in _equal_runs([_what(op) for op in old], [_what(op) for op in new], found):
        for before, now in zip(old[first : first + count], new[begin : begin + count], strict=True):
            found.new_name[before] = now
            found.stages[now] = planned[before]


def _equal_runs(old: Sequence[str], new: Sequence[str], found: _Matching) -> Iterator[tuple[int, int, int]]:
    """Yield (place in ``old``, place in ``new``, length) of what is equal: at both ends, and between."""
    shorter = min(len(old), len(new))
    begin = next((place for place in range(shorter) if old[place] != new[place]), shorter)
    rest = shorter - begin
    end = next((count for count in range(rest) if old[-1 - count] != new[-1 - count]), rest)
    yield 0, 0, begin
    yield len(old) - end, len(new) - end, end
    middle = old[begin : len(old) - end], new[begin : len(new) - end]
    if len(middle[0]) * len(middle[1]) > MAX_PAIRS:
        found.problems.append(f"{len(middle[1])} operators of one module differ from {len(middle[0])} of the plan's")
        return
    for block in SequenceMatcher(None, *middle, autojunk=False).get_matching_blocks():
        yield begin + block.a, begin + block.b, block.size


def _place_new(op: str, old: Mapping[str, Sequence[str]], module: Sequence[str], planned: Mapping[str, _Stages],
               graph: Graph, found: _Matching) -> None:
    """Give an operator that the plan does not have a stage: that of its neighbours in the module, if they share one.

    Else it goes where what it reads comes from, the last of those; else where it is read, the first of those; else to
    the one stage of the module around it.
    """
    place = module.index(op)
    before = next((found.stages[item] for item in reversed(module[:place]) if item in found.stages), None)
    behind = next((found.stages[item] for item in module[place:] if item in found.stages), None)
    if before is not None and before == behind:
        found.stages[op] = before
        return
    sources, readers = _stages_beside(op, graph, found)
    around = {before, behind} - {None} or _stages_inside(module_of(op), old, planned)
    choices = [*sorted(sources, reverse=True), *sorted(readers), *(around if len(around) == 1 else ())]
    if not choices:
        found.problems.append(f"operator {op!r} is new, and nothing says to which stage it belongs")
    found.stages[op] = choices[0] if choices else (0,)


def _stages_beside(op: str, graph: Graph, found: _Matching) -> tuple[set[_Stages], set[_Stages]]:
    """Return the stages of the operators whose results it reads, and of those that read its results, new ones left out.

    Constants, which any stage may compute for itself, do not count.
    """
    index = graph.op_index[op]
    before = [item for item in graph.tensor_producer[graph.op_inputs(index)].tolist()
              if item >= 0 and not graph.is_constant[item]]
    behind = graph.consumer_op[np.isin(graph.inputs, graph.op_outputs(index))].tolist()
    names = graph.op_names
    sources, readers = ({found.stages[names[item]] for item in items if names[item] in found.stages}
                        for items in (before, behind))
    if not sources and not readers and behind:  # it is read by other new ones: look further
        return _stages_beside(names[behind[0]], graph, found)
    return sources, readers


def _stages_inside(module: str, old: Mapping[str, Sequence[str]], planned: Mapping[str, _Stages]) -> set[_Stages]:
    """Return the stages of the plan's operators in the module, or in the nearest around it that has some."""
    for path in _with_parents(module):
        inside = {planned[op] for name, ops in old.items() if not path or name == path or name.startswith(f"{path}.")
                  for op in ops}
        if inside:
            return inside
    return set()


# ---- stages with their new names ------------------------------------------------------------------------------------


def _rebuilt(stage: Stage, index: int, found: _Matching, graph: Graph) -> Stage:
    ops = tuple(op for op in graph.op_names if index in found.stages[op])
    if not ops:
        found.problems.append(f"stage {stage.name}: none of its operators is in the model")
    if not stage.sharding:
        return replace(stage, ops=ops, saved=_saved(stage, found, graph))
    changed = _Sharded(stage=stage, found=found, graph=graph)
    sharding = changed.rebuilt()
    found.problems += [*changed.problems(ops)]
    return replace(stage, ops=ops, sharding=sharding, saved=_saved(stage, found, graph))


def _saved(stage: Stage, found: _Matching, graph: Graph) -> tuple[str, ...]:
    """Return what the stage keeps, with the names of now; what is not there any more is a problem."""
    changed = _Sharded(stage=stage, found=found, graph=graph)
    names = [changed.tensor(name) for name in stage.saved]
    found.problems += [f"stage {stage.name} keeps tensor {old!r} for its backward, which is not in the model"
                       for old, name in zip(stage.saved, names, strict=True) if name is None]
    return tuple(name for name in names if name is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sharded:
    """A stage that several devices divide: what is split must be there as it was."""

    stage: Stage
    found: _Matching
    graph: Graph

    def rebuilt(self) -> Sharding:
        """Return the sharding with the names of now; entries of what has vanished are left out (and are problems)."""
        old = self.stage.sharding
        return Sharding(
            ops={self.found.new_name[op]: words for op, words in old.ops.items() if op in self.found.new_name},
            tensors={name: words for item, words in old.tensors.items() if (name := self.tensor(item)) is not None},
            made={name: words for item, words in old.made.items() if (name := self.tensor(item)) is not None})

    def tensor(self, name: str) -> str | None:
        """Return the name that a tensor has now, or None."""
        graph = self.graph
        op, colon, position = (name, "", "") if name in self.found.new_name else name.rpartition(":")
        if op in self.found.new_name:
            now = f"{self.found.new_name[op]}{colon}{position}"
            return now if now in graph.tensor_index else None
        index = graph.tensor_index.get(name)
        return name if index is not None and graph.tensor_role[index] != TensorRole.ACTIVATION else None

    def problems(self, ops: Sequence[str]) -> Iterator[str]:
        """Yield what is split and gone, and new operators that read something that is not whole."""
        old, where = self.stage.sharding, f"stage {self.stage.name} is divided among devices, and"
        split = {name for words in (old.tensors, old.made) for name, item in words.items()
                 if any(word != "R" for word in item)}
        for op in old.ops:
            if op not in self.found.new_name:
                yield f"{where} operator {op!r}, which they divide, is not in the model"
        for name in sorted(split):
            if self.tensor(name) is None:
                yield f"{where} tensor {name!r}, which they hold in parts, is not in the model"
        in_parts = {self.tensor(name) for name in split & old.tensors.keys()}
        matched = set(self.found.new_name.values())
        for op in ops:
            read = [self.graph.tensor_names[item] for item in self.graph.op_inputs(self.graph.op_index[op]).tolist()]
            if op not in matched and in_parts & set(read):
                yield (f"{where} operator {op!r}, which the plan does not have, reads "
                       f"{next(item for item in read if item in in_parts)!r}, which they hold in parts")
