"""The modules of the zoo and inputs for them: ``build_model`` and ``sample_inputs``.

Most are made from the configuration classes of ``transformers``. Such a module is given a forward that takes plain
tensors and returns the loss or the logits. The class of the module is exchanged rather than the module wrapped, so that
parameters keep the names people know (``transformer.h.0.attn.c_attn.weight``).

VGG-19, a network like Inception v3, and an LSTM are written here in plain PyTorch, from the papers' tables (Simonyan
and Zisserman 2014; Szegedy et al. 2015, figures 5 to 7 and table 1). Their forward returns the mean loss if labels are
given, else the logits.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from weft.base.errors import ModelError
from weft.model.weights import without_memory
from weft.model.zoo import ZOO, Mode, ZooModel

Sizes = Mapping[str, int]
_ATTENTION: Final = "weft_without_masks"


def build_model(model: ZooModel, mode: Mode) -> nn.Module:
    """Return the module, its parameters on the meta device and its buffers with their true values."""
    with without_memory():
        if model.family in _PLAIN:
            return _PLAIN[model.family](model.sizes)
        try:
            importlib.import_module("transformers")
        except ImportError as problem:
            raise ModelError(f"models of the {model.family} family need the transformers package: "
                             "pip install 'weft[models]'") from problem
        logging.getLogger("transformers").setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if model.family == "flava":
                return FlavaClassifier(model.sizes)
            return _from_settings(ZOO["families"][model.family], model.sizes, mode)


def sample_inputs(model: ZooModel, mode: Mode, batch: int, seed: int) -> tuple[Tensor, ...]:
    """Return random inputs for ``model``: every sample different, the same for the same seed."""
    sizes = model.sizes
    generator = torch.Generator().manual_seed(seed)
    tokens = partial(torch.randint, generator=generator)
    labels = mode == "training"
    if model.family in ("vit", "swin", "resnet", "convnext", "vgg", "inception", "flava"):
        image = torch.randn(batch, 3, sizes["image"], sizes["image"], generator=generator)
        target = (tokens(0, sizes["classes"], (batch,)),) if labels else ()
        text = (tokens(0, sizes["vocab"], (batch, sizes["seq"])),) if model.family == "flava" else ()
        return (*text, image, *target)
    text = tokens(0, sizes["vocab"], (batch, sizes["seq"]))
    if model.family in ("t5", "mt5"):
        return text, tokens(0, sizes["vocab"], (batch, sizes["seq"]))
    if model.family == "whisper":
        return torch.randn(batch, 80, sizes["frames"], generator=generator), text
    return (text, tokens(0, sizes["vocab"], (batch, sizes["seq"]))) if labels else (text,)


# ---- models of transformers ---------------------------------------------------------------------------------------


def _class(module: str, name: str) -> Any:
    """Return a class of one model's package; the top package would import far more."""
    return getattr(importlib.import_module(f"transformers.models.{module}"), name)


def _without_masks(config: Any) -> Any:
    """Return ``config`` with attention that builds no mask tensors.

    The zoo's inputs have no padding, so a causal flag is all that attention needs. The library would build masks of
    sequence times sequence while tracing, and other operators for a batch of one than for larger ones. An attention
    function without a mask function of the same name gets none.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, sdpa_attention_forward)
    config._attn_implementation = _ATTENTION
    return config


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss; half-precision logits are widened first, as training code does."""
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def _decoder(self: Any, input_ids: Tensor, labels: Tensor | None = None) -> Any:
    logits = self._plain_forward(input_ids=input_ids, use_cache=False).logits
    if labels is None:
        return logits
    return cross_entropy(logits, functional.pad(labels[:, 1:], (0, 1), value=-100))  # the last position has no next


def _encoder(self: Any, input_ids: Tensor, labels: Tensor | None = None) -> Any:
    logits = self._plain_forward(input_ids=input_ids).logits
    return logits if labels is None else cross_entropy(logits, labels)


def _classifier(self: Any, pixel_values: Tensor, labels: Tensor | None = None) -> Any:
    logits = self._plain_forward(pixel_values=pixel_values).logits
    return logits if labels is None else cross_entropy(logits, labels)


def _translator(self: Any, input_ids: Tensor, labels: Tensor) -> Tensor:
    result = self._plain_forward(input_ids=input_ids, decoder_input_ids=_shifted(labels), use_cache=False)
    return cross_entropy(result.logits, labels)


def _translator_logits(self: Any, input_ids: Tensor, decoder_input_ids: Tensor) -> Any:
    return self._plain_forward(input_ids=input_ids, decoder_input_ids=decoder_input_ids, use_cache=False).logits


def _speech(self: Any, input_features: Tensor, labels: Tensor) -> Tensor:
    result = self._plain_forward(input_features=input_features, decoder_input_ids=_shifted(labels), use_cache=False)
    return cross_entropy(result.logits, labels)


