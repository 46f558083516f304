"""State of optimizers from checkpoints with sound checksums that lie: one clear error, or the next step is taken."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.base.errors import InputError
from weft.base.tensor_file import Entry
from weft.plan.plan import Optimizer
from weft.run.checkpoint_folder import CheckpointRecord, TensorFile, TensorWriter, dtype_name
from weft.run.optimizers import OptimizerState, make_optimizer

Make = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "plan-sgd": lambda ps: make_optimizer(ps, Optimizer(kind="sgd", lr=0.1)),
    "plan-adam": lambda ps: make_optimizer(ps, Optimizer(kind="adam", lr=0.1)),
    "plan-masters": lambda ps: make_optimizer([nn.Parameter(item.bfloat16()) for item in ps[:-1]] + list(ps[-1:]),
                                              Optimizer(kind="adamw", lr=0.1)),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "sgd-nesterov": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd-fused": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.1),
    "adam-tensor": lambda ps: torch.optim.Adam(ps, lr=torch.tensor(0.1)),
    "amsgrad": lambda ps: torch.optim.Adam(ps, lr=0.1, amsgrad=True),
    "adamw-foreach": lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=True),
    "adamw-two-groups": lambda ps: torch.optim.AdamW([{"params": ps[:1], "lr": 0.5}, {"params": ps[1:]}]),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1),
    "adagrad-fused": lambda ps: torch.optim.Adagrad(ps, lr=0.1, fused=True),
    "adadelta": lambda ps: torch.optim.Adadelta(ps),
    "adamax": lambda ps: torch.optim.Adamax(ps),
    "adafactor": lambda ps: torch.optim.Adafactor(ps),
    "asgd": lambda ps: torch.optim.ASGD(ps),
    "nadam": lambda ps: torch.optim.NAdam(ps),
    "radam": lambda ps: torch.optim.RAdam(ps),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps),
    "rmsprop-centered": lambda ps: torch.optim.RMSprop(ps, centered=True, momentum=0.9),
    "rprop": lambda ps: torch.optim.Rprop(ps),
    "muon": lambda ps: torch.optim.Muon([item for item in ps if item.dim() == 2]),
}
SHAPES = {"one": (6, 4), "two": (4, 6), "three": (1, 5), "four": (3,), "five": (2, 3, 4)}


class World:
    """An optimizer that has taken two steps, and what a checkpoint keeps of it."""

    def __init__(self, name: str) -> None:
        given = [nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1))) for shape in SHAPES.values()]
        self.optimizer = OPTIMIZERS[name](given)
        listed = [item for group in self.optimizer.param_groups for item in group["params"]]
        self.parameters = {key: item for key, shape in SHAPES.items() for item in listed if item.shape == shape}
        for _ in range(2):
            self.step()
        self.state = OptimizerState(self.optimizer, self.parameters, regions={}, shapes=SHAPES)
        self.tensors = {key: claim.tensor.clone() for key, claim in self.state.tensors(list(self.parameters)).items()}
        self.numbers = self.state.numbers(list(self.parameters))
        self.groups = self.state.groups()

    def step(self) -> None:
        for item in self.parameters.values():
            item.grad = torch.full_like(item, 0.01)
        self.optimizer.step()

    def load(self, folder: Path, *, tensors: dict[str, Tensor], groups: Sequence[dict[str, Any]] | None = None,
             numbers: dict[str, Any] | None = None) -> None:
        """Take over what a checkpoint would have, then take a step."""
        writer = TensorWriter(folder / "state", {key: Entry(dtype=dtype_name(item, key), shape=tuple(item.shape))
                                                 for key, item in tensors.items()})
        for key in writer.names:
            writer.write(tensors[key])
        writer.close()
        record = CheckpointRecord(step=2, model="", plan="", optimizer=self.state.kind, numbers=numbers or self.numbers,
                                  groups=tuple(self.groups if groups is None else groups))
        with TensorFile(folder / "state") as file:
            self.state.change(file, record)()
        self.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_goes_on_as_it_was(name, tmp_path):
    world = World(name)
    before = {key: item.detach().clone() for key, item in world.parameters.items()}
    world.step()
    after = {key: item.detach().clone() for key, item in world.parameters.items()}
    world.step()
    with torch.no_grad():
        for key, item in world.parameters.items():
            item.copy_(before[key])
    world.load(tmp_path, tensors=world.tensors)
    assert all(torch.equal(item, after[key]) for key, item in world.parameters.items())


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "plan-sgd"])
def test_lies_in_the_state_end_in_one_clear_error(name, tmp_path):
    """Each was loaded, and the next step ended with an error about something else, or read beyond a tensor's end."""
    world = World(name)
    key = next(key for key, item in world.tensors.items() if item.numel() > 1)
    value = world.tensors[key]
    lies = {"another name": {f"{key}.x": value}, "a number": {key: torch.tensor(1.0)}, "one number": {key: torch.ones(1)},
            "few numbers": {key: torch.ones(3)}, "another order": {key: torch.ones(tuple(reversed(value.shape)))},
            "one more": {key: value[None]}}
    for step in [key for key, item in world.tensors.items() if key.endswith(".step")][:1]:
        lies |= {f"a step of {number}": {step: torch.tensor(number)} for number in (-1.0, -5.0, float("nan"), float("inf"))}
        lies |= {"two steps": {step: torch.ones(2)}, "a step like its parameter": {step: torch.ones(value.shape)}}
    for what, lie in lies.items():
        tensors = {key: item for key, item in world.tensors.items() if key not in lie and not (what == "another name" and item is value)}
        with pytest.raises(InputError, match=r"cannot take over its state|is of no parameter"):
            world.load(tmp_path, tensors={**tensors, **lie})
    world.load(tmp_path, tensors=world.tensors)


