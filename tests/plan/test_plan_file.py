"""The plan file: what is saved is what is loaded, and no broken file gets past Weft's own errors."""

from __future__ import annotations

import ast
import copy
import gzip
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import weft.base.files
import weft.plan
from tests.plan.bases import BASES
from tests.worlds import pipeline, plain_cluster
from weft.base.errors import InputError, NoFeasiblePlan, PlanError
from weft.cluster.cluster_file import to_json
from weft.plan.check import check_plan
from weft.plan.plan import (
    ClusterRef,
    GradientExchange,
    ModelRef,
    Optimizer,
    Plan,
    Replica,
    SearchInfo,
    Sharding,
    Stage,
    format_plan,
    load_plan,
    parse_plan,
    plan_to_json,
    save_plan,
    split_samples,
    with_search,
)

QUICK = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

# ---- save and load -------------------------------------------------------------------------------------------------

names = st.text(max_size=8)
numbers = st.floats(allow_nan=False, allow_infinity=False)
whole = st.integers(-(2**63), 2**63 - 1)
several = st.lists(names, max_size=3).map(tuple)
values = st.recursive(st.none() | st.booleans() | whole | numbers | names,
                      lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3), max_leaves=6)
replicas = st.builds(Replica, devices=several, mesh=st.dictionaries(names, whole, max_size=2), share=numbers,
                     times=st.dictionaries(names, numbers, max_size=2))
words = st.dictionaries(names, several, max_size=2)
stages = st.builds(Stage, name=names, ops=several, replicas=st.lists(replicas, max_size=2).map(tuple), modules=several,
                   microbatches=st.none() | st.lists(whole, max_size=3).map(tuple),
                   sharding=st.builds(Sharding, ops=words, tensors=words), recompute=st.booleans())
plans = st.builds(
    Plan,
    model=st.builds(ModelRef, name=names, digest=names, mode=st.sampled_from(["training", "inference"]), batch=whole,
                    dtype=names),
    cluster=st.builds(ClusterRef, digest=names, devices=several,
                      description=st.none() | st.dictionaries(names, values, max_size=3)),
    microbatches=whole, stages=st.lists(stages, max_size=3).map(tuple),
    order=st.dictionaries(names, st.lists(names, max_size=40).map(tuple), max_size=3),
    gradients=st.lists(st.builds(
        GradientExchange, parameters=several, devices=several,
        method=st.sampled_from(["all_reduce", "hierarchical", "parameter_server", "sufficient_factors"]),
        groups=st.lists(st.lists(names, max_size=2).map(tuple), max_size=2).map(tuple),
        server=st.none() | names), max_size=2).map(tuple),
    optimizer=st.builds(Optimizer, kind=st.sampled_from(["none", "sgd", "adam", "adamw"]), lr=numbers,
                        sharded=st.booleans()),
    search=st.builds(SearchInfo, by=names, status=st.sampled_from(["optimal", "feasible", "heuristic"]),
                     step_time=st.none() | numbers, bound=st.none() | numbers, seed=whole,
                     seconds=st.none() | numbers))