def _speech_logits(self: Any, input_features: Tensor, decoder_input_ids: Tensor) -> Any:
    return self._plain_forward(input_features=input_features, decoder_input_ids=decoder_input_ids,
                               use_cache=False).logits


def _shifted(labels: Tensor) -> Tensor:
    return functional.pad(labels[:, :-1], (1, 0), value=0)


_FORWARDS: Final = {"decoder": (_decoder, _decoder), "encoder": (_encoder, _encoder),
                    "classifier": (_classifier, _classifier), "translator": (_translator, _translator_logits),
                    "speech": (_speech, _speech_logits)}
"""Of the families of ``zoo.toml``: the forward that returns the loss, and the one that returns the logits."""


def _from_settings(family: Mapping[str, Any], sizes: Sizes, mode: Mode) -> nn.Module:
    """Return the module that a configuration of transformers makes, with a forward of plain tensors."""
    settings = {**_settings(family["config"], sizes), **family.get("fixed", {})}
    config = _class(family["package"], f"{family['prefix']}Config")(**settings)
    if "attention" in family:  # with masks: windows, or sums that the plain one does not know
        config._attn_implementation = family["attention"]
    else:
        config = _without_masks(config)
    module: nn.Module = _class(family["package"], family["prefix"] + family["head"])(config)
    base = type(module)
    module.__class__ = type(base.__name__, (base,), {
        "forward": _FORWARDS[family["forward"]][mode == "inference"], "_plain_forward": base.forward,
        "__module__": base.__module__})
    return module


