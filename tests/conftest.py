"""The order of test files: those that take longest first, so that all workers of ``pytest -n`` end at the same time."""

from __future__ import annotations

from typing import Final

import pytest

SLOWEST: Final = (
    "run/test_launch.py", "model/test_zoo.py", "run/test_sharded_placements.py", "run/test_placed.py",
    "run/test_sharded.py", "test_readme.py", "run/test_exchange.py", "search/schedule/test_search.py", "test_docs.py",
    "test_warm.py", "model/test_folded.py", "run/test_equal.py", "run/test_overlap.py", "cli/test_compare_gradients.py",
    "search/schedule/test_search_oracle.py", "search/shard/test_folded_graph.py", "run/test_scheduled.py",
    "lab/test_lab.py", "search/place/test_search.py", "run/test_sharded_zoo.py", "search/schedule/test_from_plan.py",
    "run/test_searched_sharding.py", "search/deploy/test_deployer.py", "search/test_placements.py", "model/test_fold.py",
    "cli/test_place.py", "cli/test_schedule.py", "plan/test_faults.py", "model/test_factors_products.py",
    "run/test_pytorch_runs_csv.py", "cost/test_profiler.py", "search/shard/test_to_plan.py", "cli/test_shard_model.py",
    "cli/test_cli.py", "search/schedule/test_named.py", "search/schedule/test_found.py")
"""Paths below ``tests``, by the processor time they take; the rest follows in the usual order."""


def pytest_configure(config: pytest.Config) -> None:
    """Let xdist keep the order; by itself it would begin with the files of the most tests."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the slowest files to the front."""
    place = {name: number for number, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0].removeprefix("tests/"), len(SLOWEST)))
