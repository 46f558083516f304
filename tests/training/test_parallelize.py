"""``weft.parallelize`` in one process, and runs from the command line that lose a device.

Several ranks are in ``test_checkpoint.py``, a script under ``torchrun`` in ``tests/test_docs.py``.
"""

from __future__ import annotations

import gc
import json
import logging
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import weft
from tests.run.models import TinyGPT
from tests.run.plans import MODELS, pipeline_plan, source_of, traced
from weft.base.errors import ClusterError, InputError, ModelError, RunError
from weft.cli.main import main
from weft.plan.orders import one_f_one_b
from weft.plan.plan import save_plan
from weft.training.batches import digest, is_compared
from weft.training.parallelize import devices_left

pytestmark = pytest.mark.timeout(120)
CLUSTER = "1 x cpu"


@pytest.fixture(autouse=True)
def _alone(monkeypatch) -> Iterator[None]:
    """No other ranks, and no connection left behind."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Mixed(nn.Module):
    """A frozen layer, statistics, a layer that is not used, a buffer that is not saved, and dropout if asked for."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.frozen, self.norm, self.last = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.unused = nn.Linear(3, 3)
        self.dropout = nn.Dropout(dropout)
        self.frozen.weight.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.scale * self.last(self.dropout(self.norm(self.frozen(x)))), y)


def mixed_batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 5, generator=generator), torch.randn(8, 2, generator=generator)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize("call", ["tempfile.mkdtemp", "os.fsync", "os.rename"])
def test_a_disk_that_is_full_at_a_checkpoint_has_one_code_and_leaves_nothing(tmp_path, monkeypatch, call):
    """When its folder is made, when its tensors are written, or when it gets its name."""
    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    with weft.parallelize(Mixed(), mixed_batch(0), CLUSTER, optimizer=momentum) as trainer:
        trainer.step(mixed_batch(0))
        with monkeypatch.context() as context:
            context.setattr(call, full)
            with pytest.raises(RunError, match=r"cannot be written to .*new': No space left on device") as caught:
                trainer.save_checkpoint(tmp_path / "new")
        assert caught.value.exit_code == 4
        assert list(tmp_path.iterdir()) == []


def tokens(seed: int, batch: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    both = torch.randint(0, 40, (batch, 9), generator=torch.Generator().manual_seed(seed))
    return both[:, :-1].clone(), both[:, 1:].clone()


def test_one_process_trains_as_the_plain_module_does(tmp_path):
    plain = Mixed().double()
    optimizer = momentum(plain.parameters())
    with weft.parallelize(Mixed().double(), _doubles(0), CLUSTER, optimizer=momentum, max_grad_norm=0.3, microbatches=1) as trainer:
        for step in range(3):
            loss = plain(*_doubles(step))
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
            optimizer.step()
            assert trainer.step(_doubles(step)) == pytest.approx(loss.item(), rel=1e-12)
            assert trainer.gradient_norm == pytest.approx(norm.item(), rel=1e-12)
        path = trainer.save_checkpoint(tmp_path)
        state = trainer.state_dict()
    assert not dist.is_initialized()
    assert state.keys() == plain.state_dict().keys()
    again = Mixed().double()
    again.load_state_dict(load_file(path / "model.safetensors"))
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, rtol=1e-12, atol=1e-15)
        assert torch.equal(state[name], again.state_dict()[name])
    assert again.norm.num_batches_tracked == 3


def _doubles(seed: int) -> tuple[torch.Tensor, ...]:
    return tuple(item.double() for item in mixed_batch(seed))


