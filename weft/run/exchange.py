"""The ways in which the gradients of a bucket become equal on all ranks that hold its parameters, and when they begin.

``make_exchange`` returns the function that starts the exchange of one bucket. ``all_reduce`` is one collective of the
backend; the other methods have several steps and run beside the program on a ``Lane``:

    hierarchical        sum in each group at its first rank, all-reduce among the first ranks, send back in the group
    parameter_server    everyone sends to the server, which adds in the order of ranks and sends the sum to everyone
    sufficient_factors  rows of factors are gathered instead of sums, and multiplied by every rank

An exchange may be issued inside a backward, when the gradients of its parameters are final. PyTorch calls a hook when
it has added a gradient to ``parameter.grad``, once in a backward even if many operators read the parameter. The hooks
are there during one backward only, the last that adds to these gradients (``weft.plan.program`` says which). In what
order they are called does not matter: an exchange waits for those before it in the rank's list, so that every rank
issues them in the same order. What the hooks have not issued when the backward is done, because the loss does not
depend on a parameter after all, is issued after it.

For ``sufficient_factors``, ``collect_factors`` rewrites a stage so that the backward of a linear operator leaves its
factors in the rank's ``FactorBlock`` instead of multiplying them, over all micro-batches of a step:

    block:   [input of use 0 | gradient of use 0 | input of use 1 | gradient of use 1 | ... | up to the largest block]

An input that several uses have in common (query, key and value) is there once. Blocks are gathered, and every rank
forms the same products of the same numbers in the same order, so that on like devices the gradients are equal bit for
bit. Losses were weighted before the backward, so factors carry the weights of uneven shares. What else reads such a
parameter adds to its gradient as always, and that part is summed over the ranks. Shapes: N rows (samples and positions
of a step), I and O columns of an operator's input and output.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils.hooks import RemovableHandle

from weft.base.errors import RunError
from weft.model.graph import I64, Graph
from weft.plan.factors import Factors, LinearUse, block_size, bucket_rows, factor_widths
from weft.plan.program import Bucket, Program
from weft.run.cells import Transfer
from weft.run.clock import Clock, Moment
from weft.run.compiled import Compiler
from weft.run.lane import Lane
from weft.run.parameters import Parameters
from weft.run.split_backward import MatmulGradient, attributes_of, linear_call, split_matmul
from weft.run.stage import StageModule
from weft.run.transport import Transport
from weft.run.wire import Work

Start = Callable[[], Sequence[Work]]


def lane_groups(program: Program) -> Iterator[tuple[int, ...]]:
    """Yield the groups of ranks that exchanges on lanes run over, sorted, in the same order on every rank."""
    for bucket in program.buckets:
        if bucket.method == "hierarchical":
            yield from (tuple(sorted(group)) for group in bucket.groups)
            yield _leaders(bucket)
        elif bucket.method != "all_reduce":
            yield bucket.ranks


def lane_pairs(program: Program) -> Iterator[tuple[int, int]]:
    """Yield (source, target) of the messages that exchanges on lanes send."""
    for bucket in program.buckets:
        if bucket.method == "parameter_server" and bucket.server is not None:
            for rank in bucket.ranks:
                if rank != bucket.server:
                    yield from ((rank, bucket.server), (bucket.server, rank))


def make_exchange(program: Program, index: int, *, parameters: Parameters, factors: Mapping[int, FactorBlock],
                  transport: Transport, lane: Lane, later: list[Callable[[], None]] | None) -> Start:
    """Return what starts the exchange of a bucket; its works end when the gradients are there.

    What is left to compute then is added to ``later``; where that is None, waiting for the works computes it.
    """
    bucket, flat = program.buckets[index], parameters.flat[index]
    if bucket.is_of_unit:
        store = next(parameters.units.stores[unit] for unit in bucket.units if unit in parameters.units.stores)
        return store.start(bucket, transport, lane)
    match bucket.method:
        case "all_reduce":
            return lambda: [transport.all_reduce(tensor, bucket.ranks) for tensor in flat]
        case "hierarchical":
            exchange = _hierarchical(bucket, transport)
        case "parameter_server":
            exchange = _parameter_server(bucket, transport)
        case "sufficient_factors":
            block = factors[index]
            factored = FactorExchange(program, bucket, block, parameters=parameters, transport=transport)
            if later is not None:
                later.append(factored.multiply)

            def start() -> Sequence[Work]:
                block.complete()
                return [lane.submit(factored.gather, then=factored.multiply if later is None else None)]

            return start

    def run() -> None:
        for tensor in flat:
            transport.through_wire(tensor, exchange)

    return lambda: [lane.submit(run)]


def _leaders(bucket: Bucket) -> tuple[int, ...]:
    return tuple(sorted(group[0] for group in bucket.groups))


def _hierarchical(bucket: Bucket, transport: Transport) -> Callable[[Tensor], None]:
    mine = next(group for group in bucket.groups if transport.rank in group)
    inside, leaders = transport.lane_group(tuple(sorted(mine))), transport.lane_group(_leaders(bucket))

    def exchange(tensor: Tensor) -> None:
        if inside is not None:
            inside.sum_at(tensor, mine[0])
        if leaders is not None and transport.rank == mine[0]:
            leaders.sum_all(tensor)
        if inside is not None:
            inside.spread(tensor, mine[0])

    return exchange


def _parameter_server(bucket: Bucket, transport: Transport) -> Callable[[Tensor], None]:
    group, server = transport.lane_group(bucket.ranks), bucket.server
    assert group is not None, "an exchange is among several ranks"
    assert server is not None, "the plan was checked"
    others = [rank for rank in bucket.ranks if rank != server]

    def serve(tensor: Tensor) -> None:
        received = [torch.empty_like(tensor) for _ in others]
        group.receive(*zip(received, others, strict=True))
        for item in received:
            tensor.add_(item)
        group.send(tensor, *others)

    def ask(tensor: Tensor) -> None:
        group.send(tensor, server)
        group.receive((tensor, server))

    return serve if transport.rank == server else ask


@dataclass(frozen=True, slots=True, kw_only=True)
class Early:
    """One exchange that may be issued inside a backward."""

    position: int
    """Of its instruction."""
    parameters: Sequence[torch.nn.Parameter | FactorRows]
    """Those of its parameters whose gradients the backward makes final, and the factors that it completes."""
    issue: Callable[[], None]
    transfer: Transfer


class EarlyExchanges:
    """The exchanges of one backward, in the order of the list; a context that encloses the backward."""

    def __init__(self, items: Sequence[Early], *, starts: list[Moment], clock: Clock,
                 compiler: Compiler | None = None, num_uses: Mapping[int, int] | None = None) -> None:
        """Compiled pieces tell the ``compiler`` of gradients; ``num_uses`` says how often one is added to."""
        self.items = list(items)
        self._starts, self._clock, self._compiler, self._num_uses = starts, clock, compiler, num_uses or {}
        self._missing: list[int] = []
        self._issued: list[Moment] = []
        """When each exchange was issued, so far."""
        self._handles: list[Any] = []
        self._seen = 0
        """So many exchanges were seen to be done."""

    def __enter__(self) -> None:
        """Watch the parameters, and issue what waits for none of them."""
        self._missing = [sum(self._num_uses.get(id(parameter), 1) for parameter in item.parameters)
                         for item in self.items]
        self._issued, self._seen = [], 0
        self._handles = [parameter.register_post_accumulate_grad_hook(self._counter(number))
                         for number, item in enumerate(self.items) for parameter in item.parameters]
        if self._compiler is not None:
            self._compiler.added = self._added
        self._issue()

    def __exit__(self, *_: object) -> None:
        """Leave the parameters alone."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._compiler is not None:
            self._compiler.added = None

    def _added(self, parameters: Sequence[Tensor]) -> None:
        changed = {id(parameter) for parameter in parameters}
        for number, item in enumerate(self.items):
            for parameter in item.parameters:
                if id(parameter) in changed:
                    self._counter(number)(parameter)

    def instruction(self, number: int) -> Callable[[], None]:
        """Return what the instruction of an exchange does, after the backward: issue it, unless that was done."""
        item = self.items[number]

        def action() -> None:
            if number < len(self._issued):
                self._starts[item.position] = self._issued[number]
            else:
                item.issue()

        return action

    def _counter(self, number: int) -> Callable[[Any], None]:
        def hook(_: Any) -> None:
            self._missing[number] -= 1
            if self._missing[number] == 0:
                self._issue()
            elif self._seen < len(self._issued) and self.items[self._seen].transfer.is_seen_done():
                self._seen += 1

        return hook

    def _issue(self) -> None:
        while (number := len(self._issued)) < len(self.items) and self._missing[number] == 0:
            self._issued.append(self._clock.now())
            self.items[number].issue()


