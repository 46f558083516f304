"""Attention over a split sequence: keys gathered or passed round, in order and in zig-zag, against the whole."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.sharding.factor_harness import call_node, check_call
from weft.sharding import attention
from weft.sharding.attention import parts_of
from weft.sharding.factor_rules import factors_of
from weft.sharding.factors import ROWS, OpFactors, in_blocks, is_passed_round, passed_round, work_part
from weft.sharding.tensor_layout import local_ranges

SDPA = torch.ops.aten.scaled_dot_product_attention.default


def _inputs(heads: int = 4, kv: int = 4, places: int = 8, width: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(2, count, places, width, dtype=torch.float64, generator=generator)  # type: ignore[return-value]
                 for count in (heads, kv, kv))


def _form(args: tuple[object, ...], options: dict[str, object], *, is_round: bool, zigzag: bool) -> OpFactors:
    op = factors_of(call_node(SDPA, args, options)[0])
    assert op is not None
    if zigzag:
        op = in_blocks(op, [factor.name for factor in op.factors].index(ROWS), 2, zigzag=True)
    found = passed_round(op) if is_round else op
    assert found is not None
    assert is_passed_round(found) == is_round
    return found


@pytest.mark.parametrize(("is_causal", "is_round", "zigzag"), itertools.product((False, True), repeat=3))
def test_parts_make_the_whole(is_causal: bool, is_round: bool, zigzag: bool) -> None:
    for mesh, kv in (((2,), 4), ((4,), 2), ((2, 2), 4)):
        args, options = (*_inputs(kv=kv), None, 0.0, is_causal), {"enable_gqa": kv != 4}
        op = _form(args, options, is_round=is_round, zigzag=zigzag)
        checked = check_call(SDPA, *args, mesh=mesh, op=op, **options)
        assert ROWS in checked.split


@pytest.mark.parametrize("is_round", [False, True])
def test_without_a_fused_kernel(is_round: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_kernel", lambda query, value: "plain")
    args, options = (*_inputs(kv=2), None, 0.0, True), {"enable_gqa": True, "scale": 0.3}
    check_call(SDPA, *args, mesh=(2,), op=_form(args, options, is_round=is_round, zigzag=True), **options)


def test_a_wrong_order_of_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    args = (*_inputs(), None, 0.0, True)
    monkeypatch.setattr("weft.sharding.local_ops.parts_of", lambda rows, keys, is_causal: parts_of(
        tuple((start + 1, stop + 1) for start, stop in rows), keys, is_causal=is_causal))
    with pytest.raises(AssertionError, match="rows"):
        check_call(SDPA, *args, mesh=(2,), op=_form(args, {}, is_round=False, zigzag=True))


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_parts_cover_what_rows_may_see(zigzag: bool, count: int) -> None:
    size = 24
    held = [local_ranges(size, [(rank, count)], blocks=2 if zigzag else 1, zigzag=zigzag) for rank in range(count)]
    works = []
    for rows in held:
        seen = torch.zeros(size, size, dtype=torch.int64)
        own = [place for start, stop in rows for place in range(start, stop)]
        for keys in held:
            there = [place for start, stop in keys for place in range(start, stop)]
            for part in parts_of(rows, keys, is_causal=True):
                for index, row in enumerate(own[slice(*part.rows)]):
                    for key in there[slice(*part.keys)][:index + 1 if part.is_causal else None]:
                        seen[row, key] += 1
        expected = torch.zeros(size, size, dtype=torch.int64)
        expected[own] = torch.ones(size, size, dtype=torch.int64).tril()[own]
        assert torch.equal(seen, expected)
        works.append(int(seen.sum()))
    assert max(works) - min(works) == 0 if zigzag else max(works) > min(works)


def test_work_of_causal_rows() -> None:
    args = (*_inputs(places=8), None, 0.0, True)
    plain, turned = (_form(args, {}, is_round=False, zigzag=zigzag) for zigzag in (False, True))
    rows = [factor.name for factor in plain.factors].index(ROWS)
    assert work_part(plain, (rows,), (4,)) == 7 / 16  # the last quarter of the rows sees 7 of 16 squares
    assert work_part(turned, (rows,), (4,)) == 1 / 4
    assert work_part(replace(plain, factors=tuple(replace(item, grows=False) for item in plain.factors)),
                     (rows,), (4,)) == 1 / 4