def test_evaluation_changes_nothing_and_checkpoints_bring_everything_back(tmp_path):
    torch.manual_seed(0)
    model = TinyGPT()
    plain = TinyGPT()
    plain.load_state_dict(model.state_dict())
    trainer = weft.parallelize(model, tokens(0), CLUSTER, optimizer=lambda ps: torch.optim.Adam(ps, lr=1e-2))
    trainer.step(tokens(0))
    trainer.optimizer.param_groups[0]["lr"] = 5e-3
    path = trainer.save_checkpoint(tmp_path, extra={"epoch": 1})
    assert trainer.save_checkpoint(tmp_path) == path, "this step is there"
    first = trainer.eval_loss(tokens(1))
    assert trainer(*tokens(1)) == first
    after = [trainer.step(tokens(seed)) for seed in (1, 2)]
    assert after[0] == pytest.approx(first, rel=1e-6)
    trainer.optimizer.param_groups[0]["lr"] = 1.0
    record = trainer.load_checkpoint(tmp_path)
    assert (record.step, record.extra, trainer.num_steps) == (1, {"epoch": 1}, 1)
    assert trainer.optimizer.param_groups[0]["lr"] == 5e-3
    assert trainer.optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    assert [trainer.step(tokens(seed)) for seed in (1, 2)] == after
    trainer.load_state_dict(plain.state_dict())
    assert trainer.eval_loss(tokens(5)) == pytest.approx(plain(*tokens(5)).item(), rel=1e-6)
    with pytest.raises(InputError, match="has step-00000001 already"):
        weft.parallelize(plain, tokens(0), trainer.plan).save_checkpoint(tmp_path)


def test_random_numbers_go_on_under_the_same_plan(tmp_path):
    trainer = weft.parallelize(Mixed(0.5), mixed_batch(0), CLUSTER, optimizer=momentum, microbatches=2)
    trainer.step(mixed_batch(0))
    trainer.save_checkpoint(tmp_path)
    losses = [trainer.step(mixed_batch(0)) for _ in range(2)]
    assert trainer.resume(tmp_path) == 1
    assert [trainer.step(mixed_batch(0)) for _ in range(2)] == losses
    with pytest.raises(RunError, match="draws random numbers or takes statistics"):
        trainer.eval_loss(mixed_batch(0))


def test_a_checkpoint_that_has_lost_something_changes_nothing(tmp_path):
    trainer = weft.parallelize(Mixed(), mixed_batch(0), CLUSTER, optimizer=momentum)
    trainer.step(mixed_batch(0))
    path = trainer.save_checkpoint(tmp_path)
    trainer.step(mixed_batch(1))
    before = trainer.state_dict()
    whole = (path / "optimizer.safetensors").read_bytes()
    (path / "optimizer.safetensors").unlink()
    with pytest.raises(InputError, match=r"optimizer.safetensors' has 0 tensors where 5 were written.*optimizer=False"):
        trainer.load_checkpoint(tmp_path)
    (path / "optimizer.safetensors").write_bytes(whole[:-8])
    with pytest.raises(InputError, match=r"optimizer\.safetensors"):
        trainer.load_checkpoint(tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in trainer.state_dict().items())
    (path / "optimizer.safetensors").write_bytes(whole)
    trainer.load_checkpoint(tmp_path)
    assert not all(torch.equal(value, before[name]) for name, value in trainer.state_dict().items())
    trainer.load_state_dict({"last.bias": torch.ones(2), "strange": torch.ones(1)}, strict=False)
    assert trainer.state_dict()["last.bias"].tolist() == [1, 1]


def test_learning_rate_schedules_go_on(tmp_path):
    trainer = weft.parallelize(Mixed(), mixed_batch(0), CLUSTER, optimizer=momentum)
    torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1, gamma=0.5)
    trainer.save_checkpoint(tmp_path)
    other = weft.parallelize(Mixed(), mixed_batch(0), trainer.plan, optimizer=momentum)
    other.load_checkpoint(tmp_path)
    schedule = torch.optim.lr_scheduler.StepLR(other.optimizer, 1, gamma=0.5, last_epoch=1)
    assert schedule.base_lrs == [0.1]


