"""The plan: which device does which part of the model, how, and in which order. A reviewable, versioned JSON file.

A plan has *stages*, convex sets of operators. Each stage has one or more *replicas*; a replica is a group of devices
that processes its share of the samples of every micro-batch. Two stages may hold the same operators for different
micro-batches (opposite pipelines), and a device may serve many stages (interleaving). ``order`` gives each device its
actions: ``"s0:F:2"`` is stage ``s0``, forward, micro-batch 2; phases are ``F`` forward, ``B`` whole backward, or ``I``
and ``W``, the backward split into gradients of inputs and gradients of weights.

``weft.plan.lower`` turns a plan into the program that is simulated and run; ``weft.plan.check`` says what is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any, Final, Literal, get_args

from weft.base.errors import PlanError
from weft.base.files import check_header, decode, encode, load_json, write_atomic

FORMAT: Final = "weft.plan"
VERSION: Final = 1

Mode = Literal["training", "inference"]
OptimizerKind = Literal["none", "sgd", "adam", "adamw"]
OPTIMIZERS: Final = get_args(OptimizerKind)
GradientMethod = Literal["all_reduce", "hierarchical", "parameter_server", "sufficient_factors"]
Pieces = Literal["none", "states", "gradients", "parameters"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRef:
    """The model that a plan is for."""

    name: str
    digest: str
    """``Graph.digest`` of the traced model. For a model with another, ``weft.plan.binding`` says whether it is the same
    with other operators."""
    mode: Mode = "training"
    batch: int
    """Samples in one step, over all micro-batches and replicas."""
    dtype: str = "float32"
    """What all floating-point parameters, buffers and inputs are converted to; with ``own_dtypes`` that of most
    parameters, which only predictions use."""
    own_dtypes: bool = False
    """The model is left in the dtypes that it has."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Dtype and shape of each parameter (``float32 64x32``); empty in plans of earlier releases."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """The same of each input, without the samples."""

    @property
    def conversion(self) -> str | None:
        """Return the dtype that the model is converted to before it runs; None if it is not."""
        return None if self.own_dtypes else self.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRef:
    """The cluster that a plan is for; rank ``i`` of a run is ``devices[i]``."""

    digest: str
    devices: tuple[str, ...]
    description: Mapping[str, Any] | None = None
    """The cluster file's content in long form, so that a plan can be checked and shown by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A group of devices that runs a stage for its share of every micro-batch."""

    devices: tuple[str, ...]
    mesh: Mapping[str, int] = field(default_factory=dict)
    """Axes of the group, such as ``{"tensor": 2}``; their product is the number of devices. Empty for one device."""
    share: float = 1.0
    """Part of each micro-batch's samples; the shares of a stage add up to 1."""
    times: Mapping[str, float] = field(default_factory=dict)
    """Predicted seconds by phase for one micro-batch. They order communication when the plan is lowered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How the devices of a replica divide a stage's operators and tensors; each entry has one word for each axis.

    ``weft.sharding.factors`` says what factors are, ``weft.sharding.tensor_layout`` what placements are. Tensors that
    come from other stages or go to them are whole on all devices, and so are their gradients.
    """

    ops: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """For each axis the name of the factor that it splits, or ``""`` for none; ``weft.plan.sharding`` knows some
    more words. Operators that are not named are not split."""
    tensors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """For each axis a placement: of a parameter how it is stored, of another tensor how its readers find it. After a
    colon that of its gradient, if it is another: ``R:P`` is whole, and its gradients are sums that are to be taken
    (for a parameter, by an exchange at the end of the step)."""
    made: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """For each axis the placement in which an operator gives a tensor, where that is a part and readers find it in
    another. It follows from the operator's factors; said here, it is known without them what devices hold."""

    def __bool__(self) -> bool:
        return bool(self.ops or self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """What the replicas of a stage keep in pieces, each replica its own, and gather where they need the whole.

    The stage is the *unit* in which parameters are gathered and gradients scattered: ``weft.plan.units`` says how.
    """

    pieces: Pieces = "none"
    """``states``: the optimizer's states (ZeRO-1); ``gradients``: these and the gradients (ZeRO-2); ``parameters``: all
    three (ZeRO-3, FSDP)."""
    groups: tuple[tuple[int, ...], ...] = ()
    """Replicas, by their places in ``Stage.replicas``, that have a whole together; of several such groups each has all
    pieces (hybrid). Empty for one of all replicas."""
    shares: tuple[float, ...] = ()
    """The part of the pieces that each member of a group keeps; empty for equal parts."""
    keeps: bool = False
    """Gathered parameters stay from a forward to its backward, instead of being gathered again for it."""
    accumulates: bool = False
    """Gradients add up whole over the micro-batches and are scattered once in a step, instead of after each backward.
    Always so where they are not kept in pieces."""

    def __bool__(self) -> bool:
        return self.pieces != "none"

    @property
    def scatters_once(self) -> bool:
        """Return whether each replica has whole gradients until the last of them are there."""
        return self.accumulates or self.pieces == "states"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A convex set of operators and the replicas that run it."""

    name: str
    ops: tuple[str, ...]
    replicas: tuple[Replica, ...]
    modules: tuple[str, ...] = ()
    """The modules these operators belong to, for the reader."""
    microbatches: tuple[int, ...] | None = None
    """The micro-batches this stage handles; null for all."""
    sharding: Sharding = field(default_factory=Sharding)
    """How the devices of a replica divide the stage; all its replicas have the same axes."""
    storage: Storage = field(default_factory=Storage)
    """What its replicas keep in pieces."""
    recompute: bool = False
    """Keep only the stage's inputs, and what ``saved`` names, and make the rest again for the backward."""
    saved: tuple[str, ...] = ()
    """Tensors that the stage keeps where it recomputes: see ``weft.plan.saving``. Empty: the whole forward runs again
    before the backward."""
    flops: float | None = None
    """Operations of its forward for one sample, by which the same model with other operators is known; null if not
    known."""
    bytes: float | None = None
    """What that forward writes, floating-point numbers counted as 4 bytes."""

    @property
    def keeps_only_inputs(self) -> bool:
        """Return whether the whole forward runs again before the backward."""
        return self.recompute and not self.saved


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientExchange:
    """How the gradients of some parameters become equal on all devices that hold them.

    ``hierarchical`` sums inside each of ``groups`` at its first device, then among those, and sends the sum back.
    ``parameter_server``: all send their gradients to ``server``, which sends back the sum. ``sufficient_factors``: the
    rows whose product is the gradient of a linear operator's weight are gathered, and each device multiplies them
    (see ``weft.plan.factors``).
    """

    parameters: tuple[str, ...]
    method: GradientMethod = "all_reduce"
    devices: tuple[str, ...]
    """Those that hold a parameter, or the same part of it."""
    groups: tuple[tuple[str, ...], ...] = ()
    """For ``hierarchical``: the devices, divided by host."""
    server: str | None = None
    """For ``parameter_server``: one of the devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """What happens to the parameters after the gradients are there."""

    kind: OptimizerKind = "adamw"
    lr: float = 1e-3
    sharded: bool = False
    """Each of the devices that hold a parameter keeps only its part of the optimizer's state, though gradients are
    summed whole (ZeRO-1 for all that ``Stage.storage`` says nothing of)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchInfo:
    """Who made the plan, and how good it is known to be."""

    by: str
    status: Literal["optimal", "feasible", "heuristic"] = "heuristic"
    step_time: float | None = None
    bound: float | None = None
    """No plan of this kind can be faster than this many seconds; null where nothing is known."""
    seed: int = 0
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A whole plan; see the module's docstring."""

    model: ModelRef
    cluster: ClusterRef
    microbatches: int
    stages: tuple[Stage, ...]
    order: Mapping[str, tuple[str, ...]]
    gradients: tuple[GradientExchange, ...] = ()
    optimizer: Optimizer = field(default_factory=Optimizer)
    compiled: bool = False
    """Stages run as compiled graphs; else operator by operator."""
    search: SearchInfo = field(default_factory=lambda: SearchInfo(by="hand"))

    @property
    def microbatch_size(self) -> int:
        """Return the samples of one micro-batch; of all where the plan, not yet checked, says that there is none."""
        return self.model.batch // max(1, self.microbatches)


def parse_plan(value: Any, *, where: str = "plan") -> Plan:
    """Return the plan in the plain JSON value; raise ``PlanError`` with the path of every field that does not fit."""
    body = check_header(value, format_name=FORMAT, version=VERSION, where=where, error=PlanError)
    return decode(Plan, body, where=where, error=PlanError)


def load_plan(path: str | PathLike[str]) -> Plan:
    """Return the plan in the file."""
    return parse_plan(load_json(path, error=PlanError), where=str(path))


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain JSON values."""
    return {"format": FORMAT, "version": VERSION, **encode(plan)}


def save_plan(plan: Plan, path: str | PathLike[str]) -> None:
    """Write the plan to the file, whole or not at all."""
    write_atomic(path, format_plan(plan))


def format_plan(plan: Plan) -> str:
    """Return the plan file's text: one line per short list or object, indented where it is long."""
    return _format(plan_to_json(plan), "") + "\n"


def _format(value: Any, indent: str) -> str:
    flat = json.dumps(value, ensure_ascii=True, allow_nan=False)
    if len(flat) + len(indent) <= 118 or not isinstance(value, dict | list):
        return flat
    inner = indent + " "
    if isinstance(value, dict):
        items = [f"{inner}{json.dumps(key)}: {_format(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(items) + f"\n{indent}}}"
    if all(isinstance(item, str | int | float | None) for item in value):
        return "[\n" + ",\n".join(_wrap([json.dumps(item) for item in value], inner)) + f"\n{indent}]"
    return "[\n" + ",\n".join(inner + _format(item, inner) for item in value) + f"\n{indent}]"


def _wrap(items: list[str], indent: str) -> list[str]:
    lines: list[str] = []
    line = ""
    for item in items:
        if line and len(indent) + len(line) + 2 + len(item) > 118:
            lines.append(indent + line)
            line = ""
        line = f"{line}, {item}" if line else item
    return [*lines, indent + line]


def with_search(plan: Plan, **changes: Any) -> Plan:
    """Return the plan with some fields of ``search`` replaced."""
    return replace(plan, search=replace(plan.search, **changes))


def split_samples(num_samples: int, shares: tuple[float, ...]) -> tuple[int, ...]:
    """Return whole samples for each share, adding up to ``num_samples`` (largest remainder first, ties to the first).

    >>> split_samples(8, (0.75, 0.25))
    (6, 2)
    """
    total = sum(shares)
    exact = [num_samples * share / total for share in shares]
    counts = [int(value + 1e-9) for value in exact]
    by_remainder = sorted(range(len(shares)), key=lambda index: (counts[index] - exact[index], index))
    for index in by_remainder[: num_samples - sum(counts)]:
        counts[index] += 1
    return tuple(counts)