def _settings(names: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    """Return the settings that take these sizes, or multiples of one."""
    known = {"head_dim": sizes.get("hidden", 0) // sizes.get("heads", 1), "top_k": min(2, sizes.get("experts", 0)),
             "num_positions": sizes.get("frames", 0) // 2, **sizes}
    return {key: known[name] if isinstance(name, str) else [factor * known[name[0]] for factor in name[1:]]
            for key, name in names.items()}


class FlavaClassifier(nn.Module):
    """FLAVA's three encoders with a linear classifier on the joint summary."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        encoder = ZOO["families"]["bert"]
        names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
        common = {**_settings({name: encoder["config"][name] for name in names}, sizes), **encoder["fixed"]}
        config = _class("flava", "FlavaConfig")(
            text_config={**common, "vocab_size": sizes["vocab"], "max_position_embeddings": max(sizes["seq"], 2)},
            image_config={**common, "image_size": sizes["image"]},
            multimodal_config={**common, "num_hidden_layers": sizes["joint_layers"]}, hidden_size=sizes["hidden"])
        self.flava = _class("flava", "FlavaModel")(_without_masks(config))
        self.classifier = nn.Linear(config.hidden_size, sizes["classes"])

    def forward(self, input_ids: Tensor, pixel_values: Tensor,
                labels: Tensor | None = None) -> Tensor:
        """Return the loss if ``labels`` are given, else the logits."""
        joint = self.flava(input_ids=input_ids, pixel_values=pixel_values).multimodal_output.last_hidden_state
        logits: Tensor = self.classifier(joint[:, 0])
        return logits if labels is None else cross_entropy(logits, labels)


# ---- models in plain PyTorch -------------------------------------------------------------------------------------


def _result(logits: Tensor, labels: Tensor | None) -> Tensor:
    if labels is None:
        return logits
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


class Vgg19(nn.Module):
    """Sixteen 3x3 convolutions in five groups, then three linear layers."""

    def __init__(self, width: int, image: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for group, depth in enumerate((2, 2, 4, 4, 4)):
            out = width * min(2**group, 8)
            for _ in range(depth):
                layers += [nn.Conv2d(channels, out, 3, padding=1), nn.ReLU(inplace=True)]
                channels = out
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        hidden = 64 * width
        self.classifier = nn.Sequential(
            nn.Linear(channels * (image // 32) ** 2, hidden), nn.ReLU(inplace=True),
            nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, classes))

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the loss if ``labels`` are given, else the logits."""
        return _result(self.classifier(self.features(pixel_values).flatten(1)), labels)


class ConvUnit(nn.Module):
    """A convolution, batch normalisation and ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int | tuple[int, int], stride: int = 1,
                 padding: int | tuple[int, int] = 0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        self.norm = nn.BatchNorm2d(outputs, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations."""
        return functional.relu(self.norm(self.conv(x)))


class Branches(nn.Module):
    """Several chains that read the same input; their results are joined along the channels."""

    def __init__(self, *chains: nn.Module) -> None:
        super().__init__()
        self.chains = nn.ModuleList(chains)

    def forward(self, x: Tensor) -> Tensor:
        """Return the joined results."""
        return torch.cat([chain(x) for chain in self.chains], dim=1)


def _square_block(inputs: int, w: int, pool: int) -> Branches:
    """Return the block of figure 5: 3x3 convolutions at 35x35."""
    return Branches(
        ConvUnit(inputs, 2 * w, 1),
        nn.Sequential(ConvUnit(inputs, 3 * w // 2, 1), ConvUnit(3 * w // 2, 2 * w, 5, padding=2)),
        nn.Sequential(ConvUnit(inputs, 2 * w, 1), ConvUnit(2 * w, 3 * w, 3, padding=1),
                      ConvUnit(3 * w, 3 * w, 3, padding=1)),
        nn.Sequential(nn.AvgPool2d(3, 1, 1), ConvUnit(inputs, pool, 1)))


def _long_block(inputs: int, w: int, inner: int) -> Branches:
    """Return the block of figure 6: 7x7 split into 1x7 and 7x1 at 17x17."""
    def row(outputs: int) -> ConvUnit:
        return ConvUnit(inner, outputs, (1, 7), padding=(0, 3))

    def column(outputs: int) -> ConvUnit:
        return ConvUnit(inner, outputs, (7, 1), padding=(3, 0))

    return Branches(
        ConvUnit(inputs, 6 * w, 1),
        nn.Sequential(ConvUnit(inputs, inner, 1), row(inner), column(6 * w)),
        nn.Sequential(ConvUnit(inputs, inner, 1), column(inner), row(inner), column(inner), row(6 * w)),
        nn.Sequential(nn.AvgPool2d(3, 1, 1), ConvUnit(inputs, 6 * w, 1)))


def _wide_block(inputs: int, w: int) -> Branches:
    """Return the block of figure 7: outputs widened by parallel 1x3 and 3x1 at 8x8."""
    def fork() -> Branches:
        return Branches(ConvUnit(12 * w, 12 * w, (1, 3), padding=(0, 1)),
                        ConvUnit(12 * w, 12 * w, (3, 1), padding=(1, 0)))

    return Branches(
        ConvUnit(inputs, 10 * w, 1),
        nn.Sequential(ConvUnit(inputs, 12 * w, 1), fork()),
        nn.Sequential(ConvUnit(inputs, 14 * w, 1), ConvUnit(14 * w, 12 * w, 3, padding=1), fork()),
        nn.Sequential(nn.AvgPool2d(3, 1, 1), ConvUnit(inputs, 6 * w, 1)))


class Inception(nn.Module):
    """A stem, then blocks of branches at three resolutions with reductions between them."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        w = width
        self.stem = nn.Sequential(
            ConvUnit(3, w, 3, 2), ConvUnit(w, w, 3), ConvUnit(w, 2 * w, 3, padding=1), nn.MaxPool2d(3, 2),
            ConvUnit(2 * w, 5 * w // 2, 1), ConvUnit(5 * w // 2, 6 * w, 3), nn.MaxPool2d(3, 2))
        self.square = nn.Sequential(_square_block(6 * w, w, w), _square_block(8 * w, w, 2 * w),
                                    _square_block(9 * w, w, 2 * w))
        self.reduce = Branches(
            ConvUnit(9 * w, 12 * w, 3, 2),
            nn.Sequential(ConvUnit(9 * w, 2 * w, 1), ConvUnit(2 * w, 3 * w, 3, padding=1),
                          ConvUnit(3 * w, 3 * w, 3, 2)),
            nn.MaxPool2d(3, 2))
        self.long = nn.Sequential(*(_long_block(24 * w, w, inner) for inner in (4 * w, 5 * w, 5 * w, 6 * w)))
        self.reduce_again = Branches(
            nn.Sequential(ConvUnit(24 * w, 6 * w, 1), ConvUnit(6 * w, 10 * w, 3, 2)),
            nn.Sequential(ConvUnit(24 * w, 6 * w, 1), ConvUnit(6 * w, 6 * w, (1, 7), padding=(0, 3)),
                          ConvUnit(6 * w, 6 * w, (7, 1), padding=(3, 0)), ConvUnit(6 * w, 6 * w, 3, 2)),
            nn.MaxPool2d(3, 2))
        self.wide = nn.Sequential(_wide_block(40 * w, w), _wide_block(64 * w, w))
        self.classifier = nn.Linear(64 * w, classes)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the loss if ``labels`` are given, else the logits."""
        x = self.long(self.reduce(self.square(self.stem(pixel_values))))
        x = self.wide(self.reduce_again(x))
        return _result(self.classifier(x.mean((2, 3))), labels)


class LstmModel(nn.Module):
    """An embedding, stacked LSTM layers and a linear layer over the vocabulary."""

    def __init__(self, layers: int, hidden: int, vocab: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.lstm = nn.LSTM(hidden, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, vocab)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the loss if ``labels`` are given, else the logits."""
        states, _ = self.lstm(self.embedding(input_ids))
        return _result(self.head(states), labels)


_PLAIN: Final[Mapping[str, Callable[[Sizes], nn.Module]]] = {
    "vgg": lambda sizes: Vgg19(sizes["width"], sizes["image"], sizes["classes"]),
    "inception": lambda sizes: Inception(sizes["width"], sizes["classes"]),
    "lstm": lambda sizes: LstmModel(sizes["layers"], sizes["hidden"], sizes["vocab"]),
}