class Strange(torch.optim.SGD):
    """Keeps something that is no tensor."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].update(past=[1, 2], count=3)


def test_optimizer_state_that_no_file_can_hold_is_told(tmp_path, caplog):
    trainer = weft.parallelize(Mixed(), mixed_batch(0), CLUSTER, optimizer=lambda ps: Strange(ps, lr=0.1))
    trainer.step(mixed_batch(0))
    with caplog.at_level(logging.WARNING):
        trainer.save_checkpoint(tmp_path)
    assert "the optimizer's state has past, which is neither a tensor nor a number" in caplog.text
    record = json.loads((tmp_path / "step-00000001" / "checkpoint.json").read_text())
    assert record["numbers"]["last.bias.count"] == 3


def test_the_model_is_let_go(tmp_path):
    model = Mixed()
    known = weakref.ref(model)
    model = weft.parallelize(model, mixed_batch(0), CLUSTER, optimizer=momentum)
    gc.collect()
    assert known() is None
    assert {name for name, _ in model.named_parameters()} == {
        "frozen.weight", "frozen.bias", "norm.weight", "norm.bias", "last.weight", "last.bias"}
    assert model.resume(tmp_path / "none") == 0


def test_what_does_not_fit_is_refused(tmp_path, caplog):
    trainer = weft.parallelize(Mixed(), mixed_batch(0), CLUSTER, optimizer=momentum)
    for call, message in (
            (lambda: trainer.step(mixed_batch(0)[0]), r"the batch has 1 tensors, but the model takes 2 \(x, y\)"),
            (lambda: trainer.step({"x": mixed_batch(0)[0]}), r"is a dictionary: give its tensors in the order .* \(x, y\)"),
            (lambda: trainer.step([item[:4] for item in mixed_batch(0)]), r"'x' in the batch is torch.float32 of \(4, 5\)"),
            (lambda: trainer.load_checkpoint(tmp_path), "there is no checkpoint in"),
            (lambda: trainer.eval(), "cannot change to eval mode"),
            (lambda: trainer.double(), "cannot be moved or converted"),
            (lambda: trainer.save_checkpoint(tmp_path, keep=0), "keep must be a whole number, 1 or more, or None for all, not 0"),
            (lambda: trainer.save_checkpoint(tmp_path, extra={"x": {1}}), "extra must be what JSON can say"),
            (lambda: trainer.load_state_dict({}), "for another model: it lacks frozen.weight")):
        with pytest.raises((InputError, RunError), match=message):
            call()
    trainer.step(mixed_batch(0))
    trainer.save_checkpoint(tmp_path)
    other = weft.parallelize(Mixed(), mixed_batch(0), trainer.plan, optimizer=lambda ps: torch.optim.Adam(ps))
    with pytest.raises(InputError, match=r"written with SGD, but the optimizer is Adam.*optimizer=False"):
        other.load_checkpoint(tmp_path)
    assert other.load_checkpoint(tmp_path, optimizer=False).step == 1
    grouped = weft.parallelize(Mixed(), mixed_batch(0), trainer.plan, optimizer=lambda ps: momentum(
        [{"params": [p for p in ps if p.ndim > 1]}, {"params": [p for p in ps if p.ndim < 2], "weight_decay": 0.0}]))
    with caplog.at_level(logging.WARNING):
        grouped.load_checkpoint(tmp_path)
    assert "1 parameter groups and the optimizer 2" in caplog.text
    state = load_file(tmp_path / "step-00000001" / "model.safetensors")
    with pytest.raises(InputError, match=r"'last.weight' has the shape \(2, 5\) in the state dict but \(2, 6\)"):
        trainer.load_state_dict(state | {"last.weight": torch.zeros(2, 5)})


@pytest.mark.parametrize(("change", "kind", "message"), [
    ({"cluster_or_plan": "2 x cpu"}, InputError, "the cluster has 2 devices but there are 1 processes"),
    ({"cluster_or_plan": "2 x cpu", "devices": ["b7"]}, ClusterError, "has no device 'b7': it has a0, a1"),
    ({"cluster_or_plan": "none.json"}, ClusterError, "none.json"),
    ({"tp": 2}, InputError, "--tp 2 devices of one host cannot divide operators"),
    ({"pp": 0}, InputError, "--pp must be a whole number, 1 or more, not 0"),
    ({"example_inputs": ()}, ModelError, "example_inputs must be a tensor or a tuple of tensors"),
    ({"optimizer": torch.optim.LBFGS}, InputError, "LBFGS evaluates the loss several times"),
    ({"optimizer": lambda ps: None}, InputError, "must be a function that returns a torch.optim.Optimizer"),
    ({"optimizer": torch.optim.AdamW([torch.zeros(1)])}, InputError, "optimizer is an AdamW, but it must be a function"),
    ({"optimizer": 0.1}, InputError, "optimizer is a float, but it must be a function"),
    ({"example_inputs": None}, ModelError, "must be a tensor or a tuple of tensors.*not NoneType"),
    ({"example_inputs": {"x": torch.zeros(2)}}, ModelError, "must be a tensor or a tuple of tensors.*not dict"),
    ({"example_inputs": tuple(item.half() for item in mixed_batch(0))}, ModelError, "multiplies float16 and float32"),
])
def test_arguments_that_are_wrong(change, kind, message):
    arguments = {"example_inputs": mixed_batch(0), "cluster_or_plan": CLUSTER, **change}
    with pytest.raises(kind, match=message):
        weft.parallelize(Mixed(), **arguments)


def test_plans_in_files_and_for_the_devices_that_are_left(tmp_path):
    trainer = weft.parallelize(Mixed(), mixed_batch(0), "2 x cpu", devices=["a1"], batch=16)
    assert trainer.plan.cluster.devices == ("a1",)
    assert trainer.plan.model.batch == 16
    save_plan(trainer.plan, tmp_path / "plan.json")
    again = weft.parallelize(Mixed(), mixed_batch(0), tmp_path / "plan.json")
    assert again.plan == trainer.plan
    with pytest.raises(InputError, match="batch is 8, but the plan is for 16"):
        weft.parallelize(Mixed(), mixed_batch(0), tmp_path / "plan.json", batch=8)
    save_plan(pipeline_plan(traced("tiny_gpt").graph, [0, 1], one_f_one_b(2, 2), microbatches=2), tmp_path / "two.json")
    with pytest.raises(InputError, match="does not describe its cluster"):
        weft.parallelize(source_of("tiny_gpt").build(), tokens(0), tmp_path / "two.json", devices=["d0"])


class Checkpointed(nn.Module):
    """Layers that ask for gradient checkpointing, in the new way or the old."""

    def __init__(self, *, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.begin, self.first, self.second, self.reentrant = nn.Linear(5, 5), nn.Linear(5, 6), nn.Linear(6, 2), reentrant

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.first, self.begin(x), use_reentrant=self.reentrant).tanh()
        return functional.mse_loss(checkpoint(self.second, x, use_reentrant=self.reentrant), y)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_becomes_recomputation_or_is_said_to_be_ignored(reentrant, caplog):
    model, plain = Checkpointed(reentrant=reentrant), Checkpointed()
    plain(*mixed_batch(0)).backward()
    with weft.parallelize(model, mixed_batch(0), CLUSTER, optimizer=momentum) as trainer:
        assert all(stage.recompute for stage in trainer.plan.stages)
        assert any("asks for gradient checkpointing: the plan's stages keep their inputs" in note for note in trainer.notes)
        assert trainer.step(mixed_batch(0)) == pytest.approx(plain(*mixed_batch(0)).item(), rel=1e-6)
        for name, parameter in trainer.named_parameters():
            torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad, rtol=1e-4, atol=1e-6)
    kept = replace(trainer.plan, stages=tuple(replace(stage, recompute=False) for stage in trainer.plan.stages))
    with caplog.at_level(logging.WARNING), weft.parallelize(model, mixed_batch(0), kept) as trainer:
        assert "the model asks for gradient checkpointing, which is ignored: this plan keeps activations" in caplog.text
        assert trainer.step(mixed_batch(0)) == pytest.approx(plain(*mixed_batch(0)).item(), rel=1e-6)
    model(*mixed_batch(0)).backward()
    assert model.first.weight.grad is not None, "the function is as it was"


def test_old_checkpointing_gives_no_gradients_without_an_input_that_needs_one():
    class First(Checkpointed):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return functional.mse_loss(self.second(checkpoint(self.first, x, use_reentrant=True)), y)

    with weft.parallelize(First(), mixed_batch(0), CLUSTER, optimizer=momentum) as trainer:
        trainer.step(mixed_batch(0))
        found = dict(trainer.named_parameters())
        assert found["first.weight"].grad is None
        assert found["second.weight"].grad.any()


def test_notes_reach_the_trainer_and_the_log(caplog):
    with caplog.at_level(logging.WARNING), weft.parallelize(
            Mixed(0.5), mixed_batch(0), CLUSTER, optimizer=momentum, microbatches=2) as trainer:
        pass
    for text in ("batch normalisation in training uses the statistics of each micro-batch", "aten.dropout draws random numbers",
                 "batch norm takes its statistics over 4 samples where one device would take them over 8"):
        assert any(text in note for note in trainer.notes)
        assert text in caplog.text


def test_a_mean_over_targets_that_count_is_refused_only_where_parts_have_different_numbers_of_them():
    labels = tokens(0)[1]
    labels[:, 0] = -100
    with weft.parallelize(TinyGPT(), tokens(0), CLUSTER, optimizer=momentum, microbatches=2) as trainer:
        trainer.step((tokens(0)[0], labels))
        labels[3, 1:3] = -100
        for method in (trainer.step, trainer.eval_loss):
            with pytest.raises(InputError, match=r"targets that are not -100, but the 2 parts .* have 14, 12 of them"):
                method((tokens(0)[0], labels))
    with weft.parallelize(TinyGPT(), tokens(0), CLUSTER, optimizer=momentum, microbatches=1) as trainer:
        trainer.step((tokens(0)[0], labels))


class Shifted(nn.Module):
    """Targets are moved by one, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = TinyGPT()

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        labels = functional.pad(labels, (0, 1), value=-100)[:, 1:]
        return functional.cross_entropy(self.inner(words).flatten(0, 1), labels.reshape(-1))