@settings(QUICK, max_examples=120)
@given(plan=plans)
def test_saving_and_loading_gives_an_equal_plan(plan, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans")
    for name in ("plan.json", "plan.json.gz"):
        save_plan(plan, folder / name)
        assert load_plan(folder / name) == plan
    assert format_plan(load_plan(folder / "plan.json")) == format_plan(plan)


@pytest.mark.parametrize("name", BASES)
def test_real_plans_survive_the_file_and_mean_the_same(name, tmp_path):
    graph, plan = BASES[name]()
    save_plan(plan, tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded == plan
    check_plan(loaded, graph, plain_cluster(len(plan.cluster.devices)))


def test_same_plan_same_bytes(tmp_path):
    for name in ("a.json", "b.json", "a.json.gz", "b.json.gz"):
        save_plan(pipeline("1f1b", 3, 4)[1], tmp_path / name)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()
    assert gzip.decompress((tmp_path / "a.json.gz").read_bytes()) == (tmp_path / "a.json").read_bytes()


def test_file_is_ascii_with_lines_that_fit_a_screen(tmp_path):
    plan = pipeline("1f1b", 4, 40)[1]
    save_plan(replace(plan, model=replace(plan.model, name="mod\u00e8le")), tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_bytes().decode("ascii")
    assert max(map(len, text.splitlines())) <= 120
    assert json.loads(text)["format"] == "weft.plan"


def test_saving_over_a_file_that_cannot_be_replaced_leaves_it_whole(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    save_plan(pipeline("1f1b", 2, 2)[1], path)
    before = path.read_bytes()

    def refuse(*_args: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("weft.base.files.os.replace", refuse)
    with pytest.raises(InputError, match=r"cannot write .*the disk is full"):
        save_plan(pipeline("1f1b", 3, 3)[1], path)
    assert path.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir()] == ["plan.json"]


def test_with_search_replaces_only_what_is_given():
    plan = with_search(pipeline("1f1b", 2, 2)[1], by="me", step_time=2.5)
    assert plan.search == SearchInfo(by="me", step_time=2.5)


# ---- fields that do not fit ----------------------------------------------------------------------------------------

def good() -> dict[str, Any]:
    """Return a good plan as plain JSON values, with every field in use."""
    plan = pipeline("1f1b", 2, 2)[1]
    first = replace(plan.stages[0], modules=("layers.0",), microbatches=(0, 1),
                    sharding=Sharding(ops={"op0": ("",)}, tensors={"y0": ("R",)}),
                    replicas=(replace(plan.stages[0].replicas[0], times={"F": 1.5, "B": 3.0}),))
    cluster = replace(plan.cluster, description=to_json(plain_cluster(2)))
    return json.loads(format_plan(replace(plan, stages=(first, plan.stages[1]), cluster=cluster)))


@pytest.mark.parametrize(("path", "value", "sentence"), [
    (("surprise",), 1, "surprise is not a known field (known: cluster, compiled, gradients, microbatches, model, optimizer, "
                       "order, search, stages)"),
    (("stages", 1, "replicas", 0, "device"), ["d0"], "stages[1].replicas[0].device is not a known field"),
    (("stages", 0, "sharding", "y0"), ["S0"], "stages[0].sharding.y0 is not a known field"),
    (("stages", 0, "sharding", "tensors", "y0"), "S0", "stages[0].sharding.tensors.y0 must be a list, not 'S0'"),
    (("microbatches",), "2", "microbatches must be a whole number, not '2'"),
    (("microbatches",), True, "microbatches must be a whole number, not True"),
    (("microbatches",), 2.5, "microbatches must be a whole number, not 2.5"),
    (("microbatches",), 10**30, f"microbatches must be a whole number of at most 64 bits, not {10**30}"),
    (("microbatches",), 10**300, "microbatches must be a whole number of at most 64 bits, not a number of more than"),
    (("stages",), {}, "stages must be a list, not an object"),
    (("stages", 0), [], "stages[0] must be an object, not a list"),
    (("stages", 0, "ops", 0), 7, "stages[0].ops[0] must be text, not 7"),
    (("stages", 0, "microbatches"), [0, None], "stages[0].microbatches[1] must be a whole number, not None"),
    (("stages", 0, "recompute"), 1, "stages[0].recompute must be true or false, not 1"),
    (("stages", 0, "replicas", 0, "share"), "half", "stages[0].replicas[0].share must be a number, not 'half'"),
    (("stages", 0, "replicas", 0, "times", "F"), None, "stages[0].replicas[0].times.F must be a number, not None"),
    (("order", "d0"), "s0:F:0", "order.d0 must be a list, not 's0:F:0'"),
    (("model", "mode"), "dreaming", "model.mode must be one of 'training', 'inference', not 'dreaming'"),
    (("optimizer", "kind"), "lion", "optimizer.kind must be one of 'none', 'sgd', 'adam', 'adamw', not 'lion'"),
    (("search", "bound"), "low", "search.bound must be a number, not 'low'"),
    (("search",), None, "search must be an object, not None"),
    (("cluster", "description", "hosts"), 2**70, "cluster.description.hosts must be a whole number of at most 64 bits"),
    (("format",), "weft.graph", "format must be 'weft.plan', not 'weft.graph'"),
    (("format",), [[[]]], "format must be 'weft.plan', not a list"),
    (("version",), 2, "version must be 1, not 2; this Weft reads no other"),
    (("version",), True, "version must be 1, not True; this Weft reads no other"),
    (("version",), {"a": 1}, "version must be 1, not an object; this Weft reads no other"),
])
def test_field_that_does_not_fit_is_named(path, value, sentence):
    broken = good()
    parent = broken
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    with pytest.raises(PlanError) as caught:
        parse_plan(broken, where="my.json")
    assert str(caught.value).startswith("my.json: ")
    assert sentence in str(caught.value)


@pytest.mark.parametrize(("path", "sentence"), [
    (("microbatches",), "microbatches is missing"), (("model", "digest"), "model.digest is missing"),
    (("stages", 1, "replicas", 0, "devices"), "stages[1].replicas[0].devices is missing"),
    (("format",), "format must be 'weft.plan', not None"), (("version",), "version must be 1, not None"),
])
def test_field_that_is_missing_is_named(path, sentence):
    broken = good()
    parent = broken
    for key in path[:-1]:
        parent = parent[key]
    del parent[path[-1]]
    with pytest.raises(PlanError) as caught:
        parse_plan(broken)
    assert sentence in str(caught.value)


def test_fields_with_a_default_may_be_left_out():
    short = {key: good()[key] for key in ("format", "version", "model", "cluster", "microbatches", "stages", "order")}
    assert parse_plan(short).optimizer == Optimizer()


def test_all_fields_that_do_not_fit_are_named_at_once():
    broken = good()
    broken["microbatches"], broken["order"]["d1"], broken["model"]["batch"] = "x", 5, None
    with pytest.raises(PlanError) as caught:
        parse_plan(broken)
    assert all(part in str(caught.value) for part in ("model.batch must be", "microbatches must", "order.d1 must"))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '"x"', "{]", '{"format": "weft.plan", "version": 1}',
                                  '{"format": "weft.plan", "format": "weft.plan"}', '{"a": NaN}', '{"a": Infinity}',
                                  "[" * 100_000, '{"a":' * 50_000, '{"format": ' + "9" * 5000 + "}", "\ufeff{}", "\0"])
def test_text_that_is_no_plan(text, tmp_path):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError, match=r"plan\.json"):
        load_plan(tmp_path / "plan.json")


def test_duplicate_key_is_named(tmp_path):
    (tmp_path / "plan.json").write_text('{"format": "weft.plan", "order": {"d0": [], "d0": ["x"]}}')
    with pytest.raises(PlanError, match="the key 'd0' is there twice"):
        load_plan(tmp_path / "plan.json")


def test_huge_exponents_are_refused(tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps(good()).replace('"share": 1.0', '"share": 1e999'))
    with pytest.raises(PlanError, match=r"stages\[0\]\.replicas\[0\]\.share must be a finite number, not inf"):
        load_plan(tmp_path / "plan.json")


def test_deep_nesting_in_the_description_is_refused():
    broken = good()
    for _ in range(200):
        broken["cluster"]["description"] = {"a": broken["cluster"]["description"]}
    with pytest.raises(PlanError, match="is nested more than 50 deep"):
        parse_plan(broken)


# ---- mutations -----------------------------------------------------------------------------------------------------

BROKEN_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 10**6, 2**31, 2**63 - 1, 2**63, -(2**63), 10**400, 0.5, -0.0, 1e308, 1e-308,
    float("inf"), "", "s0", "d0", "d9", "op0", ":", "s0:F:0", "s0:F:999999999", "training", "inference", "\x1b[2J",
    "\ud800", "x" * 5000, [], {}, [[]], [None], {"": None}, ["d0", "d0"], [0] * 100, {"d0": []}, {"tensor": 2},
    "__import__('os').abort()", [{}], [[[[[[]]]]]])


