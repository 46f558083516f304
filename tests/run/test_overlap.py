"""Gradients exchanged inside the backward: the same numbers, really issued inside, in the order of the list."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.run.plans import cut, pipeline_plan, replicated_plan, traced
from tests.run.pool import Pool
from tests.run.sharded_plans import sharded_plan, sharding_of
from tests.run.test_sharded import DATA, GPT, GPT_SEQUENCE, GPT_TENSOR, GPT_VOCABULARY
from weft.cluster.cluster_file import parse_cluster
from weft.cost.costs import estimate_costs
from weft.plan.check import check_plan
from weft.plan.lower import lower
from weft.plan.plan import Plan
from weft.plan.program import inside_backward
from weft.run.cells import Transfer
from weft.run.clock import Clock
from weft.run.exchange import Early, EarlyExchanges
from weft.run.failures import PeerLost
from weft.search.common.problem import cut_gradients
from weft.simulate.timing import first_readers

TOLERANCE = 1e-10
CONTROL = 1e-7
"""A control must be at least this far off."""


def in_buckets(plan: Plan, model: str, num_buckets: int) -> Plan:
    """Return the plan with every exchange cut into so many, those last that are final last."""
    graph = traced(model).graph
    order = first_readers(graph, torch.arange(graph.num_ops).numpy())
    found = []
    for exchange in plan.gradients:
        names = sorted(exchange.parameters, key=lambda name: -order[graph.tensor_index[name]])
        size = -(-len(names) // num_buckets)
        found += [(number, replace(exchange, parameters=tuple(names[number * size : (number + 1) * size])))
                  for number in range(num_buckets) if names[number * size : (number + 1) * size]]
    return replace(plan, gradients=tuple(item for _, item in sorted(found, key=lambda pair: pair[0])))


def data_parallel(model: str, shares: tuple[float, ...] = (0.5, 0.5), *, microbatches: int = 2,
                  recompute: bool = False) -> Plan:
    graph = traced(model).graph
    plan = replicated_plan(graph, [list(enumerate(shares))], microbatches=microbatches,
                           batch=2 * len(shares) * microbatches, num_devices=4)
    return replace(plan, stages=tuple(replace(stage, recompute=recompute) for stage in plan.stages))


def hybrid(model: str) -> Plan:
    """Two stages of two replicas: the second sends gradients after its backward, the first does not."""
    graph = traced(model).graph
    return replicated_plan(graph, [[(0, 0.5), (1, 0.5)], [(2, 0.5), (3, 0.5)]], microbatches=2, batch=8, num_devices=4)


def tied_pipeline(model: str) -> Plan:
    """The tied weight is in both stages: of the two, only the first's last backward is followed by the exchange."""
    graph = traced(model).graph
    order = [[(0, "F", 0), (0, "F", 1), (0, "I", 0), (0, "W", 0), (0, "B", 1)],
             [(1, "F", 0), (1, "B", 0), (1, "F", 1), (1, "I", 1), (1, "W", 1)]]
    plan = pipeline_plan(graph, [0, 1], order, microbatches=2, ops=cut(graph, 2))
    return replace(plan, cluster=replace(plan.cluster, devices=("d0", "d1", "d2", "d3")))


def sharded(mesh: dict[str, int], axes: list[dict[str, str]], **options: object) -> Plan:
    return sharded_plan(GPT, mesh, sharding_of(GPT, tuple(mesh.values()), axes), **options)