def test_targets_are_counted_where_the_loss_finds_them():
    with weft.parallelize(Shifted(), tokens(0), CLUSTER, optimizer=momentum, microbatches=2) as trainer:
        labels = tokens(0)[1]
        labels[0, 0] = -100
        trainer.step((tokens(0)[0], labels))
        labels[0, 5] = -100
        with pytest.raises(InputError, match="have 13, 14 of them"):
            trainer.step((tokens(0)[0], labels))


class Divided(nn.Module):
    """A mean over what counts, written out in one of several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.kind = nn.Linear(5, 4), kind
        self.register_buffer("weights", torch.tensor([0.1, 0.5, 1.0, 2.0]))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out, counts = self.layer(x), y >= 0
        if self.kind == "classes":
            return functional.cross_entropy(out, y, weight=self.weights)
        losses = functional.cross_entropy(out, y.clamp(min=0), reduction="none") * counts
        return {"sum": lambda: losses.sum() / counts.sum(), "clamp": lambda: losses.sum() / counts.sum().clamp(min=1),
                "weights": lambda: (losses * (counts / counts.sum())).sum(),
                "mean": lambda: losses.mean() / counts.float().mean()}[self.kind]()


def labelled(*labels: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(0)), torch.tensor(labels)


@pytest.mark.parametrize("kind", ["sum", "clamp", "weights", "mean"])
def test_numbers_taken_over_a_batch_that_losses_are_divided_by_must_be_alike_in_its_parts(kind):
    with weft.parallelize(Divided(kind), labelled(0, 1, 2, 3), CLUSTER, optimizer=momentum, microbatches=2) as trainer:
        trainer.step(labelled(-1, 1, 2, -1))
        for method in (trainer.step, trainer.eval_loss):
            with pytest.raises(InputError, match=r"a number that it takes over all samples of the batch \(.*test_parallel"):
                method(labelled(-1, -1, 2, 3) if kind == "clamp" else labelled(-1, 1, 2, 3))
    with weft.parallelize(Divided(kind), labelled(0, 1, 2, 3), CLUSTER, optimizer=momentum, microbatches=1) as trainer:
        trainer.step(labelled(-1, 1, 2, 3))


def test_targets_count_by_the_weights_of_their_classes():
    with weft.parallelize(Divided("classes"), labelled(1, 1, 1, 1), CLUSTER, optimizer=momentum, microbatches=2) as trainer:
        trainer.step(labelled(0, 3, 3, 0))
        with pytest.raises(InputError, match=r"have 2\.5, 0\.6 of them, each counted by the weight of its class"):
            trainer.step(labelled(1, 3, 0, 1))


class Scaled(nn.Module):
    """A number for all, and one whose differences on the example did no harm."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * (scale * 2)).pow(2).mean() + 0 * self.layer.bias.sum() * x.mean()


