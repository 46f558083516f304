"""The search for a deployment: seeds, tree search with a learned prior, and local improvement, raced with each other.

    choose      m, a number of micro-batches (``microbatch_numbers``), and for each group ``g`` of operators that follow
                each other (``group_operators``) an action ``a[g]``: which devices, how they share (``list_actions``)
    minimise    T(m, a), the seconds of a step by a compiled simulation (``Deployer.evaluate``, ``kernel.run``)
    subject to  what device ``d`` holds at most <= its memory, for all ``d`` (``Evaluation.missing_bytes``)
                a device is in one tp group wherever it is used (``Deployer._tp_groups_agree``)
                groups that share a parameter are divided alike (``Deployer._ties_agree``)
    bounds      T(m, a) >= what its devices, links and exchanges have to do (``least_seconds``, ``find_bounds``)
                T(m, a) >= all devices busy all the time and nothing sent, for all m and a (``Problem.work_bound``)

Nothing is proven: the bound of all devices busy is rarely reached. ``auto`` first tries data parallelism, HEFT and some
steps of the tree search; then the best pipelines of stages by a dynamic program, every action for all groups alike, the
best actions two by two, each for a part of the groups; all for every number of micro-batches. What cannot be better by
its bounds is not simulated. Then it goes in rounds: on one core the tree search, in turns from nothing and from the
best deployment so far, on the other annealing from the best seeds, of which half are dropped after each round until few
are left. A round is a fixed number of steps on each, so the result is the same for the same seed unless a time limit
ends the search. At the end the best few become plans, which are checked and simulated in full; the fastest that fits is
the result. So it is never worse than data parallelism or HEFT. The other methods are parts of it, to compare with.

Tree search over deployments: decide the heaviest groups first, and look deeper where it pays (PUCT).

A node of the tree has decided the actions of the first groups in the order of weight; groups that are not decided
follow the heaviest decided one, or, in a restart from a good deployment, stay as they are there. So every node is a
whole deployment, and its value is that of a simulation. Each step goes down from the root by

    argmax over actions  Q + explore * P * sqrt(visits of the node) / (1 + visits of the action)

to a node that has not been simulated, simulates it, and takes its value up. ``P`` is the policy's prior. ``Q`` lies
between the mean and the best of the values below, scaled to 0..1 by what has been seen. The first decision, above all
groups, is the number of micro-batches.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final, Literal, get_args

import numpy as np

from weft.base.errors import InputError, NoFeasiblePlan
from weft.model.graph import F64, I64
from weft.plan.plan import Plan, with_search
from weft.search.common.budget import Budget, OutOfTime, cut_short, ended_by_ctrl_c
from weft.search.common.incumbent import Incumbent
from weft.search.common.problem import Problem, divisors, evaluate_plan, with_plan
from weft.search.deploy import seeds
from weft.search.deploy.deployer import Deployer, Evaluation, Found, deployment_plan, make_world
from weft.search.deploy.local import Annealer, polish
from weft.search.deploy.op_groups import group_operators
from weft.search.deploy.policy import Policy, UniformPolicy
from weft.search.deploy.seeds import staged_choices
from weft.search.deploy.splits import NO_SPLITS, Splits
from weft.search.deploy.tuning import TUNING
from weft.simulate.timeline import Timeline


@dataclass(slots=True, eq=False)
class _Node:
    deployer: Deployer
    choice: tuple[int, ...]
    num_decided: int
    evaluation: Evaluation
    value: float
    visits: I64
    total: F64
    best: F64
    prior: F64 | None = None
    """Asked for when an action is first chosen here: most nodes are never come back to."""
    children: dict[int, _Node] = field(default_factory=dict)


class TreeSearch:
    """Searches deployments for several numbers of micro-batches; ``start`` makes it a restart from a deployment."""

    def __init__(self, deployers: Sequence[Deployer], policy: Policy, *, start: Found | None = None) -> None:
        self.policy, self.start = policy, start
        self.deployers = tuple(deployers) if start is None else (start.deployer,)
        self.best: Found | None = None
        self._low, self._high = math.inf, -math.inf
        self._scale_s: float | None = None
        self._roots: list[_Node] = []
        self._visits = np.zeros(len(self.deployers), dtype=np.int64)

    def step(self) -> Found:
        """Simulate one more deployment and return it."""
        if len(self._roots) < len(self.deployers):
            return self._plant()
        root = self._roots[self._choose_root()]
        path: list[tuple[_Node, int]] = []
        node = root
        while True:
            action = self._choose(node)
            path.append((node, action))
            if action not in node.children:
                break
            node = node.children[action]
            if node.num_decided == len(node.choice):
                break
        found = None
        if action not in path[-1][0].children:
            child, found = self._expand(path[-1][0], action)
            path[-1][0].children[action] = child
            node = child
        for above, taken in path:
            above.visits[taken] += 1
            above.total[taken] += node.value
            above.best[taken] = max(above.best[taken], node.value)
        if found is None:
            found = self._found(node.deployer, node.choice)
        return found

    def _plant(self) -> Found:
        """Simulate the root for the next number of micro-batches."""
        deployer = self.deployers[len(self._roots)]
        choice = (0,) * deployer.groups.num_groups if self.start is None else self.start.choice
        found = self._found(deployer, choice)
        self._roots.append(self._node(found, 0))
        return found

    def _choose_root(self) -> int:
        if len(self._roots) == 1:
            return 0
        worth = [self._scaled(float(node.best.max())) if node.visits.any() else self._scaled(node.value)
                 for node in self._roots]
        explore = math.sqrt(self._visits.sum() + 1) / (1 + self._visits) / len(self._roots)
        chosen = int(np.argmax(np.asarray(worth) + TUNING.explore * explore))
        self._visits[chosen] += 1
        return chosen

    def _choose(self, node: _Node) -> int:
        if node.prior is None:
            node.prior = self.policy.prior(node.deployer, node.choice, node.num_decided, node.evaluation)
        visited = node.visits > 0
        mean = np.where(visited, node.total / np.maximum(node.visits, 1), node.value)
        best = np.where(visited, node.best, node.value)
        worth = self._scaled(TUNING.best_part * best + (1 - TUNING.best_part) * mean)
        explore = TUNING.explore * node.prior * math.sqrt(node.visits.sum() + 1) / (1 + node.visits)
        return int(np.argmax(worth + explore))

    def _scaled(self, value: F64 | float) -> F64:
        span = self._high - self._low
        return np.asarray((value - self._low) / span if span > 0 else np.zeros_like(value), dtype=np.float64)

    def _expand(self, node: _Node, action: int) -> tuple[_Node, Found]:
        order, decided = node.deployer.by_weight, node.num_decided
        choice = list(node.choice)
        choice[order[decided]] = action
        if self.start is None and decided == 0:
            choice = [action] * len(choice)
        found = self._found(node.deployer, tuple(choice))
        return self._node(found, decided + 1), found

    def _node(self, found: Found, decided: int) -> _Node:
        num_actions = len(found.deployer.actions)
        return _Node(found.deployer, found.choice, decided, found.evaluation, self._value(found),
                     np.zeros(num_actions, dtype=np.int64), np.zeros(num_actions), np.full(num_actions, -math.inf))

    def _found(self, deployer: Deployer, choice: tuple[int, ...]) -> Found:
        found = deployer.find(choice)
        if self.best is None or found.key < self.best.key:
            self.best = found
        return found

    def _value(self, found: Found) -> float:
        """Return how good a deployment is: speed against the first one; less than anything seen if it does not fit."""
        evaluation = found.evaluation
        if self._scale_s is None:
            self._scale_s = evaluation.seconds
        value = math.log(self._scale_s / evaluation.seconds) if math.isfinite(evaluation.seconds) else -10.0
        if not evaluation.fits:
            value = min(value, 0.0) - 1.0
        else:
            self._low, self._high = min(self._low, value), max(self._high, value)
        if self._low == math.inf:
            self._low, self._high = value, value
        return value


# ---- tree search -----------------------------------------------------------------------------------------------------


Method = Literal["auto", "tree", "anneal", "heft", "data-parallel"]
METHODS: Final[tuple[Method, ...]] = get_args(Method)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployOptions:
    """How to search."""

    method: Method = "auto"
    cpu_seconds: float | None = None
    """What the search may take, of all cores together; None: until it no longer gets better."""
    max_simulations: int | None = None
    """Deployments that the search may look at, those that it has met before included; rounds are not cut short."""
    seed: int = 0
    max_groups: int = TUNING.max_groups
    use_factors: bool = True
    """Let layers exchange sufficient factors where that is faster."""
    use_shares: bool = True
    """Let devices have shares by their speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """The plan that was found, and how."""

    plan: Plan
    timeline: Timeline
    method: Method
    bound_s: float
    num_simulations: int
    cpu_seconds: float
    history: tuple[tuple[int, float, float], ...]
    """(simulations, CPU seconds, step time) whenever it got better."""

    @property
    def step_time_s(self) -> float:
        """Return the predicted seconds of a step."""
        return self.timeline.step_time_s


