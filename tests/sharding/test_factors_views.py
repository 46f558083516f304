"""Factor rules of views: reshapes, permutations, cuts, joins and copies, split in every way and compared."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sharding.factor_harness import MESHES, Checked, call_node, check_call, check_meshes
from weft.sharding.factor_rules import factors_of
from weft.sharding.factor_rules.views import common_pieces
from weft.sharding.factors import Factor, OpFactors, input_layout, output_layout
from weft.sharding.local_ops import LocalCall, run_local

aten = torch.ops.aten


def check(target: object, *args: object, **kwargs: object) -> Checked:
    """Return all strategies checked on a line of three ranks and on a square of four."""
    return check_meshes(target, *args, meshes=((3,), (2, 2)), **kwargs)



def tensor(*shape: int) -> torch.Tensor:
    """Return random numbers that depend on the shape alone."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(math.prod(shape)))


def factors(target: object, *args: object, **kwargs: object) -> OpFactors:
    """Return the factors of a call."""
    found = factors_of(call_node(target, args, kwargs)[0])
    assert found is not None
    return found


def named(op: OpFactors, dims: tuple[tuple[int, ...], ...]) -> list[str]:
    """Return the names and sizes of each dimension's factors."""
    return [" ".join(f"{op.factors[item].name}={op.factors[item].size}" for item in dim) for dim in dims]


# ---- reshapes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after", "expected"), [
    ((2, 5, 12), (2, 5, 4, 3), ["d0=2", "d1=5", "d2=4 d3=3"]),
    ((2, 5, 36), (2, 5, 3, 4, 3), ["d0=2", "d1=5", "d2=3 d3=4 d4=3"]),
    ((2, 5, 4), (10, 4), ["d0a=2", "d0b=5", "d1=4"]),
    ((1, 6, 1), (6,), ["", "d0=6", ""]),
    ((4, 6), (1, 8, 3), ["d1a=4", "d1b=2 d2=3"]),
    ((6, 4), (4, 6), ["d0a=2 from0=3", "from1=2 d1b=2"]),
    ((3, 5), (5, 3), ["from0=3", "from1=5"]),
    ((2, 3, 7, 2, 3), (3, 2, 7, 3, 2), ["from0=2", "from1=3", "d2=7", "from3=2", "from4=3"]),
    ((), (1,), []),
])
def test_reshape_is_the_common_refinement_of_both_shapes(before, after, expected):
    op = factors(aten.reshape.default, tensor(*before), list(after))
    assert named(op, op.inputs[0]) == expected
    assert all(factor.fixed for factor in op.factors if "from" in factor.name)


def test_queries_keys_and_values_in_one_matrix_split_by_heads_in_blocks():
    op = factors(aten.reshape.default, tensor(2, 5, 36), [2, 5, 3, 4, 3])
    heads = next(index for index, factor in enumerate(op.factors) if factor.name == "d3")
    assert str(input_layout(op, (heads,), (2,), 0)[0]) == "S2/3"
    assert str(output_layout(op, (heads,), (2,), 0)[0]) == "S3"


def test_uneven_heads_are_split_in_whole_heads():
    op = factors(aten.reshape.default, tensor(2, 5, 9), [2, 5, 3, 3])
    heads = next(index for index, factor in enumerate(op.factors) if factor.name == "d2")
    assert str(input_layout(op, (heads,), (2,), 0)[0]) == "S2x3"


@pytest.mark.parametrize(("before", "after"), [
    ((4, 3, 12), (4, 3, 4, 3)), ((4, 3, 8), (12, 8)), ((12, 4), (4, 3, 4)), ((2, 3, 24), (2, 3, 3, 4, 2)), ((7, 6), (42,)),
    ((6, 4), (4, 6)), ((3, 10), (2, 15)), ((8, 9), (6, 12)), ((0, 4), (4, 0)), ((5,), (5, 1, 1)), ((1, 1), ()),
])
def test_reshape(before, after):
    check(aten.reshape.default, tensor(*before), list(after))


@pytest.mark.parametrize("target", [aten.view.default, aten._unsafe_view.default])
def test_other_names_of_reshape(target):
    assert check(target, tensor(4, 3, 8), [12, 4, 2]).split == {"d0a", "d0b", "d1", "d2"}