def test_numbers_that_do_no_harm_are_let_pass():
    x = labelled(0, 0, 0, 0)[0]
    with weft.parallelize(Scaled(), (x, torch.tensor(1.5)), CLUSTER, optimizer=momentum, microbatches=2) as trainer:
        trainer.step((x, torch.tensor(3.0)))


def test_arguments_that_would_train_nothing_or_something_else_are_refused():
    batch, model = labelled(0, 1, 2, 3), Divided("sum")
    for arguments, text in (
            ({"max_grad_norm": -1.0}, "max_grad_norm must be a number above 0"),
            ({"max_grad_norm": 0}, "or None to leave gradients as they are, not 0"),
            ({"max_grad_norm": "1"}, "max_grad_norm must be a number above 0"),
            ({"batch": 0}, "batch must be a number of samples, 1 or more, not 0"),
            ({"batch": "8"}, "batch must be a number of samples"),
            ({"optimizer": lambda ps: torch.optim.SGD(model.parameters(), lr=1.0)}, "nothing would be trained")):
        with pytest.raises(InputError, match=text):
            weft.parallelize(model, batch, CLUSTER, **{"optimizer": momentum, **arguments})
    with pytest.raises(InputError, match="example_inputs have no samples"):
        weft.parallelize(model, (batch[0][:0], batch[1][:0]), CLUSTER, optimizer=momentum)
    with pytest.raises(InputError, match="cluster_or_plan is NoneType: give a plan or its file"):
        weft.parallelize(model, batch, None, optimizer=momentum)