@dataclass(slots=True, eq=False)
class _Race:
    """What the methods have found so far."""

    options: DeployOptions
    first: Found
    """Data parallelism."""
    deployers: list[Deployer]
    best: Incumbent[Found]
    begin: float = field(default_factory=time.process_time)
    finalists: dict[tuple[int, tuple[int, ...]], Found] = field(default_factory=dict)
    """The best few, by numbers of micro-batches and layouts."""
    starts: dict[int | str, Found] = field(default_factory=dict)
    """The best seed for each number of micro-batches, and of each kind."""
    history: list[tuple[int, float, float]] = field(default_factory=list)

    @property
    def num_simulations(self) -> int:
        return sum(deployer.num_simulations for deployer in self.deployers)

    @property
    def seconds(self) -> float:
        return time.process_time() - self.begin

    @property
    def is_late(self) -> bool:
        late = self.options.cpu_seconds is not None and self.seconds >= self.options.cpu_seconds
        return self.best.budget.is_spent or late

    @property
    def is_over(self) -> bool:
        most = self.options.max_simulations
        return self.is_late or (most is not None and sum(item.num_asked for item in self.deployers) >= most)

    @property
    def leader(self) -> Found:
        """Return the best deployment so far."""
        return self.best.answer or self.first

    @property
    def ranking(self) -> list[Found]:
        """Return the finalists, the best first."""
        return sorted(self.finalists.values(), key=lambda found: found.key)

    def clock(self) -> tuple[int, float]:
        """Return the simulations and the CPU seconds so far."""
        return self.num_simulations, self.seconds

    def keep(self, found: Found, what: str) -> None:
        """Keep a deployment for the rounds to begin with if it is the best of its kind."""
        for kind in (found.deployer.microbatches, what):
            known = self.starts.setdefault(kind, found)
            if found.key < known.key:
                self.starts[kind] = found

    def take_round(self, chains: Iterable[Annealer], steps: Sequence[tuple[int, float, Found]], what: str) -> None:
        """Keep what annealings and the ``steps`` of a tree search beside them found, in the order of time."""
        every = itertools.chain(steps, *(chain.progress for chain in chains))
        for count, seconds, found in sorted(every, key=lambda item: item[0]):
            self.take(found, what, (count, seconds))

    def take(self, found: Found, what: str, when: tuple[int, float] | None = None) -> None:
        """Keep a deployment if it is among the best; it was found then, by ``clock``, or now."""
        key = found.deployer.microbatches, tuple(found.evaluation.layout_of.tolist())
        if key in self.finalists and self.finalists[key] is self.best.answer:
            self.best.answer = found  # the same deployment: further searches begin with the choice that was met last
        self.finalists[key] = found
        if len(self.finalists) > TUNING.num_finalists:
            self.finalists.pop(max(self.finalists, key=lambda key: self.finalists[key].key))
        excess, seconds = found.key
        if self.best.offer(seconds, found, f"{what}, {self.num_simulations} simulations", excess):
            self.history.append((*(when or self.clock()), seconds))


