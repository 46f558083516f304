"""The options that fix degrees by hand, the same in every command that makes plans; ``Degrees`` has their fields.

    @with_degrees
    def plan(model, ..., *, degrees: Degrees): ...        weft plan MODEL CLUSTER --tp 8 --pp 2
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Annotated, Any, Final, TypeVar

import typer

from weft.search.common.degrees import Degrees, is_recompute, option

HELP: Final = {
    "tp": "Devices that divide every operator (tensor parallelism).",
    "pp": "Stages of the pipeline, each on devices of its own.",
    "dp": "Replicas of every stage (data parallelism).",
    "cp": "Devices that divide the sequence of a sample.",
    "ep": "Devices that divide the experts.",
    "zero": "What replicas keep in pieces: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 parameters too.",
    "zero_group": "Who divides that: host (the replicas of a host) or all.",
    "microbatch_size": "Samples of a micro-batch on one replica.",
    "interleave": "Stages (chunks) on each device.",
    "recompute": "What the backward computes again: none, full, selective, or all but BYTES kept by a stage.",
}
_METAVAR: Final = {"zero": "0|1|2|3", "zero_group": "host|all", "recompute": "none|full|selective|BYTES"}
_TEXTS: Final = ("zero_group", "recompute")
_COMMANDS: Final = ("plan", "fit", "explain")
Command = TypeVar("Command", bound=Callable[..., Any])


def with_degrees(command: Command) -> Command:
    """Return the command with an option for each degree, in place of its parameter ``degrees``."""
    plain = inspect.signature(command, eval_str=True)
    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None,
                               annotation=Annotated[str | None if name in _TEXTS else int | None, typer.Option(
                                   option(name), metavar=_METAVAR.get(name, "N"), rich_help_panel="Degrees by hand",
                                   help=text + " Chosen if absent.")]) for name, text in HELP.items()]
    kept = [item for item in plain.parameters.values() if item.name != "degrees"]

    @wraps(command)
    def run(**given: Any) -> Any:
        return command(**{name: value for name, value in given.items() if name not in HELP},
                       degrees=Degrees(**{name: given[name] for name in HELP}))

    parameters = [*(item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in kept), *added]
    run.__signature__ = plain.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {item.name: item.annotation for item in parameters}
    return run  # type: ignore[return-value]


def with_old_words(arguments: Sequence[str]) -> list[str]:
    """Return the command line in today's words: ``--recompute`` was an option without a word after it.

    What is changed is noted on stderr.
    """
    result = list(arguments)
    for place in range(len(result) - 1, 0, -1) if result and result[0] in _COMMANDS else ():
        new = {"--recompute": "full", "--no-recompute": "none"}.get(result[place])
        if new is not None and not (result[place] == "--recompute" and is_recompute("".join(result[place + 1:][:1]))):
            print(f"note: {result[place]} is now --recompute {new}", file=sys.stderr, flush=True)
            result[place:place + 1] = ["--recompute", new]
    return result
