"""The table of factor rules as a whole: every entry is an operator of PyTorch, and every operator of the zoo has one."""

from __future__ import annotations

import operator
from collections import Counter

import pytest
import torch
from torch import fx

from tests.sharding.factor_harness import check_structure
from weft.model.capture import capture
from weft.model.source import resolve_model
from weft.model.zoo import Mode
from weft.sharding.factor_rules import factors_of, has_rule
from weft.sharding.factor_rules.common import RULES


def test_every_rule_is_of_a_functional_operator():
    assert has_rule(torch.ops.aten.relu.default)
    for name in RULES:
        namespace, packet, kind = name.split(".")
        if namespace == "transformers":
            import transformers.integrations.moe  # noqa: F401 - registers the operator
        target = getattr(getattr(getattr(torch.ops, namespace), packet), kind)
        assert str(target) == name
        assert not target._schema.is_mutable, name


def test_an_operator_without_a_rule_has_no_factors():
    graph = fx.Graph()
    assert not has_rule(torch.ops.aten.nonzero.default)
    assert factors_of(graph.call_function(torch.ops.aten.nonzero.default, (graph.placeholder("x"),))) is None


WITHOUT_FACTORS = {"aten.arange.default", "aten.sort.default", "aten.cumsum.default", "aten.index_put.default"}
"""Operators of the zoo that are never split: what they make depends on the position, or on all rows of experts."""


@pytest.mark.parametrize(("spec", "mode"), [
    ("t5-base:layers=1,seq=16", "training"),
    ("mixtral-8x:layers=1,seq=16", "training"), ("opt-1.3b:layers=1,seq=16", "inference"),
    ("whisper-base:layers=1,seq=16,frames=64", "inference"), ("lstm:seq=4", "training")])
def test_every_operator_of_the_zoo_has_a_rule(spec: str, mode: Mode):
    """A few models that together have nearly every operator of the zoo."""
    source = resolve_model(spec).with_mode(mode)
    graph = capture(source.build(), source.inputs(2, 0), training=mode == "training").graph
    calls = [node for node in graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
    assert Counter(str(node.target) for node in calls if not has_rule(node.target)) == Counter()
    for node in calls:
        _check_factors(node)


def _check_factors(node: fx.Node) -> None:
    op = factors_of(node)
    assert op is not None, f"{node.format_node()} cannot be split"
    value = node.meta["val"]
    results = [item.shape for item in (value if isinstance(value, list | tuple) else [value])]
    check_structure(op, [item.meta["val"].shape for item in node.all_input_nodes], results)
    is_tiny = all(size == 1 for shape in results for size in shape)
    assert op.factors or is_tiny or str(node.target) in WITHOUT_FACTORS, f"{node.format_node()} has no factors"
