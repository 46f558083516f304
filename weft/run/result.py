"""What a run is asked for and what it gives back, and how that travels from rank 0 to whoever asked: a folder of files.

    result.json        losses, times, verification, memory
    timeline.json.gz   the measured timeline of the step with the median time
    gradients.npz      gradients of the first step by parameter (float64), if asked for
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from weft.base.array_files import read_arrays
from weft.base.errors import InputError, RunError
from weft.base.files import check_output, decode, encode, load_json, write_atomic, written_together
from weft.plan.memory import CATEGORIES
from weft.simulate.timeline import Timeline
from weft.simulate.timeline_file import load_timeline, save_timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The most that one rank held in a step, as the account says and as measured, in bytes by category."""

    device: str
    account: dict[str, int]
    measured: dict[str, int]
    inside: int
    """What of the measured peak was taken by the instruction that ran then, above what was held when it began."""
    account_at: str
    measured_at: str
    """The instructions during which the totals were largest."""

    @property
    def account_bytes(self) -> int:
        """Return the account's total."""
        return sum(self.account.values())

    @property
    def measured_bytes(self) -> int:
        """Return the measured total."""
        return sum(self.measured.values())

    @property
    def difference(self) -> float:
        """Return how far the measured peak is above the account's, as a part of the account's."""
        return self.measured_bytes / self.account_bytes - 1 if self.account_bytes else 0.0


def memory_table(ranks: Sequence[RankMemory]) -> str:
    """Return the comparison for people: for each rank the account's and the measured peak, by category, in MB."""
    heads = ["rank", "", *CATEGORIES, "peak", "off", "while"]
    rows = []
    for rank, item in enumerate(ranks):
        for parts, words in ((item.account, (f"{rank} ({item.device})", "account", "", item.account_at)),
                             (item.measured, ("", "measured", f"{item.difference:+.1%}", item.measured_at))):
            sizes = [*(parts[part] for part in CATEGORIES), sum(parts.values())]
            rows.append([*words[:2], *(f"{num_bytes / 1e6:.3f}" for num_bytes in sizes), *words[2:]])
    widths = [max(len(row[place]) for row in (heads, *rows)) for place in range(len(heads))]
    lines = [_line(row, widths) for row in (heads, *rows)]
    return "\n".join(["peak memory in MB:", *lines])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    numbers = range(2, len(cells) - 1)
    return "  ".join(cell.rjust(width) if place in numbers else cell.ljust(width)
                     for place, (cell, width) in enumerate(zip(cells, widths, strict=True))).rstrip()


