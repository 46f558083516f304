"""What ``benchmarks.bench_mps`` predicts with, and what it says where there is no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from benchmarks.mps_measure import busy_weights, points_of
from benchmarks.mps_runs import Options, plans, shares
from weft.plan.program import Op


def timeline(*spans: list[tuple[float, float]]) -> Any:
    """Return what ``busy_weights`` looks at: computes of each rank, and a message that must not count."""
    rows = [(rank, start, end, Op.COMPUTE) for rank, items in enumerate(spans) for start, end in items]
    rows += [(rank, 0.0, 100.0, Op.SEND) for rank in range(len(spans))]
    rank, start, end, op = (np.asarray(column) for column in zip(*rows, strict=True))
    return SimpleNamespace(rank=rank, start_s=start, end_s=end, op=op, num_ranks=len(spans))


def test_parts_that_compute_all_the_time_slow_each_other_down_fully() -> None:
    found = busy_weights(cast(Any, timeline([(0, 4)], [(0, 1), (1, 4)], [(0, 4)])), (50, 25, 25))
    assert found == pytest.approx([1.0, 1.0, 1.0])


def test_a_part_feels_the_others_by_their_size_and_for_as_long_as_both_compute() -> None:
    first, second, third = busy_weights(cast(Any, timeline([(0, 2)], [(1, 5)], [])), (50, 30, 10))
    assert first == pytest.approx(0.5 * 30 / 40)
    assert second == pytest.approx(0.25 * 50 / 60)
    assert third == 1.0  # it has nothing to do: no time to predict


def test_sections_are_skipped_in_words_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for section in (shares, plans):
        (row,) = section(Options())
        assert (row.figure, row.ok) == ("skipped", None)
        assert "GPU" in row.reference


def test_messages_count_half_of_there_and_back_and_what_stages_wait_for_counts_for_its_group() -> None:
    answers = [{"found": [["p2p", [0, 1], 1024, 0.004], ["all_reduce", [0, 1], 1024, 0.003]],
                "waited": [["all_reduce", [0, 1], 4096, 0.005]]}]
    found, waited = points_of(answers, "found"), points_of(answers, "waited")
    assert found["p2p", (0, 1)] == [(1024, 0.002)]
    assert (found | waited)["all_reduce", (0, 1)] == [(4096, 0.005)]