def test_sizes_left_to_infer():
    assert {"d2", "d3"} <= check(aten.reshape.default, tensor(2, 3, 12), [2, 3, -1, 3]).split
    assert check(aten.view.default, tensor(2, 4), [-1]).split == {"d0a", "d0b"}


@st.composite
def reshapes(draw):
    primes = draw(st.lists(st.sampled_from([2, 2, 3, 5]), min_size=1, max_size=5))
    def shape(order):
        sizes = [1]
        for prime in order:
            if draw(st.booleans()):
                sizes.append(1)
            sizes[-1] *= prime
        return tuple(sizes)
    return shape(primes), shape(draw(st.permutations(primes)) if draw(st.booleans()) else primes)


@settings(max_examples=40, deadline=None)
@given(reshapes(), st.sampled_from(MESHES))
def test_random_reshapes(shapes, mesh):
    before, after = shapes
    check_call(aten.reshape.default, tensor(*before), list(after), mesh=mesh)


@settings(max_examples=100, deadline=None)
@given(reshapes())
def test_pieces_make_both_shapes_and_miss_no_factor_at_either_end(shapes):
    before, after = shapes
    pieces = common_pieces(before, after)
    for side, shape in (("before", before), ("after", after)):
        for dim, size in enumerate(shape):
            assert math.prod(piece.size for piece in pieces if getattr(piece, side) == dim) == size
    common = [piece.size for piece in pieces if piece.before is not None and piece.after is not None]
    cuts = [{math.prod(shape[:end]) for end in range(len(shape) + 1)} for shape in shapes]
    chain = sorted(cuts[0] | cuts[1])
    if all(large % small == 0 for small, large in itertools.pairwise(chain)):
        assert common == [large // small for small, large in itertools.pairwise(chain)]


def test_a_wrong_order_of_factors_is_seen():
    """The control: with the two factors of a merged dimension swapped, some split must give wrong numbers."""
    swapped = OpFactors(factors=(Factor(name="a", size=4), Factor(name="b", size=2)), inputs=(((0,), (1,)),),
                        outputs=(((1, 0),),), shape_args=(1,))
    with pytest.raises(AssertionError, match="split by a"):
        check_call(aten.reshape.default, tensor(4, 2), [8], op=swapped)


@pytest.mark.parametrize(("target", "other"), [
    (aten.view.default, [4, 12]), (aten._unsafe_view.default, [4, 12]), (aten.view_as.default, tensor(4, 12))])
def test_a_part_that_cannot_be_viewed_is_reshaped(target, other):
    """A part of a tensor may have other strides than the whole."""
    whole = tensor(4, 4, 3)
    op = factors(target, whole, other)
    heads = next(index for index, factor in enumerate(op.factors) if factor.name == "d1a")
    part = whole[:, :2].transpose(1, 2).contiguous().transpose(1, 2)
    local_other = other[:, :6] if isinstance(other, torch.Tensor) else other
    call = LocalCall(target=target, args=(part, local_other), kwargs={}, op=op, strategy=(heads,), mesh=(2,),
                     coordinates=(0,), group=lambda axes: pytest.fail("no group is needed"))
    with pytest.raises(RuntimeError, match="view"):
        part.view(4, 6)
    torch.testing.assert_close(run_local(call, [(4, 12)]), whole.view(4, 12)[:, :6])


def test_reshape_as_and_views_of_other_tensors_shapes():
    check(aten.reshape_as.default, tensor(4, 6), tensor(4, 2, 3))
    check(aten.view_as.default, tensor(4, 6), tensor(24))


@pytest.mark.parametrize(("target", "shape", "args", "split"), [
    (aten.flatten.using_ints, (2, 3, 4), [1], {"d0", "d1a", "d1b"}),
    (aten.flatten.using_ints, (2, 3, 4), [-2, -1], {"d0", "d1a", "d1b"}),
    (aten.flatten.using_ints, (), [], set()),
    (aten.unflatten.int, (3, 8), [-1, [4, 2]], {"d0", "d1", "d2"}),
    (aten.unflatten.int, (8, 3), [0, [2, -1]], {"d0", "d1", "d2"}),
    (aten.unsqueeze.default, (2, 3), [-1], {"d0", "d1"}),
    (aten.unsqueeze.default, (2, 3), [1], {"d0", "d2"}),
    (aten.squeeze.default, (2, 1, 3), [], {"d0", "d1"}),
    (aten.squeeze.dim, (2, 3, 1), [-1], {"d0", "d1"}),
    (aten.squeeze.dim, (2, 3), [0], {"d0", "d1"}),
    (aten.squeeze.dims, (1, 2, 4, 1), [[0, 1, -1]], {"d0", "d1"}),
])
def test_dimensions_made_and_removed(target, shape, args, split):
    assert check(target, tensor(*shape), *args).split == split


@pytest.mark.parametrize(("target", "shape", "args"), [
    (aten.transpose.int, (2, 3, 4), [1, -1]), (aten.transpose.int, (2, 3), [0, 0]), (aten.t.default, (3, 2), []),
    (aten.t.default, (4,), []), (aten.permute.default, (2, 3, 4, 2), [[-1, 0, 2, 1]]),
    (aten.swapaxes.default, (2, 3, 4), [0, -1]), (aten.movedim.int, (2, 3, 4), [0, -1]),
    (aten.movedim.intlist, (2, 3, 4), [[0, 1], [2, 0]]), (aten.numpy_T.default, (2, 3), []),
    (aten.mT.default, (2, 3, 4), []),
])
def test_permutations(target, shape, args):
    checked = check(target, tensor(*shape), *args)
    assert checked.split == {f"d{dim}" for dim in range(len(shape))}
    assert checked.num_linear


# ---- copies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "size"), [((1, 3), [4, 3]), ((1, 3), [4, -1]), ((3,), [2, 3]), ((2, 1, 3), [5, 2, 4, 3]),
                                             ((), [4]), ((4, 3), [4, 3])])