RESULT_FILE: Final = "result.json"
TIMELINE_FILE: Final = "timeline.json.gz"
GRADIENTS_FILE: Final = "gradients.npz"
OPTIONS_FILE: Final = "options.json"
FILES: Final = (TIMELINE_FILE, GRADIENTS_FILE, RESULT_FILE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How to run a plan."""

    steps: int = 1
    """Measured steps, all on the same inputs."""
    warmup: int = 0
    """Steps before the measured ones."""
    seed: int = 0
    """For initial parameters and inputs."""
    dtype: str | None = None
    """Run in this dtype instead of the plan's."""
    device: str = "cpu"
    """``cpu`` (gloo) or ``cuda`` (nccl) for all ranks, or one for each, such as ``cuda,cpu`` or ``cuda:0,cuda:0``
    (gloo; what is on a GPU passes through the host's memory). ``cuda:0@25%`` is a quarter of a GPU that several ranks
    share by the multi-process service, which must be running."""
    compiled: bool | None = None
    """Run stages as compiled graphs, or operator by operator; None for what the plan says."""
    gpu_memory_bytes: int | None = None
    """No rank may take more of its GPU's memory than this; None for no limit."""
    verify: bool = False
    """Compare with the original module on one device."""
    gradients: bool = False
    """Collect the gradients of the first step."""
    memory: bool = False
    """Measure what every rank holds, in one more step after the measured ones."""
    timeout_s: float = 300.0
    """A message or collective that takes longer than this ends the run."""
    checkpoint: str | None = None
    """Folder for checkpoints of a training run: one is written after the last step."""
    checkpoint_every: int | None = None
    """Also after every so many steps."""
    resume: bool = False
    """Go on from the latest checkpoint in that folder, if there is one: its steps are counted as taken."""


def save_options(options: RunOptions, folder: Path) -> None:
    """Write the options for the ranks that find them in the folder."""
    write_atomic(folder / OPTIONS_FILE, json.dumps(encode(options)))


def load_options(folder: Path) -> RunOptions:
    """Return the options that the launcher has written there."""
    return decode(RunOptions, load_json(folder / OPTIONS_FILE), where=OPTIONS_FILE)


def check_folders(options: RunOptions, output: str | PathLike[str] | None) -> None:
    """Raise ``InputError`` unless the result and checkpoints could be written where they are to go."""
    for folder in (output, options.checkpoint):
        if folder is not None:
            check_output(Path(folder), is_folder=True)


def rank_devices(text: str, num_ranks: int) -> tuple[str, ...]:
    """Return the kind of device of each rank (``cpu``, ``cuda``, ``cuda:0@25%``) that ``RunOptions.device`` means."""
    wanted = tuple(text.split(",")) if "," in text else (text,) * num_ranks
    if len(wanted) != num_ranks:
        raise InputError(f"device {text!r} names {len(wanted)} devices, but there are {num_ranks} ranks: name one for "
                         "each, or one for all")
    for name in wanted:
        if not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?(@([1-9][0-9]?|100)%)?", name):
            raise InputError(f"device {text!r}: {name!r} is not a device; use cpu, cuda, cuda:0 or, for a part of a "
                             "GPU, cuda:0@25%")
    return wanted


def share_environment(device: str) -> dict[str, str]:
    """Return what a process needs in its environment to have the part of a GPU that ``device`` names."""
    _, at, share = device.partition("@")
    return {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": share.rstrip("%")} if at else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """How far a run is from the run on one device; see ``weft.run.verify`` for what the errors are."""

    passed: bool
    tolerance: float
    loss_error: float
    """Of the loss in training, of the outputs in inference."""
    gradient_error: float
    """The largest over all gradients."""
    worst: str
    """The gradient with the largest error, as ``name (rank r)``; ``""`` where there is none."""
    num_gradients: int
    """Gradients that were compared; one for each rank that holds the parameter."""
    reference_loss: float
    draws_random: bool = False
    """The model draws random numbers: under another plan it draws others, so that results differ."""
    reason: str = ""
    """Why it differs, where that is known: the loss is not a mean over samples, so the batch must not be cut."""
    float64_error: float | None = None
    """The largest error of the same step in float64, where this one missed the tolerance; see
    ``weft.run.verify``."""
    rounding_error: float | None = None
    """How far one process in the run's dtype is from itself in float64, in the same measure."""
    note: str = ""
    """What float64 says, where it does not make the run equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """What is in a result's JSON file."""

    num_ranks: int
    losses: tuple[float | None, ...]
    """Loss of the whole batch in every step, warm-up included; empty in inference. None where it is not finite, which
    JSON cannot say."""
    step_times_s: tuple[float, ...]
    """From the first start to the last end over all ranks, for every measured step."""
    cpu_s: tuple[float, ...]
    """CPU time of each rank over the measured steps, all its threads."""
    verification: Verification | None
    gradient_spread: float | None = None
    """The largest difference between the gradients of one parameter on two ranks, where gradients were collected or
    verified."""
    memory: tuple[RankMemory, ...] | None = None
    """By rank, the most memory by the account and as measured, where that was asked for."""
    notes: tuple[str, ...] = ()
    """What the user should know about the model under the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult(_Record):
    """What a run gives back."""

    losses: tuple[float, ...]
    verification: Verification | None = None
    timeline: Timeline | None = None
    gradients: Mapping[str, npt.NDArray[np.float64]] | None = None

    @property
    def step_time_s(self) -> float:
        """Return the median time of a measured step."""
        return float(np.median(self.step_times_s))


def save_result(result: RunResult, folder: Path) -> None:
    """Write the result's files into the folder: all of them, or none and ``InputError``."""
    record = _Record(**_record_fields(result, losses=losses_or_none(result)))
    with written_together(folder, FILES) as fresh:
        if result.timeline is not None:
            save_timeline(result.timeline, fresh / TIMELINE_FILE)
        if result.gradients is not None:
            np.savez(fresh / GRADIENTS_FILE, allow_pickle=False, **result.gradients)
        write_atomic(fresh / RESULT_FILE, json.dumps(finite(encode(record))))


def _record_fields(record: _Record, *, losses: tuple[float | None, ...]) -> dict[str, Any]:
    return {item.name: getattr(record, item.name) for item in fields(_Record)} | {"losses": losses}


def keep_files(folder: Path, target: Path) -> None:
    """Copy a result's files to another folder: all of them, or none and ``InputError``."""
    with written_together(target, FILES) as fresh:
        for name in FILES:
            if (folder / name).exists():
                shutil.copy(folder / name, fresh / name)


def load_result(folder: Path) -> RunResult:
    """Return the result whose files are in the folder."""
    if not (folder / RESULT_FILE).exists():
        raise RunError(f"the run left no {RESULT_FILE} in {str(folder)!r}")
    record = decode(_Record, load_json(folder / RESULT_FILE), where=RESULT_FILE)
    result = RunResult(**_record_fields(
        record, losses=tuple(math.nan if loss is None else loss for loss in record.losses)))
    if (folder / TIMELINE_FILE).exists():
        result = replace(result, timeline=load_timeline(folder / TIMELINE_FILE))
    if (folder / GRADIENTS_FILE).exists():
        result = replace(result, gradients=_load_gradients(folder / GRADIENTS_FILE))
    return result


def _load_gradients(path: Path) -> dict[str, npt.NDArray[np.float64]]:
    """Return the arrays in the file, which are as large as the file says and, being unpacked, no larger than it is."""
    found = read_arrays(path, max_bytes=path.stat().st_size)
    for name, array in found.items():
        if array.dtype != np.float64:
            raise InputError(f"{str(path)!r}: {name!r} is not an array of float64")
    return found


def losses_or_none(result: RunResult) -> tuple[float | None, ...]:
    """Return the losses as JSON can say them: None for those that are not finite."""
    return tuple(loss if math.isfinite(loss) else None for loss in result.losses)


def finite(value: object) -> object:
    """Return the value with infinities, which JSON does not have, as a very large number."""
    if isinstance(value, float) and not -1e308 < value < 1e308:
        return 1e308
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list) else value
