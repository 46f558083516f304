"""Every dtype travels in every way that the runtime sends things, and what goes wrong keeps its cause.

The collectives are gloo's own, between two threads of this process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.run.plans import pipeline_plan, replicated_plan, source_of, traced
from tests.run.pool import Pool
from tests.run.sharded_plans import sharded_plan, sharding_of
from weft.base.errors import RunError
from weft.plan.orders import one_f_one_b
from weft.run.failures import PeerLost, failure
from weft.run.status import StatusLine
from weft.run.transport import Transport
from weft.run.verify import relative_error
from weft.run.wire import Staging, memory_order, settled, strides_in

pytestmark = pytest.mark.timeout(120)
BOTH = (0, 1)
MOVED = (torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.int16,
         torch.uint8, torch.bool, torch.complex64, torch.complex128)
ADDED = (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.complex64, torch.complex128)


@pytest.fixture(scope="module", params=["", "by way of the host"])
def transports(request) -> list[Transport]:
    """Two transports over gloo, as those of two ranks; the second pair copies what it sends first, as for a GPU."""
    store, made = dist.HashStore(), [object.__new__(Transport) for _ in BOTH]

    def connect(rank: int) -> None:
        transport, groups = made[rank], []
        for number in range(2):
            own = dist.PrefixStore(str(number), store)
            group = dist.ProcessGroup(own, rank, 2)
            backend = dist.ProcessGroupGloo(own, rank, 2, timedelta(seconds=20))
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            groups.append((group, backend))
        transport.rank, transport.num_ranks, transport.device = rank, 2, torch.device("cpu")
        transport.staging = Staging(torch.device("cpu")) if request.param else None
        transport._groups, transport._exchange_groups = {BOTH: groups[0][0]}, {BOTH: groups[1][0]}
        transport._lane_groups, transport._backend, transport._cpu = {BOTH: groups[1][0]}, groups[0][1], groups[0][1]
        transport._record_tag, transport._lane_pairs, transport.status = 1 << 28, {}, StatusLine()

    on_both(connect)
    return made


def on_both(function: Callable[[int], Any]) -> list[Any]:
    """Return what the function returns on two threads; raise what it raises on rank 0."""
    results: list[Any] = [None, None]

    def run(rank: int) -> None:
        try:
            results[rank] = function(rank)
        except BaseException as problem:
            results[rank] = problem

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in BOTH]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def values(dtype: torch.dtype, rank: int, shape: tuple[int, ...] = (2, 3)) -> torch.Tensor:
    """Return small numbers; complex ones are a conjugate that is only marked as such."""
    count = torch.arange(torch.Size(shape).numel()).view(shape) + 2 * rank
    if dtype.is_complex:
        return torch.complex(count.double(), -1.0 - count.double()).to(dtype).conj()
    return (count % 2 == 0) if dtype == torch.bool else count.to(dtype)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    first, second = (item.resolve_conj().resolve_neg().contiguous().view(-1) for item in (found, expected))
    return found.shape == expected.shape and found.dtype == expected.dtype and torch.equal(
        first.view(torch.uint8), second.view(torch.uint8))


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_gloo_refused_to_move_a_dtype(transports, dtype):
    mine, both = [values(dtype, rank) for rank in BOTH], torch.stack([values(dtype, rank) for rank in BOTH])

    def run(rank: int) -> None:
        transport, other = transports[rank], 1 - rank
        received = torch.empty((2, 3), dtype=dtype)
        works = [transport.send(mine[rank], other, 5), transport.receive(received, other, 5)]
        for work in works:
            work.wait()
        assert same(received, mine[other])
        assert same(transport.gathered(mine[rank], BOTH), both)
        flat = transport.all_to_all(mine[rank].reshape(-1), BOTH, sent=[2, 4] if rank == 0 else [1, 5],
                                    received=[2, 1] if rank == 0 else [4, 5])
        pieces = [item.resolve_conj().reshape(-1) for item in mine]
        assert same(flat, torch.cat([pieces[0][:2], pieces[1][:1]] if rank == 0 else [pieces[0][2:], pieces[1][1:]]))
        lane = transport.lane_group(BOTH)
        assert same(lane.gather(mine[rank].reshape(-1)).view(both.shape), both)
        spread = mine[rank].resolve_conj().clone()
        lane.spread(spread, 1)
        assert same(spread, mine[1])
        whole = transport.gather_tensor(mine[rank].reshape(-1), source=1)
        assert rank or same(whole.view(dtype), mine[1].reshape(-1))

    on_both(run)


@pytest.mark.parametrize("dtype", ADDED, ids=str)
def test_gloo_refused_to_add_up_a_dtype(transports, dtype):
    mine = [values(dtype, rank) for rank in BOTH]
    total = mine[0] + mine[1]

    def run(rank: int) -> None:
        transport = transports[rank]
        assert same(transport.reduced(mine[rank], BOTH), total)
        assert same(transport.sum_scattered(mine[rank].clone(), BOTH), total[rank])
        summed = mine[rank].resolve_conj().clone()
        transport.all_reduce(summed, BOTH).wait()
        assert same(summed, total)
        lane, summed = transport.lane_group(BOTH), mine[rank].resolve_conj().clone()
        lane.sum_all(summed)
        assert same(summed, total)
        summed = mine[rank].resolve_conj().clone()
        lane.sum_at(summed, 0)
        assert rank or same(summed, total)

    on_both(run)


def laid_out(dtype: torch.dtype, rank: int) -> dict[str, torch.Tensor]:
    """Return tensors that lie in memory in unlike ways; those of all ranks lie alike."""
    plain = values(dtype, rank, (2, 3, 4)).resolve_conj()
    found = {"in one piece": plain, "turned": plain.permute(2, 0, 1), "last two swapped": plain.mT,
             "every other": plain[:, :, ::2], "a part of rows": plain[:, 1:], "last rows": plain[1:],
             "expanded": plain[:, :1].expand(2, 3, 4), "expanded in front": plain[:1].expand(3, 3, 4),
             "all the same": plain[0, 0, 0].expand(2, 3), "flipped": plain.flip(1).mT, "one number": plain[1, 2, 3],
             "nothing": plain[:, :0], "nothing, turned": plain[:, :0].permute(1, 2, 0), "none in front": plain[:0],
             "one row, far apart": plain.as_strided((1, 3, 1), (100, 4, 50)), "overlapping": plain.as_strided((2, 3, 4), (4, 4, 1)),
             "channels last": values(dtype, rank, (2, 3, 2, 2)).resolve_conj().to(memory_format=torch.channels_last)}
    if dtype.is_complex:
        found |= {"a marked conjugate": plain.conj(), "a marked conjugate, turned": plain.conj().permute(1, 2, 0),
                  "a part of a marked conjugate": plain.conj()[:, :, 1:3], "no conjugates": plain.conj()[:0]}
    elif dtype.is_floating_point and dtype.itemsize > 1:
        pairs = torch.complex(plain.double(), plain.double())
        found |= {"marked negative": pairs.conj().imag, "every other of complex": pairs.real[:, ::2]}
    return found


LAYOUTS = sorted({name for dtype in (torch.complex64, torch.float64) for name in laid_out(dtype, 0)})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_message_lies_as_what_was_sent_however_that_lies(transports, layout):
    """As the binder does it: both sides know the order of dimensions from what was traced."""
    for dtype in MOVED:
        mine = [laid_out(dtype, rank).get(layout) for rank in BOTH]
        if mine[0] is None:
            continue
        order = memory_order(mine[0])
        strides = strides_in(mine[0].shape, order)

        def run(rank: int, mine=mine, order=order, strides=strides) -> None:
            other, value = 1 - rank, mine[rank]
            buffer = torch.empty_strided(value.shape, strides, dtype=value.dtype)
            before = value.clone()
            assert buffer.permute(order).is_contiguous()
            cut = settled(value.detach().permute(order))
            works = [transports[rank].send(cut, other, 7), transports[rank].receive(buffer.permute(order), other, 7)]
            for work in works:
                work.wait()
            assert same(buffer, mine[other])
            assert same(value, before)
            if value.permute(order).is_contiguous() and value.numel():  # it was sent as it lay
                assert all(size == 1 or one == two
                           for size, one, two in zip(value.shape, buffer.stride(), value.stride(), strict=True))
                assert (cut.data_ptr() == value.data_ptr()) is not (value.is_conj() or value.is_neg())

        on_both(run)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_collectives_take_tensors_however_they_lie(transports, layout):
    for dtype in MOVED:
        mine = [laid_out(dtype, rank).get(layout) for rank in BOTH]
        if mine[0] is None:
            continue
        before = [item.clone() for item in mine]
        entries = [torch.stack([item, item]).contiguous() for item in mine]

        def run(rank: int, mine=mine, before=before, entries=entries, dtype=dtype) -> None:
            transport, lane = transports[rank], transports[rank].lane_group(BOTH)
            assert same(transport.gathered(mine[rank], BOTH), torch.stack(before))
            flat = mine[rank].reshape(-1)
            assert same(lane.gather(flat), torch.stack([item.reshape(-1) for item in before]))
            half = flat.numel() // 2
            sizes = [half, flat.numel() - half]
            found = transport.all_to_all(flat, BOTH, sent=sizes, received=[sizes[rank]] * 2)
            assert same(found, torch.cat([item.reshape(-1).split(sizes)[rank] for item in before]))
            if dtype in ADDED:
                assert same(transport.reduced(mine[rank], BOTH), before[0] + before[1])
                turned = entries[rank].transpose(0, -1).contiguous().transpose(0, -1)
                assert same(transport.sum_scattered(turned, BOTH), before[0] + before[1])
            assert same(mine[rank], before[rank])

        on_both(run)


def test_what_cannot_be_added_up_says_so(transports):
    with pytest.raises(RunError, match=r"tensors of float8_e4m3fn cannot be added up over ranks: use a plan"):
        transports[0].reduced(torch.ones(2).to(torch.float8_e4m3fn), BOTH)
    with pytest.raises(RunError, match=r"tensors of complex64 cannot be compared over ranks"):
        transports[0].reduced(torch.ones(2, dtype=torch.complex64), BOTH, "max")


# ---- causes ---------------------------------------------------------------------------------------------------------


class Failing:
    """A group whose every collective fails."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __getattr__(self, name: str) -> Any:
        def fail(*_: Any) -> Any:
            raise RuntimeError(self.text)

        return fail


