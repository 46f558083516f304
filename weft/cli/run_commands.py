"""``weft run``."""

from __future__ import annotations

from weft.cli.common import JsonOption, ModelArgument, PlanArgument


def run(
    plan: PlanArgument,
    model: ModelArgument,
    as_json: JsonOption = False,
) -> None:
    """Run a plan on local processes."""
    raise NotImplementedError
