"""Losses split by rows and by classes: the parts add up to the whole loss, its gradients are exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.sharding.factor_harness import check_call, check_meshes

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def targets(num_classes: int, *shape: int, num_ignored: int = 3) -> torch.Tensor:
    """Return random classes; the first few rows are ignored, so that parts differ in how many rows count."""
    found = torch.randint(0, num_classes, shape)
    found.flatten()[:num_ignored] = -100
    return found


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_cross_entropy(reduction: int, smoothing: float, is_weighted: bool) -> None:
    weight = rand(11).abs() if is_weighted else None
    checked = check_meshes(aten.cross_entropy_loss.default, 4 * rand(7, 11), targets(11, 7), weight, reduction, -100,
                           smoothing, no_gradient=[] if weight is None else [weight])
    assert checked.split == {"rows0", "classes"}
    special = {factor.name for factor in checked.op.factors if factor.special}
    assert special == ({"rows0", "classes"} if reduction == MEAN else {"classes"})


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
def test_cross_entropy_of_images(reduction: int) -> None:
    checked = check_meshes(aten.cross_entropy_loss.default, rand(5, 6, 4, 3), targets(6, 5, 4, 3), None, reduction)
    assert checked.split == {"rows0", "rows2", "rows3", "classes"}


def test_cross_entropy_of_one_row_and_of_far_scores() -> None:
    assert check_meshes(aten.cross_entropy_loss.default, rand(7), torch.tensor(5)).split == {"classes"}
    check_meshes(aten.cross_entropy_loss.default, 1e3 * rand(4, 7), targets(7, 4, num_ignored=1))


def test_another_class_may_be_the_ignored_one() -> None:
    check_meshes(aten.cross_entropy_loss.default, rand(8, 6), targets(6, 8, num_ignored=0), None, MEAN, 2)


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
def test_cross_entropy_of_probabilities(reduction: int) -> None:
    checked = check_meshes(aten.cross_entropy_loss.default, rand(7, 6), rand(7, 6).softmax(-1), None, reduction, -100,
                           0.1)
    assert checked.split == {"rows0"}


@pytest.mark.parametrize("target", [aten.nll_loss_nd.default, aten.nll_loss.default])
@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_likelihood(target: object, reduction: int, is_weighted: bool) -> None:
    weight = rand(6).abs() if is_weighted else None
    checked = check_meshes(target, rand(7, 6), targets(6, 7), weight, reduction,
                           no_gradient=[] if weight is None else [weight])
    assert checked.split == {"rows0", "classes"}
    assert checked.num_linear > 0


@pytest.mark.parametrize("target", [aten.mse_loss.default, aten.l1_loss.default])
@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
def test_distances(target: object, reduction: int) -> None:
    assert check_meshes(target, rand(5, 4), rand(5, 4), reduction).split == {"d0", "d1"}


def test_a_mean_of_each_part_alone_is_caught() -> None:
    scores, classes = rand(7, 5), targets(5, 7)
    right = check_call(aten.cross_entropy_loss.default, scores, classes).op
    wrong = replace(right, factors=tuple(replace(factor, special=False) for factor in right.factors))
    with pytest.raises(AssertionError, match="split by rows0: result 0 in layout P"):
        check_call(aten.cross_entropy_loss.default, scores, classes, op=wrong)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_in_low_precision(smoothing: float) -> None:
    """Sums are taken in single precision, results and gradients have the type of the scores."""
    check_meshes(aten.cross_entropy_loss.default, (3 * rand(8, 12)).bfloat16(), targets(12, 8), None, MEAN, -100,
                 smoothing, tolerance=0.03)
