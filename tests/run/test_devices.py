"""Which device each rank gets, and messages of ranks on unlike devices, which pass through the host's memory."""

from __future__ import annotations

import pytest
import torch

from tests.run.models import __file__ as models_file
from tests.run.plans import greedy_order, pipeline_plan, traced
from weft.base.errors import InputError, RunError
from weft.run.failures import PeerLost
from weft.run.launch import run_plan
from weft.run.result import RunOptions, rank_devices, share_environment
from weft.run.transport import Transport
from weft.run.wire import Staging
from weft.run.worker import own_device


def test_one_device_for_all_or_one_for_each():
    assert rank_devices("cpu", 3) == ("cpu", "cpu", "cpu")
    assert rank_devices("cuda,cpu,cuda:1", 3) == ("cuda", "cpu", "cuda:1")
    assert rank_devices("cuda:0@50%,cuda@7%", 2) == ("cuda:0@50%", "cuda@7%")
    with pytest.raises(InputError, match="names 2 devices, but there are 3 ranks"):
        rank_devices("cuda,cpu", 3)
    for text in ("gpu", "cpu:0", "cuda:", "cuda:x", "cuda,", "", "cuda@", "cuda@0%", "cuda@101%", "cpu@5%"):
        with pytest.raises(InputError, match="is not a device; use cpu, cuda, cuda:0 or"):
            rank_devices(text, 2)


def test_gpus_are_given_out_in_order(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    text = "cuda,cpu,cuda@50%,cuda:0@25%"
    assert [str(own_device(text, rank=rank, num_ranks=4)) for rank in range(4)] == ["cuda:0", "cpu", "cuda:1", "cuda:0"]
    assert share_environment("cuda:0") == {}
    assert share_environment("cuda:0@25%") == {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"}
    with pytest.raises(RunError, match="GPU 2 is needed for rank 2, but this machine has 2"):
        own_device("cuda", rank=2, num_ranks=3)
    monkeypatch.setenv("LOCAL_RANK", "0")  # the second host of a run under torchrun
    assert str(own_device("cuda", rank=2, num_ranks=4)) == "cuda:0"


class Wire:
    """A backend that delivers what was sent when the receive is waited for."""

    def __init__(self) -> None:
        self.sent: dict[int, torch.Tensor] = {}

    def send(self, tensors, target, tag):
        self.sent[tag] = tensors[0]
        return self

    def recv(self, tensors, source, tag):
        self.receive = lambda: tensors[0].copy_(self.sent[tag])
        return self

    def wait(self):
        if hasattr(self, "receive"):
            self.receive()


def test_messages_pass_through_the_hosts_memory():
    transport = object.__new__(Transport)
    wire = Wire()
    transport.rank, transport.device, transport._backend = 0, torch.device("cpu"), wire
    transport.staging = Staging(transport.device)
    value = torch.arange(6.0).view(2, 3)
    work = transport.send(value, 1, 7)
    work.wait()
    assert wire.sent[7].data_ptr() != value.data_ptr()
    value.zero_()
    target = torch.full((2, 3), -1.0)
    arrival = transport.receive(target, 1, 7)
    assert target.eq(-1).all()
    arrival.wait()
    assert target.flatten().tolist() == [0, 1, 2, 3, 4, 5]


def test_copies_are_sent_in_the_order_in_which_they_were_asked_for():
    started: list[int] = []
    staging = Staging(torch.device("cpu"))
    works = [staging.send(torch.full((2,), float(number)), lambda copy: started.append(int(copy[0])) or Wire())
             for number in range(50)]
    for work in works:
        work.wait()
    assert started == list(range(50))


def test_what_a_collective_leaves_in_the_copy_is_brought_back():
    class Sum(Wire):
        def __init__(self, copy: torch.Tensor) -> None:
            self.copy = copy

        def wait(self) -> None:
            self.copy.mul_(2)

    value = torch.ones(3)
    work = Staging(torch.device("cpu")).send(value, Sum, brings_back=True)
    work.wait()
    assert value.tolist() == [2, 2, 2]


def test_a_lost_rank_is_named_by_who_waits_for_the_message():
    class Gone(Wire):
        def send(self, tensors, target, tag):
            raise RuntimeError("connection closed")

    transport = object.__new__(Transport)
    transport.rank, transport._backend, transport.staging = 0, Gone(), Staging(torch.device("cpu"))
    work = transport.send(torch.ones(2), 1, 7)
    with pytest.raises(PeerLost, match="rank 0 lost rank 1: connection closed"):
        work.wait()


def test_a_run_needs_a_device_for_each_rank():
    """``test_launch`` runs with one for each."""
    graph = traced("tiny_gpt").graph
    plan = pipeline_plan(graph, [0, 1], greedy_order([0, 1], 2), microbatches=2)
    with pytest.raises(InputError, match="names 3 devices, but there are 2 ranks"):
        run_plan(plan, f"{models_file}:tiny_gpt", options=RunOptions(device="cpu,cpu,cpu"))