def test_expanded_dimensions_are_only_in_the_result(shape, size):
    checked = check(aten.expand.default, tensor(*shape), size)
    assert checked.split == {f"d{dim}" for dim in range(len(size))}
    check(aten.expand_as.default, tensor(*shape), tensor(*checked_shape(shape, size)))


def checked_shape(shape: tuple[int, ...], size: list[int]) -> list[int]:
    """Return the shape that ``expand`` gives."""
    return list(torch.empty(shape).expand(size).shape)


@pytest.mark.parametrize(("target", "shape", "args", "split"), [
    (aten.repeat.default, (1, 3), [[4, 1]], {"copies0", "d1"}),
    (aten.repeat.default, (2, 3), [[2, 4, 2]], {"copies0", "copies1", "copies2", "d0", "d1"}),
    (aten.tile.default, (2, 3), [[2]], {"copies1", "d0", "d1"}),
    (aten.repeat_interleave.self_int, (3, 4), [2, 0], {"copies", "d0", "d1"}),
    (aten.repeat_interleave.self_int, (3, 4), [4, -1], {"copies", "d0", "d1"}),
    (aten.repeat_interleave.self_int, (3, 4), [2], {"copies", "d0", "d1"}),
])
def test_copies(target, shape, args, split):
    assert check(target, tensor(*shape), *args).split == split


# ---- cuts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "args", "split"), [
    (aten.slice.Tensor, [1, 1, 3], {"d0", "d2"}),
    (aten.slice.Tensor, [-1, 0, 2**63 - 1], {"d0", "d1", "d2"}),
    (aten.slice.Tensor, [1, 0, 2**63 - 1, 2], {"d0", "d2"}),
    (aten.slice.Tensor, [0], {"d0", "d1", "d2"}),
    (aten.slice.Tensor, [0, -99, 4], {"d0", "d1", "d2"}),
    (aten.narrow.default, [1, 0, 6], {"d0", "d2"}),
    (aten.select.int, [-2, 5], {"d0", "d2"}),
    (aten.unbind.int, [1], {"d0", "d2"}),
    (aten.unbind.int, [-1], {"d0", "d1"}),
    (aten.pad.default, [[0, 0, 1, 2]], {"d0", "d2"}),
    (aten.pad.default, [[0, 0, 0, 0, 0, 0]], {"d0", "d1", "d2"}),
    (aten.pad.default, [[1, -1], "constant", 2.5], {"d0", "d1"}),
    (aten.pad.default, [[1, 1], "reflect"], {"d0", "d1"}),
    (aten.constant_pad_nd.default, [[0, 0, 1, 0], 0], {"d0", "d2"}),
    (aten.roll.default, [[1, -2], [1, -1]], {"d0"}),
    (aten.roll.default, [[1]], set()),
    (aten.flip.default, [[-2]], {"d0", "d2"}),
    (aten.tril.default, [], {"d0"}),
    (aten.triu.default, [1], {"d0"}),
    (aten.diagonal.default, [0, 0, -1], {"d1"}),
    (aten.unfold.default, [1, 2, 1], {"d0", "d2"}),
])
def test_dimensions_that_are_cut_shifted_or_padded_are_whole(target, args, split):
    checked = check(target, tensor(4, 6, 4), *args)
    assert checked.split == split
    assert bool(checked.num_linear) == (args[-1:] != [2.5])  # padding with another number than 0 is not linear


