"""Rules of operators that other people's models have: sums by letters, bags, transforms, images: split and compared."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tests.sharding.factor_harness import call_node, check_call, check_meshes
from weft.sharding.factor_rules import factors_of
from weft.sharding.factor_rules.signals import _equation

aten = torch.ops.aten
NONE, MEAN, SUM, MAX = 0, 1, 2, 2
MESHES = ((2,), (3,), (2, 2))


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# ---- einsum ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("equation", "shapes", "split"), [
    ("bhid,bhjd->bhij", [(2, 3, 4, 5), (2, 3, 6, 5)], {"b", "h", "i", "j", "d"}),
    ("...i,ij", [(2, 3, 4), (4, 6)], {"0", "1", "i", "j"}),
    ("i...->...", [(4, 6)], {"i", "0"}),
    ("bi, bj, ijk -> bk", [(4, 3), (4, 5), (3, 5, 2)], {"b", "i", "j", "k"}),
    ("ii->i", [(4, 4)], set()),
    ("ab->", [(4, 6)], {"a", "b"}),
    ("ij,jk", [(4, 1), (6, 5)], {"i", "j", "k"}),
])
def test_einsum_is_split_by_its_letters(equation: str, shapes: list[tuple[int, ...]], split: set[str]) -> None:
    assert check_meshes(aten.einsum.default, equation, [rand(*shape) for shape in shapes], meshes=MESHES).split == split


def test_equations_drawn_at_random() -> None:
    for seed in range(12):
        draw = random.Random(seed)
        sizes = {letter: draw.choice([2, 3, 4]) for letter in "abcde"}
        operands = [draw.sample("abcde", draw.randint(1, 3)) for _ in range(draw.randint(1, 3))]
        known = sorted({letter for letters in operands for letter in letters})
        result = draw.sample(known, draw.randint(0, min(3, len(known))))
        equation = ",".join(map("".join, operands)) + "->" + "".join(result)
        tensors = [rand(*(sizes[letter] for letter in letters)) for letters in operands]
        assert check_call(aten.einsum.default, equation, tensors, mesh=(2,)).split == set(known)


def test_a_result_that_is_not_written_down_has_the_letters_that_stand_once() -> None:
    assert _equation("ba,ca", (2, 2), 2) == ([["b", "a"], ["c", "a"]], ["b", "c"])
    assert _equation("...a,a...", (2, 3), 2)[1] == ["1", "0"]


def test_a_letter_of_the_wrong_dimension_is_seen() -> None:
    tensors = [rand(4, 4), rand(4, 4)]
    op = factors_of(call_node(aten.einsum.default, ("ij,jk->ik", tensors), {})[0])
    with pytest.raises(AssertionError, match="Mismatch in shape"):
        check_call(aten.einsum.default, "ij,jk->ik", tensors, op=replace(op, outputs=(op.outputs[0][::-1],)))


# ---- bags -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("padding", ["", None, 3, -1])
def test_bags_of_rows_are_split_by_columns_and_sums_by_rows(mode: int, padding: int | str | None) -> None:
    indices, offsets = torch.tensor([1, 3, 3, 0, 6, 5, 6]), torch.tensor([0, 2, 2, 5])
    args = (rand(7, 4), indices, offsets, False, mode, False, None, False)
    target = aten.embedding_bag.default if padding == "" else aten.embedding_bag.padding_idx
    more = () if padding == "" else (padding,)
    assert check_meshes(target, *args, *more, meshes=MESHES).split == ({"d", "vocab"} if mode == 0 else {"d"})


def test_bags_of_weighted_rows() -> None:
    indices, offsets = torch.tensor([1, 3, 3, 0, 6, 5]), torch.tensor([0, 2, 6])
    checked = check_meshes(aten.embedding_bag.default, rand(7, 4), indices, offsets, False, 0, False, rand(6), True,
                           meshes=MESHES)
    assert checked.split == {"d", "vocab"}


# ---- losses and copies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
def test_losses_entry_by_entry(reduction: int) -> None:
    frozen = [rand(4).abs(), rand(5, 4).abs()]
    target = torch.rand(5, 4, dtype=torch.float64)
    logits = aten.binary_cross_entropy_with_logits.default
    for weight, positive in ((None, None), (frozen[0], None), (frozen[1], frozen[0])):
        checked = check_meshes(logits, rand(5, 4), target, weight, positive, reduction, meshes=MESHES,
                               no_gradient=[target, *frozen])
        assert checked.split == {"d0", "d1"}
    check_meshes(aten.binary_cross_entropy.default, torch.rand(5, 4, dtype=torch.float64), target, frozen[1], reduction,
                 meshes=MESHES, no_gradient=[target, *frozen])
    check_meshes(aten.smooth_l1_loss.default, 3 * rand(5, 4), rand(5, 4), reduction, 0.5, meshes=MESHES)
    check_meshes(aten.huber_loss.default, 3 * rand(5, 4), rand(5, 4), reduction, 0.5, meshes=MESHES)


def test_tensors_copied_to_one_shape() -> None:
    checked = check_meshes(aten.broadcast_tensors.default, [rand(4, 1, 3), rand(5, 3), rand(1)], meshes=MESHES)
    assert checked.split == {"d0", "d1", "d2"}
    assert checked.num_linear


# ---- complex numbers, transforms, images ----------------------------------------------------------------------------


def test_pairs_and_complex_numbers() -> None:
    assert check_meshes(aten.view_as_complex.default, rand(4, 3, 2), meshes=MESHES).split == {"d0", "d1"}
    number = torch.randn(4, 3, dtype=torch.complex128)
    assert check_meshes(aten.view_as_real.default, number, meshes=MESHES).split == {"d0", "d1"}
    check_meshes(aten.polar.default, rand(4, 3).abs(), rand(4, 3), meshes=MESHES)


@pytest.mark.parametrize(("target", "args", "split"), [
    (aten.fft_rfft.default, (None, -1), {"d0", "d1"}), (aten.fft_fft.default, (8, 1), {"d0", "d2"}),
    (aten.fft_fftn.default, (None, [1, 2]), {"d0"}), (aten.fft_fftn.default, ([4, 8],), {"d0"}),
    (aten.fft_fftn.default, (), set()), (aten.fft_rfft2.default, (), {"d0"}), (aten.fft_fftshift.default, ([1],), {"d0", "d2"}),
])
def test_transforms_are_split_by_what_they_leave(target: object, args: tuple[object, ...], split: set[str]) -> None:
    assert check_meshes(target, rand(4, 5, 6), *args, meshes=MESHES).split == split


def test_counts_of_parts_add_up() -> None:
    entries = torch.randint(0, 6, (5, 4)).double()
    assert check_meshes(aten.histc.default, entries, 6, 0, 5, no_gradient=[entries], meshes=MESHES).split == {"d0", "d1"}
    assert factors_of(call_node(aten.histc.default, (entries, 6), {})[0]) is None


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_grids_of_places(mode: int) -> None:
    checked = check_meshes(aten.grid_sampler.default, rand(4, 3, 5, 6), rand(4, 3, 2, 2).tanh(), mode, 0, False,
                           meshes=MESHES)
    assert checked.split == {"d0", "d1", "d2", "d3"}


def test_windows_as_columns_and_back() -> None:
    settings = [2, 3], [1, 1], [0, 1], [2, 1]
    checked = check_meshes(aten.im2col.default, rand(4, 3, 6, 5), *settings, meshes=MESHES)
    assert checked.split == {"d0", "channels"}
    columns = aten.im2col.default(rand(4, 3, 6, 5), *settings)
    assert check_meshes(aten.col2im.default, columns, [6, 5], *settings, meshes=MESHES).split == {"d0", "channels"}


@pytest.mark.parametrize("dim", [0, 2])
def test_norms_of_weights(dim: int) -> None:
    direction = rand(4, 3, 5)
    length = rand(*(size if at == dim else 1 for at, size in enumerate(direction.shape)))
    assert check_meshes(aten._weight_norm.default, direction, length, dim, meshes=MESHES).split == {"outer"}