class _Rows:
    """Room for the rows of one tensor."""

    __slots__ = ("filled", "rows_NC")

    def __init__(self, rows_NC: Tensor) -> None:
        self.rows_NC, self.filled = rows_NC, 0

    def put(self, first: int, values: Tensor) -> None:
        """Copy rows to their place, unless another reader of the tensor has done so."""
        if first == self.filled:
            self.filled = first + len(values)
            self.rows_NC[first : self.filled].copy_(values)

    def complete(self) -> None:
        """Let what no backward has reached be zero, and start anew."""
        if self.filled < len(self.rows_NC):
            self.rows_NC[self.filled :].zero_()
        self.filled = 0


class FactorRows:
    """Room for the factors of one operator; as a queue of ``split_matmul`` it copies what comes into the room.

    They are copied because what arrives from other stages lies in buffers that are used again.
    """

    __slots__ = ("expected", "gradient", "hooks", "input", "use")

    def __init__(self, use: LinearUse, input_: _Rows, gradient: _Rows) -> None:
        self.use, self.input, self.gradient = use, input_, gradient
        self.expected = 0
        """Rows that the stages of the rank will give."""
        self.hooks: OrderedDict[int, Callable[[FactorRows], None]] = OrderedDict()
        """Called when a backward has given its rows."""

    @property
    def capacity(self) -> int:
        """Return how many rows there is room for."""
        return len(self.gradient.rows_NC)

    @property
    def pending(self) -> FactorRows:
        """Return what ``append`` is called on."""
        return self

    def append(self, item: MatmulGradient) -> None:
        """Take the factors of one backward."""
        first = self.gradient.filled
        for room, rows in zip((self.gradient, self.input), item.factors(), strict=True):
            room.put(first, rows)
        for hook in self.hooks.values():
            hook(self)

    def register_post_accumulate_grad_hook(self, hook: Callable[[FactorRows], None]) -> RemovableHandle:
        """Call the hook whenever a backward has given its rows, as a parameter does for its gradient."""
        handle = RemovableHandle(self.hooks)
        self.hooks[handle.id] = hook
        return handle


