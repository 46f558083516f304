"""The tables of pieces against the account of plans: equal where they are sums, never below and close where they are peaks."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.worlds import chain_graph
from weft.cluster.cluster_file import read_cluster
from weft.cost.costs import estimate_costs
from weft.model.graph import Graph
from weft.model.source import resolve_model
from weft.model.trace import trace
from weft.plan.layout import stage_inputs
from weft.plan.lower import lower
from weft.plan.memory import account_memory, optimizer_bytes
from weft.plan.piece_memory import PieceMemory
from weft.plan.plan import Optimizer
from weft.plan.stage_memory import stage_memory
from weft.search.common.problem import PlanOptions, Problem
from weft.search.joint.baselines import pipeline
from weft.search.joint.chain import Chain, Load

MODELS = ("gpt2-tiny", "gpt2:layers=3,hidden=96,heads=4,vocab=500,seq=64", "llama-tiny", "opt-1.3b:layers=2,hidden=64,heads=4,vocab=300,seq=32,ffn=128",
          "mixtral-8x:layers=2", "bert-large:layers=2,hidden=64,heads=4", "t5-base:layers=2", "t5-large:layers=1", "mt5-base:layers=2",
          "vit-base:layers=2", "swin-t", "flava:layers=2,joint_layers=1", "resnet-50", "convnext-t", "whisper-base:layers=2", "vgg-19",
          "inception-v3", "lstm", "llama-3-8b:layers=2", "llama-70b:layers=1")
LOW = 0.95
"""The table's peak is at least this part of the plan's: what crosses odd cuts in several tensors may be counted less."""
HIGH = 1.10
"""And in the median of the pieces of a model no more than this."""


def graph_of(name: str, mode: str = "training") -> Graph:
    return trace(resolve_model(name, batch=2, mode=mode), batch=2, batch_dims=True, backward="rule").graph


def pieces_of(graph: Graph, *, places=None, training: bool = True) -> PieceMemory:
    places = np.arange(graph.num_ops + 1) if places is None else places
    return PieceMemory(graph, np.arange(graph.num_ops), places, training=training, optimizer=Optimizer(kind="adamw"),
                       max_samples=16)


@pytest.mark.parametrize("name", MODELS)
def test_sums_are_those_of_the_account_at_every_cut(name):
    """For each place the two pieces beside it, and random pieces: bytes equal to the last, for two numbers of samples."""
    graph = graph_of(name)
    rng = random.Random(7)
    places = np.arange(graph.num_ops + 1) if graph.num_ops < 120 else np.unique(
        [0, graph.num_ops, *rng.sample(range(1, graph.num_ops), 100)])
    pieces = pieces_of(graph, places=places)
    last = len(places) - 1
    spans = [(0, place) for place in range(1, last + 1)] + [(place, last) for place in range(1, last)]
    spans += [tuple(sorted(rng.sample(range(last + 1), 2))) for _ in range(40)]
    for begin, end in rng.sample(spans, min(len(spans), 120)):
        ops = np.arange(places[begin], places[end])
        read = np.unique(np.concatenate([graph.op_inputs(op) for op in ops.tolist()]))
        parameters = np.intersect1d(read, graph.parameters)
        assert pieces.lasting.parameters[begin, end] == graph.tensor_bytes[parameters].sum()
        assert pieces.lasting.states[begin, end] == sum(
            optimizer_bytes(graph, int(tensor), Optimizer(kind="adamw")) for tensor in parameters)
        for samples in (2, 16):
            account = stage_memory(graph, ops, num_samples=samples, training=True, crossing=stage_inputs(graph, ops))
            now = pieces.passing(samples)
            assert now.saved[begin, end] == pytest.approx(account.saved, abs=1 + 1e-9 * account.saved)
            assert now.inputs[begin, end] == pytest.approx(account.inputs, abs=1)
            assert now.input_gradients[begin, end] == pytest.approx(account.input_gradients, abs=1)
            assert now.forward[begin, end] >= account.forward_peak - 1
            own = now.saved[begin, end] - now.saved_inputs[begin, end]
            assert now.backward[begin, end] - own >= account.backward_rise - account.input_gradients - 1


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny", "resnet-50", "t5-base:layers=2"])
def test_what_a_stage_is_said_to_take_is_what_its_plan_takes(name, recompute):
    graph = graph_of(name)
    cluster = read_cluster("4 x A100-80GB")
    problem = Problem(graph=graph, cluster=cluster, costs=estimate_costs(graph, cluster), options=PlanOptions(
        batch=16, microbatches=8, recompute=recompute, optimizer=Optimizer(kind="adamw")))
    chain, rng = Chain(problem), random.Random(3)
    few = np.flatnonzero(chain.crossing <= 1.5 * np.quantile(chain.crossing, 0.2))
    few = few[(few > 0) & (few < chain.num_places - 1)]
    ratios = []
    for _ in range(5):
        cuts = [0, *sorted(rng.sample(few.tolist(), 3)), chain.num_places - 1]
        account = account_memory(lower(pipeline(problem, 8, chain.places[cuts].tolist(), by="1f1b"), graph))
        for stage in range(4):
            load = Load(num_samples=2, in_flight=min(8, 4 - stage), microbatches=8, recompute=recompute, is_alone=True)
            need = float(chain.stage_bytes((0,), cuts[stage], load)[cuts[stage + 1] - cuts[stage]])
            ratios.append(need / account.peak_bytes(stage))
    assert min(ratios) >= LOW, ratios
    assert np.median(ratios) <= HIGH, ratios


def test_a_parameter_that_is_read_twice_is_held_by_both_pieces():
    graph = graph_of("gpt2-tiny")
    pieces = pieces_of(graph)
    tied = next(tensor for tensor in graph.parameters.tolist() if "wte" in graph.tensor_names[tensor])
    readers = np.unique(graph.consumer_op[graph.inputs == tied])
    assert len(readers) == 2
    middle = int(readers.mean())
    whole = pieces.lasting.parameters[0, graph.num_ops]
    parts = pieces.lasting.parameters[0, middle] + pieces.lasting.parameters[middle, graph.num_ops]
    assert parts - whole == graph.tensor_bytes[tied]


def test_without_training_nothing_is_kept():
    graph = chain_graph(6, batch=4)
    pieces = pieces_of(graph, training=False)
    now = pieces.passing(4)
    assert not now.saved.any()
    assert not now.input_gradients.any()
    assert not pieces.lasting.states.any()
    assert now.forward[0, 6] > 0
