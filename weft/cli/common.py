"""What all commands share: options, progress on stderr, JSON on stdout, and loading of models, clusters and plans."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, NoReturn

import typer

from weft.base.errors import InputError
from weft.base.files import check_output, write_atomic
from weft.cli import late
from weft.cluster import read_cluster
from weft.cluster.cluster import Cluster
from weft.cluster.cluster_file import parse_cluster
from weft.model.zoo import DTYPES, MODELS
from weft.plan.plan import OPTIMIZERS, Optimizer, Plan, save_plan

INTERRUPTED: Final = 130
"""Exit code after Ctrl-C."""
MAX_WIDTH: Final = 100_000
"""No chart of text is wider: every column takes memory and time, and no screen has so many."""
ModelArgument = Annotated[str, typer.Argument(
    metavar="MODEL", help="A name from `weft models` (options after a colon: gpt2:layers=4,seq=128), "
    "path/to/file.py:function (:in_eval_mode after it: trained in eval mode), an .onnx file or a graph file.")]
ClusterArgument = Annotated[str, typer.Argument(
    metavar="CLUSTER", help="A cluster file, or a text such as '4 x A100-80GB'.")]
PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")]
ModelOption = Annotated[str | None, typer.Option(
    "--model", help="The plan's model, where it is not from `weft models`.")]
ClusterOption = Annotated[str | None, typer.Option(
    "--cluster", help="Another cluster than the one the plan describes.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout and nothing else there.")]
ProfileOption = Annotated[Path | None, typer.Option(
    "--profile", metavar="FILE", help="A profile store written by `weft profile`; measured times replace estimates.")]
TimeLimitOption = Annotated[float | None, typer.Option(
    help="Seconds for all of it but imports and tracing; the best found by then is the result.")]
MAX_SEED: Final = 2**31 - 1
SeedOption = Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed of the search.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]
LARGE_RESULT: Final = 20_000
"""A result whose fields have more items in all is written without line breaks, which takes a fraction of the time."""


def to_json_text(value: Any) -> str:
    """Return ``value`` as JSON: with line breaks, unless it is large."""
    sizes = (len(item) for item in value.values() if isinstance(item, (list, dict))) if isinstance(value, dict) else ()
    return json.dumps(value, indent=None if sum(sizes) > LARGE_RESULT else 1, allow_nan=False)


def print_json(value: Any) -> None:
    """Print ``value`` as JSON on stdout."""
    print(to_json_text(value))


def print_result(as_json: bool, value: Callable[[], Any], show: Callable[[], object]) -> None:
    """Print the result on stdout: its value as JSON, or by the function that shows it to people."""
    if as_json:
        print_json(value())
    else:
        show()


def write_result(path: Path | None, value: Mapping[str, Any], report: Callable[[str], None]) -> None:
    """Write a result as JSON, if that is wanted, without how long the search took: the same input gives the same file.
    """
    if path is not None:
        write_atomic(path, to_json_text({key: item for key, item in value.items() if key != "seconds"}) + "\n")
        report(f"result written to {path}")


def reporter(quiet: bool) -> Callable[[str], None]:
    """Return a function that writes progress lines to stderr, or nothing."""
    def report(text: str) -> None:
        if not quiet:
            print(text, file=sys.stderr, flush=True)
    return report


def end_interrupted(text: str) -> NoReturn:
    """Say what Ctrl-C has ended, and end with the exit code for that: the best so far is written."""
    print(f"weft: {text}", file=sys.stderr, flush=True)
    raise typer.Exit(INTERRUPTED)


def end_if_interrupted(is_interrupted: bool) -> None:
    """End with the exit code for Ctrl-C if it has ended the search, of which the best so far was told."""
    if is_interrupted:
        end_interrupted("interrupted: this is the best so far")


def refuse_given(given: Mapping[str, object], why: str, *, joined: str = " or ") -> None:
    """Raise ``InputError`` if one of the options, by name, is given; their names go into ``why``."""
    if names := [name for name, value in given.items() if value is not None]:
        raise InputError(why.format(joined.join(names)))


def refuse_model(text: str) -> None:
    """Raise ``InputError`` for what looks like a model where a file is wanted, since its cluster is missing."""
    if not Path(text).exists() and (is_zoo_name(text) or ".py:" in text):
        raise InputError(f"{text!r} is a model, so CLUSTER is missing: give a cluster file or a text such as "
                         "'8 x H100-80GB' after it")


def choice(option: str, text: str, allowed: tuple[str, ...]) -> Any:
    """Return ``text`` if it is one of the allowed values of the option."""
    if text not in allowed:
        raise InputError(f"{option} must be one of {', '.join(allowed)}, not {text!r}")
    return text


def dtype_choice(text: str | None) -> Any:
    """Return the dtype by its whole name (``bf16`` is bfloat16), if it is known; None if it is not given."""
    return None if text is None else DTYPES[choice("--dtype", text, tuple(DTYPES))]


def optimizer_choice(kind: str) -> Optimizer:
    """Return the optimizer of that kind."""
    return Optimizer(kind=choice("--optimizer", kind, OPTIMIZERS))




def write_plan(path: Path | None, plan: Plan, report: Callable[[str], None]) -> None:
    """Write a plan, if that is wanted, and say where."""
    if path is not None:
        save_plan(plan, path)
        report(f"plan written to {path}")


def check_time_limit(time_limit: float | None) -> None:
    """Raise ``InputError`` unless the limit is a number of seconds, or there is none."""
    if time_limit is not None and not (math.isfinite(time_limit) and time_limit > 0):
        raise InputError(f"--time-limit must be a number of seconds above 0, not {time_limit}")


def check_width(width: int | None) -> None:
    """Raise ``InputError`` unless a chart can be so wide."""
    if width is not None and not 1 <= width <= MAX_WIDTH:
        raise InputError(f"--width must be at least 1 and at most {MAX_WIDTH}, not {width}")


def check_outputs(outputs: Mapping[str, Path | None], inputs: Sequence[str | Path | None] = (), *,
                  folders: Mapping[str, Path | None] = MappingProxyType({})) -> None:
    """Raise ``InputError`` where a file to be written, by option, could not be, is an input, or written twice.

    Likewise where files could not be written into one of the ``folders``.
    """
    taken = {os.path.realpath(item): "an input" for item in inputs if item is not None and os.path.isfile(item)}
    for option, path in outputs.items():
        if path is None:
            continue
        check_output(path)
        place = os.path.realpath(path)
        if place in taken:
            raise InputError(f"{option} {str(path)!r} is {taken[place]} as well, which would be lost: give it another "
                             "name")
        taken[place] = f"that of {option}"
    for folder in folders.values():
        if folder is not None:
            check_output(folder, is_folder=True)


def graph_of_plan(plan: Plan, model: str | None, *, batch_dims: bool = False) -> late.Graph:
    """Return the graph that a plan is for: of the model given, or of the zoo model that the plan names.

    A file that a plan names is never executed: such a model must be given on the command line. Dimensions of the batch
    are found where the plan needs them, or where they are asked for.
    """
    spec = model or plan.model.name
    if model is None and not is_zoo_name(spec):
        raise InputError(f"the plan's model {spec!r} is not a name from `weft models`: give it as well (--model)")
    return late.load_graph_for(spec, mode=plan.model.mode, batch=plan.microbatch_size, dtype=plan.model.conversion,
                               batch_dims=batch_dims or has_unaligned_replicas(plan))


def cluster_of_plan(plan: Plan, cluster: str | None) -> Cluster:
    """Return the cluster given on the command line, or the one that the plan describes."""

    if cluster is not None:
        return read_cluster(cluster)
    if plan.cluster.description is None:
        raise InputError("the plan does not describe its cluster: give it as well (--cluster)")
    return parse_cluster(plan.cluster.description, where="the plan's cluster.description")


def is_zoo_name(spec: str) -> bool:
    """Return whether the text names a model of the zoo, so that building it runs no code but Weft's."""

    return spec.partition(":")[0] in MODELS


def has_unaligned_replicas(plan: Plan) -> bool:
    """Return whether stages divide the samples differently, so that tensors must be cut along the batch."""
    return len({tuple(replica.share for replica in stage.replicas) for stage in plan.stages}) > 1