@dataclass(frozen=True, kw_only=True, eq=False)
class FactorBlock:
    """What one rank has for the others of a bucket; see the module's docstring."""

    flat: Tensor
    rows: Mapping[str, FactorRows]
    """By operator."""
    rooms: Sequence[_Rows]
    """All that is in the block."""
    counts: Mapping[int, tuple[int, ...]]
    """For each rank its number of rows for each use."""

    def filled_by(self, ops: I64) -> list[FactorRows]:
        """Return what the backward of these operators fills."""
        inside = frozenset(ops.tolist())
        return [rows for rows in self.rows.values() if rows.use.op in inside]

    def complete(self) -> None:
        """Make the block ready to be sent, and let the next step fill it anew."""
        for room in self.rooms:
            room.complete()


def make_blocks(program: Program, rank: int, device: torch.device) -> dict[int, FactorBlock]:
    """Return the blocks of a rank, by bucket."""
    return {index: _make_block(program, bucket, rank, device) for index, bucket in enumerate(program.buckets)
            if bucket.method == "sufficient_factors" and rank in bucket.ranks}


def _make_block(program: Program, bucket: Bucket, rank: int, device: torch.device) -> FactorBlock:
    graph, factors = program.graph, bucket.factors
    counts = bucket_rows(program, bucket)
    largest = max(block_size(graph, factors, rows) for rows in counts.values())
    dtype: torch.dtype = getattr(torch, graph.tensor_dtypes[bucket.parameters[0]])
    flat = torch.zeros(largest, dtype=dtype, device=device)
    views = _views(graph, factors, counts[rank], flat)
    rooms = {id(view): _Rows(view) for pair in views for view in pair}
    rows = {graph.op_names[use.op]: FactorRows(use, rooms[id(inputs)], rooms[id(gradients)])
            for use, (inputs, gradients) in zip(factors.uses, views, strict=True)}
    return FactorBlock(flat=flat, rows=rows, rooms=tuple(rooms.values()), counts=counts)