def deploy(problem: Problem, options: DeployOptions | None = None, *, splits: Splits = NO_SPLITS,
           policy: Policy | None = None, budget: Budget | None = None) -> Deployment:
    """Return the fastest deployment found, as a checked plan; raise ``NoFeasiblePlan`` if nothing fits the memory.

    With ``splits`` (``weft.search.deploy.splits``) devices may divide operators: tensor parallelism.
    """
    options = options or DeployOptions()
    if options.method == "data-parallel":
        options = replace(options, use_factors=False)
    if options.method not in METHODS:
        raise InputError(f"there is no method {options.method!r}; choose from {', '.join(METHODS)}")
    budget = budget or Budget(effort=float("inf"))
    begin, bound_s = time.process_time(), problem.work_bound()
    deployers = make_deployers(problem, options, splits)
    first = deployers[0].find((0,) * deployers[0].groups.num_groups)
    race = _Race(options=options, first=first, deployers=list(deployers), begin=begin,
                 best=Incumbent(budget=budget, what="step time", unit="s", bound=bound_s))
    race.take(first, "data parallel")
    try:
        with ended_by_ctrl_c(budget), cut_short(budget.deadline):
            _run(race, deployers, policy or UniformPolicy())
    except OutOfTime:
        race.best.tell(f"time limit, {race.num_simulations} simulations")
    return _finish(race, problem)