def places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in items for place in places_in(item, (*path, key)))] if path else [
        place for key, item in items for place in places_in(item, (key,))]


def mutate(plan: dict[str, Any], draw: Any) -> None:
    """Change one place of a JSON value."""
    places = places_in(plan)
    path = draw(st.sampled_from(places)) if places else ("format",)
    parent: Any = plan
    for key in path[:-1]:
        parent = parent[key]
    key = path[-1]
    match draw(st.integers(0, 6)):
        case 0:
            del parent[key]
        case 1 | 2:
            parent[key] = copy.deepcopy(draw(st.sampled_from(BROKEN_VALUES)))
        case 3:
            other: Any = plan
            for step in draw(st.sampled_from(places)):
                other = other[step]
            parent[key] = copy.deepcopy(other)
        case 4 if isinstance(parent, list):
            parent.insert(draw(st.integers(0, len(parent))), copy.deepcopy(parent[key]))
        case 4 | 5 if isinstance(parent, dict):
            parent[draw(st.sampled_from(["extra", "d1", "F", "", "\x07", "y" * 300, *parent]))] = parent.pop(key)
        case _:
            parent[key] = [parent[key]] if draw(st.booleans()) else {"a": parent[key]}


def examine(path: Path, graph: Any, cluster: Any) -> str:
    """Return what became of a plan file; anything but Weft's own errors escapes."""
    try:
        plan = load_plan(path)
    except PlanError as error:
        assert str(error).encode()  # noqa: PT017 - every message can be printed
        return "refused by load_plan"
    try:
        check_plan(plan, graph, cluster)
    except (PlanError, NoFeasiblePlan) as error:
        assert str(error).encode()  # noqa: PT017
        return "refused by check_plan"
    return "accepted"


RICH = [name for name in BASES if name != "gpipe"]
WORLDS = {name: BASES[name]() for name in RICH}


@pytest.mark.timeout(150)
@settings(QUICK, max_examples=400)
@given(data=st.data())
def test_mutated_plan_files_only_raise_our_own_errors(data, tmp_path_factory):
    graph, plan = WORLDS[data.draw(st.sampled_from(RICH))]
    cluster = plain_cluster(len(plan.cluster.devices))
    if data.draw(st.integers(0, 5)) == 0:
        plan = replace(plan, cluster=replace(plan.cluster, description=to_json(cluster)))
    value = json.loads(format_plan(plan))
    for _ in range(data.draw(st.integers(1, 3))):
        mutate(value, data.draw)
    path = tmp_path_factory.getbasetemp() / "mutated.json"
    path.write_text(json.dumps(value))
    examine(path, graph, cluster)


