"""Training of the network for deployments: expert iteration on generated cases.

Each round makes examples of new cases (the module ``expert``), from the second round on with the network so far at the
expert's hand, and then trains on the examples of all rounds. The loss of a state is the cross-entropy against

    softmax over actions of (-gap / temperature)

less its least possible value, plus a part for the value; the temperature follows the spread of the gaps. One case in
ten is held out. A round's examples and weights are kept in a folder, so a training that was interrupted goes on where
it was: by case while examples are made, by round while the network learns. The same seed gives the same weights,
interrupted or not.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from benchmarks.policy_training.blind import without_feedback
from benchmarks.policy_training.expert import Effort, Example, make_examples, read_examples, write_examples
from benchmarks.policy_training.network import Batch, DeployNetwork, from_arrays, make_batch, to_arrays, write_policy
from weft.base.errors import InputError
from weft.base.files import decode, load_json, write_atomic
from weft.search.deploy.policy import NetworkPolicy, read_policy

HELD_OUT: Final = 10
"""One case in so many is not trained on."""
SEEDS_PER_RUN: Final = 1_000_000
"""Cases of different training seeds are different."""
_BATCH: Final = 64
_RATE: Final = 1e-3
_LEAST_RATE: Final = 2e-5
_WARM_STEPS: Final = 100
_VALUE_PART: Final = 0.25
_BLIND: Final = 0.15
"""Part of the states that are shown without feedback, so that the network can do without it too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """What is trained on, and for how long."""

    rounds: int = 3
    cases: int = 1000
    """New ones in each round."""
    epochs: int = 20
    """In each round."""
    seed: int = 0
    effort: Effort = field(default_factory=Effort)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How well the network knew the examples after an epoch."""

    round: int
    epoch: int
    num_states: int
    loss: float
    held_out_loss: float
    value_error: float
    """Mean absolute difference of logarithms, held out."""
    agreement: float
    """Part of the states in which the likeliest action was as good as the best, held out."""
    regret: float
    """What the likeliest action loses on average: logarithm of time, held out."""


def train_policy(out: Path, folder: Path, options: TrainOptions, *, workers: int = 2, device: str = "cpu",
                 report: Callable[[str], None] = lambda text: None) -> list[Progress]:
    """Return how the training went, after writing the weights to ``out`` and the loss curve beside them."""
    _claim(folder, options)
    curve: list[Progress] = []
    network: DeployNetwork | None = None
    for number in range(options.rounds):
        weights, curve_file = folder / f"round-{number}.safetensors", folder / f"round-{number}.json"
        if weights.exists() and curve_file.exists():
            report(f"round {number + 1}: trained already")
            curve += decode(tuple[Progress, ...], load_json(curve_file), where=str(curve_file))
        else:
            before = folder / f"round-{number - 1}.safetensors" if number else None
            _make_cases(folder, number, before, options, workers, report)
            network, rows = _train_round(folder, number, before, options, device, report)
            curve += rows
            facts = {"training": json.dumps(asdict(options)), "round": str(number + 1)}
            write_policy(weights, to_arrays(network), facts)
            write_atomic(curve_file, json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    final = folder / f"round-{options.rounds - 1}.safetensors"
    write_atomic(out, final.read_bytes())
    write_atomic(out.with_suffix(".json"), json.dumps([asdict(row) for row in curve], indent=1) + "\n")
    report(f"weights written to {out}, loss curve to {out.with_suffix('.json')}")
    return curve


def _claim(folder: Path, options: TrainOptions) -> None:
    """Note what the folder is for; refuse one of a training with other options. More rounds may follow later."""
    if min(options.rounds, options.cases, options.epochs) < 1 or not 0 <= options.seed < 2**31:
        raise InputError(f"rounds, cases and epochs must be 1 or more, and the seed 0 or more: not {options}")
    note = folder / "training.json"
    asked = {**asdict(options), "rounds": None}
    if not note.exists():
        write_atomic(note, json.dumps(asked, indent=1) + "\n")
        return
    found = load_json(note)
    if found != json.loads(json.dumps(asked)):
        raise InputError(f"{str(folder)!r} is of a training with other options: {found}; give those, or another folder")


def check_device(device: str) -> None:
    """Refuse a device that torch does not have."""
    if device not in ("cpu", "cuda"):
        raise InputError(f"--device must be cpu or cuda, not {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch finds no such device here; try cpu")


# ---- examples -------------------------------------------------------------------------------------------------------


def _case_file(folder: Path, number: int, case: int) -> Path:
    return folder / f"round-{number}" / f"case-{case:06d}.npz"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    path: Path
    seed: int
    weights: Path | None
    effort: Effort


def _make_cases(folder: Path, number: int, weights: Path | None, options: TrainOptions, workers: int,
                report: Callable[[str], None]) -> None:
    """Write the examples of a round's cases, those that are not there yet."""
    jobs = []
    for case in range(options.cases):
        path = _case_file(folder, number, case)
        if not path.exists():
            seed = options.seed * SEEDS_PER_RUN + number * options.cases + case
            jobs.append(_Job(path=path, seed=seed, weights=weights, effort=options.effort))
    begin, states, shown = time.monotonic(), 0, time.monotonic()
    for done, count in enumerate(_counts(jobs, workers), start=1):
        states += count
        if done == len(jobs) or time.monotonic() - shown > 10.0:
            shown = time.monotonic()
            report(f"round {number + 1}: {done} of {len(jobs)} cases, {states} states, {shown - begin:.0f} s")