@pytest.mark.parametrize(("name", "option", "value"), [
    ("adam", "amsgrad", True), ("plan-masters", "amsgrad", True), ("adamw-foreach", "amsgrad", True),
    ("plan-adam", "differentiable", True), ("adam", "lr", "0.1"), ("adam", "lr", None), ("adam", "lr", True),
    ("sgd", "lr", float("inf")), ("sgd", "lr", 10**400), ("adam-tensor", "lr", "0.1"), ("adam-tensor", "lr", None),
    ("adam", "betas", [0.9, 0.99, 0.999]), ("adam", "betas", 0.9), ("adam", "betas", [True, 0.9]),
    ("adam", "betas", [1.5, 1.5]), ("adam", "betas", [0.9, 1e300]), ("rmsprop", "centered", True), ("rmsprop", "momentum", 0.9),
    ("sgd", "momentum", [0.9]), ("sgd", "nesterov", "yes"), ("rprop", "etas", [0.5]), ("adafactor", "eps", [None, None]),
    ("adagrad", "differentiable", "yes"), ("adam", "capturable", True), ("adamax", "capturable", True), ("muon", "ns_steps", 1000),
    ("muon", "ns_coefficients", [1.0]), ("adam", "foreach", 0.999)])
def test_lies_in_the_options_end_in_one_clear_error(name, option, value, tmp_path):
    """As above; options that a step takes are no lies as far as anybody can tell."""
    world = World(name)
    assert option in world.groups[0]
    with pytest.raises(InputError, match=r"cannot take over its state|groups\[0\]\.\w+ is .*where"):
        world.load(tmp_path, tensors=world.tensors, groups=[{**group, option: value} for group in world.groups])
    world.load(tmp_path, tensors=world.tensors)


def test_a_switch_that_was_taken_over_goes_back_to_nothing(tmp_path):
    world = World("adam")
    world.load(tmp_path, tensors=world.tensors, groups=[{**group, "foreach": 3} for group in world.groups])
    world.load(tmp_path, tensors=world.tensors)


def test_numbers_in_place_of_tensors_are_refused(tmp_path):
    world = World("adam")
    for key in ("one.exp_avg", "one.step"):
        tensors = {name: item for name, item in world.tensors.items() if name != key}
        for number in (3, "text", None, True, 10**400, -1):
            if (key, number) != ("one.step", 3):
                with pytest.raises(InputError, match="cannot take over its state"):
                    world.load(tmp_path, tensors=tensors, numbers={key: number})


def test_masters_that_are_gone_are_refused(tmp_path):
    """They began anew from the rounded parameters without a word."""
    world = World("plan-masters")
    lies: tuple[dict[str, Tensor], ...] = ({}, {"one.master": torch.ones(1)}, {"one.master": torch.ones(4, 6)})
    for lie in lies:
        with pytest.raises(InputError, match=r"has no 'master' of 'one' in the shape \[6, 4\]"):
            world.load(tmp_path, tensors={**{key: item for key, item in world.tensors.items() if key != "one.master"}, **lie})
    with pytest.raises(InputError, match=r"'ones.master' in .* is of no parameter of the model"):
        world.load(tmp_path, tensors={**world.tensors, "ones.master": torch.ones(3)})


def mutate(world: World, draw: random.Random) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Return state and options with lies in them."""
    tensors, groups = dict(world.tensors), copy.deepcopy(list(world.groups))
    for _ in range(draw.choice((1, 1, 2))):
        key, other = (draw.choice(sorted(tensors)) if tensors else "" for _ in range(2))
        option = draw.choice(sorted(groups[0]))
        match draw.randrange(5) if tensors else 4:
            case 0:
                tensors[key] = tensors[other]
            case 1:
                tensors.pop(key)
            case 2:
                tensors[f"{key}{draw.choice(('x', '.x', '.step'))}"] = tensors.pop(key)
            case 3:
                tensors[key] = draw.choice((torch.tensor(-1.0), torch.ones(3), torch.zeros(0), torch.tensor(float("nan")), torch.ones(1),
                                            torch.tensor(1e30), torch.zeros(tensors[key].shape), tensors[key].flatten(), tensors[key][None]))
            case _:
                draw.choice(groups)[option] = draw.choice(
                    (None, True, False, 0, 1, -1, 1e300, -1e300, 1e-300, 3, 2**70, 10**400, "text", [], [1], [0.5, 0.5], [3, 3], [-1, 0.5], {"a": 1},
                     [1.0, 1.0], [0.1, 0.2, 0.3]))
    return tensors, groups


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "plan-sgd"])
def test_random_lies_end_in_one_clear_error_or_a_step(name, tmp_path):
    """``python -m tests.run.test_optimizer_state 2000 [SEED]`` does as many for each optimizer."""
    attack(name, tmp_path, 25, seed=0)


def attack(name: str, folder: Path, number: int, *, seed: int) -> None:
    """Load so much state with lies in it, and take a step with what is loaded."""
    world, draw, refused = World(name), random.Random(seed), 0
    for _ in range(number):
        tensors, groups = mutate(world, draw)
        try:
            world.load(folder, tensors=tensors, groups=groups)
        except InputError:
            refused += 1
        for group, before in zip(world.optimizer.param_groups, world.groups, strict=True):
            group.update(before)
        world.load(folder, tensors=world.tensors)
    assert refused > number // 4


if __name__ == "__main__":
    import sys
    import tempfile
    import traceback

    for each in OPTIMIZERS:
        if each != "plan-sgd":
            with tempfile.TemporaryDirectory() as place:
                try:
                    attack(each, Path(place), int(sys.argv[1]), seed=int(sys.argv[2]) if len(sys.argv) > 2 else 1)
                except Exception:
                    print(each)
                    traceback.print_exc()