@pytest.mark.parametrize(("target", "shape", "args", "split"), [
    (aten.pixel_shuffle.default, (3, 16, 2, 3), [2], {"d0", "channels", "height", "width"}),
    (aten.pixel_unshuffle.default, (4, 4, 6), [2], {"channels", "height", "width"}),
])
def test_pixels_moved_from_channels_and_back(target, shape, args, split):
    checked = check(target, tensor(*shape), *args)
    assert checked.split == split
    assert checked.num_linear


@pytest.mark.parametrize(("target", "args", "split"), [
    (aten.split.Tensor, [4, -1], {"d0", "d1"}),
    (aten.split.Tensor, [12, 1], {"d0", "d1"}),
    (aten.split.Tensor, [5, 1], {"d0"}),
    (aten.split_with_sizes.default, [[4, 4, 4], 1], {"d0", "d1"}),
    (aten.split_with_sizes.default, [[8, 4], -1], {"d0"}),
    (aten.split.sizes, [[6, 6], 1], {"d0", "d1"}),
    (aten.chunk.default, [3, 1], {"d0", "d1"}),
    (aten.chunk.default, [5, 1], {"d0", "d1"}),
    (aten.chunk.default, [7, -1], {"d0", "d1"}),
    (aten.tensor_split.sections, [3, 1], {"d0", "d1"}),
    (aten.tensor_split.sections, [5, 1], {"d0"}),
])
def test_equal_pieces_are_split_in_blocks_and_unequal_ones_not(target, args, split):
    checked = check(target, tensor(4, 12), *args)
    assert checked.split == split
    assert checked.num_linear


@pytest.mark.parametrize(("shapes", "dim", "split"), [
    ([(4, 6), (4, 6), (4, 6)], -1, {"d0", "d1"}), ([(4, 6), (4, 3)], 1, {"d0"}), ([(4, 6)], 0, {"d0", "d1"}),
    ([(4, 1), (4, 1)], 1, {"d0"}), ([(2, 3, 4), (2, 3, 4)], 0, {"d0", "d1", "d2"})])
def test_joins_of_equal_pieces_are_split_in_blocks(shapes, dim, split):
    checked = check(aten.cat.default, [tensor(*shape) for shape in shapes], dim)
    assert checked.split == split
    assert checked.op.linear == (tuple(range(len(shapes))),)


def test_joins_of_a_tensor_with_itself():
    x = tensor(4, 6)
    assert check(aten.cat.default, [x, x], 1).split == {"d0", "d1"}
    assert check(aten.stack.default, [x, x, tensor(4, 6)], -1).split == {"d0", "d1"}


def test_stack_adds_a_whole_dimension():
    op = check(aten.stack.default, [tensor(4, 3), tensor(4, 3)], 1).op
    assert named(op, op.outputs[0]) == ["d0=4", "", "d1=3"]


def test_an_empty_list_of_another_rank_is_not_split():
    assert factors_of(call_node(aten.cat.default, ([tensor(0), tensor(4, 3)], 0), {})[0]) is None


def test_repeat_interleave_with_its_size_written_down_keeps_that_dimension_whole() -> None:
    x = torch.randn(4, 6, 8, dtype=torch.float64)
    checked = check_call(aten.repeat_interleave.self_int, x, 2, 1, output_size=12)
    assert checked.split == {"d0", "d2"}