def _counts(jobs: Sequence[_Job], workers: int) -> Iterator[int]:
    """Yield the number of states of each case when it is written."""
    if workers <= 1 or len(jobs) <= 1:
        yield from map(_do, jobs)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=_begin_worker) as pool:
        try:
            yield from pool.map(_do, jobs)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _begin_worker() -> None:
    torch.set_num_threads(1)


_policies: dict[Path, NetworkPolicy] = {}


def _do(job: _Job) -> int:
    policy = None
    if job.weights is not None:
        policy = _policies.get(job.weights)
        if policy is None:
            policy = _policies[job.weights] = NetworkPolicy(read_policy(job.weights))
    examples = make_examples(job.seed, policy, job.effort)
    write_examples(job.path, examples)
    return len(examples)


# ---- learning -------------------------------------------------------------------------------------------------------


def _train_round(folder: Path, number: int, before: Path | None, options: TrainOptions, device: str,
                 report: Callable[[str], None]) -> tuple[DeployNetwork, list[Progress]]:
    kept, held_out = _read_all(folder, number, options.cases)
    if not kept or not held_out:
        raise InputError(f"only {len(kept)} states to train on and {len(held_out)} held out: give more cases")
    torch.manual_seed(options.seed * 1000 + number)
    network = (DeployNetwork() if before is None else from_arrays(read_policy(before))).to(device)
    learner = _Learner(network, device, num_steps=options.epochs * math.ceil(len(kept) / _BATCH))
    rng, rows = np.random.default_rng([options.seed, number, 666]), []
    for epoch in range(options.epochs):
        losses = [learner.step(batch) for batch in _batches(kept, rng)]
        rows.append(_judge(network, held_out, device, round=number + 1, epoch=epoch + 1, num_states=len(kept),
                           loss=float(np.mean(losses))))
        row = rows[-1]
        report(f"round {row.round}, epoch {row.epoch} of {options.epochs}: loss {row.loss:.4f}, held-out "
               f"{row.held_out_loss:.4f}, value off by {row.value_error:.3f}, agrees {100 * row.agreement:.1f} %, "
               f"loses {100 * row.regret:.2f} %")
    return network, rows


def _read_all(folder: Path, number: int, num_cases: int) -> tuple[list[Example], list[Example]]:
    """Return the examples of all rounds so far: to train on, and held out."""
    result: tuple[list[Example], list[Example]] = [], []
    for earlier in range(number + 1):
        for case in range(num_cases):
            result[case % HELD_OUT == HELD_OUT - 1].extend(read_examples(_case_file(folder, earlier, case)))
    return result