def broken(text: str) -> Transport:
    transport = object.__new__(Transport)
    transport.rank, transport.device, transport.staging = 0, torch.device("cpu"), None
    transport._groups = transport._exchange_groups = {BOTH: Failing(text)}
    transport._backend, transport.status = Failing(text), StatusLine()
    return transport


WAYS: dict[str, Callable[[Transport, torch.Tensor], Any]] = {
    "sending": lambda transport, tensor: transport.send(tensor, 1, 0),
    "receiving": lambda transport, tensor: transport.receive(tensor, 1, 0),
    "adding up": lambda transport, tensor: transport.reduced(tensor, BOTH),
    "gathering": lambda transport, tensor: transport.gathered(tensor, BOTH),
    "adding up and scattering": lambda transport, tensor: transport.sum_scattered(tensor, BOTH),
    "exchanging": lambda transport, tensor: transport.all_to_all(tensor.view(-1), BOTH, sent=[1, 1], received=[1, 1]),
}


@pytest.mark.parametrize("way", WAYS)
def test_any_error_of_a_collective_was_called_a_lost_rank(way):
    with pytest.raises(RunError, match=rf"^{way} a float32 tensor of shape .* failed: Invalid scalar type") as found:
        WAYS[way](broken("Invalid scalar type"), torch.ones(2, 1))
    assert not isinstance(found.value, PeerLost)
    with pytest.raises(PeerLost, match=r"rank 0 lost .*rank.* 1.*: \[pair.cc:553\] Connection closed by peer"):
        WAYS[way](broken("[pair.cc:553] Connection closed by peer [127.0.0.1]:39823"), torch.ones(2, 1))


