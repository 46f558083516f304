"""Factors of operators on signals and images, of complex numbers, and of sums that are written down as letters.

    einsum            (letters of each operand) -> (letters of the result), as its equation says
    Fourier           (d..., transformed) -> (d..., frequencies)
    histogram         (d...) -> (bins): entries of a part are counted, counts are summed
    grid sampler      (images channels, images rows columns) -> (images channels rows columns)
    columns of images (images channels) -> (images channels.kernel), and back
    weight norm       (outer, outer) -> (outer)

What is transformed, what is looked up in and what a norm is taken over is whole. Complex numbers are pairs in another
form; sums that are not taken yet are made of real ones only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from weft.sharding.factor_rules.common import Call, Items, aligned, dims_in, nonnegative, rule, shape_of
from weft.sharding.factors import OpFactors

# ---- sums by letters ------------------------------------------------------------------------------------------------


@rule
def einsum(call: Call) -> OpFactors | None:
    """Return the letters of an equation as factors; a letter that an operand has twice is never split."""
    operands = call.args["tensors"]
    given, result = _equation(call.args["equation"], [len(shape_of(item)) for item in operands], len(call.output))
    sizes: dict[str, int] = {}
    for operand, letters in zip(operands, given, strict=True):
        for letter, size in zip(letters, shape_of(operand), strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    twice = {letter for letters in given for letter in letters if letters.count(letter) > 1}
    factors = {letter: () if letter in twice else call.factor(letter, size) for letter, size in sizes.items()}
    inputs: list[tuple[object, Items]] = [
        (operand, aligned(shape_of(operand), [factors[letter] for letter in letters]))
        for operand, letters in zip(operands, given, strict=True)]
    linear = [[operand] for operand in operands] if len(set(operands)) == len(operands) else []
    return call.done(inputs, [[factors[letter] for letter in result]], linear=linear)


def _equation(equation: str, ranks: Sequence[int], rank: int) -> tuple[list[list[str]], list[str]]:
    """Return the letters of the operands' dimensions, and of the result's; what stands for dots has names of its own.

    >>> _equation("...i,ij", (3, 2), 3)
    ([['1', '0', 'i'], ['i', 'j']], ['1', '0', 'j'])
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    operands = left.split(",")
    given = [_letters(text, length) for text, length in zip(operands, ranks, strict=True)]
    if arrow:
        return given, _letters(right, rank)
    once = sorted(letter for letter in set(left) - set(".,") if left.count(letter) == 1)
    return given, [*map(str, reversed(range(rank - len(once)))), *once]


def _letters(text: str, rank: int) -> list[str]:
    before, dots, after = text.partition("...")
    num_dots = rank - len(before) - len(after) if dots else 0
    return [*before, *map(str, reversed(range(num_dots))), *after]


# ---- complex numbers and Fourier transforms -------------------------------------------------------------------------


@rule
def complex_entries(call: Call) -> OpFactors | None:
    """Return the dimensions of what is made of complex numbers, or of which they are made, entry by entry."""
    dims = call.plain(call.output)
    return call.done([(tensor, aligned(shape_of(tensor), dims)) for tensor in call.tensors], [dims])


@rule
def view_as_complex(call: Call) -> OpFactors | None:
    """Return all dimensions but the pairs, which become one number each."""
    dims = call.plain(call.output)
    return call.done([(call.args["self"], [*dims, ()])], [dims])


@rule
def view_as_real(call: Call) -> OpFactors | None:
    """Return all dimensions; a number becomes a pair."""
    dims = call.plain(call.shape)
    return call.done([(call.args["self"], dims)], [[*dims, ()]])


@rule
def fourier(call: Call) -> OpFactors | None:
    """Return the dimensions that are not transformed."""
    rank = len(call.shape)
    named, lengths = call.args.get("dim"), call.args.get("s")
    if named is None and lengths is not None:
        named = list(range(rank - len(lengths), rank))
    dims = call.plain(call.shape, but=dims_in(named, rank))
    return call.done([(call.args["self"], dims)], [dims])


# ---- counts, samples and columns ------------------------------------------------------------------------------------


@rule
def histogram(call: Call) -> OpFactors | None:
    """Return the entries that are counted; None where the range is that of the values."""
    if call.args["min"] == call.args["max"]:
        return None
    return call.done([(call.args["self"], call.plain(call.shape))], [[()]])


@rule
def grid_sampler(call: Call) -> OpFactors | None:
    """Return images, channels and the places that are looked up; what is looked up in is whole."""
    images, channels, *places = call.plain(call.output)
    source = call.args["input"]
    return call.done([(source, [images, channels, *[()] * len(places)]), (call.args["grid"], [images, *places, ()])],
                     [[images, channels, *places]], linear=[(source,)])


@rule
def image_columns(call: Call) -> OpFactors | None:
    """Return images and channels of windows written as columns, or of columns put back."""
    is_back = "col2im" in call.operator
    columns, image = (call.shape, call.output) if is_back else (call.output, call.shape)
    window = math.prod(call.args["kernel_size"])
    images = call.plain(columns[:-2])
    channels, kernel = call.factor("channels", image[-3]), call.factor("window", window, fixed=True)
    dims: list[Items] = [[*images, channels, (), ()], [*images, channels + kernel, ()]]
    before, after = reversed(dims) if is_back else dims
    return call.done([(call.args["self"], before)], [after], linear=[(call.args["self"],)])


@rule
def weight_norm(call: Call) -> OpFactors | None:
    """Return the dimension over which no norm is taken."""
    direction, length = call.args["v"], call.args["g"]
    rank = len(shape_of(direction))
    at = nonnegative(call.args["dim"], rank)
    if shape_of(length) != tuple(size if dim == at else 1 for dim, size in enumerate(shape_of(direction))):
        return None
    outer = call.factor("outer", shape_of(direction)[at])
    dims: Items = [outer if dim == at else () for dim in range(rank)]
    return call.done([(direction, dims), (length, dims)], [dims] * len(call.outputs),
                     linear=[(length,)] if len(call.outputs) == 1 else [])
