"""Groups by a table of the fusions that inference backends make (cuDNN, TensorRT, ONNX Runtime, inductor).

Every operator has a *role*: what kind of operator it is for the table. A rule is a chain of roles that becomes one
group with a role of its own, so that rules build on one another:

    conv2d -> batch_norm -> relu         conv + batch norm = conv, conv + pointwise = conv
    matmul -> div -> softmax -> matmul   pointwise + softmax = softmax, matmul + softmax + matmul = attention

A link of a chain is there only if everything that the first group writes is read by the second group and by nothing
else: an intermediate with another reader, or one that the model returns, blocks the fusion. So a group has one operator
whose results leave it, its *exit*. That keeps groups convex: a tensor goes from a group to another one only if the
exit of the first is before that of the second in the order of the graph.

Views cost nothing. One that is its producer's only reader joins the producer; any other (of parameters, of inputs, of
what others read as well) joins its readers if they are in one group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import pairwise
from typing import Final

from weft.coarsen.groups import Groups, Limits, group_edges, is_free, loose_constants, number_groups
from weft.cost.op_classes import base_name, op_class
from weft.model.graph import Graph


class Role(Enum):
    """What an operator, or a group, is for the rules."""

    CONV = "conv"
    MATMUL = "matmul"
    ATTENTION = "attention"
    BATCH_NORM = "batch norm"
    """At inference a scale and a shift per channel, which a convolution takes into its weights."""
    NORM = "norm"
    SOFTMAX = "softmax"
    POINTWISE = "pointwise"
    """One result per element of the input: arithmetic, activations, comparisons, casts."""
    REORDER = "reorder"
    """One result per element, read from other places: copies. No epilogue of a matrix product."""
    JOIN = "join"
    """Concatenation: part of a chain of elementwise operators if one of them alone reads it, never their end."""
    REDUCE = "reduce"
    GATHER = "gather"
    VIEW = "view"
    """Free: moves nothing."""
    OTHER = "other"
    """Never fused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A chain of roles that backends run as one kernel."""

    name: str
    chain: tuple[Role, ...]
    gives: Role
    """The role of the group that comes out."""


def _rule(name: str, *chain: Role, gives: Role) -> Rule:
    return Rule(name=name, chain=chain, gives=gives)


STEPS: Final[tuple[tuple[Rule, ...], ...]] = (
    (_rule("elementwise chain", Role.POINTWISE, Role.POINTWISE, gives=Role.POINTWISE),),
    (_rule("conv + batch norm", Role.CONV, Role.BATCH_NORM, gives=Role.CONV),),
    (_rule("conv (+ norm) + add, activation", Role.CONV, Role.POINTWISE, gives=Role.CONV),),
    (_rule("batch norm + elementwise", Role.BATCH_NORM, Role.POINTWISE, gives=Role.POINTWISE),
     _rule("elementwise + batch norm", Role.POINTWISE, Role.BATCH_NORM, gives=Role.POINTWISE)),
    (_rule("scale, mask + softmax", Role.POINTWISE, Role.SOFTMAX, gives=Role.SOFTMAX),
     _rule("softmax + elementwise", Role.SOFTMAX, Role.POINTWISE, gives=Role.SOFTMAX)),
    (_rule("attention", Role.MATMUL, Role.SOFTMAX, Role.MATMUL, gives=Role.ATTENTION),),
    (_rule("residual add + norm", Role.POINTWISE, Role.NORM, gives=Role.NORM),
     _rule("norm + elementwise", Role.NORM, Role.POINTWISE, gives=Role.NORM),
     _rule("norm written out: after the mean", Role.REDUCE, Role.POINTWISE, gives=Role.NORM),
     _rule("norm written out: before the mean", Role.POINTWISE, Role.REDUCE, gives=Role.REDUCE),
     _rule("norm written out: mean and variance", Role.REDUCE, Role.NORM, gives=Role.NORM)),
    (_rule("matmul + bias, activation, residual", Role.MATMUL, Role.POINTWISE, gives=Role.MATMUL),),
    (_rule("embedding + elementwise", Role.GATHER, Role.POINTWISE, gives=Role.GATHER),
     _rule("embedding + copy", Role.GATHER, Role.REORDER, gives=Role.GATHER)),
    (_rule("elementwise + copy", Role.POINTWISE, Role.REORDER, gives=Role.REORDER),
     _rule("copy + elementwise", Role.REORDER, Role.POINTWISE, gives=Role.REORDER),
     _rule("copy + copy", Role.REORDER, Role.REORDER, gives=Role.REORDER),
     _rule("concatenation + elementwise", Role.JOIN, Role.POINTWISE, gives=Role.REORDER),
     _rule("concatenation + copy", Role.JOIN, Role.REORDER, gives=Role.REORDER)),
)
"""The table: step by step over the whole graph, from its end to its beginning, again until nothing changes. Where two
steps want the same operator the earlier one has it."""

_ROLE_OF_CLASS: Final[Mapping[str, Role]] = {
    "convolution": Role.CONV, "matmul": Role.MATMUL, "attention": Role.ATTENTION, "normalisation": Role.NORM,
    "softmax": Role.SOFTMAX, "elementwise": Role.POINTWISE, "transcendental": Role.POINTWISE,
    "embedding": Role.GATHER, "view": Role.REORDER}
"""By the class of ``weft.cost.op_classes``; a view that is not free copies its input into another order."""
_ROLE_OF_NAME: Final[Mapping[str, Role]] = {
    **dict.fromkeys(("batch_norm", "native_batch_norm", "batchnormalization", "native_batch_norm_legit_no_training"),
                    Role.BATCH_NORM),
    **dict.fromkeys(("cat", "concat", "concatenate", "stack"), Role.JOIN),
    **dict.fromkeys(("clone", "contiguous", "copy", "tile", "repeat"), Role.REORDER),
    **dict.fromkeys(("mean", "sum", "amax", "amin", "var", "std", "var_mean", "std_mean", "linalg_vector_norm",
                     "logsumexp", "reducemean", "reducesum", "reducemax", "reducemin", "reducel2", "reducesumsquare"),
                    Role.REDUCE),
    **dict.fromkeys(("arange", "range", "linspace", "eye", "rand", "randn", "randint", "bernoulli", "pad",
                     "constant_pad_nd", "roll", "flip", "rot90", "channel_shuffle", "pixel_shuffle", "pixel_unshuffle",
                     "depthtospace", "spacetodepth", "im2col", "col2im", "unfold", "meshgrid", "repeat_interleave",
                     "slice_scatter", "select_scatter", "cross_entropy_loss", "cross_entropy",
                     "softmaxcrossentropyloss", "gumbel_softmax", "index_put", "index_add", "index_copy", "scatter",
                     "scatter_add", "scatter_reduce", "scatternd", "scatterelements", "masked_select", "nonzero"),
                    Role.OTHER),
}
"""Exceptions by plain name."""


@cache
def role_of(kind: str) -> Role:
    """Return the role of an operator that is not free."""
    return _ROLE_OF_NAME.get(base_name(kind)) or _ROLE_OF_CLASS.get(op_class(kind), Role.OTHER)


def fuse_by_rules(graph: Graph, steps: Sequence[Sequence[Rule]] = STEPS) -> Groups:
    """Return the groups that the table, or a part of it, gives."""
    fusion = _Fusion(graph)
    fusion.views_to_producers()
    while any([*[fusion.apply(rules) for rules in steps], fusion.views_to_readers()]):
        pass
    return number_groups(graph, [fusion.find(op) for op in range(graph.num_ops)], how="rules")


class _Fusion:
    """The groups while they grow: a union-find whose root is the exit, the last operator, of its group."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._parent = list(range(graph.num_ops))
        self._readers: list[list[int]] = [[] for _ in range(graph.num_ops)]
        self._producers: list[list[int]] = [[] for _ in range(graph.num_ops)]
        for source, target in group_edges(graph).tolist():
            self._readers[source].append(target)
            self._producers[target].append(source)
        self._is_loose = loose_constants(graph)
        free = is_free(graph)
        self._role = [Role.VIEW if is_view else role_of(kind)
                      for kind, is_view in zip(graph.op_kinds, free.tolist(), strict=True)]
        self._limits = Limits(graph, free)
        self._returned = set(graph.tensor_producer[list(graph.outputs)].tolist())

    def find(self, op: int) -> int:
        """Return the exit of the operator's group."""
        while self._parent[op] != op:
            self._parent[op] = self._parent[self._parent[op]]
            op = self._parent[op]
        return op

    def _exits(self) -> list[int]:
        return [op for op in range(self.graph.num_ops) if self._parent[op] == op and not self._is_loose[op]]

    def _only_reader(self, exit_op: int) -> int | None:
        """Return the group that alone reads what a group writes; None if there are others, or the model returns it."""
        groups = {self.find(reader) for reader in self._readers[exit_op]}
        return groups.pop() if len(groups) == 1 and exit_op not in self._returned else None

    def _join(self, exit_op: int, reader: int, role: Role) -> None:
        self._limits.join(exit_op, reader)
        self._parent[exit_op] = reader
        self._role[reader] = role

    def views_to_producers(self) -> None:
        """Let each view that is its producer's only reader join it, first to last so that chains of views follow."""
        for view in self._exits():
            producers = {self.find(producer) for producer in self._producers[view]}
            if self._role[view] is not Role.VIEW or len(producers) != 1:
                continue
            producer = producers.pop()
            if self._only_reader(producer) == view and self._limits.allow((producer, view)):
                self._join(producer, view, self._role[producer])

    def views_to_readers(self) -> bool:
        """Let views that are left join their readers where they are in one group; return whether there were any."""
        changed = False
        for view in reversed(self._exits()):
            reader = self._only_reader(view) if self._role[view] is Role.VIEW else None
            if reader is not None and self._limits.allow((view, reader)):
                self._join(view, reader, self._role[reader])
                changed = True
        return changed

    def apply(self, rules: Sequence[Rule]) -> bool:
        """Join all chains of the rules, last to first; return whether there were any.

        Of two groups that could both join a third, the later one does: what the other wrote is in memory by then.
        """
        return sum(self._join_first(exit_op, rules) for exit_op in reversed(self._exits())) > 0

    def _join_first(self, exit_op: int, rules: Sequence[Rule]) -> bool:
        """Join the chain of the first rule that has one beginning with this group; return whether there was any."""
        for rule in rules:
            chain = self._chain(exit_op, rule)
            for first, second in pairwise(chain):
                self._join(first, second, rule.gives)
            if chain:
                return True
        return False

    def _chain(self, exit_op: int, rule: Rule) -> list[int]:
        """Return the groups of the chain that begins with this one; none if they do not have the rule's roles."""
        if self._role[exit_op] is not rule.chain[0]:
            return []
        chain = [exit_op]
        for role in rule.chain[1:]:
            reader = self._only_reader(chain[-1])
            if reader is None or self._role[reader] is not role:
                return []
            chain.append(reader)
        return chain if self._limits.allow(chain) else []