@pytest.mark.timeout(60)
@settings(QUICK, max_examples=300)
@given(data=st.data())
def test_damaged_bytes_only_raise_our_own_errors(data, tmp_path_factory):
    graph, plan = WORLDS["1f1b"]
    text = bytearray(format_plan(plan).encode())
    at = data.draw(st.integers(0, len(text) - 1))
    match data.draw(st.integers(0, 5)):
        case 0:
            del text[at:]
        case 1:
            text[at] = data.draw(st.integers(0, 255))
        case 2:
            text[at:at] = data.draw(st.binary(max_size=6))
        case 3:
            text[at:at] = data.draw(st.sampled_from([b"NaN", b"-Infinity", b"[" * 3000, b"1e999", b"\xff\xfe", b"\\u",
                                                     b'{"a":1,"a":2}', b"\xed\xa0\x80", b"9" * 5000, b"/*", b","]))
        case 4:
            text = bytearray(data.draw(st.binary(max_size=200)))
        case _:
            end = data.draw(st.integers(at, len(text)))
            text[at:at] = text[at:end]
    compress = data.draw(st.sampled_from(["", "whole", "cut", "not"]))
    raw = bytes(text) if compress in ("", "not") else gzip.compress(bytes(text), mtime=0)
    path = tmp_path_factory.getbasetemp() / ("damaged.json" + (".gz" if compress else ""))
    path.write_bytes(raw[:len(raw) // 2] if compress == "cut" else raw)
    examine(path, graph, plain_cluster(3))


def test_mutations_reach_every_part_of_the_checks():
    """The mutations above are of use only if some files load and some of these pass."""
    graph, plan = WORLDS["1f1b"]
    cluster, seen = plain_cluster(3), set()
    for changes in ({"microbatches": 3}, {"microbatches": 0}, {"microbatches": "x"}):
        value = plan_to_json(plan) | changes
        try:
            check_plan(parse_plan(value), graph, cluster)
            seen.add("accepted")
        except PlanError as error:
            seen.add("check" if error.problems else "load")
    assert seen == {"accepted", "check", "load"}


def test_files_never_become_code(tmp_path):
    marker = tmp_path / "marker"
    call = f"__import__('pathlib').Path({str(marker)!r}).touch()"

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (marker,)

    value = good()
    value["model"]["name"] = value["stages"][0]["name"] = value["order"]["d0"][0] = call
    for content in (json.dumps(value).encode(), pickle.dumps(Bomb()), b"!!python/object/apply:os.abort []",
                    f"{{\"format\": {call}}}".encode()):
        (tmp_path / "plan.json").write_bytes(content)
        examine(tmp_path / "plan.json", *reversed([plain_cluster(2), pipeline("1f1b", 2, 2)[0]]))
    assert not marker.exists()


def test_no_code_that_could_run_a_file():
    folder = Path(weft.plan.__file__).parent
    for path in [Path(weft.base.files.__file__), *folder.glob("*.py")]:
        tree = ast.parse(path.read_text())
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        used |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)
                 for name in node.names}
        assert not used & {"eval", "exec", "compile", "__import__", "pickle", "marshal", "importlib", "subprocess"}


# ---- samples -------------------------------------------------------------------------------------------------------

@settings(QUICK, max_examples=200)
@given(num_samples=st.integers(0, 2**31 - 1), weights=st.lists(st.integers(1, 1000), min_size=1, max_size=9))
def test_samples_are_divided_without_rest_and_within_one_of_the_share(num_samples, weights):
    shares = tuple(weight / sum(weights) for weight in weights)
    counts = split_samples(num_samples, shares)
    assert sum(counts) == num_samples
    assert all(abs(count - num_samples * share) < 1 + 1e-3 for count, share in zip(counts, shares, strict=True))


@pytest.mark.parametrize(("num_samples", "shares", "counts"), [
    (8, (0.75, 0.25), (6, 2)), (4, (0.75, 0.25), (3, 1)), (3, (0.5, 0.5), (2, 1)), (1, (0.5, 0.5), (1, 0)),
    (10, (1 / 3, 1 / 3, 1 / 3), (4, 3, 3)), (7, (1.0,), (7,)), (5, (0.2, 0.2, 0.6), (1, 1, 3)),
    (3, (0.4, 0.6), (1, 2)), (7, (0.5, 0.3, 0.2), (4, 2, 1))])
def test_samples_by_hand(num_samples, shares, counts):
    assert split_samples(num_samples, shares) == counts
