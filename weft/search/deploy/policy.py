"""The prior of the tree search: which action is likely to be good for the next group.

``load_policy`` gives the network's with the weights that come with Weft. Weights that are missing or broken only cost
quality: there is one warning, and all actions are equally likely.

``ForwardNetwork`` is the network for one state at a time, in numpy; ``benchmarks.policy_training.network`` is the same
in torch, where it is trained, and has its formula. For a state this small torch takes most of its time for getting from
one operation to the next, and its threads wait for each other; this takes about half of that, on one core, and without
importing torch. The tests compare the two. Names of the weights are those of the network.

G operator groups, D device groups, J sources (2 G + D for operator groups, G + D for device groups), W hidden, H heads.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from weft.base.errors import InputError
from weft.base.tensor_file import TensorFile
from weft.model.graph import F64
from weft.search.deploy.deployer import Deployer, Evaluation
from weft.search.deploy.features import F32, WIDTHS, Features, Featurizer

HIDDEN: Final = 64
NUM_HEADS: Final = 4
NUM_LAYERS: Final = 3
_MASKED: Final = np.float32(-1e9)
_LARGEST: Final = 250_000
"""Multiplications of a product that the libraries under numpy do on the calling thread, without waking others."""
_MAX_FLOWS: Final = 32
"""Models at a time of which the edges are kept."""


class ForwardNetwork:
    """The network's weights, ready to be asked."""

    def __init__(self, arrays: Mapping[str, F32]) -> None:
        check_shapes(arrays)
        self.weights = {name: np.ascontiguousarray(array.T if array.ndim == 2 else array)
                        for name, array in arrays.items()}
        self._projections = {name: _by_offer(array) for name, array in self.weights.items()
                             if name.endswith(".project.weight")}
        self._flows: dict[int, tuple[F32, F32, F32]] = {}

    def __call__(self, state: Features) -> F32:
        """Return the logits of the actions."""
        for_ops, for_devices = np.split(self._linear("world_in", state.world[None]), 2, axis=1)
        ops = self._linear("op_in", state.ops) + for_ops
        devices = self._linear("device_in", state.devices) + for_devices
        op_edges, device_edges = self._edges_of_ops(state), self._edges_of_devices(state)
        for layer in range(NUM_LAYERS):
            name = f"layers.{layer}"
            own = slice(layer * NUM_HEADS, (layer + 1) * NUM_HEADS)
            op, device = self._offers(f"{name}.op", ops), self._offers(f"{name}.device", devices)
            ops = self._update(f"{name}.op", ops, op[0], (op[1], op[3], device[1]), (op[2], op[4], device[2]),
                               op_edges[0][own], op_edges[1])
            devices = self._update(f"{name}.device", devices, device[0], (op[5], device[3]), (op[6], device[4]),
                                   device_edges[0][own], device_edges[1])
        return self._judge(state, self._norm("op_out", ops), self._norm("device_out", devices))

    def _judge(self, state: Features, ops: F32, devices: F32) -> F32:
        whole = np.concatenate([ops[state.group], ops.mean(axis=0), devices.mean(axis=0)])[None]
        used = (state.members / state.members.sum(axis=1, keepdims=True)) @ devices
        most = np.where(state.members[:, :, None] > 0, devices, _MASKED).max(axis=1)
        action = self._linear("action_in", np.concatenate([state.actions, used, most], axis=1))
        hidden = self._linear("score.1", _relu(action + self._linear("group_in", whole)))
        return self._linear("score.3", _relu(hidden))[:, 0]

    # ---- attention --------------------------------------------------------------------------------------------------

    def _edges_of_ops(self, state: Features) -> tuple[F32, F32]:
        """Return [layers * H, G, J] terms of weights and [G, J, ...] features of what operator groups read."""
        _, terms, edges = self._flow(state.flow)
        place = self._terms("op_device", state.place)
        edges = _beside((edges, state.place))
        return np.concatenate([terms, place], axis=2), edges

    def _flow(self, flow: F32) -> tuple[F32, F32, F32]:
        """Return the array itself, and terms and features of edges among operator groups; kept for the next states."""
        known = self._flows.get(id(flow))
        if known is None or known[0] is not flow:
            if len(self._flows) >= _MAX_FLOWS:
                self._flows.clear()
            before, is_after = flow.transpose(1, 0, 2), (flow != 0).any(axis=2)
            missing = np.concatenate([~is_after.T, ~is_after], axis=1)
            terms = np.concatenate([self._terms("before", before), self._terms("after", flow)], axis=2)
            known = self._flows[id(flow)] = flow, terms + missing * _MASKED, _beside((before, flow))
        return known

    def _edges_of_devices(self, state: Features) -> tuple[F32, F32]:
        served = state.place.transpose(1, 0, 2)
        terms = [self._terms("device_op", served), self._terms("device_device", state.links)]
        return np.concatenate(terms, axis=2), _beside((served, state.links))

    def _terms(self, name: str, edge: F32) -> F32:
        columns = np.ascontiguousarray(edge.reshape(-1, edge.shape[2]).T)
        terms = np.matmul(self.weights[f"edges.{name}.weight"].T, columns)
        return np.asarray(terms.reshape(-1, *edge.shape[:2]), dtype=np.float32)

    def _offers(self, name: str, nodes: F32) -> F32:
        """Return [offers, nodes, W]: the query, then keys and values in turn."""
        parts: F32 = np.matmul(self._norm(f"{name}.before", nodes), self._projections[f"{name}.project.weight"])
        parts += self.weights[f"{name}.project.bias"].reshape(len(parts), 1, -1)
        return parts

    def _update(self, name: str, nodes: F32, query: F32, keys: Sequence[F32], values: Sequence[F32], terms: F32,
                edges: F32) -> F32:
        """Return the nodes after they have read from all sources."""
        scale = np.float32((nodes.shape[1] // NUM_HEADS) ** -0.5)
        weight = _heads(query * scale) @ _heads(np.concatenate(keys)).transpose(0, 2, 1)
        weight += terms
        weight -= weight.max(axis=2, keepdims=True)
        np.exp(weight, out=weight)
        weight /= weight.sum(axis=2, keepdims=True)
        message = (weight @ _heads(np.concatenate(values))).transpose(1, 0, 2).reshape(nodes.shape)
        features = np.matmul(np.ascontiguousarray(weight.transpose(1, 0, 2)), edges).reshape(len(nodes), -1)
        nodes = nodes + self._linear(f"{name}.output", np.concatenate([message, features], axis=1))
        inner = _relu(self._linear(f"{name}.inner.0", self._norm(f"{name}.after", nodes)))
        return nodes + self._linear(f"{name}.inner.2", inner)

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _linear(self, name: str, rows: F32) -> F32:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        step = max(1, _LARGEST // weight.size)
        if len(rows) <= step:
            return rows @ weight + bias
        return np.concatenate([rows[first : first + step] @ weight for first in range(0, len(rows), step)]) + bias

    def _norm(self, name: str, rows: F32) -> F32:
        size = np.float32(rows.shape[1])
        result: F32 = rows - (rows.sum(axis=1) / size)[:, None]
        variance = np.einsum("ij,ij->i", result, result) / size
        result *= (np.float32(1.0) / np.sqrt(variance + np.float32(1e-5)))[:, None]
        result *= self.weights[f"{name}.weight"]
        result += self.weights[f"{name}.bias"]
        return result


def check_shapes(arrays: Mapping[str, F32]) -> None:
    """Refuse weights whose names and shapes are not exactly those of the network."""
    expected = weight_shapes()
    wrong = sorted(set(arrays) ^ set(expected))
    if wrong:
        raise InputError(f"weights and network differ in {len(wrong)} names, first {wrong[0]!r}")
    for name, shape in expected.items():
        if arrays[name].shape != shape:
            raise InputError(f"the weights {name!r} have the shape {arrays[name].shape}, the network needs {shape}")


def weight_shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of all weights by name."""
    flow, links, place, world = (WIDTHS[name] for name in ("flow", "links", "place", "world"))
    terms = NUM_LAYERS * NUM_HEADS
    edges = {"before": flow, "after": flow, "op_device": place, "device_op": place, "device_device": links}
    shapes: dict[str, tuple[int, ...]] = {f"edges.{name}.weight": (terms, width) for name, width in edges.items()}
    linear = {"op_in": (WIDTHS["ops"], HIDDEN), "device_in": (WIDTHS["devices"], HIDDEN),
              "world_in": (world, 2 * HIDDEN), "action_in": (WIDTHS["actions"] + 2 * HIDDEN, HIDDEN),
              "group_in": (3 * HIDDEN, HIDDEN), "score.1": (HIDDEN, HIDDEN), "score.3": (HIDDEN, 1),
              "value.0": (3 * HIDDEN + world, HIDDEN), "value.2": (HIDDEN, 1)}
    norms = ["op_out", "device_out"]
    for layer in range(NUM_LAYERS):
        for node, num_offers, width in (("op", 3, 2 * flow + place), ("device", 2, place + links)):
            name = f"layers.{layer}.{node}"
            linear |= {f"{name}.project": (HIDDEN, (1 + 2 * num_offers) * HIDDEN),
                       f"{name}.output": (HIDDEN + NUM_HEADS * width, HIDDEN),
                       f"{name}.inner.0": (HIDDEN, HIDDEN), f"{name}.inner.2": (HIDDEN, HIDDEN)}
            norms += [f"{name}.before", f"{name}.after"]
    for name, (num_in, num_out) in linear.items():
        shapes |= {f"{name}.weight": (num_out, num_in), f"{name}.bias": (num_out,)}
    return shapes | {f"{name}.{part}": (HIDDEN,) for name in norms for part in ("weight", "bias")}


def _by_offer(weight: F32) -> F32:
    """Return [offers, W, W]."""
    width = len(weight)
    return np.ascontiguousarray(weight.reshape(width, -1, width).transpose(1, 0, 2))


def _relu(values: F32) -> F32:
    return np.maximum(values, np.float32(0.0))


def _heads(rows: F32) -> F32:
    """Return [H, rows, W / H]."""
    return np.ascontiguousarray(rows.reshape(len(rows), NUM_HEADS, -1).transpose(1, 0, 2))


def _beside(parts: Sequence[F32]) -> F32:
    """Return the edges one after the other, each kind with columns of its own."""
    result = np.zeros((parts[0].shape[0], sum(part.shape[1] for part in parts), sum(part.shape[2] for part in parts)),
                      dtype=np.float32)
    row, column = 0, 0
    for part in parts:
        result[:, row : row + part.shape[1], column : column + part.shape[2]] = part
        row, column = row + part.shape[1], column + part.shape[2]
    return result


WEIGHTS: Final = Path(__file__).with_name("policy.safetensors")
"""The weights that come with Weft."""
FORMAT: Final = {"format": "weft.deploy-policy", "version": "1"}
"""What a weights file says of itself; the version counts changes of features and network."""

_log = logging.getLogger(__name__)


class Policy(Protocol):
    """Says how likely each action is to be good."""

    def prior(self, deployer: Deployer, choice: Sequence[int], num_decided: int, evaluation: Evaluation) -> F64:
        """Return the probability of each action for the group ``deployer.by_weight[num_decided]``."""


class UniformPolicy:
    """Knows nothing: all actions are equally likely."""

    def prior(self, deployer: Deployer, choice: Sequence[int], num_decided: int, evaluation: Evaluation) -> F64:
        """Return equal probabilities."""
        return np.full(len(deployer.actions), 1.0 / len(deployer.actions))


class NetworkPolicy:
    """Asks a network."""

    def __init__(self, arrays: Mapping[str, F32]) -> None:
        self.featurizer, self._network = Featurizer(), ForwardNetwork(arrays)

    def prior(self, deployer: Deployer, choice: Sequence[int], num_decided: int, evaluation: Evaluation) -> F64:
        """Return the probability of each action for the group ``deployer.by_weight[num_decided]``."""
        logits = self._network(self.featurizer.features(deployer, choice, num_decided, evaluation)).astype(np.float64)
        weights = np.exp(logits - logits.max())
        return np.asarray(weights / weights.sum())


def load_policy(path: Path | None = None) -> NetworkPolicy | UniformPolicy:
    """Return the network's policy with the weights in the file, by default Weft's own.

    A file that is missing, broken or of another version gives a warning and the policy that knows nothing.
    """
    try:
        return NetworkPolicy(read_policy(path or WEIGHTS))
    except InputError as problem:
        _log.warning("deployments are searched without the network: %s", problem)
        return UniformPolicy()


def read_policy(path: Path) -> dict[str, F32]:
    """Return the network's weights in a file, by name."""
    arrays = {}
    with TensorFile(path, dtypes=("F32",)) as file:
        metadata = file.metadata
        for name, entry in file.entries.items():
            arrays[name] = np.frombuffer(file.data(name), dtype="<f4").astype(np.float32).reshape(entry.shape)
            if not np.isfinite(arrays[name]).all():
                raise InputError(f"{name!r} in the file {str(path)!r} has numbers that are not finite: get it again")
    found = {key: metadata.get(key) for key in FORMAT}
    if found != FORMAT:
        raise InputError(f"the weights file {str(path)!r} is for {found['format']!r}, version {found['version']!r}; "
                         f"this Weft needs {FORMAT['format']!r}, version {FORMAT['version']!r}")
    check_shapes(arrays)
    return arrays