def make_deployers(problem: Problem, options: DeployOptions, splits: Splits = NO_SPLITS) -> list[Deployer]:
    """Return what evaluates deployments, one for each number of micro-batches to try."""
    seconds = np.mean([problem.op_seconds(device, problem.graph.batch) for device in problem.devices], axis=0)
    groups = group_operators(problem.graph, seconds, max_groups=options.max_groups)
    world = make_world(problem, groups)
    return [Deployer(problem, groups, number, use_factors=options.use_factors, use_shares=options.use_shares,
                     splits=splits, world=world) for number in microbatch_numbers(problem)]


def microbatch_numbers(problem: Problem) -> list[int]:
    """Return the numbers of micro-batches to try."""
    if problem.options.microbatches is not None:
        return [problem.options.microbatches]
    every = [number for number in divisors(problem.options.batch) if number <= TUNING.max_microbatches]
    powers = [number for number in every if number & (number - 1) == 0]
    return powers if len(powers) > 1 else every[:4]


def _run(race: _Race, deployers: list[Deployer], policy: Policy) -> None:
    """Search by the method that is asked for."""
    match race.options.method:
        case "data-parallel":
            for deployer in deployers[1:]:
                race.take(deployer.find(race.first.choice), "data parallel")
        case "heft":
            for deployer, choice in seeds.heft_choices(deployers):
                race.take(deployer.find(choice), "HEFT")
        case "tree":
            tree = TreeSearch(deployers, policy)
            while not race.is_over and (race.options.cpu_seconds or race.options.max_simulations
                                        or deployers[0].num_asked < TUNING.tree_patience):
                race.take(tree.step(), "tree search")
        case "anneal":
            annealer = Annealer(deployers, race.first, seed=race.options.seed, clock=race.clock)
            for _ in _rounds(race):
                annealer.run(TUNING.anneal_steps)
                race.take_round([annealer], (), "annealing")
        case "auto":
            tree = TreeSearch(deployers, policy)
            alike = _seed(race, tree)
            if not race.is_over:
                _auto_rounds(race, tree, alike)
            if race.options.use_shares:
                for found in race.ranking[:TUNING.num_polished]:
                    race.take(polish(found), "shares of devices")


def _seed(race: _Race, tree: TreeSearch) -> list[Found]:
    """Try what the rounds may begin with; return what was simulated of all groups alike."""
    deployers = tree.deployers
    _attempt(race, seeds.data_parallel_choices(deployers), "data parallel", slack=1.0)
    _attempt(race, seeds.heft_choices(deployers), "HEFT", slack=1.0)
    for _ in range(TUNING.first_steps):
        if race.is_late:
            break
        race.take(tree.step(), "tree search")
    alike = [race.first]
    if not race.is_over:
        staged = ((deployer, choice) for deployer in deployers for choice in staged_choices(deployer))
        _attempt(race, staged, "pipeline of stages", slack=TUNING.slack)
    if not race.is_over:
        alike += _attempt(race, seeds.uniform_choices(deployers), "all groups alike", slack=TUNING.slack)
    if not race.is_over:
        _attempt(race, seeds.two_part_choices(alike), "two parts", slack=TUNING.slack)
    return alike


def _attempt(race: _Race, choices: Iterable[tuple[Deployer, seeds.Choice]], what: str, *, slack: float) -> list[Found]:
    """Return those of the deployments that take at most ``slack`` times as long as the best so far."""
    result = []
    for deployer, choice in choices:
        if race.is_late:
            break
        best = race.leader.evaluation
        limit_s = slack * best.seconds
        evaluation = deployer.evaluate_within(choice, limit_s) if best.fits else deployer.evaluate(choice)
        if evaluation is not None:
            result.append(Found(deployer=deployer, choice=choice, evaluation=evaluation))
            race.take(result[-1], what)
            race.keep(result[-1], what)
    return result


def _rounds(race: _Race) -> Iterator[int]:
    """Yield numbers of rounds until the limits are reached, or nothing gets better any more."""
    number, last_better, known = 0, 0, len(race.history)
    while not race.is_over:
        yield number
        if len(race.history) > known:
            known, last_better = len(race.history), number
        number += 1
        unlimited = race.options.cpu_seconds is None and race.options.max_simulations is None
        if unlimited and number - last_better > TUNING.patience:
            return


