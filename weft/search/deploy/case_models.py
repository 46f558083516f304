"""Random training graphs in six families, for training the policy; ``weft.search.deploy.cases`` says what is held out.

- ``mlp``: wide fully connected layers, by themselves or behind tables that tokens look rows up in (a recommender)
- ``vgg``: convolutions in a chain, then wide fully connected layers
- ``residual``: residual blocks of convolutions whose maps get smaller and deeper
- ``encoder``: attention and feed-forward layers over tokens or patches, then a small classifier
- ``unet``: maps that get smaller and larger again, with skips across
- ``towers``: two or three branches of different kinds that join at the end
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from weft.model.graph import Graph
from weft.search.deploy.case_graph import GraphDraft


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