@pytest.mark.parametrize(("text", "is_lost"), [
    ("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:4", True),
    ("[gloo/transport/tcp/pair.cc:547] Read error [10.0.0.1]:4: Connection reset by peer", True),
    ("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 60000ms for recv operation to complete", True),
    ("Application timeout caused pair closure", True), ("writev [10.0.0.1]:4: Broken pipe", True),
    ("Gloo connectFullMesh failed with [pair.cc:144] no error", True),
    ("NCCL error: remote process exited or there was a network error, NCCL version 2.21", True),
    ("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)", True),
    ("NCCL communicator was aborted on rank 0.", True),
    ("Invalid scalar type", False), ("CUDA out of memory. Tried to allocate 2 GiB", False),
    ("[enforce fail at pair.cc:488] op.preamble.length <= op.nbytes. 12 vs 8", False),
    ("The size of tensor a (3) must match the size of tensor b (4)", False),
])
def test_only_what_speaks_of_the_connection_is_a_lost_rank(text, is_lost):
    assert isinstance(failure(RuntimeError(text), lost="rank 0 lost rank 1", doing="sending"), PeerLost) is is_lost


# ---- a model with complex numbers -----------------------------------------------------------------------------------

ROTARY = {"first.linear": "n", "mul": "d2", "matmul": "n", "mul_1": "d2", "div": "d2", "add": "d2", "tanh": "d2"}


