"""The network over deployments: what it must not depend on, broken weights, and that it learns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.policy_training.blind import blinded, without_feedback
from benchmarks.policy_training.expert import Effort, make_examples, read_examples, write_examples
from benchmarks.policy_training.network import DeployNetwork, from_arrays, make_batch, to_arrays, write_policy
from benchmarks.policy_training.train import TrainOptions, train_policy
from tests.search.deploy.worlds import even_splits
from tests.worlds import chain_graph
from weft.base.errors import InputError
from weft.base.tensor_file import Entry, file_begin, file_order
from weft.cli import deploy_commands
from weft.cli.main import main
from weft.cluster.cluster import Cluster, Device, DeviceKind, Link
from weft.cost.costs import estimate_costs
from weft.search.common.problem import PlanOptions, Problem
from weft.search.deploy.deployer import Deployer
from weft.search.deploy.features import WIDTHS, Featurizer
from weft.search.deploy.op_groups import group_operators
from weft.search.deploy.policy import (
    FORMAT,
    ForwardNetwork,
    NetworkPolicy,
    UniformPolicy,
    load_policy,
    read_policy,
    weight_shapes,
)

HOSTS = {"a": (2, "fast", 20e9), "b": (1, "slow", 8e9), "c": (1, "middle", 8e9)}


def make_problem(*, hosts="abc", num_ops=9, time=1.0, size=1.0):
    """Return a chain on three hosts; a second has ``time`` times as many ticks, and a byte weighs ``size``."""
    kinds = {name: DeviceKind(name=name, flop_per_s={"float32": rate / time}, memory_bytes=int(2**33 * size),
                              memory_bytes_per_s=rate / 8 * size / time, overhead_s=2e-6 * time)
             for name, rate in {"fast": 8e12, "middle": 4e12, "slow": 1.5e12}.items()}
    devices, links = [], []

    def join(a, b, rate, latency):
        links.extend(Link(source=x, target=y, bytes_per_s=rate * size / time, latency_s=latency * time) for x, y in ((a, b), (b, a)))

    for host in hosts:
        count, kind, rate = HOSTS[host]
        for index in range(count):
            devices.append(Device(name=f"{host}{index}", kind=kind, host=host, memory_bytes=kinds[kind].memory_bytes))
            join(f"{host}{index}", f"{host}/fabric", rate, 2e-6)
        join(f"{host}/fabric", "switch", 2e9, 8e-6)
    cluster = Cluster(name="three", kinds=kinds, devices=tuple(devices), links=tuple(links))
    batch = 24  # All devices, three and two of them divide a micro-batch of 12 evenly.
    graph = chain_graph(num_ops, skips=((1, 5),), parameter_bytes=int(2**22 * size), activation_bytes=int(2**20 * batch * size), batch=batch)
    weight = 1e9 * batch * (1 + np.arange(num_ops) % 3)
    graph = replace(graph, flops=weight, input_grad_flops=weight, weight_grad_flops=weight, bytes_read=np.full(num_ops, 2.0**24 * size),
                    tensor_bytes=np.where(graph.tensor_bytes == 4, int(4 * size), graph.tensor_bytes))
    return Problem(graph=graph, cluster=cluster, costs=estimate_costs(graph, cluster), options=PlanOptions(batch=batch))


def make_deployer(*, microbatches=2, with_tensor=True, **changes):
    problem = make_problem(**changes)
    return Deployer(problem, group_operators(problem.graph, np.ones(problem.graph.num_ops)), microbatches, splits=even_splits(problem) if with_tensor else {})


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads that wait for each other in turns take minutes on a machine that is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(3)
    return DeployNetwork().eval()


@pytest.fixture(scope="module")
def policy(network):
    return NetworkPolicy(to_arrays(network))


@pytest.fixture(scope="module")
def deployer():
    return make_deployer()


def assess(policy, deployer, choice, decided=2):
    return policy.prior(deployer, choice, decided, deployer.evaluate(choice))


def random_choice(deployer, seed):
    """Return actions at random, of those deployments that there can be."""
    rng = np.random.default_rng(seed)
    while True:
        choice = tuple(rng.integers(len(deployer.actions), size=deployer.groups.num_groups).tolist())
        if np.isfinite(deployer.evaluate(choice).seconds):
            return choice


def test_prior_is_a_distribution_over_all_actions_and_repeats_exactly(policy, deployer, network):
    for seed in range(3):
        choice = random_choice(deployer, seed)
        found = assess(policy, deployer, choice, seed)
        assert found.shape == (len(deployer.actions),)
        assert found.min() > 0
        assert found.sum() == pytest.approx(1.0)
        again = assess(NetworkPolicy(to_arrays(network)), make_deployer(), choice, seed)
        np.testing.assert_array_equal(again, found)


def test_prior_depends_on_decisions_and_on_the_group(policy, deployer):
    first = assess(policy, deployer, random_choice(deployer, 0))
    assert not np.allclose(first, assess(policy, deployer, random_choice(deployer, 1)), rtol=1e-3)
    assert not np.allclose(first, assess(policy, deployer, random_choice(deployer, 0), 3), rtol=1e-3)


def test_order_of_actions_does_not_matter(policy, deployer):
    order = [0, *(1 + np.random.default_rng(0).permutation(len(deployer.actions) - 1)).tolist()]  # The first is data parallel.
    other = make_deployer()
    other.actions = tuple(deployer.actions[index] for index in order)
    choice = random_choice(deployer, 5)
    found = assess(policy, other, [order.index(action) for action in choice])
    expected = assess(policy, deployer, choice)
    np.testing.assert_allclose(found, expected[order], rtol=1e-5)


def test_order_of_devices_does_not_matter(policy, deployer):
    def names(of, action):
        devices = of.problem.cluster.devices
        return action.kind, action.by_speed, frozenset(devices[device].name for device in action.devices)

    other = make_deployer(hosts="cab")
    place = {names(other, action): index for index, action in enumerate(other.actions)}
    there = [place[names(deployer, action)] for action in deployer.actions]
    symmetric = [index for index, action in enumerate(deployer.actions) if action.kind in ("replicate", "single")]
    for action in symmetric:  # Of all groups: with several, the simulation has ties, which break by number.
        choice = [action] * deployer.groups.num_groups
        found, expected = assess(policy, other, [there[action]] * len(choice)), assess(policy, deployer, choice)
        np.testing.assert_allclose(found[there], expected, rtol=1e-4)


@pytest.mark.parametrize("changes", [{"time": 64.0}, {"size": 16.0}, {"time": 0.125, "size": 4.0}])
def test_units_of_time_and_size_do_not_matter(policy, deployer, changes):
    other, choice = make_deployer(**changes), random_choice(deployer, 9)
    assert other.evaluate(choice).seconds == pytest.approx(changes.get("time", 1.0) * deployer.evaluate(choice).seconds)
    found, expected = assess(policy, other, choice), assess(policy, deployer, choice)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_faster_links_do_matter(policy, deployer):
    other, choice = make_deployer(time=1.0, size=1.0), random_choice(deployer, 9)
    slow = replace(other.problem.cluster, links=tuple(replace(link, latency_s=0.1) for link in other.problem.cluster.links))
    problem = replace(other.problem, cluster=slow, costs=estimate_costs(other.problem.graph, slow))
    changed = Deployer(problem, other.groups, 2, splits=even_splits(problem))
    assert not np.allclose(assess(policy, changed, choice), assess(policy, deployer, choice), rtol=1e-3)


def test_padding_changes_nothing_and_numpy_says_the_same_as_torch(network, deployer):
    small = make_deployer(hosts="a", num_ops=4, with_tensor=False)
    states = [Featurizer().features(of, (0,) * of.groups.num_groups, decided, of.evaluate((0,) * of.groups.num_groups))
              for of, decided in ((small, 1), (deployer, 3))]
    for name, width in WIDTHS.items():
        assert {getattr(state, name).shape[-1] for state in states} == {width}
    with torch.inference_mode():
        logits, value = network(make_batch(states))
        for row, state in enumerate(states):
            alone, own_value = network(make_batch([state]))
            torch.testing.assert_close(logits[row, : len(state.actions)], alone[0], rtol=1e-4, atol=1e-5)
            assert (logits[row, len(state.actions) :] < -1e8).all()
            assert value[row] == pytest.approx(float(own_value[0]), abs=1e-5)
            plain = ForwardNetwork(to_arrays(network))(state)
            np.testing.assert_allclose(plain, alone[0].numpy(), rtol=1e-4, atol=1e-5)


def test_without_feedback_the_simulation_is_not_seen(network, deployer):
    blind, choice = blinded(NetworkPolicy(to_arrays(network))), random_choice(deployer, 2)
    found = deployer.evaluate(choice)
    outcome = found.outcome._replace(busy_s=found.outcome.busy_s * 0.1, used=found.outcome.used * 3, link_busy_s=found.outcome.link_busy_s * 0,
                                     group_end_s=found.outcome.group_end_s * 0.5, exchange_s=found.outcome.exchange_s + 1)
    other = replace(found, seconds=found.seconds * 2, missing_bytes=5.0, outcome=outcome)
    np.testing.assert_array_equal(blind.prior(deployer, choice, 1, found), blind.prior(deployer, choice, 1, other))
    seeing = NetworkPolicy(to_arrays(network))
    assert not np.allclose(seeing.prior(deployer, choice, 1, found), seeing.prior(deployer, choice, 1, other), rtol=1e-4)
    state = Featurizer().features(deployer, choice, 1, found)
    assert (without_feedback(state).flow == state.flow).all()


def test_a_deployment_that_cannot_end_gives_finite_numbers(policy, deployer):
    choice = random_choice(deployer, 2)
    found = deployer.evaluate(choice)
    assert np.isfinite(policy.prior(deployer, choice, 0, replace(found, seconds=float("inf")))).all()


def test_one_device_has_one_action_at_most_of_each_kind(policy):
    alone = make_deployer(hosts="b", with_tensor=False)
    assert assess(policy, alone, (0,) * alone.groups.num_groups, 0).tolist() == [1.0]


def test_asking_the_network_needs_no_torch():
    code = "import sys, weft.search.deploy.policy; print([name for name in ('torch', 'ortools') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


# ---- weights --------------------------------------------------------------------------------------------------------


def test_weights_are_small_and_come_back(tmp_path, network, deployer, policy):
    path = tmp_path / "policy.safetensors"
    write_policy(path, to_arrays(network), {"note": "test"})
    assert path.stat().st_size <= 2e6
    assert 100_000 <= sum(array.size for array in to_arrays(network).values()) <= 400_000
    loaded = load_policy(path)
    assert isinstance(loaded, NetworkPolicy)
    choice = random_choice(deployer, 0)
    np.testing.assert_array_equal(assess(loaded, deployer, choice), assess(policy, deployer, choice))
    assert weight_shapes() == {name: array.shape for name, array in to_arrays(network).items()}
    assert all((from_arrays(to_arrays(network)).state_dict()[name] == tensor).all() for name, tensor in network.state_dict().items())
    library = pytest.importorskip("safetensors.numpy")
    theirs = library.load_file(path)
    assert sorted(theirs) == sorted(to_arrays(network))
    assert all((theirs[name] == array).all() for name, array in to_arrays(network).items())


def header(**fields):
    text = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **fields}}).encode()
    return len(text).to_bytes(8, "little") + text


BROKEN = [
    (b"", "ends within its header"), (b"\xff" * 20, "ends within its header"),
    ((3).to_bytes(8, "little") + b"{,}", "not valid JSON"), ((2).to_bytes(8, "little") + b"[]", "not a JSON object"),
    ((21).to_bytes(8, "little") + b'{"__metadata__": [1]}', "object of texts"),
    (header() + b"\0" * 7, "has the bytes"), (header() + b"\0" * 12, "belong to no tensor"),
    (header(shape=[3]) + b"\0" * 8, "has the bytes"), (header(shape=[-2]) + b"\0" * 8, "list of counts"),
    (header(dtype="F16") + b"\0" * 8, "only F32"), (header(data_offsets=[4, 12]) + b"\0" * 12, "has the bytes"),
    (header(data_offsets=None) + b"\0" * 8, "has the bytes"), (header(more=1) + b"\0" * 8, "exactly the fields"),
    (header() + np.array([1, np.nan], dtype="<f4").tobytes(), "not finite"),
    (header() + b"\0" * 8, "is for None"),
]


@pytest.mark.parametrize(("data", "message"), BROKEN)
def test_broken_weights_give_one_warning_and_the_uniform_policy(tmp_path, caplog, deployer, data, message):
    path = tmp_path / "broken.safetensors"
    path.write_bytes(data)
    with pytest.raises(InputError, match=message):
        read_policy(path)
    policy = load_policy(path)
    assert isinstance(policy, UniformPolicy)
    assert len(caplog.records) == 1
    assert "without the network" in caplog.text
    assert message in caplog.text
    prior = policy.prior(deployer, (0,) * deployer.groups.num_groups, 0, deployer.evaluate((0,) * deployer.groups.num_groups))
    assert prior.tolist() == [1 / len(deployer.actions)] * len(deployer.actions)


def test_missing_weights_other_versions_and_other_shapes_are_refused(tmp_path, caplog, network):
    assert isinstance(load_policy(tmp_path / "none.safetensors"), UniformPolicy)
    assert "no file" in caplog.text
    path, arrays, texts = tmp_path / "p.safetensors", to_arrays(network), FORMAT
    name = next(iter(arrays))
    for changed, facts, message in (
            (arrays, {**texts, "version": "99"}, "version '99'"), (arrays, {}, "is for None"),
            ({**arrays, name: arrays[name][:-1]}, texts, "the network needs"),
            ({**arrays, "more": np.zeros(1, np.float32)}, texts, "1 names, first 'more'"),
            ({key: array for key, array in arrays.items() if key != name}, texts, "1 names")):
        entries = {key: Entry(dtype="F32", shape=array.shape) for key, array in changed.items()}
        path.write_bytes(file_begin(entries, facts) + b"".join(changed[key].tobytes() for key in file_order(entries)))
        with pytest.raises(InputError, match=message):
            read_policy(path)


# ---- training -------------------------------------------------------------------------------------------------------

QUICK = TrainOptions(rounds=1, cases=10, epochs=12, effort=Effort(anneal_steps=16, tree_steps=4, num_states=3))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    return folder, train_policy(folder / "p.safetensors", folder / "work", QUICK, workers=1)


def test_training_lowers_the_loss_and_writes_its_curve(trained):
    folder, curve = trained
    assert len(curve) == QUICK.epochs
    assert curve[-1].loss < 0.95 * curve[0].loss
    assert [row["loss"] for row in json.loads((folder / "p.json").read_text())] == [row.loss for row in curve]
    assert isinstance(load_policy(folder / "p.safetensors"), NetworkPolicy)


def test_training_goes_on_where_it_was_with_the_same_result(trained, tmp_path):
    folder, curve = trained
    weights, lines = (folder / "p.safetensors").read_bytes(), []
    (folder / "work/round-0/case-000004.npz").unlink()
    (folder / "work/round-0.safetensors").unlink()
    again = train_policy(tmp_path / "q.safetensors", folder / "work", QUICK, workers=1, report=lines.append)
    assert (tmp_path / "q.safetensors").read_bytes() == weights
    assert again == curve
    assert "1 of 1 cases" in lines[0]


def test_a_second_round_lets_the_expert_use_the_network(trained, tmp_path):
    folder, _ = trained
    network = load_policy(folder / "p.safetensors")
    plain, guided = (make_examples(1, policy, QUICK.effort) for policy in (None, network))
    assert len(plain) == len(guided) == QUICK.effort.num_states
    assert any(not np.array_equal(a.features.ops, b.features.ops) for a, b in zip(plain, guided, strict=True))
    for example in guided:
        assert example.gaps.min() == 0
        assert np.isfinite(example.gaps).all()
    with pytest.raises(InputError, match="other options"):
        train_policy(tmp_path / "q.safetensors", folder / "work", replace(QUICK, seed=5), workers=1)


def test_examples_come_back_from_their_file(tmp_path):
    examples = make_examples(5, None, QUICK.effort)
    write_examples(tmp_path / "case.npz", examples)
    for before, after in zip(examples, read_examples(tmp_path / "case.npz"), strict=True):
        np.testing.assert_allclose(after.features.actions, before.features.actions, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(after.gaps, before.gaps, rtol=1e-3, atol=1e-3)
        assert (after.features.group, after.features.flow.shape) == (before.features.group, before.features.flow.shape)
    write_examples(tmp_path / "none.npz", [])
    assert read_examples(tmp_path / "none.npz") == []
    (tmp_path / "case.npz").write_bytes((tmp_path / "case.npz").read_bytes()[:200])
    with pytest.raises(InputError, match="are damaged"):
        read_examples(tmp_path / "case.npz")


@pytest.mark.parametrize("change", [
    lambda arrays: {**arrays, "count": np.asarray([1, 2])}, lambda arrays: {**arrays, "count": np.asarray(2)},
    lambda arrays: {**arrays, "flow": arrays["flow"][:1]}, lambda arrays: {**arrays, "gaps": arrays["gaps"] * np.nan},
    lambda arrays: {**arrays, "group": arrays["group"] + 1000}, lambda arrays: {**arrays, "world": np.asarray(1.0)},
    lambda arrays: {name: array for name, array in arrays.items() if name != "links"}])
def test_examples_that_do_not_fit_together_are_damaged(tmp_path, change):
    write_examples(tmp_path / "case.npz", make_examples(5, None, QUICK.effort))
    with np.load(tmp_path / "case.npz") as stored:
        arrays = dict(stored)
    np.savez_compressed(tmp_path / "case.npz", **change(arrays))
    with pytest.raises(InputError, match=r"are damaged .*: delete the file"):
        read_examples(tmp_path / "case.npz")


@pytest.mark.parametrize(("options", "message"), [
    (["--workers", "0"], "--workers must be 1 or more"), (["--out", "weights.bin"], "must end in .safetensors"),
    (["--device", "tpu"], "--device must be cpu or cuda"), (["--rounds", "0"], "must be 1 or more")])
def test_bad_training_options_are_refused(capsys, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    assert main(["train-policy", *options]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_training_needs_the_source_and_says_so(capsys, tmp_path, monkeypatch):
    command = [sys.executable, "-m", "weft", "train-policy", "--device", "tpu", "--out", str(tmp_path / "p.safetensors")]
    env = {**os.environ, "PYTHONPATH": str(deploy_commands.SOURCE)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path, env=env)
    assert "--device must be cpu or cuda" in done.stderr, "its code is found from any folder"
    monkeypatch.setattr(deploy_commands, "SOURCE", tmp_path)
    assert main(["train-policy", "--out", str(tmp_path / "p.safetensors")]) == 2
    assert "there is no folder benchmarks/policy_training" in " ".join(capsys.readouterr().err.split())
