"""Random training graphs in six families, for training the policy; the module ``cases`` says what is held out.

- ``mlp``: wide fully connected layers, by themselves or behind tables that tokens look rows up in (a recommender)
- ``vgg``: convolutions in a chain, then wide fully connected layers
- ``residual``: residual blocks of convolutions whose maps get smaller and deeper
- ``encoder``: attention and feed-forward layers over tokens or patches, then a small classifier
- ``unet``: maps that get smaller and larger again, with skips across
- ``towers``: two or three branches of different kinds that join at the end

A ``GraphDraft`` puts them together layer by layer, without PyTorch, with shapes, costs and memory as the tracer has them:

    draft = GraphDraft("two-layers", batch=32, dtype="float32")
    x = draft.input((784,))
    x = draft.relu(draft.linear(x, 256))
    graph = draft.finish(draft.linear(x, 10))

Every operator's backward costs follow the rule ``backward_source="rule"``: as much as its forward for the gradient of
its inputs, where one needs it, and once more for that of its parameters, where it multiplies by one. What is kept for
the backward is what PyTorch keeps: the operands of products, the inputs of norms, the results of activations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from weft.model.graph import NO_BATCH_DIM, Graph, TensorRole

Shape = tuple[int, ...]
_ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "int64": 8}
_ATTENTION_BACKWARD: Final = 2.5
"""Of its forward: attention computes its weights once more."""


@dataclass(slots=True, kw_only=True)
class _Tensor:
    name: str
    shape: Shape
    dtype: str
    role: TensorRole
    producer: int = -1
    base: int = -1
    is_batched: bool = True
    needs_gradient: bool = False
    is_saved: bool = False

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Op:
    name: str
    kind: str
    module: str
    inputs: tuple[int, ...]
    flops: float = 0.0
    bytes_read: float = 0.0
    bytes_written: float = 0.0
    input_grad_flops: float = 0.0
    input_grad_bytes: float = 0.0
    weight_grad_flops: float = 0.0
    weight_grad_bytes: float = 0.0
    saved_inside_bytes: float = 0.0


@dataclass(slots=True)
class GraphDraft:
    """A graph that grows; tensors are known by number. Shapes that methods take are without the batch."""

    name: str
    batch: int
    dtype: str
    module: str = ""
    """The module that the next operators belong to."""
    _tensors: list[_Tensor] = field(default_factory=list)
    _ops: list[_Op] = field(default_factory=list)
    _counts: dict[str, int] = field(default_factory=dict)

    def shape(self, tensor: int) -> Shape:
        """Return the shape of a tensor, batch first."""
        return self._tensors[tensor].shape

    # ---- tensors ----------------------------------------------------------------------------------------------------

    def input(self, shape: Shape, *, dtype: str | None = None) -> int:
        """Return an input of the model: one ``shape`` for each sample."""
        return self._tensor(self._unique("input"), (self.batch, *shape), dtype or self.dtype, TensorRole.INPUT)

    def _parameter(self, name: str, shape: Shape) -> int:
        path = self._unique(f"{self.module}.{name}" if self.module else name)
        return self._tensor(path, shape, self.dtype, TensorRole.PARAMETER, is_batched=False, needs_gradient=True)

    def _tensor(self, name: str, shape: Shape, dtype: str, role: TensorRole, **more: Any) -> int:
        self._tensors.append(_Tensor(name=name, shape=shape, dtype=dtype, role=role, **more))
        return len(self._tensors) - 1

    def _unique(self, name: str) -> str:
        count = self._counts.get(name, 0)
        self._counts[name] = count + 1
        return name if count == 0 else f"{name}_{count}"

    # ---- operators --------------------------------------------------------------------------------------------------

    def _op(self, kind: str, inputs: Sequence[int], shape: Shape, *, flops: float, saves: Sequence[int] = (),
            saves_output: bool = False, weight_flops: float = 0.0, inside: float = 0.0, factor: float = 1.0,
            dtype: str | None = None) -> int:
        """Return the result of an operator; ``saves`` are inputs that it keeps, ``factor`` its backward's part."""
        tensors = [self._tensors[index] for index in inputs]
        needs = [tensor.needs_gradient for tensor in tensors]
        is_parameter = [tensor.role == TensorRole.PARAMETER for tensor in tensors]
        has_input = any(need and not own for need, own in zip(needs, is_parameter, strict=True))
        read = float(sum(tensor.num_bytes for tensor in tensors))
        output = self._output(kind, shape, dtype=dtype, needs_gradient=any(needs), is_saved=saves_output and any(needs))
        moved = read + self._tensors[output].num_bytes
        weights = float(sum(tensor.num_bytes for tensor, own in zip(tensors, is_parameter, strict=True) if own))
        self._ops.append(_Op(
            name=self._tensors[output].name, kind=kind, module=self.module, inputs=tuple(dict.fromkeys(inputs)),
            flops=flops, bytes_read=read, bytes_written=moved - read, saved_inside_bytes=inside,
            input_grad_flops=factor * flops * has_input, input_grad_bytes=factor * moved * has_input,
            weight_grad_flops=weight_flops, weight_grad_bytes=moved if weight_flops else 2 * weights))
        for index in saves:
            base = self._tensors[index].base
            self._tensors[index if base < 0 else base].is_saved |= any(needs)
        return output

    def _output(self, kind: str, shape: Shape, *, dtype: str | None = None, **more: Any) -> int:
        plain = kind.removeprefix("aten.")
        name = self._unique(f"{self.module}.{plain}" if self.module else plain)
        return self._tensor(name, shape, dtype or self.dtype, TensorRole.ACTIVATION, producer=len(self._ops), **more)

    def view(self, kind: str, x: int, shape: Shape) -> int:
        """Return ``x`` seen with another shape; it costs nothing."""
        own = self._tensors[x]
        output = self._output(kind, shape, dtype=own.dtype, needs_gradient=own.needs_gradient,
                              base=x if own.base < 0 else own.base)
        self._ops.append(_Op(name=self._tensors[output].name, kind=kind, module=self.module, inputs=(x,)))
        return output

    def linear(self, x: int, width: int) -> int:
        """Return ``x`` times a weight, with a bias."""
        shape = self.shape(x)
        weight, bias = self._parameter("weight", (width, shape[-1])), self._parameter("bias", (width,))
        flops = 2.0 * math.prod(shape) * width
        return self._op("aten.linear", (x, weight, bias), (*shape[:-1], width), flops=flops, weight_flops=flops,
                        saves=(x,))

    def conv2d(self, x: int, channels: int, *, kernel: int = 3, stride: int = 1) -> int:
        """Return ``x`` (batch, channels, height, width) convolved, padded so that a stride of 1 keeps its size."""
        batch, own, height, width = self.shape(x)
        shape = (batch, channels, -(-height // stride), -(-width // stride))
        weight = self._parameter("weight", (channels, own, kernel, kernel))
        flops = 2.0 * math.prod(shape) * own * kernel**2
        return self._op("aten.conv2d", (x, weight), shape, flops=flops, weight_flops=flops, saves=(x,))

    def batch_norm(self, x: int) -> int:
        """Return ``x`` with every channel scaled by its own statistics."""
        channels = self.shape(x)[1]
        more = self._parameter("weight", (channels,)), self._parameter("bias", (channels,))
        return self._op("aten._native_batch_norm_legit_functional", (x, *more), self.shape(x), saves=(x,),
                        flops=5.0 * math.prod(self.shape(x)))

    def layer_norm(self, x: int) -> int:
        """Return ``x`` with its last dimension scaled."""
        width = self.shape(x)[-1]
        more = self._parameter("weight", (width,)), self._parameter("bias", (width,))
        return self._op("aten.layer_norm", (x, *more), self.shape(x), flops=7.0 * math.prod(self.shape(x)), saves=(x,))

    def relu(self, x: int) -> int:
        """Return what of ``x`` is above zero."""
        return self._op("aten.relu", (x,), self.shape(x), flops=math.prod(self.shape(x)), saves_output=True)

    def gelu(self, x: int) -> int:
        """Return ``x`` after a smooth activation."""
        return self._op("aten.gelu", (x,), self.shape(x), flops=2.0 * math.prod(self.shape(x)), saves=(x,))

    def add(self, x: int, y: int) -> int:
        """Return the sum of two tensors of the same shape."""
        return self._op("aten.add", (x, y), self.shape(x), flops=math.prod(self.shape(x)), factor=0.0)

    def mul(self, x: int, y: int) -> int:
        """Return the product of two tensors, element by element."""
        return self._op("aten.mul", (x, y), self.shape(x), flops=math.prod(self.shape(x)), factor=2.0, saves=(x, y))

    def cat(self, parts: Sequence[int]) -> int:
        """Return the tensors joined along their first dimension after the batch."""
        first = self.shape(parts[0])
        shape = (first[0], sum(self.shape(part)[1] for part in parts), *first[2:])
        return self._op("aten.cat", parts, shape, flops=0.0)

    def pool(self, x: int) -> int:
        """Return the largest of every two by two pixels."""
        batch, channels, height, width = self.shape(x)
        shape = (batch, channels, max(1, height // 2), max(1, width // 2))
        return self._op("aten.max_pool2d", (x,), shape, flops=math.prod(self.shape(x)), saves=(x,),
                        inside=8.0 * math.prod(shape))

    def upsample(self, x: int) -> int:
        """Return ``x`` with twice the height and width."""
        batch, channels, height, width = self.shape(x)
        shape = (batch, channels, 2 * height, 2 * width)
        return self._op("aten.upsample_nearest2d", (x,), shape, flops=math.prod(shape))

    def mean_pixels(self, x: int) -> int:
        """Return the mean over height and width as (batch, channels)."""
        mean = self._op("aten.adaptive_avg_pool2d", (x,), (*self.shape(x)[:2], 1, 1), flops=math.prod(self.shape(x)))
        return self.flatten(mean)

    def mean_rows(self, x: int) -> int:
        """Return the mean over the dimension after the batch."""
        shape = self.shape(x)
        return self._op("aten.mean", (x,), (shape[0], *shape[2:]), flops=math.prod(shape))

    def flatten(self, x: int) -> int:
        """Return each sample as one row."""
        return self.view("aten.flatten", x, (self.batch, math.prod(self.shape(x)[1:])))

    def embedding(self, tokens: int, num_rows: int, width: int) -> int:
        """Return a row of a table for every token; the gradient is as large as the table."""
        weight = self._parameter("weight", (num_rows, width))
        shape = (*self.shape(tokens), width)
        return self._op("aten.embedding", (weight, tokens), shape, flops=0.0, weight_flops=float(num_rows * width),
                        saves=(tokens,))

    def attention(self, query: int, key: int, value: int, num_heads: int) -> int:
        """Return (batch, rows, width) tensors attended to, head by head."""
        batch, rows, width = self.shape(query)
        others = self.shape(key)[1]
        heads = [self._heads(tensor, num_heads) for tensor in (query, key, value)]
        mixed = self._op("aten.scaled_dot_product_attention", heads, self.shape(heads[0]), saves=heads,
                         saves_output=True, flops=4.0 * batch * rows * others * width, factor=_ATTENTION_BACKWARD)
        turned = self.view("aten.transpose", mixed, (batch, rows, num_heads, width // num_heads))
        return self.view("aten.reshape", turned, (batch, rows, width))

    def _heads(self, x: int, num_heads: int) -> int:
        batch, rows, width = self.shape(x)
        split = self.view("aten.reshape", x, (batch, rows, num_heads, width // num_heads))
        return self.view("aten.transpose", split, (batch, num_heads, rows, width // num_heads))

    # ---- the result -------------------------------------------------------------------------------------------------

    def finish(self, scores: int) -> Graph:
        """Return the graph with the mean cross entropy of ``scores`` (classes last) as its loss."""
        self.module = ""
        labels = self.input(self.shape(scores)[1:-1], dtype="int64")
        loss = self._op("aten.cross_entropy_loss", (scores, labels), (), flops=6.0 * math.prod(self.shape(scores)),
                        inside=float(self._tensors[scores].num_bytes))
        self._tensors[loss].is_batched = False
        starts = np.cumsum([0] + [len(op.inputs) for op in self._ops])
        return Graph(
            name=self.name, batch=self.batch, outputs=(loss,), has_backward=True, backward_source="rule",
            **_op_columns(self._ops), **_tensor_columns(self._tensors), input_start=starts.astype(np.int64),
            inputs=np.asarray([tensor for op in self._ops for tensor in op.inputs], dtype=np.int64))


_NUMBERS: Final = ("flops", "bytes_read", "bytes_written", "input_grad_flops", "input_grad_bytes",
                   "weight_grad_flops", "weight_grad_bytes", "saved_inside_bytes")


def _op_columns(ops: Sequence[_Op]) -> dict[str, Any]:
    return {
        "op_names": tuple(op.name for op in ops), "op_kinds": tuple(op.kind for op in ops),
        "op_modules": tuple(op.module for op in ops), "is_constant": np.zeros(len(ops), dtype=np.bool_),
        **{name: np.asarray([getattr(op, name) for op in ops], dtype=np.float64) for name in _NUMBERS}}


def _tensor_columns(tensors: Sequence[_Tensor]) -> dict[str, Any]:
    def whole(values: Sequence[int]) -> Any:
        return np.asarray(values, dtype=np.int64)

    return {
        "tensor_names": tuple(tensor.name for tensor in tensors),
        "tensor_shapes": tuple(tensor.shape for tensor in tensors),
        "tensor_dtypes": tuple(tensor.dtype for tensor in tensors),
        "tensor_role": whole([tensor.role for tensor in tensors]),
        "tensor_producer": whole([tensor.producer for tensor in tensors]),
        "tensor_bytes": whole([tensor.num_bytes for tensor in tensors]),
        "tensor_base": whole([tensor.base for tensor in tensors]),
        "is_saved": np.asarray([tensor.is_saved for tensor in tensors], dtype=np.bool_),
        "tensor_batch_dim": whole([0 if tensor.is_batched else NO_BATCH_DIM for tensor in tensors])}


def random_model(family: str, rng: np.random.Generator, *, name: str, batch: int, dtype: str) -> Graph:
    """Return a random training graph of a family."""
    draft = GraphDraft(name, batch, dtype)
    return draft.finish(FAMILIES[family](draft, rng))


def _pick(rng: np.random.Generator, *values: int) -> int:
    return int(rng.choice(np.asarray(values)))


def _between(rng: np.random.Generator, low: int, high: int) -> int:
    return int(rng.integers(low, high + 1))


def _width(rng: np.random.Generator, low: int, high: int) -> int:
    """Return a multiple of 64, small ones as likely as large ones."""
    return 64 * max(1, round(float(np.exp(rng.uniform(np.log(low), np.log(high)))) / 64))


# ---- families -------------------------------------------------------------------------------------------------------


def _mlp(draft: GraphDraft, rng: np.random.Generator) -> int:
    x = _tables(draft, rng) if rng.random() < 0.5 else draft.input((_width(rng, 256, 8192),))
    x = _dense_layers(draft, rng, x, num_layers=_between(rng, 3, 20), low=512, high=16384)
    return _head(draft, x, _pick(rng, 10, 100, 1000, 20000))


def _tables(draft: GraphDraft, rng: np.random.Generator) -> int:
    """Return rows of several tables beside each other, as a recommender begins."""
    width, parts = _pick(rng, 16, 32, 64, 128), []
    for index in range(_between(rng, 2, 8)):
        draft.module = f"tables.{index}"
        tokens = draft.input((_pick(rng, 1, 1, 4, 20),), dtype="int64")
        rows = draft.embedding(tokens, _width(rng, 10_000, 2_000_000), width)
        parts.append(draft.mean_rows(rows))
    draft.module = "join"
    return draft.cat(parts)


def _dense_layers(draft: GraphDraft, rng: np.random.Generator, x: int, *, num_layers: int, low: int, high: int) -> int:
    width, is_even = _width(rng, low, high), rng.random() < 0.5
    for index in range(num_layers):
        draft.module = f"dense.{index}"
        x = draft.relu(draft.linear(x, width if is_even else _width(rng, low, high)))
    return x


def _head(draft: GraphDraft, x: int, num_classes: int) -> int:
    draft.module = "head"
    return draft.linear(x, num_classes)


def _vgg(draft: GraphDraft, rng: np.random.Generator) -> int:
    size = _pick(rng, 32, 64, 96, 128, 224)
    x = draft.input((3, size, size))
    channels, block = _pick(rng, 16, 32, 48, 64), 0
    while draft.shape(x)[2] > 7:
        for layer in range(_between(rng, 1, 4)):
            draft.module = f"features.{block}.{layer}"
            x = draft.relu(draft.conv2d(x, channels))
        x, channels, block = draft.pool(x), min(2 * channels, 512), block + 1
    x = draft.flatten(x)
    x = _dense_layers(draft, rng, x, num_layers=_between(rng, 1, 3), low=1024, high=8192)
    return _head(draft, x, _pick(rng, 10, 100, 1000))


def _residual(draft: GraphDraft, rng: np.random.Generator) -> int:
    x = _stem(draft, rng)
    channels, has_neck = draft.shape(x)[1], bool(rng.random() < 0.5)
    for stage in range(_between(rng, 3, 5)):
        for layer in range(_between(rng, 1, 8)):
            draft.module = f"stages.{stage}.{layer}"
            x = _residual_block(draft, x, channels, stride=2 if stage and layer == 0 else 1, has_neck=has_neck)
        channels *= 2
    return _head(draft, draft.mean_pixels(x), _pick(rng, 10, 100, 1000))


def _stem(draft: GraphDraft, rng: np.random.Generator) -> int:
    size = _pick(rng, 64, 128, 160, 224, 256)
    draft.module = "stem"
    x = draft.conv2d(draft.input((3, size, size)), _pick(rng, 32, 48, 64, 96), kernel=7, stride=2)
    return draft.pool(draft.relu(draft.batch_norm(x)))


def _residual_block(draft: GraphDraft, x: int, channels: int, *, stride: int, has_neck: bool) -> int:
    out = 4 * channels if has_neck else channels
    plan = ((channels, 1, 1), (channels, 3, stride), (out, 1, 1)) if has_neck else (
        (channels, 3, stride), (out, 3, 1))
    y = x
    for index, (width, kernel, step) in enumerate(plan):
        y = draft.batch_norm(draft.conv2d(y, width, kernel=kernel, stride=step))
        y = y if index == len(plan) - 1 else draft.relu(y)
    if draft.shape(x) != draft.shape(y):
        x = draft.batch_norm(draft.conv2d(x, out, kernel=1, stride=stride))
    return draft.relu(draft.add(y, x))


def _encoder(draft: GraphDraft, rng: np.random.Generator) -> int:
    width = _width(rng, 192, 4096)
    x = _tokens(draft, rng, width) if rng.random() < 0.5 else _patches(draft, rng, width)
    x = _encoder_layers(draft, x, num_layers=_between(rng, 2, 24), ratio=_pick(rng, 2, 4, 4, 8))
    return _head(draft, draft.mean_rows(draft.layer_norm(x)), _pick(rng, 2, 10, 1000))


def _tokens(draft: GraphDraft, rng: np.random.Generator, width: int) -> int:
    draft.module = "embed"
    return draft.embedding(draft.input((_pick(rng, 32, 64, 128, 256, 384, 512),), dtype="int64"),
                           _width(rng, 1000, 60_000), width)


def _patches(draft: GraphDraft, rng: np.random.Generator, width: int) -> int:
    draft.module = "patches"
    x = draft.conv2d(draft.input((3, 224, 224)), width, kernel=16, stride=_pick(rng, 14, 16, 32))
    batch, _, height, wide = draft.shape(x)
    flat = draft.view("aten.flatten", x, (batch, width, height * wide))
    return draft.view("aten.transpose", flat, (batch, height * wide, width))


def _encoder_layers(draft: GraphDraft, x: int, *, num_layers: int, ratio: int) -> int:
    width = draft.shape(x)[-1]
    for index in range(num_layers):
        draft.module = f"layers.{index}.attention"
        before = draft.layer_norm(x)
        query, key, value = (draft.linear(before, width) for _ in range(3))
        mixed = draft.attention(query, key, value, width // 64)
        x = draft.add(draft.linear(mixed, width), x)
        draft.module = f"layers.{index}.feed_forward"
        x = draft.add(draft.linear(draft.gelu(draft.linear(draft.layer_norm(x), ratio * width)), width), x)
    return x


def _unet(draft: GraphDraft, rng: np.random.Generator) -> int:
    size, levels = _pick(rng, 64, 96, 128), _between(rng, 2, 4)
    x, channels, skips = draft.input((3, size, size)), _pick(rng, 16, 32, 48, 64), []
    num_layers = _between(rng, 1, 3)
    for level in range(levels):
        x = _map_layers(draft, x, channels << level, num_layers, f"down.{level}")
        skips.append(x)
        x = draft.pool(x)
    x = _map_layers(draft, x, channels << levels, num_layers, "middle")
    for level in reversed(range(levels)):
        draft.module = f"up.{level}.join"
        x = draft.cat((draft.upsample(x), skips[level]))
        x = _map_layers(draft, x, channels << level, num_layers, f"up.{level}")
    return _head(draft, draft.mean_pixels(x), _pick(rng, 10, 100, 1000))


def _map_layers(draft: GraphDraft, x: int, channels: int, num_layers: int, name: str) -> int:
    for layer in range(num_layers):
        draft.module = f"{name}.{layer}"
        x = draft.relu(draft.batch_norm(draft.conv2d(x, channels)))
    return x


def _towers(draft: GraphDraft, rng: np.random.Generator) -> int:
    kinds = (_dense_tower, _map_tower, _token_tower)
    ends = []
    for index in range(_between(rng, 2, 3)):
        ends.append(kinds[_between(rng, 0, len(kinds) - 1)](draft, rng))
        draft.module = f"ends.{index}"
        ends[-1] = draft.linear(ends[-1], 512)
    draft.module = "join"
    x = draft.mul(ends[0], ends[1]) if len(ends) == 2 and rng.random() < 0.5 else draft.cat(ends)
    x = _dense_layers(draft, rng, x, num_layers=_between(rng, 1, 4), low=512, high=4096)
    return _head(draft, x, _pick(rng, 10, 1000, 10_000))


def _dense_tower(draft: GraphDraft, rng: np.random.Generator) -> int:
    x = draft.input((_width(rng, 256, 4096),))
    return _dense_layers(draft, rng, x, num_layers=_between(rng, 2, 8), low=512, high=6144)


def _map_tower(draft: GraphDraft, rng: np.random.Generator) -> int:
    x = _stem(draft, rng)
    for level in range(_between(rng, 2, 4)):
        x = _map_layers(draft, x, min(64 << level, 512), _between(rng, 1, 4), f"maps.{level}")
        x = draft.pool(x)
    return draft.mean_pixels(x)


def _token_tower(draft: GraphDraft, rng: np.random.Generator) -> int:
    x = _tokens(draft, rng, _width(rng, 192, 1024))
    return draft.mean_rows(_encoder_layers(draft, x, num_layers=_between(rng, 2, 8), ratio=4))


FAMILIES: Final[Mapping[str, Callable[[GraphDraft, np.random.Generator], int]]] = {
    "mlp": _mlp, "vgg": _vgg, "residual": _residual, "encoder": _encoder, "unet": _unet, "towers": _towers}
"""What adds a model of each family to a draft and returns its scores."""
