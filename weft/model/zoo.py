"""Named models to plan with, built from configurations alone: no weights are downloaded, none are allocated.

``gpt2`` is GPT-2; ``gpt2:layers=4,seq=128`` is GPT-2 cut to four layers at sequence length 128. Each model's forward
takes plain tensors. For training it returns one number, the mean loss over the batch, and the labels are an input; for
inference it returns the logits. Dropout is off, so that a run on many devices can equal a run on one.

``zoo.toml`` is the table; ``weft.model.zoo_models`` makes the modules and their inputs. This module imports neither
PyTorch nor transformers, so that listing models is quick.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, TypeAlias

from weft.base.errors import ModelError

Mode: TypeAlias = Literal["training", "inference"]

DTYPES: Final = {"float64": "float64", "fp64": "float64", "float32": "float32", "fp32": "float32",
                 "bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16", "fp16": "float16",
                 "bfloat16-mixed": "bfloat16-mixed", "bf16-mixed": "bfloat16-mixed"}
"""How dtypes may be written. A mixed one has float32 parameters, and a forward under ``torch.autocast``."""


def is_mixed(dtype: str) -> bool:
    """Return whether parameters have another dtype than what is computed with."""
    return dtype.endswith("-mixed")


MAX_OPTION: Final = 1 << 24
"""No size may be larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooModel:
    """One line of the table: what the model is and its sizes."""

    name: str
    """How it is asked for."""
    family: str
    """Which builder makes it, and which inputs it takes."""
    parameters: str
    """Number of parameters, for people."""
    batch: int
    """Samples per step unless asked otherwise."""
    sizes: Mapping[str, int]
    """Every size that can be set, with its value."""
    about: str
    """One line for people."""
    in_eval_mode: bool = False
    """The module is in eval mode even for training: it computes the same, and else branches on random numbers."""


ZOO: Final = tomllib.loads(Path(__file__).with_name("zoo.toml").read_text(encoding="utf-8"))
"""The table of models, and the settings of their families."""
MODELS: Final[Mapping[str, ZooModel]] = {name: ZooModel(name=name, **entry) for name, entry in ZOO["models"].items()}


def list_models() -> tuple[ZooModel, ...]:
    """Return every model of the zoo, in the order of the table."""
    return tuple(MODELS.values())


def find_model(spec: str, options: Mapping[str, str] | None = None) -> tuple[ZooModel, str | None]:
    """Return the model that ``spec`` (``name:option=value,...``) means, with its sizes set, and the dtype asked for."""
    name, _, text = spec.partition(":")
    if name not in MODELS:
        near = difflib.get_close_matches(name, MODELS, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(MODELS)}"
        raise ModelError(f"no model {name!r} in the zoo: {hint} (a file is given as file.py:function, model.onnx or "
                         "graph.json)")
    model = MODELS[name]
    given = {**_parse_options(spec, text), **(options or {})}
    dtype = given.pop("dtype", None)
    sizes = dict(model.sizes)
    for key, value in given.items():
        if key not in (*sizes, "batch"):
            raise ModelError(f"model {name!r} has no option {key!r}: known are {', '.join(sizes)}, batch and dtype")
        if not value.isdecimal() or not 1 <= int(value) <= MAX_OPTION:
            raise ModelError(f"option {key}={value} of model {name!r} must be a whole number from 1 to {MAX_OPTION}")
        sizes[key] = int(value)
    batch = sizes.pop("batch", model.batch)
    if sizes.get("hidden", 0) % sizes.get("heads", 1):
        raise ModelError(f"model {spec!r}: hidden={sizes['hidden']} is not a multiple of heads={sizes['heads']}")
    changed = ",".join(f"{key}={value}" for key, value in sizes.items() if model.sizes[key] != value)
    return replace(model, sizes=sizes, batch=batch, name=f"{name}:{changed}" if changed else name), dtype


def _parse_options(spec: str, text: str) -> dict[str, str]:
    result: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        key, sign, value = part.partition("=")
        if not sign or not key.strip() or not value.strip():
            raise ModelError(f"cannot read {part!r} in model {spec!r}: options are written name:layers=4,seq=128")
        result[key.strip()] = value.strip()
    return result