CASES = {
    "four buckets": ("tiny_gpt", lambda: in_buckets(data_parallel("tiny_gpt", (0.25,) * 4), "tiny_gpt", 4)),
    "uneven shares": ("tiny_gpt", lambda: in_buckets(data_parallel("tiny_gpt", (0.75, 0.25)), "tiny_gpt", 5)),
    "tied weights": ("tied_gpt", lambda: in_buckets(data_parallel("tied_gpt", microbatches=1), "tied_gpt", 4)),
    "recomputation": ("tiny_gpt", lambda: in_buckets(data_parallel("tiny_gpt", recompute=True), "tiny_gpt", 4)),
    "pipeline of replicas": ("tiny_gpt", lambda: in_buckets(hybrid("tiny_gpt"), "tiny_gpt", 3)),
    "tied pipeline, I and W": ("tied_gpt", lambda: tied_pipeline("tied_gpt")),
    "data and tensor": (GPT, lambda: in_buckets(sharded({"data": 2, "tensor": 2}, [
        DATA, {**GPT_TENSOR, **GPT_VOCABULARY}]), GPT, 4)),
    "sequence, all on one group": (GPT, lambda: in_buckets(sharded({"tensor": 2}, [GPT_SEQUENCE], recompute=True), GPT, 4)),
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory) -> Iterator[Pool]:
    with Pool(4, tmp_path_factory.mktemp("pool"), models=("tiny_gpt", "tied_gpt", GPT)) as running:
        yield running