def _auto_rounds(race: _Race, whole: TreeSearch, alike: Sequence[Found]) -> None:
    deployers = whole.deployers
    twins = [deployer.twin() for deployer in deployers]
    race.deployers += twins
    chains = _make_chains(race, twins, alike)
    heats, num_steps = _heats(chains), TUNING.tree_steps
    with ThreadPoolExecutor(max_workers=1) as second_core:
        for number in _rounds(race):
            heat, anneal_steps = next(heats)
            annealed = second_core.submit(_anneal, race, heat, anneal_steps)
            tree = TreeSearch(deployers, whole.policy, start=_moved(race.leader, deployers)) if number % 2 else whole
            known, found = race.leader.key, []
            for _ in range(num_steps):
                step = tree.step()
                if step.key < known:
                    known = step.key
                    found.append((*race.clock(), step))
                if race.is_late:
                    break
            num_steps = TUNING.tree_steps if found else max(num_steps // 2, TUNING.tree_steps // 8)
            annealed.result()
            race.take_round(heat, found, f"round {number + 1}")
            if number % 4 == 3 and race.leader.key < chains[0].best.key:
                chains[0].current = chains[0].best = _moved(race.leader, twins)


def _make_chains(race: _Race, deployers: Sequence[Deployer], alike: Sequence[Found]) -> list[Annealer]:
    """Return annealings from the best seeds of each kind, the best first."""
    taste = seeds.find_taste(race.deployers[: len(deployers)], alike)
    starts = {(found.deployer.microbatches, found.choice): found for found in (*race.starts.values(), alike[0])}
    order = sorted(starts.values(), key=lambda found: found.key)
    limit = order[0].key[0], TUNING.far_off * order[0].key[1]
    return [Annealer(deployers, _moved(start, deployers), seed=race.options.seed + number, taste=taste,
                     clock=race.clock)
            for number, start in enumerate(order[:TUNING.max_chains]) if start.key <= limit]


def _heats(chains: list[Annealer]) -> Iterator[tuple[tuple[Annealer, ...], int]]:
    """Yield what to anneal, round by round, and for how many steps each.

    The better half goes on until few are left; these take turns then, the best every other time.

    ``chains`` are sorted and thinned out on the way.
    """
    every = list(chains)
    while len(chains) > TUNING.num_left:
        yield tuple(chains), TUNING.heat_steps // len(chains)
        chains.sort(key=lambda chain: chain.best.key)
        del chains[(len(chains) + 1) // 2 :]
    for number in itertools.count():
        chains.sort(key=lambda chain: chain.best.key)
        chain = chains[_ruler(number) % len(chains)]
        chain.peers = [peer.best.choice for peer in every if peer is not chain]
        yield (chain,), TUNING.anneal_steps


def _anneal(race: _Race, chains: Iterable[Annealer], num_steps: int) -> None:
    for chain in chains:
        chain.run(num_steps, hot=TUNING.hot, is_late=lambda: race.is_late)


def _moved(found: Found, deployers: Sequence[Deployer]) -> Found:
    """Return the same deployment for other deployers."""
    deployer = next(item for item in deployers if item.microbatches == found.deployer.microbatches)
    return deployer.find(found.choice)


def _ruler(number: int) -> int:
    """Return how often 2 divides ``number + 1``: 0 every other time, 1 every fourth time, and so on."""
    return ((number + 1) & -(number + 1)).bit_length() - 1


def _finish(race: _Race, problem: Problem) -> Deployment:
    """Return the best of the finalists as a checked plan."""
    best: tuple[Plan, Timeline] | None = None
    miss: NoFeasiblePlan | None = None
    for found in race.ranking:
        if not np.isfinite(found.evaluation.seconds) or (best is not None and race.best.budget.is_late):
            continue
        plan = deployment_plan(found.deployer, found.evaluation, by=f"deploy {race.options.method}")
        try:
            timeline = evaluate_plan(plan, problem)
        except NoFeasiblePlan as problem_found:
            miss = miss or problem_found
            continue
        if best is None or timeline.step_time_s < best[1].step_time_s:
            best = plan, timeline
    if best is None:
        assert miss is not None, "there is at least one finalist"
        if race.best.budget.is_late:
            raise NoFeasiblePlan(f"no deployment that fits was found within the time limit, though there may be one: "
                                 f"give it more time. Of the nearest: {miss}", missing_bytes=miss.missing_bytes,
                                 device=miss.device)
        if race.best.budget.is_interrupted:  # nothing is known yet
            raise KeyboardInterrupt from miss
        raise miss
    plan = with_search(best[0], status="feasible", step_time=best[1].step_time_s, bound=race.best.bound,
                       seed=race.options.seed)
    return Deployment(plan=plan, timeline=with_plan(best[1], plan), method=race.options.method, bound_s=race.best.bound,
                      num_simulations=race.num_simulations, cpu_seconds=race.seconds, history=tuple(race.history))