def _views(graph: Graph, factors: Factors, rows: tuple[int, ...], flat: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return (rows of the input, rows of the gradient) of each use in a block with these numbers of rows."""
    views: list[tuple[Tensor, Tensor]] = []
    rest = flat
    for use, count in zip(factors.uses, rows, strict=True):
        num_in, num_out = factor_widths(graph, use)
        if use.takes_input_of is None:
            input_NI, rest = rest[: count * num_in].view(count, num_in), rest[count * num_in :]
        else:
            input_NI = views[use.takes_input_of][0]
        gradient_NO, rest = rest[: count * num_out].view(count, num_out), rest[count * num_out :]
        views.append((input_NI, gradient_NO))
    return views


def summed_in(graph: Graph, ops: I64, bucket: Bucket) -> list[int]:
    """Return the parameters of a bucket whose gradients these operators leave as sums, not as factors."""
    factored: set[tuple[int | None, int]] = set()
    for use in bucket.factors.uses:
        factored |= {(use.weight, use.op if use.transpose is None else use.transpose), (use.bias, use.op)}
    read = {tensor for op in ops.tolist() for tensor in graph.op_inputs(op).tolist() if (tensor, op) not in factored}
    return [tensor for tensor in bucket.parameters if tensor in read]


# ---- in the stages --------------------------------------------------------------------------------------------------


def collect_factors(module: StageModule, blocks: Mapping[int, FactorBlock], *, num_microbatches: int) -> StageModule:
    """Return the stage with the operators of the blocks rewritten, in place, so that they leave their factors there."""
    known = {name: rows for block in blocks.values() for name, rows in block.rows.items()}
    renamed: dict[Node, Node] = {}
    for node, name in module.op_names.items():
        if name in known and node.op == "call_function":  # not what comes from another stage under its name
            renamed[node] = _rewrite(module, node, name, known[name], num_microbatches)
    if not renamed:
        return module
    module.module.graph.eliminate_dead_code()
    module.module.recompile()
    return replace(module, op_names={renamed.get(node, node): name for node, name in module.op_names.items()},
                   tensor_names={renamed.get(node, node): name for node, name in module.tensor_names.items()})


def _rewrite(module: StageModule, node: Node, name: str, rows: FactorRows, num_microbatches: int) -> Node:
    call = linear_call(node, attributes_of(module.module))
    if call is None or call[3] != rows.use.gradient_left:
        raise RunError(f"operator {name!r} ({node.target}) multiplies by its weight in a way that sufficient_factors "
                       "does not know: exchange its parameters by all_reduce")
    x, weight, bias, transposed = call
    value = node.meta["val"]
    rows.expected += value.numel() // value.shape[-1] * num_microbatches
    graph, attribute = module.module.graph, f"factors_of_{node.name}"
    setattr(module.module, attribute, rows)
    with graph.inserting_before(node):
        queue = graph.create_node("get_attr", attribute)
        if bias is None or rows.use.bias is not None:
            new = graph.call_function(split_matmul, (x, weight, bias, transposed, queue))
        else:  # the bias is exchanged otherwise, so autograd must see it
            product = graph.call_function(split_matmul, (x, weight, None, transposed, queue))
            new = graph.call_function(torch.ops.aten.add.Tensor, (product, bias))
    new.meta = node.meta
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return new


def check_rows(blocks: Mapping[int, FactorBlock]) -> None:
    """Raise ``RunError`` if the stages give other numbers of rows than the other ranks will assume."""
    for block in blocks.values():
        for name, rows in block.rows.items():
            if rows.expected != rows.capacity:
                raise RunError(f"operator {name!r} has {rows.expected} rows in a step, not {rows.capacity}, which "
                               "its samples would give: exchange its parameters by all_reduce")


# ---- the exchange ---------------------------------------------------------------------------------------------------


class FactorExchange:
    """The exchange of one bucket: blocks are gathered beside the program, and multiplied after that, as part of it."""

    def __init__(self, program: Program, bucket: Bucket, block: FactorBlock, *, parameters: Parameters,
                 transport: Transport) -> None:
        names, factors = program.graph.tensor_names, bucket.factors
        self._program, self._bucket, self._block, self._transport = program, bucket, block, transport
        self._group = transport.lane_group(bucket.ranks)
        self._shared = [parameters.tensors[names[tensor]] for tensor in factors.shared]
        self._results = [(parameters.tensors[names[tensor]], is_weight, tensor in factors.shared,
                          [place for place, use in enumerate(factors.uses)
                           if tensor == (use.weight if is_weight else use.bias)])
                         for tensor, is_weight in _made_by(factors)]
        """Parameters whose gradients come from factors: as a weight or not, whether added, and places of the uses."""
        self._gathered: Tensor | None = None

    def gather(self) -> None:
        """Sum what was not made of factors, and get the blocks of all ranks."""
        assert self._group is not None, "an exchange is among several ranks"
        for parameter in self._shared:
            self._transport.through_wire(parameter.grad, self._group.sum_all)
        self._gathered = self._group.gather(self._transport.on_wire(self._block.flat))

    def multiply(self) -> None:
        """Set the gradients of the bucket's parameters."""
        if self._gathered is None:
            return
        gathered, self._gathered = self._gathered.to(self._block.flat.device), None
        if gathered.is_cuda:  # its memory is the lane's, and must not be used again while this stream reads it
            gathered.record_stream(torch.cuda.current_stream(gathered.device))
        uses = self._bucket.factors.uses
        views = [_views(self._program.graph, self._bucket.factors, self._block.counts[rank], gathered[place])
                 for place, rank in enumerate(self._bucket.ranks)]
        with torch.no_grad():
            for parameter, is_weight, adds, places in self._results:
                if parameter.requires_grad:
                    parts = [(*rank[place], uses[place].gradient_left) for place in places for rank in views]
                    _set_gradient(parameter.grad, parts, is_weight=is_weight, adds=adds)


def _made_by(factors: Factors) -> list[tuple[int, bool]]:
    """Return the parameters that factors give a gradient to, and whether as a weight or as a bias."""
    weights = [(use.weight, True) for use in factors.uses]
    biases = [(use.bias, False) for use in factors.uses if use.bias is not None]
    return sorted(dict.fromkeys([*weights, *biases]))


def _set_gradient(gradient: Tensor | None, parts: list[tuple[Tensor, Tensor, bool]], *, is_weight: bool,
                  adds: bool) -> None:
    """Set a gradient, given (rows of the input, rows of the gradient, whether the latter are left).

    Where it ``adds``, the gradient has another part, which is there already.
    """
    assert gradient is not None, "the gradients of buckets are views of flat tensors"
    if not is_weight:
        total = torch.cat([gradient_NO for _, gradient_NO, _ in parts]).sum(0).view(gradient.shape)
        gradient.copy_(gradient + total if adds else total)
        return
    left = torch.cat([gradient_NO if is_left else input_NI for input_NI, gradient_NO, is_left in parts])
    right = torch.cat([input_NI if is_left else gradient_NO for input_NI, gradient_NO, is_left in parts])
    if adds:
        gradient.addmm_(left.t(), right)
    else:
        torch.mm(left.t(), right, out=gradient)
