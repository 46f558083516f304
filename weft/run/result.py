"""What a run gives back, and how it travels from rank 0 to whoever asked: a folder with plain files.

    result.json        losses, times, verification
    timeline.json.gz   the measured timeline of the step with the median time
    gradients.npz      gradients of the first step by parameter (float64), if asked for
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from weft.errors import InputError, RunError
from weft.files import decode, encode, load_json, write_atomic
from weft.simulate.timeline import Timeline
from weft.simulate.timeline_file import load_timeline, save_timeline

RESULT_FILE: Final = "result.json"
TIMELINE_FILE: Final = "timeline.json.gz"
GRADIENTS_FILE: Final = "gradients.npz"


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
    gpu_memory_bytes: int | None = None
    """No rank may take more of its GPU's memory than this; None for no limit."""
    verify: bool = False
    """Compare with the original module on one device."""
    gradients: bool = False
    """Collect the gradients of the first step."""
    timeout_s: float = 300.0
    """A message or collective that takes longer than this ends the run."""
    checkpoint: str | None = None
    """Folder for checkpoints of a training run: one is written after the last step."""
    checkpoint_every: int | None = None
    """Also after every so many steps."""
    resume: bool = False
    """Go on from the latest checkpoint in that folder, if there is one: its steps are counted as taken."""


def rank_devices(text: str, num_ranks: int) -> tuple[str, ...]:
    """Return the kind of device of each rank (``cpu``, ``cuda``, ``cuda:0@25%``) that ``RunOptions.device`` means."""
    wanted = tuple(text.split(",")) if "," in text else (text,) * num_ranks
    if len(wanted) != num_ranks:
        raise InputError(f"device {text!r} names {len(wanted)} devices, but there are {num_ranks} ranks: name one for "
                         "each, or one for all")
    for name in wanted:
        if not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?(@([1-9][0-9]?|100)%)?", name):
            raise InputError(f"device {text!r}: {name!r} is none; use cpu, cuda, cuda:0 or, for a part of a GPU, "
                             "cuda:0@25%")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run gives back."""

    num_ranks: int
    losses: tuple[float, ...]
    """Loss of the whole batch in every step, warm-up included; empty in inference."""
    step_times_s: tuple[float, ...]
    """From the first start to the last end over all ranks, for every measured step."""
    cpu_s: tuple[float, ...]
    """CPU time of each rank over the measured steps, all its threads."""
    verification: Verification | None = None
    timeline: Timeline | None = None
    gradients: Mapping[str, npt.NDArray[np.float64]] | None = None
    gradient_spread: float | None = None
    """The largest difference between the gradients of one parameter on two ranks, where gradients were collected or
    verified."""

    @property
    def step_time_s(self) -> float:
        """Return the median time of a measured step."""
        return float(np.median(self.step_times_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    num_ranks: int
    losses: tuple[float, ...]
    step_times_s: tuple[float, ...]
    cpu_s: tuple[float, ...]
    verification: Verification | None
    gradient_spread: float | None = None


def save_result(result: RunResult, folder: Path) -> None:
    """Write the result's files into the folder."""
    record = _Record(num_ranks=result.num_ranks, losses=result.losses, step_times_s=result.step_times_s,
                     cpu_s=result.cpu_s, verification=result.verification, gradient_spread=result.gradient_spread)
    folder.mkdir(parents=True, exist_ok=True)
    if result.timeline is not None:
        save_timeline(result.timeline, folder / TIMELINE_FILE)
    if result.gradients is not None:
        np.savez(folder / GRADIENTS_FILE, allow_pickle=False, **result.gradients)
    write_atomic(folder / RESULT_FILE, json.dumps(_finite(encode(record))))


def load_result(folder: Path) -> RunResult:
    """Return the result whose files are in the folder."""
    if not (folder / RESULT_FILE).exists():
        raise RunError(f"the run left no {RESULT_FILE} in {str(folder)!r}")
    record = decode(_Record, load_json(folder / RESULT_FILE), where=RESULT_FILE)
    result = RunResult(num_ranks=record.num_ranks, losses=record.losses, step_times_s=record.step_times_s,
                       cpu_s=record.cpu_s, verification=record.verification, gradient_spread=record.gradient_spread)
    if (folder / TIMELINE_FILE).exists():
        result = replace(result, timeline=load_timeline(folder / TIMELINE_FILE))
    if (folder / GRADIENTS_FILE).exists():
        with np.load(folder / GRADIENTS_FILE, allow_pickle=False) as stored:
            result = replace(result, gradients={name: stored[name] for name in stored.files})
    return result


def _finite(value: object) -> object:
    """Return the value with infinities, which JSON does not have, as a very large number."""
    if isinstance(value, float) and not -1e308 < value < 1e308:
        return 1e308
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value