@pytest.fixture(scope="module")
def pool(tmp_path_factory) -> Iterator[Pool]:
    with Pool(2, tmp_path_factory.mktemp("pool"), models=("rotary",)) as running:
        yield running


def piped(at: str) -> Any:
    graph = traced("rotary").graph
    place = graph.op_names.index(at)
    return pipeline_plan(graph, [0, 1], one_f_one_b(2, 2), microbatches=2,
                         ops=[list(graph.op_names[:place]), list(graph.op_names[place:])])


PLANS: dict[str, Callable[[], Any]] = {
    "data parallel": lambda: replicated_plan(traced("rotary").graph, [[(0, 0.5), (1, 0.5)]], microbatches=2, batch=4,
                                             num_devices=2),
    "pipeline between complex operators": lambda: piped("mul_1"),
    "pipeline behind a marked conjugate": lambda: piped("matmul"),
    "tensor parallel": lambda: sharded_plan("rotary", {"tensor": 2}, sharding_of("rotary", (2,), [ROTARY]), num_devices=2),
    "tensor parallel with sums": lambda: sharded_plan(
        "rotary", {"tensor": 2}, sharding_of("rotary", (2,), [{**ROTARY, "matmul": "k", "mul": "d1"}]), num_devices=2),
}


@pytest.mark.parametrize("name", PLANS)
def test_complex_numbers_did_not_travel(pool, name):
    """Behind a marked conjugate, the gradient of ``mix`` lay in a buffer that the next message overwrote."""
    found = pool.run(PLANS[name](), "rotary", gradients=False)["verification"]
    assert found["passed"], found
    assert found["num_gradients"] == (6 if "pipeline" in name else 12)


def test_a_model_in_another_precision_lost_its_imaginary_parts():
    for dtype, expected in (("float64", torch.complex128), ("float32", torch.complex64), ("bfloat16", torch.complex64)):
        module = source_of("rotary", dtype=dtype).build()
        assert (module.turns.dtype, module.mix.dtype) == (expected, expected)
        assert module.mix.imag.abs().max() > 0
    one = torch.tensor([1.0 + 1.0j])
    assert relative_error(one, one.conj()) > 1
