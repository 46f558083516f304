"""Trace one of each repeated layer: how equal layers are known, stood in for, compared and copied.

Tracing costs two to three milliseconds per operator, so the 80 equal layers of a large model take many seconds. Layers
are *equal* when their classes, settings and parameter shapes are (``equal_children``); a number that counts the layers
is the only difference allowed, and it must not be used (``watch_numbers``). While ``torch.export`` runs, the first and
the last layer are traced in full between two markers, ``fold_enter`` and ``fold_leave`` (``trace_layer``); others
become a single operator ``fold_repeat``, which is afterwards replaced with a copy of the first, wired to the copy's own
parameters (``write_copy``), if the layers that were traced agree, operator by operator (``check_equal``):

    x -> [enter h.0 ... leave] -> repeat h.1 -> repeat h.2 -> ... -> [enter h.47 ... leave] -> loss

A difference, or an operator that changes memory inside a layer (``check_unchanging``), raises ``FoldMismatch``. Which
layers are traced and which are stood in for: ``weft.model.chains``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx
from torch.utils import _pytree as pytree

MIN_MODULES: Final = 3
"""A layer of fewer modules than this has too few operators to be worth a stand-in."""
_MEMBERS: Final = ("_parameters", "_buffers", "_modules")
_PLAIN: Final = frozenset({bool, type(None), str, float, torch.dtype, torch.device})

_LIBRARY: Final = torch.library.Library("weft", "DEF")
_LIBRARY.define("fold_enter(str key, Tensor[] tensors) -> Tensor[]")
_LIBRARY.define("fold_leave(str key, Tensor[] tensors) -> Tensor[]")
_LIBRARY.define("fold_repeat(str key, Tensor[] tensors) -> Tensor[]")


class FoldMismatch(Exception):  # noqa: N818 - it is caught by the tracer, never shown
    """Layers that looked equal are not: trace every one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What a stand-in must know about a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorSpec:
        """Return the spec of ``tensor``."""
        return TensorSpec(shape=tuple(tensor.shape), stride=tuple(tensor.stride()), dtype=tensor.dtype,
                          device=tensor.device, requires_grad=tensor.requires_grad)

    def empty(self) -> torch.Tensor:
        """Return an unfilled tensor like this."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(slots=True, kw_only=True)
class Record:
    """One set of equal layers called with equal inputs."""

    id: int
    outputs: tuple[TensorSpec, ...] = ()
    """The tensors that the layer makes, in order."""
    layout: tuple[tuple[str, Any], ...] = ()
    """Per leaf of the result: ``("new", i)``, ``("input", i)`` or ``("value", plain value)``."""
    spec: Any = None


RECORDS: dict[int, Record] = {}
_NUMBERS: Final = itertools.count()


def _like(key: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [TensorSpec.of(tensor).empty() for tensor in tensors]


def _repeated(key: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [spec.empty() for spec in RECORDS[int(key.split(":")[0])].outputs]


for _name, _body in (("fold_enter", _like), ("fold_leave", _like), ("fold_repeat", _repeated)):
    _LIBRARY.impl(_name, _body, "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"weft::{_name}", _body, lib=_LIBRARY)

ENTER: Final = torch.ops.weft.fold_enter.default
LEAVE: Final = torch.ops.weft.fold_leave.default
REPEAT: Final = torch.ops.weft.fold_repeat.default
MARKERS: Final = (ENTER, LEAVE, REPEAT)


# ---- which layers are equal ---------------------------------------------------------------------------------------


def equal_children(children: list[torch.nn.Module], owners: Mapping[int, tuple[str, ...]]) -> list[list[int]]:
    """Return the positions of ``children`` in sets of equal ones."""
    alike: dict[Any, list[tuple[int, tuple[int, ...]]]] = {}
    for position, child in enumerate(children):
        numbers: list[int] = []
        shape = _shape_of(child, owners, numbers) or ("alone", position)
        alike.setdefault(shape, []).append((position, tuple(numbers)))
    result: list[list[int]] = []
    for members in alike.values():
        # a whole number that grows with the layer's position is its index, not a setting
        start, firsts = members[0]
        is_index = [all(found[slot] - position == number - start for position, found in members)
                    for slot, number in enumerate(firsts)]
        equal: dict[Any, list[int]] = {}
        for position, found in members:
            key = tuple(number for number, index in zip(found, is_index, strict=True) if not index)
            equal.setdefault(key, []).append(position)
        result.extend(equal.values())
    return sorted(result)


def parameter_owners(module: torch.nn.Module) -> Mapping[int, tuple[str, ...]]:
    """Return the paths of the modules that have each parameter or buffer, by its ``id``."""
    owners: dict[int, list[str]] = {}
    for path, child in module.named_modules(remove_duplicate=False):
        for tensor in (*child._parameters.values(), *child._buffers.values()):
            if tensor is not None:
                owners.setdefault(id(tensor), []).append(path)
    return {key: tuple(paths) for key, paths in owners.items()}


def _shape_of(layer: torch.nn.Module, owners: Mapping[int, tuple[str, ...]], numbers: list[int]) -> Any:
    """Return all of ``layer`` but its whole-number settings, which go to ``numbers``; None if it must not be folded."""
    parts: list[Any] = []
    num_modules = 0
    for name, module in layer.named_modules():
        num_modules += 1
        changes_buffers = module.training and getattr(module, "track_running_stats", False)
        if "forward" in module.__dict__ or isinstance(module, torch.jit.ScriptModule) or changes_buffers:
            return None
        parts.append((name, type(module)))
        for kind in ("_parameters", "_buffers"):
            for key, tensor in getattr(module, kind).items():
                if tensor is not None and len(owners[id(tensor)]) > 1:
                    return None  # shared with another module: copying the wiring would lose that
                parts.append((key, None if tensor is None else
                              (tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)))
        for key, value in module.__dict__.items():
            if key not in _MEMBERS:
                parts.append(key)
                parts.append("none" if isinstance(value, dict) and not value else _setting(value, numbers))
    return tuple(parts) if num_modules >= MIN_MODULES else None


def _setting(value: Any, numbers: list[int]) -> Any:
    kind = type(value)
    if kind is int:
        numbers.append(value)
        return int
    if kind in _PLAIN:
        return kind, value
    if isinstance(value, str | float):
        return kind, str(value)
    if isinstance(value, list | tuple):
        return (type(value).__name__, *(_setting(item, numbers) for item in value))
    if isinstance(value, dict):
        return ("dict", *((str(key), _setting(item, numbers)) for key, item in value.items()))
    if isinstance(value, set | frozenset):
        return ("set", *sorted(str(item) for item in value))
    return (type(value).__name__, id(value))


# ---- numbers that must not be looked at ---------------------------------------------------------------------------
#
# Equal layers may each have a number of their own, such as the position in the stack that a cache would need. A layer
# that computes with it may do something else in one of the layers that are not traced, whatever the traced ones do. So
# while layers are folded these numbers are replaced by ones that raise an error when they are used.


class Watched(int):
    """A whole number that raises ``problem`` when anything is done with it but printing."""

    problem: Exception


def _refuse(self: Watched, *args: Any) -> Any:
    raise self.problem


_USES: Final = (
    "eq ne lt le gt ge hash bool index int float complex trunc round floor ceil abs neg pos invert add radd sub rsub "
    "mul rmul mod rmod floordiv rfloordiv truediv rtruediv divmod rdivmod pow rpow and rand or ror xor rxor lshift "
    "rlshift rshift rrshift")
for _name in _USES.split():
    setattr(Watched, f"__{_name}__", _refuse)


def watch_numbers(layers: Sequence[torch.nn.Module], stack: ExitStack, problem: Callable[[str], Exception]) -> None:
    """Replace the whole numbers in which equal ``layers`` differ by watched ones, until ``stack`` is closed.

    ``problem`` makes the exception from a reason; it is raised at once where numbers differ inside a list or dict.
    """
    first, last = (dict(layer.named_modules()) for layer in (layers[0], layers[-1]))
    for path, module in first.items():
        for key, value in module.__dict__.items():
            other = last[path].__dict__.get(key)
            if isinstance(value, list | tuple | dict):
                if value and key not in ("_modules", "_parameters", "_buffers") and _numbers(value) != _numbers(other):
                    raise problem(f"{key} differs between layers")
            elif type(value) is int and value != other:
                for layer in layers:
                    _watch(layer.get_submodule(path).__dict__, key, stack, problem("a layer looks at its own number"))


def _watch(settings: dict[str, Any], key: str, stack: ExitStack, problem: Exception) -> None:
    value = settings[key]
    stack.callback(settings.__setitem__, key, value)
    settings[key] = Watched(value)
    settings[key].problem = problem


def _numbers(value: Any) -> list[int]:
    return [leaf for leaf in pytree.tree_leaves(value) if type(leaf) is int]


# ---- while tracing ------------------------------------------------------------------------------------------------


def new_record() -> Record:
    """Return a record that ``REPEAT`` can be called with."""
    record = Record(id=next(_NUMBERS))
    RECORDS[record.id] = record
    return record


def wanting(tensors: list[torch.Tensor], like: Sequence[TensorSpec | torch.Tensor]) -> list[torch.Tensor]:
    """Return ``tensors``, each wanting a gradient as its counterpart does: PyTorch picks some kernels by that."""
    for tensor, other in zip(tensors, like, strict=True):
        tensor.requires_grad = other.requires_grad
    return list(tensors)


def call_signature(leaves: Sequence[Any], spec: Any) -> Any:
    """Return what calls of equal layers must have in common: settings, and what stands where in the arguments."""
    first: dict[int, int] = {}
    shared = tuple(first.setdefault(id(leaf), position) for position, leaf in enumerate(leaves)
                   if isinstance(leaf, torch.Tensor))
    return (str(spec), tuple(TensorSpec.of(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves),
            shared, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))


def trace_layer(record: Record, key: str, real: Callable[..., Any], leaves: Sequence[Any],
                spec: Any) -> tuple[list[torch.Tensor], Any]:
    """Return the tensors that a layer makes, called between markers, and its result; the record learns of both."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    entered = wanting(ENTER(key, tensors), tensors)
    rest = iter(entered)
    args, kwargs = pytree.tree_unflatten(
        [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)
    found, result_spec = pytree.tree_flatten(real(*args, **kwargs))
    layout: list[tuple[str, Any]] = []
    made: list[torch.Tensor] = []
    for leaf in found:
        position = next((i for i, tensor in enumerate(entered) if tensor is leaf), None)
        if position is not None:
            layout.append(("input", position))
        elif isinstance(leaf, torch.Tensor):
            layout.append(("new", len(made)))
            made.append(leaf)
        else:
            layout.append(("value", leaf))
    outputs = tuple(TensorSpec.of(tensor) for tensor in made)
    if record.spec is not None and (record.outputs, record.layout) != (outputs, tuple(layout)):
        raise FoldMismatch(f"the results of {key} differ from those of an equal layer")
    record.outputs, record.layout, record.spec = outputs, tuple(layout), result_spec
    made = wanting(LEAVE(key, made), outputs)
    return made, rebuild(record, tensors, made)


def rebuild(record: Record, tensors: list[torch.Tensor], made: list[torch.Tensor]) -> Any:
    """Return a layer's result from its inputs and the tensors that it made."""
    source = {"input": tensors, "new": made}
    return pytree.tree_unflatten(
        [source[kind][value] if kind != "value" else value for kind, value in record.layout], record.spec)


def check_unchanging(graph: fx.Graph, changed_tensors: Callable[[fx.Node], list[fx.Node] | None],
                     owner_of: Callable[[fx.Node], fx.Node]) -> None:
    """Raise ``FoldMismatch`` if memory is changed that a folded layer shares with the rest of the model.

    The markers hide which tensors share memory across a layer's border, so a layer may only change what it made, and
    the rest of the model only what never crossed a border.
    """
    markers = [node for node in graph.nodes if node.target in MARKERS]
    if not markers:
        return
    crossed = {owner_of(tensor) for node in markers for tensor in node.all_input_nodes}
    made: set[fx.Node] | None = None
    for node in graph.nodes:
        if node.target is ENTER or node.target is LEAVE:
            made = set() if node.target is ENTER else None
            continue
        if any(source.target in MARKERS for source in node.all_input_nodes):
            crossed.add(node)
        elif made is not None:
            made.add(node)
        changed = changed_tensors(node)
        if changed is None or any(tensor in crossed if made is None else tensor not in made for tensor in changed):
            raise FoldMismatch(f"{node.name} changes memory across the border of a folded layer")


# ---- after tracing ------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Region:
    """The nodes of one layer that was traced in full."""

    path: str
    enter: fx.Node
    leave: fx.Node
    body: list[fx.Node]


def remove_markers(regions: Mapping[str, Sequence[Region]]) -> None:
    """Let what is read of the markers around traced layers be read from where it comes."""
    for region in itertools.chain.from_iterable(regions.values()):
        forward_items(region.enter, region.enter.args[1])
        forward_items(region.leave, region.leave.args[1])


def find_regions(graph: fx.Graph) -> tuple[dict[str, list[Region]], list[fx.Node]]:
    """Return the layers that were traced in full, by the text of their record's id, and the stand-ins of others."""
    regions: dict[str, list[Region]] = {}
    repeats: list[fx.Node] = []
    current: Region | None = None
    for node in graph.nodes:
        if node.target is ENTER:
            current = Region(path=node.args[0].split(":", 1)[1], enter=node, leave=node, body=[])
        elif node.target is LEAVE:
            if current is None or current.enter.args[0] != node.args[0]:
                raise FoldMismatch(f"layer {node.args[0]} calls another folded layer")
            current.leave = node
            regions.setdefault(node.args[0].split(":", 1)[0], []).append(current)
            current = None
        elif node.target is REPEAT:
            repeats.append(node)
        elif current is not None and node.op != "placeholder":
            if node.op != "call_function":
                raise FoldMismatch(f"{node.name} in {current.path} cannot be copied")
            current.body.append(node)
    return regions, repeats


def _relative(node: fx.Node, region: Region, owned: Mapping[str, str]) -> str | None:
    path = owned.get(node.name) if node.op == "placeholder" else None
    if path is None or not path.startswith(region.path + "."):
        return None
    return path[len(region.path) :]


def check_equal(first: Region, other: Region, owned: Mapping[str, str]) -> None:
    """Raise ``FoldMismatch`` unless both layers do the same, operator by operator."""
    position_a = {node: index for index, node in enumerate(first.body)}
    position_b = {node: index for index, node in enumerate(other.body)}

    def plain(region: Region, position: dict[fx.Node, int]) -> Callable[[fx.Node], Any]:
        def name(node: fx.Node) -> Any:
            if node in position:
                return ("inside", position[node])
            if node is region.enter:
                return "enter"
            return ("own", relative) if (relative := _relative(node, region, owned)) else ("outside", node.name)
        return name

    name_a, name_b = plain(first, position_a), plain(other, position_b)
    pairs = [*zip(first.body, other.body, strict=False), (first.leave, other.leave)]
    same = len(first.body) == len(other.body) and all(
        a.target == b.target and
        _named((a.args[1:] if a is first.leave else a.args, a.kwargs), name_a)
        == _named((b.args[1:] if b is other.leave else b.args, b.kwargs), name_b) for a, b in pairs)
    if not same:
        raise FoldMismatch(f"{first.path} and {other.path} differ")


def _named(value: Any, name: Callable[[fx.Node], Any]) -> str:
    """Return the arguments with every node's place for it, as text that can be compared."""
    return repr(fx.node.map_arg(value, lambda node: f"<{name(node)}>"))


def write_copy(graph: fx.Graph, repeat: fx.Node, template: Region, path: str, owned: Mapping[str, str],
               nodes: Mapping[str, fx.Node]) -> list[Any]:
    """Return the results of a copy of ``template`` that is put in place of a stand-in, for the layer at ``path``."""
    inputs = repeat.args[1]
    copies: dict[fx.Node, fx.Node] = {}

    def copy_of(node: fx.Node) -> fx.Node:
        if node in copies:
            return copies[node]
        relative = _relative(node, template, owned)
        if relative is None:
            return node
        if path + relative not in nodes:
            raise FoldMismatch(f"no parameter {path + relative}")
        return nodes[path + relative]

    with graph.inserting_before(repeat):
        for node in template.body:
            if node.args and node.args[0] is template.enter:
                copies[node] = inputs[node.args[1]]
                continue
            copy = graph.create_node("call_function", node.target, fx.node.map_arg(node.args, copy_of),
                                     fx.node.map_arg(node.kwargs, copy_of))
            copy.meta = {key: value for key, value in node.meta.items() if key in ("val", "stack_trace")}
            copy.meta["module"] = path + node.meta["module"][len(template.path) :]
            copies[node] = copy
    results = [copy_of(item) for item in template.leave.args[1]]
    forward_items(repeat, results)
    return results


def forward_items(node: fx.Node, values: Any) -> None:
    """Replace each ``getitem(node, i)`` by ``values[i]`` and remove ``node``."""
    for user in list(node.users):
        user.replace_all_uses_with(values[user.args[1]])
        user.graph.erase_node(user)
    node.graph.erase_node(node)