def spans(answer: dict, rank: int, word: str) -> list[tuple[float, float]]:
    """Return (start, end) of a rank's instructions whose label begins with the word, in order."""
    line = answer["timeline"]
    return [(start, end) for label, start, end, of in zip(
        line["labels"], line["start_s"], line["end_s"], line["rank"], strict=True) if of == rank and label.startswith(word)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", CASES)
def test_equals_one_process(pool, case):
    model, make = CASES[case]
    plan = make()
    assert (inside_backward(lower(plan, traced(model).graph)) >= 0).any()
    check = pool.run(plan, model, steps=2, warmup=0)["verification"]
    assert check["num_gradients"] > 0
    assert check["loss_error"] <= TOLERANCE
    assert check["gradient_error"] <= TOLERANCE, check["worst"]
    control = pool.run(plan, model, damage="too_early")["verification"]
    assert not control["passed"]
    assert control["gradient_error"] > CONTROL


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", ["four buckets", "tied weights", "data and tensor", "sequence, all on one group"])
def test_exchanges_begin_inside_the_backward_in_the_order_of_the_list(pool, case):
    model, make = CASES[case]
    plan = make()
    answer = pool.run(plan, model, steps=1, warmup=2)
    members = [plan.cluster.devices.index(name) for name in plan.gradients[0].devices]
    begins, ends = zip(*(spans(answer, rank, "B")[-1] for rank in members), strict=True)
    for rank in members:
        # An exchange counts from when the last of its members has issued it.
        starts = [start for start, _ in spans(answer, rank, "all_reduce")]
        assert len(starts) >= 4
        assert starts == sorted(starts)
        assert max(begins) < starts[0] < starts[1] < max(ends)


def test_devices_of_a_mesh_get_the_same_buckets():
    names, kind = [f"d{index}" for index in range(4)], {"flops": {"float32": 1e8}, "memory_bandwidth": "1TB/s"}
    cluster = parse_cluster({
        "format": "weft.cluster", "version": 1, "switches": ["switch"], "kinds": {"slow": {**kind, "memory": "8GB"}},
        "devices": [{"name": name, "kind": "slow"} for name in names],
        "links": [{"from": name, "to": "switch", "bandwidth": "4MB/s", "latency": "5us"} for name in names]})
    plan = sharded({"data": 2, "tensor": 2}, [DATA, {**GPT_TENSOR, **GPT_VOCABULARY}])
    plan, graph = replace(plan, cluster=replace(plan.cluster, digest=cluster.digest)), traced(GPT).graph
    found = cut_gradients(plan, graph, estimate_costs(graph, cluster, dtype="float32"))
    assert len(found.gradients) > len(plan.gradients) > 1
    program = check_plan(found, graph, cluster)
    assert (inside_backward(program) >= 0).sum() == sum(len(bucket.ranks) for bucket in program.buckets)


@pytest.mark.timeout(120)
def test_exchanges_behind_weight_gradients_begin_after_them(pool):
    plan = in_buckets(sharded({"data": 2}, [DATA], split=True), GPT, 4)
    answer = pool.run(plan, GPT)
    assert answer["verification"]["passed"]
    assert spans(answer, 0, "all_reduce")[0][0] >= spans(answer, 0, "W")[-1][1]


class Recorded:
    """Exchanges of parameters in one process, which note their order instead of being sent."""

    def __init__(self, *groups: list[torch.Tensor]) -> None:
        self.log: list[int] = []
        clock = Clock(torch.device("cpu"))
        self.starts, self.ends = [0] * len(groups), [0] * len(groups)
        self.early = EarlyExchanges(
            [Early(position=number, parameters=tensors, issue=lambda number=number: self.log.append(number),
                   transfer=Transfer(number, self.ends, clock)) for number, tensors in enumerate(groups)],
            starts=self.starts, clock=clock)

    def backward(self, loss: torch.Tensor) -> list[int]:
        """Return what was issued inside the backward."""
        with self.early:
            loss.backward()
        inside = list(self.log)
        for number in range(len(self.starts)):
            self.early.instruction(number)()
        return inside


def chain(num_layers: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    weights = [torch.nn.Parameter(torch.randn(3, 3)) for _ in range(num_layers)]
    x = torch.randn(2, 3)
    for weight in weights:
        x = (x @ weight).tanh()
    return weights, x.sum()


def test_the_order_of_the_list_holds_whatever_the_order_of_gradients():
    (first, second, third), loss = chain(3)
    recorded = Recorded([first], [third], [second])
    assert recorded.backward(loss) == [0, 1, 2] == recorded.log
    assert recorded.starts[0] <= recorded.starts[1] <= recorded.starts[2]


def test_what_no_gradient_reaches_is_issued_after_the_backward_with_all_behind_it():
    (first, second, third), loss = chain(3)
    unused = torch.nn.Parameter(torch.ones(2))
    recorded = Recorded([third], [second, unused], [first])
    assert recorded.backward(loss) == [0]
    assert recorded.log == [0, 1, 2]


def test_a_parameter_of_several_operators_is_final_once():
    weight, other = (torch.nn.Parameter(torch.randn(3, 3)) for _ in range(2))
    seen: list[torch.Tensor] = []
    recorded = Recorded([weight], [])
    recorded.early.items[0] = replace(recorded.early.items[0], issue=lambda: seen.append(weight.grad.clone()))
    recorded.backward((((torch.ones(2, 3) @ weight) @ other) @ weight).sum())
    assert len(seen) == 1
    assert torch.equal(seen[0], weight.grad)


def test_no_hook_stays_and_a_second_step_begins_anew():
    (first, second), loss = chain(2)
    recorded = Recorded([second], [first])
    recorded.backward(loss)
    recorded.early.items.clear()
    (first.sum() + second.sum()).backward()
    assert recorded.log == [0, 1]
    recorded = Recorded([first])
    for _ in range(2):
        assert recorded.backward(first.square().sum())[-1:] == [0]
    assert recorded.log == [0, 0]


def test_an_exchange_that_fails_inside_the_backward_is_reported_as_itself():
    (first, second), loss = chain(2)
    recorded = Recorded([second], [first])

    def lost() -> None:
        raise PeerLost("rank 1 is gone")

    recorded.early.items[0] = replace(recorded.early.items[0], issue=lost)
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        recorded.backward(loss)


class FakeWork:
    """A work that is done when it is told so."""

    done = False

    def is_completed(self) -> bool:
        return self.done

    def wait(self) -> None:
        assert self.done


def test_the_end_of_an_exchange_is_noted_inside_the_backward():
    (first, second), loss = chain(2)
    recorded, work = Recorded([second], [first, torch.nn.Parameter(torch.ones(1))]), FakeWork()
    transfer = recorded.early.items[0].transfer

    def issue() -> None:
        transfer.works, work.done = [work], True

    recorded.early.items[0] = replace(recorded.early.items[0], issue=issue)
    recorded.backward(loss)
    seen = recorded.ends[0]
    assert recorded.starts[0] < seen
    recorded.ends[0] = 0
    transfer.wait()
    assert recorded.ends[0] == seen


def test_operators_that_the_loss_does_not_depend_on():
    graph = traced("tiny_gpt").graph
    assert graph.on_path_to_loss.sum() > 0.8 * graph.num_ops  # all but positions and masks
    other = replace(graph, outputs=(int(graph.op_outputs(3)[0]),))
    assert 0 < other.on_path_to_loss.sum() <= 4