def test_the_trace_is_compared_with_backwards_outside_of_autocast():
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(5, 32), nn.Linear(32, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                return self.last(torch.tanh(self.first(x))).pow(2).mean()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        trainer = weft.parallelize(Partly(), labelled(0, 0, 0, 0)[0], CLUSTER, optimizer=momentum, microbatches=2)
    trainer.close()


def test_batches_are_compared_at_first_and_now_and_then_and_any_change_shows():
    assert [number for number in range(2100) if is_compared(number)] == [
        0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 1024, 2000, 2048]
    value = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    known = {digest([value])}
    for other in (value.flip(0), value.half(), value.double(), -value, value[:, :2], value.to(torch.complex64),
                  value > 0, (value * 100).to(torch.int16), torch.zeros(0)):
        known.add(digest([other]))
    bits = value.clone()
    bits.view(torch.int32)[6, 2] ^= 1
    known.add(digest([bits]))
    known.add(digest([value, value]))
    assert len(known) == 12
    assert digest([value.t().contiguous().t()]) == digest([value])


def test_links_of_lost_devices_are_gone():
    cluster = devices_left(weft.read_cluster("3 x cpu"), ["a2", "a0"])
    assert [device.name for device in cluster.devices] == ["a0", "a2"]
    assert cluster.links
    assert all("a1" not in (link.source, link.target) for link in cluster.links)
    assert cluster.route(cluster.device_index["a0"], cluster.device_index["a2"]).links


# ---- the command line -----------------------------------------------------------------------------------------------


def test_a_lost_device_is_planned_around(tmp_path, capsys, monkeypatch):
    """A process dies in its fourth step; the rest is run on the device that is left, from the checkpoint of step 2."""
    model, plan, folder = f"{MODELS}:tiny_gpt", str(tmp_path / "plan.json"), tmp_path / "checkpoints"
    assert main(["plan", model, "2 x cpu", "--batch", "8", "--strategy", "data-parallel", "--optimizer", "sgd", "-o", plan]) == 0
    monkeypatch.setenv("WEFT_TEST_FAULT", "1:B@3")
    capsys.readouterr()
    assert main(["run", plan, model, "--steps", "5", "--dtype", "float64", "--checkpoint", str(folder), "--checkpoint-every",
                 "2", "--replan", "--json"]) == 0
    captured = capsys.readouterr()
    assert "rank 1 (a1) was killed by SIGKILL" in captured.err
    assert "planning again for a0\n" in captured.err
    found = json.loads(captured.out)
    assert found["num_ranks"] == 1
    source = source_of("tiny_gpt")
    module, expected = source.build(), []
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    for _ in range(5):
        optimizer.zero_grad()
        loss = module(*source.inputs(8, 0))
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert found["losses"] == pytest.approx(expected[2:], rel=1e-10)
    assert weft.load_plan(folder / "plan.json").cluster.devices == ("a0",)


def test_options_that_belong_together(tmp_path, capsys):
    path = tmp_path / "plan.json"
    save_plan(pipeline_plan(traced("tiny_gpt").graph, [0, 1], one_f_one_b(2, 2), microbatches=2), path)
    for options, message in ((["--resume", "--checkpoint", "x", "--verify"], "a resumed run begins elsewhere"),
                             (["--replan"], "give --checkpoint DIR as well"), (["--resume"], "give checkpoint as well"),
                             (["--checkpoint", "x", "--checkpoint-every", "0"], "checkpoint_every must be 1 or more"),
                             (["--devices", "d0"], "does not describe its cluster")):
        assert main(["run", str(path), f"{MODELS}:tiny_gpt", *options]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(("key", "value"), [("betas", 0.5), ("betas", [0.9]), ("lr", "fast"), ("weight_decay", [])])
def test_options_of_another_kind_in_a_checkpoint_are_refused(tmp_path, key, value):
    trainer = weft.parallelize(TinyGPT(), tokens(0), CLUSTER, optimizer=lambda ps: torch.optim.Adam(ps, lr=1e-2))
    trainer.step(tokens(0))
    path = trainer.save_checkpoint(tmp_path) / "checkpoint.json"
    record = json.loads(path.read_text())
    record["groups"][0][key] = value
    del record["checksum"], record["checksums"]  # as before there were checksums
    path.write_text(json.dumps(record))
    with pytest.raises(InputError, match=rf"groups\[0\].{key} is "):
        trainer.load_checkpoint(tmp_path)


def test_a_script_of_one_process_with_a_group_of_its_own_ends_without_an_address(monkeypatch):
    """Another part of the script has made the group, from a store that no environment variable names."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with weft.parallelize(Mixed(), mixed_batch(0), CLUSTER, optimizer=momentum) as trainer:
            trainer.step(mixed_batch(0))
        assert dist.is_initialized(), "it is the script's"
    finally:
        dist.destroy_process_group()
