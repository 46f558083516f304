"""The factor rules against DTensor's strategies: they agree, or the table below says why they differ.

For every operator that both know, on random shapes, each way to split it over one axis of four devices is taken from both
sides: placements of inputs and of results. ``pytest -s`` prints the differences with their explanations.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.sharding.dtensor_oracle import Combination, Oracle, OracleMissingError, fake_world
from tests.sharding.dtensor_samples import SAMPLES, sample
from tests.sharding.factor_harness import call_node, valid_strategies
from weft.sharding.factor_rules import factors_of
from weft.sharding.factor_rules.common import RULES
from weft.sharding.factors import OpFactors, input_layout, output_layout

aten = torch.ops.aten
MESH = (4,)
OTHER_NAMES = {
    aten.scaled_dot_product_attention.default: aten._scaled_dot_product_efficient_attention.default,
    aten.group_norm.default: aten.native_group_norm.default,
    aten.nll_loss.default: aten.nll_loss_forward.default,
}
"""Operators that DTensor only knows in another form, which has more results."""
TAKEN_APART = (aten.linear.default, aten.matmul.default, aten.mv.default, aten.rms_norm.default, aten.softmax.int,
               aten.cross_entropy_loss.default, aten.mse_loss.default, aten.max_pool2d.default)
"""Operators whose strategies DTensor finds by taking them apart, which takes it long."""


@dataclass(frozen=True, slots=True)
class Explained:
    """Differences that are meant to be; patterns are regular expressions."""

    side: str
    """Who has the strategy: ``ours`` or ``theirs``."""
    operators: str
    strategy: str
    """As in ``S1 S0 -> P``."""
    reason: str


EXPLAINED = (
    Explained("ours", "addmm|baddbmm", r"R S\d S\d -> P",
              "k split with the bias whole: the device with the first part adds it (DTensor: the bias is a sum)"),
    Explained("theirs", "addmm|baddbmm", r"P S\d S\d -> P", "the same with the bias as a sum, see above"),
    Explained("ours", "convolution", r"R S0 -> S1|S1 S1 -> P",
              "channels are split like columns and rows of a matrix; DTensor splits images only"),
    Explained("ours", "embedding|index|index_select", "S0 R -> P",
              "a split table: zeros for rows that are elsewhere (DTensor has a masked kind of sum for embedding)"),
    Explained("ours", "_native_batch_norm_legit_functional", "S0 R R R R -> .*",
              "statistics of the whole batch by all-reduces inside the operator"),
    Explained("ours", "_native_batch_norm_legit_no_training", "S0 R R R R -> .*",
              "without training images do not depend on each other"),
    Explained("(ours|theirs)", "_native_batch_norm_legit_no_training", "S1 S0 S0 S0 S0 -> .*",
              "the saved statistics are empty, so there is nothing to split; DTensor calls them split"),
    Explained("ours", "scaled_dot_product_attention", r"S2 R R -> S2|R R S3 -> S3",
              "queries do not depend on each other, nor do columns of values; DTensor splits batch and heads only"),
    Explained("ours", "grid_sampler_[23]d", r"R S\d -> S\d|S1 R -> S1",
              "places that are looked up do not depend on each other, nor do channels; DTensor splits images only"),
    Explained("ours", "group_norm", "S1 S0 S0 -> S1", "groups do not depend on each other; the number of groups changes"),
    Explained("ours", "cross_entropy_loss|nll_loss|mse_loss|l1_loss|mean", r".*S\d.* -> P",
              "a part of a mean is divided by the number of all, so the parts are a sum and may be uneven; classes too"),
    Explained("theirs", "cross_entropy_loss|nll_loss|mse_loss|l1_loss|mean", r".* -> P\(avg\)",
              "the mean of means, which is wrong for uneven parts and ignored rows"),
    Explained("ours", ".*", ".*P.* -> P( P)*", "the operator is linear in these inputs: sums in, sums out"),
    Explained("ours", ".*", r".*/\d+.*", "a dimension split in blocks, where dimensions are merged or joined"),
    Explained("ours", "expand|broadcast_to|expand_as", r"R( R)? -> S\d",
              "the copies are split: every device makes some of them"),
    Explained("theirs", r"new_\w+|full_like|ones_like|zeros_like|empty_like|rand\w*_like", ".* -> (R|P)",
              "the result does not depend on the values given; our rules make each device's part, or all of it"),
    Explained("theirs", r"rand\w*_like", r"S\d -> S\d", "random numbers would not be those of one device"),
    Explained("theirs", ".*", r".*(P\((max|min|product)\)|_NormP).*",
              "sums are the only unfinished results here: maxima, products and norms are taken of whole dimensions"),
    Explained("theirs", "any", ".* -> P", "a sum of truths is a count; as above"),
    Explained("theirs", "nansum", "P -> P", "not linear: what is no number in a part may be one in the sum"),
    Explained("theirs", "_fft_.*|view_as_.*|_conj", "P -> P", "sums that are not taken yet are made of real numbers only"),
    Explained("theirs", "rms_norm", "R P -> P", "linear in the weight, which is a parameter and never a sum"),
)


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    try:
        with fake_world(MESH[0]):
            yield Oracle(MESH[0])
    except OracleMissingError as error:
        pytest.skip(f"DTensor's registry is not where it was: {error}")


def our_strategies(op: OpFactors | None) -> set[Combination]:
    """Return the placements of inputs and results of every way to split an operator over the mesh."""
    return set() if op is None else {
        (tuple(str(input_layout(op, strategy, MESH, position)[0]) for position in range(len(op.inputs))),
         tuple(str(output_layout(op, strategy, MESH, position)[0]) for position in range(len(op.outputs))))
        for strategy in valid_strategies(op, MESH)}


def differences(oracle: Oracle, target: Any, *, seed: int, op: OpFactors | None = None) -> list[tuple[str, str]]:
    """Return (side, strategy) of what only one side has."""
    torch.manual_seed(seed)
    args, kwargs = sample(target, seed)
    node, values = call_node(target, args, kwargs)
    ours = our_strategies(op if op is not None else factors_of(node))
    if target in OTHER_NAMES:
        theirs = _first_result(oracle.strategies(*call_node(OTHER_NAMES[target], *sample(OTHER_NAMES[target], seed))))
        ours = _first_result(ours)
    else:
        theirs = oracle.strategies(node, values)
    return [(side, f"{' '.join(inputs)} -> {' '.join(outputs)}")
            for side, only in (("ours", ours - theirs), ("theirs", theirs - ours)) for inputs, outputs in sorted(only)]


def _first_result(combinations: set[Combination]) -> set[Combination]:
    return {(inputs, outputs[:1]) for inputs, outputs in combinations}


def explanation(target: Any, side: str, strategy: str) -> Explained | None:
    """Return the first line of the table that explains a difference."""
    name = str(target).split(".")[1]
    return next((item for item in EXPLAINED if re.fullmatch(item.side, side) and re.fullmatch(item.operators, name)
                 and re.fullmatch(item.strategy, strategy)), None)


def common_operators(oracle: Oracle) -> list[Any]:
    """Return the operators that both sides know."""
    known = oracle.operators() | {str(target) for target in (*OTHER_NAMES, *TAKEN_APART)}
    found = []
    for name in sorted(RULES):
        _, packet, overload = name.split(".")
        if name in known:
            found.append(getattr(getattr(aten, packet), overload))
    return found


def test_rules_agree_with_dtensor_or_the_difference_is_explained(oracle: Oracle) -> None:
    targets = common_operators(oracle)
    used: dict[Explained, list[str]] = {}
    unexplained = []
    for target in targets:
        num_shapes = 1 if target in TAKEN_APART or str(target).removeprefix("aten.") not in SAMPLES else 2
        for side, strategy in {item for seed in range(num_shapes) for item in differences(oracle, target, seed=seed)}:
            why = explanation(target, side, strategy)
            if why is None:
                unexplained.append(f"{target}: {side}: {strategy}")
            else:
                used.setdefault(why, []).append(f"{target} {strategy}")
    for why, cases in used.items():
        print(f"{why.side}: {why.reason}\n    " + "\n    ".join(cases))
    assert not unexplained, unexplained
    assert len(targets) > 290, len(targets)
    assert set(EXPLAINED) == set(used), [item.reason for item in EXPLAINED if item not in used]


def test_a_rule_that_misses_a_factor_is_not_explained(oracle: Oracle) -> None:
    args, kwargs = sample(aten.mm.default, 0)
    op = factors_of(call_node(aten.mm.default, args, kwargs)[0])
    assert op is not None
    assert differences(oracle, aten.mm.default, seed=0) == []
    wrong = replace(op, inputs=(op.inputs[0][:1] + ((),), ((),) + op.inputs[1][1:]))
    found = differences(oracle, aten.mm.default, seed=0, op=wrong)
    assert ("theirs", "S1 S0 -> P") in found
    assert explanation(aten.mm.default, "theirs", "S1 S0 -> P") is None