class _Learner:
    """Takes steps of AdamW; the rate rises for a while, then falls like a cosine."""

    def __init__(self, network: DeployNetwork, device: str, *, num_steps: int) -> None:
        self.network, self.device, self.num_steps, self.num_done = network, device, num_steps, 0
        self.optimizer = torch.optim.AdamW(network.parameters(), lr=_RATE, weight_decay=0.01)

    def step(self, examples: Sequence[Example]) -> float:
        """Learn from a batch and return its loss."""
        self.network.train()
        warm = min(1.0, (self.num_done + 1) / min(_WARM_STEPS, 1 + self.num_steps // 10))
        fall = 0.5 * (1 + math.cos(math.pi * min(1.0, self.num_done / self.num_steps)))
        for group in self.optimizer.param_groups:
            group["lr"] = warm * (_LEAST_RATE + (_RATE - _LEAST_RATE) * fall)
        blind = np.random.default_rng([self.num_done, 6666]).random(len(examples)) < _BLIND
        self.optimizer.zero_grad(set_to_none=True)
        policy_loss, value_error, _ = _losses(self.network, examples, blind.tolist(), self.device)
        loss = policy_loss.mean() + _VALUE_PART * torch.nn.functional.smooth_l1_loss(
            value_error, torch.zeros_like(value_error), beta=0.2)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        self.num_done += 1
        return float(loss.detach())


def _losses(network: DeployNetwork, examples: Sequence[Example], blind: Sequence[bool],
            device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return, by state, how far the policy is from its target, the value's error, and the likeliest action's gap."""
    states = [without_feedback(item.features) if hide else item.features
              for item, hide in zip(examples, blind, strict=True)]
    batch = make_batch(states).to(device)
    gaps = _padded_gaps(examples, batch)
    logits, value = network(batch)
    target = torch.softmax(-gaps / _temperature(examples).to(gaps)[:, None], dim=1)
    log_target = torch.log(target.clamp(min=1e-9))
    divergence = (target * (log_target - torch.log_softmax(logits, dim=1))).sum(dim=1)
    wanted = torch.tensor([item.value for item in examples]).to(value)
    return divergence, value - wanted, gaps.gather(1, logits.argmax(dim=1, keepdim=True))[:, 0]


def _padded_gaps(examples: Sequence[Example], batch: Batch) -> Tensor:
    gaps = np.full(tuple(batch.has_action.shape), 1e4, dtype=np.float32)
    for row, item in zip(gaps, examples, strict=True):
        row[: len(item.gaps)] = item.gaps
    return torch.from_numpy(gaps).to(batch.ops.device)


def _temperature(examples: Sequence[Example]) -> Tensor:
    """Return, by state, what a gap is measured by: where all actions are alike, small gaps count."""
    spread = [0.2 * float(np.median(item.gaps)) for item in examples]
    return torch.tensor(np.clip(spread, 0.003, 0.03), dtype=torch.float32)


def _batches(examples: Sequence[Example], rng: np.random.Generator) -> Iterator[list[Example]]:
    """Yield all examples in batches of similar size, in random order."""
    order = rng.permutation(len(examples))
    pools = [order[first : first + 16 * _BATCH] for first in range(0, len(order), 16 * _BATCH)]
    batches = []

    def size(index: int) -> tuple[int, int]:
        return len(examples[index].gaps), len(examples[index].features.ops)

    for pool in pools:
        by_size = sorted(pool.tolist(), key=size)
        batches += [by_size[first : first + _BATCH] for first in range(0, len(by_size), _BATCH)]
    for index in rng.permutation(len(batches)):
        yield [examples[item] for item in batches[index]]


def _judge(network: DeployNetwork, held_out: Sequence[Example], device: str, *, round: int, epoch: int,  # noqa: A002
           num_states: int, loss: float) -> Progress:
    network.eval()
    parts = []
    with torch.inference_mode():
        for first in range(0, len(held_out), _BATCH):
            examples = held_out[first : first + _BATCH]
            parts.append(torch.stack(_losses(network, examples, [False] * len(examples), device)).cpu())
    divergence, error, gap = torch.cat(parts, dim=1).double()
    return Progress(round=round, epoch=epoch, num_states=num_states, loss=loss,
                    held_out_loss=float(divergence.mean() + _VALUE_PART * torch.nn.functional.smooth_l1_loss(
                        error, torch.zeros_like(error), beta=0.2)),
                    value_error=float(error.abs().mean()), agreement=float((gap < 1e-3).double().mean()),
                    regret=float(gap.mean()))
