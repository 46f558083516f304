"""Named models to plan with, built from configurations alone: no weights are downloaded, none are allocated.

``gpt2`` is GPT-2; ``gpt2:layers=4,seq=128`` is GPT-2 cut to four layers at sequence length 128. Each model's forward
takes plain tensors. For training it returns one number, the mean loss over the batch, and the labels are an input; for
inference it returns the logits. Dropout is off, so that a run on many devices can equal a run on one.

``MODELS`` is the table; ``weft.model.zoo_models`` makes the modules and their inputs. This module imports neither
PyTorch nor transformers, so that listing models is quick.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

from weft.base.errors import ModelError

Mode: TypeAlias = Literal["training", "inference"]

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

    @property
    def sequence(self) -> str:
        """Return the length or image size of one sample, for people."""
        if "image" in self.sizes:
            return f"{self.sizes['image']} px" + (f" + {self.sizes['seq']}" if "seq" in self.sizes else "")
        return str(self.sizes["seq"])


def _table(*rows: tuple[str, str, str, int, str, dict[str, int]]) -> dict[str, ZooModel]:
    evaluated = ("opt", "whisper")
    return {name: ZooModel(name=name, family=family, parameters=parameters, batch=batch, about=about, sizes=sizes,
                           in_eval_mode=family in evaluated)
            for name, family, parameters, batch, about, sizes in rows}


def _decoder(layers: int, hidden: int, heads: int, vocab: int, seq: int, **more: int) -> dict[str, int]:
    return {"layers": layers, "hidden": hidden, "heads": heads, "vocab": vocab, "seq": seq, **more}


MODELS: Final[Mapping[str, ZooModel]] = _table(
    ("gpt2", "gpt2", "124M", 8, "GPT-2 small, language model", _decoder(12, 768, 12, 50257, 1024)),
    ("gpt2-xl", "gpt2", "1.56B", 8, "GPT-2 XL, language model", _decoder(48, 1600, 25, 50257, 1024)),
    ("gpt2-tiny", "gpt2", "218k", 8, "GPT-2 for tests and demonstrations", _decoder(4, 64, 4, 256, 32)),
    ("llama-7b", "llama", "6.74B", 1, "LLaMA 7B, language model",
     _decoder(32, 4096, 32, 32000, 2048, kv_heads=32, ffn=11008)),
    ("llama-70b", "llama", "69B", 1, "LLaMA 2 70B with grouped queries, language model",
     _decoder(80, 8192, 64, 32000, 4096, kv_heads=8, ffn=28672)),
    ("llama-3-8b", "llama", "8.03B", 1, "LLaMA 3 8B with grouped queries, language model",
     _decoder(32, 4096, 32, 128256, 8192, kv_heads=8, ffn=14336)),
    ("llama-tiny", "llama", "181k", 8, "LLaMA for tests and demonstrations",
     _decoder(4, 64, 4, 256, 32, kv_heads=2, ffn=128)),
    ("opt-1.3b", "opt", "1.32B", 4, "OPT 1.3B, language model", _decoder(24, 2048, 32, 50272, 1024, ffn=8192)),
    ("mixtral-8x", "mixtral", "795M", 4, "mixture of 8 experts like Mixtral, small",
     _decoder(8, 1024, 16, 32000, 512, kv_heads=8, ffn=3584, experts=8)),
    ("bert-large", "bert", "335M", 8, "BERT large, masked language model",
     _decoder(24, 1024, 16, 30522, 512, ffn=4096)),
    ("t5-base", "t5", "223M", 8, "T5 base, encoder and decoder", _decoder(12, 768, 12, 32128, 512, ffn=3072)),
    ("t5-large", "t5", "738M", 8, "T5 large, encoder and decoder", _decoder(24, 1024, 16, 32128, 512, ffn=4096)),
    ("mt5-base", "mt5", "390M", 8, "multilingual T5 base, embeddings tied",
     _decoder(12, 768, 12, 250112, 512, ffn=2048)),
    ("vit-base", "vit", "86.6M", 32, "vision transformer",
     {"layers": 12, "hidden": 768, "heads": 12, "ffn": 3072, "image": 224, "classes": 1000}),
    ("swin-t", "swin", "28.3M", 32, "Swin transformer, tiny", {"hidden": 96, "image": 224, "classes": 1000}),
    ("flava", "flava", "242M", 8, "FLAVA: text, image and joint encoders, with a classifier",
     {"layers": 12, "joint_layers": 6, "hidden": 768, "heads": 12, "ffn": 3072, "vocab": 30522, "seq": 77,
      "image": 224, "classes": 1000}),
    ("resnet-50", "resnet", "25.6M", 32, "residual convolutional network",
     {"width": 64, "image": 224, "classes": 1000}),
    ("convnext-t", "convnext", "28.6M", 32, "ConvNeXt, tiny", {"hidden": 96, "image": 224, "classes": 1000}),
    ("whisper-base", "whisper", "72.6M", 8, "Whisper base, speech to text",
     _decoder(6, 512, 8, 51865, 448, ffn=2048, frames=3000)),
    ("vgg-19", "vgg", "144M", 32, "VGG-19: convolutions and large linear layers",
     {"width": 64, "image": 224, "classes": 1000}),
    ("inception-v3", "inception", "23.8M", 32, "branches like Inception v3 (no auxiliary head)",
     {"width": 32, "image": 299, "classes": 1000}),
    ("lstm", "lstm", "24.6M", 32, "two-layer LSTM language model",
     {"layers": 2, "hidden": 512, "vocab": 20000, "seq": 64}),
)
"""Every model, by name."""


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
    return replace(model, sizes=sizes, batch=batch, name=_full_name(name, model.sizes, sizes)), dtype


def _full_name(name: str, before: Mapping[str, int], after: Mapping[str, int]) -> str:
    changed = ",".join(f"{key}={value}" for key, value in after.items() if before[key] != value)
    return f"{name}:{changed}" if changed else name


def _parse_options(spec: str, text: str) -> dict[str, str]:
    result: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        key, sign, value = part.partition("=")
        if not sign or not key.strip() or not value.strip():
            raise ModelError(f"cannot read {part!r} in model {spec!r}: options are written name:layers=4,seq=128")
        result[key.strip()] = value.strip()
    return result
