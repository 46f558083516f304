"""The zoo's models that are made from the configuration classes of ``transformers``.

``build`` makes the module and gives it a forward that takes plain tensors and returns the loss or the logits. The class
of the module is exchanged rather than the module wrapped, so that parameters keep the names people know
(``transformer.h.0.attn.c_attn.weight``).
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch.nn import functional

from weft.base.errors import ModelError
from weft.model.zoo import Mode

Sizes = Mapping[str, int]
_ATTENTION: Final = "weft_without_masks"


def build(family: str, sizes: Sizes, mode: Mode) -> torch.nn.Module:
    """Return the module of ``family`` with ``sizes``; for training its forward returns the mean loss."""
    try:
        importlib.import_module("transformers")
    except ImportError as problem:
        raise ModelError(f"models of the {family} family need the transformers package: "
                         "pip install 'weft[models]'") from problem
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _FAMILIES[family](sizes, mode)


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


def _made(package: str, name: str, config: Any, forward: Callable[..., Any]) -> torch.nn.Module:
    """Return a model of ``config`` whose forward is ``forward``."""
    module: torch.nn.Module = _class(package, name)(_without_masks(config))
    base = type(module)
    module.__class__ = type(base.__name__, (base,), {
        "forward": forward, "_plain_forward": base.forward, "__module__": base.__module__})
    return module


# ---- forwards: plain tensors in, loss or logits out ---------------------------------------------------------------


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean loss; half-precision logits are widened first, as training code does."""
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of predicting each next token; the last position has none."""
    return cross_entropy(logits, functional.pad(labels[:, 1:], (0, 1), value=-100))


def _decoder_loss(self: Any, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return next_token_loss(self._plain_forward(input_ids=input_ids, use_cache=False).logits, labels)


def _decoder_logits(self: Any, input_ids: torch.Tensor) -> Any:
    return self._plain_forward(input_ids=input_ids, use_cache=False).logits


def _encoder_loss(self: Any, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(self._plain_forward(input_ids=input_ids).logits, labels)


def _encoder_logits(self: Any, input_ids: torch.Tensor) -> Any:
    return self._plain_forward(input_ids=input_ids).logits


def _shifted(labels: torch.Tensor) -> torch.Tensor:
    return functional.pad(labels[:, :-1], (1, 0), value=0)


def _translator_loss(self: Any, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    result = self._plain_forward(input_ids=input_ids, decoder_input_ids=_shifted(labels), use_cache=False)
    return cross_entropy(result.logits, labels)


def _translator_logits(self: Any, input_ids: torch.Tensor, decoder_input_ids: torch.Tensor) -> Any:
    return self._plain_forward(input_ids=input_ids, decoder_input_ids=decoder_input_ids, use_cache=False).logits


def _speech_loss(self: Any, input_features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    result = self._plain_forward(input_features=input_features, decoder_input_ids=_shifted(labels), use_cache=False)
    return cross_entropy(result.logits, labels)


def _speech_logits(self: Any, input_features: torch.Tensor, decoder_input_ids: torch.Tensor) -> Any:
    return self._plain_forward(input_features=input_features, decoder_input_ids=decoder_input_ids,
                               use_cache=False).logits


def _image_loss(self: Any, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(self._plain_forward(pixel_values=pixel_values).logits, labels)


def _image_logits(self: Any, pixel_values: torch.Tensor) -> Any:
    return self._plain_forward(pixel_values=pixel_values).logits


_Forwards = Mapping[Mode, Callable[..., Any]]
_DECODER: Final[_Forwards] = {"training": _decoder_loss, "inference": _decoder_logits}
_ENCODER: Final[_Forwards] = {"training": _encoder_loss, "inference": _encoder_logits}
_TRANSLATOR: Final[_Forwards] = {"training": _translator_loss, "inference": _translator_logits}
_SPEECH: Final[_Forwards] = {"training": _speech_loss, "inference": _speech_logits}
_IMAGE: Final[_Forwards] = {"training": _image_loss, "inference": _image_logits}


# ---- families -----------------------------------------------------------------------------------------------------


def _gpt2(sizes: Sizes, mode: Mode) -> torch.nn.Module:
    config = _class("gpt2", "GPT2Config")(
        n_layer=sizes["layers"], n_embd=sizes["hidden"], n_head=sizes["heads"], vocab_size=sizes["vocab"],
        n_positions=sizes["seq"], resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return _made("gpt2", "GPT2LMHeadModel", config, _DECODER[mode])


def _llama(sizes: Sizes, mode: Mode) -> torch.nn.Module:
    config = _class("llama", "LlamaConfig")(**_llama_sizes(sizes))
    return _made("llama", "LlamaForCausalLM", config, _DECODER[mode])


def _llama_sizes(sizes: Sizes) -> dict[str, int]:
    return {"hidden_size": sizes["hidden"], "intermediate_size": sizes["ffn"], "num_hidden_layers": sizes["layers"],
            "num_attention_heads": sizes["heads"], "num_key_value_heads": sizes["kv_heads"],
            "vocab_size": sizes["vocab"], "max_position_embeddings": sizes["seq"],
            "head_dim": sizes["hidden"] // sizes["heads"]}


def _mixtral(sizes: Sizes, mode: Mode) -> torch.nn.Module:
    config = _class("mixtral", "MixtralConfig")(
        **_llama_sizes(sizes), num_local_experts=sizes["experts"], num_experts_per_tok=min(2, sizes["experts"]),
        experts_implementation="batched_mm")  # the others need the values of the router
    return _made("mixtral", "MixtralForCausalLM", config, _DECODER[mode])


def _opt(sizes: Sizes, mode: Mode) -> torch.nn.Module:
    config = _class("opt", "OPTConfig")(
        num_hidden_layers=sizes["layers"], hidden_size=sizes["hidden"], word_embed_proj_dim=sizes["hidden"],
        num_attention_heads=sizes["heads"], ffn_dim=sizes["ffn"], vocab_size=sizes["vocab"],
        max_position_embeddings=sizes["seq"], dropout=0.0, layerdrop=0.0)
    return _made("opt", "OPTForCausalLM", config, _DECODER[mode])


def _bert(sizes: Sizes, mode: Mode) -> torch.nn.Module:
    config = _class("bert", "BertConfig")(
        **_encoder_sizes(sizes), vocab_size=sizes["vocab"], max_position_embeddings=sizes["seq"])
    return _made("bert", "BertForMaskedLM", config, _ENCODER[mode])


def _encoder_sizes(sizes: Sizes) -> dict[str, Any]:
    return {"num_hidden_layers": sizes["layers"], "hidden_size": sizes["hidden"],
            "num_attention_heads": sizes["heads"], "intermediate_size": sizes["ffn"],
            "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _t5(sizes: Sizes, mode: Mode, package: str = "t5", prefix: str = "T5") -> torch.nn.Module:
    config = _class(package, f"{prefix}Config")(
        num_layers=sizes["layers"], num_decoder_layers=sizes["layers"], d_model=sizes["hidden"],
        num_heads=sizes["heads"], d_kv=sizes["hidden"] // sizes["heads"], d_ff=sizes["ffn"],
        vocab_size=sizes["vocab"], dropout_rate=0.0)
    return _made(package, f"{prefix}ForConditionalGeneration", config, _TRANSLATOR[mode])


def _mt5(sizes: Sizes, mode: Mode) -> torch.nn.Module:
    return _t5(sizes, mode, "mt5", "MT5")


def _whisper(sizes: Sizes, mode: Mode) -> torch.nn.Module:
    config = _class("whisper", "WhisperConfig")(
        encoder_layers=sizes["layers"], decoder_layers=sizes["layers"], d_model=sizes["hidden"],
        encoder_attention_heads=sizes["heads"], decoder_attention_heads=sizes["heads"],
        encoder_ffn_dim=sizes["ffn"], decoder_ffn_dim=sizes["ffn"], vocab_size=sizes["vocab"],
        max_target_positions=sizes["seq"], max_source_positions=sizes["frames"] // 2, pad_token_id=0,
        bos_token_id=0, eos_token_id=0, decoder_start_token_id=0)
    return _made("whisper", "WhisperForConditionalGeneration", config, _SPEECH[mode])


def _vit(sizes: Sizes, mode: Mode) -> torch.nn.Module:
    config = _class("vit", "ViTConfig")(**_encoder_sizes(sizes), image_size=sizes["image"],
                                        num_labels=sizes["classes"])
    return _made("vit", "ViTForImageClassification", config, _IMAGE[mode])


def _swin(sizes: Sizes, mode: Mode) -> torch.nn.Module:
    config = _class("swin", "SwinConfig")(embed_dim=sizes["hidden"], image_size=sizes["image"],
                                          num_labels=sizes["classes"], drop_path_rate=0.0)
    return _made("swin", "SwinForImageClassification", config, _IMAGE[mode])


def _resnet(sizes: Sizes, mode: Mode) -> torch.nn.Module:
    width = sizes["width"]
    config = _class("resnet", "ResNetConfig")(
        embedding_size=width, hidden_sizes=[4 * width, 8 * width, 16 * width, 32 * width],
        num_labels=sizes["classes"])
    return _made("resnet", "ResNetForImageClassification", config, _IMAGE[mode])


def _convnext(sizes: Sizes, mode: Mode) -> torch.nn.Module:
    hidden = sizes["hidden"]
    config = _class("convnext", "ConvNextConfig")(
        hidden_sizes=[hidden, 2 * hidden, 4 * hidden, 8 * hidden], num_labels=sizes["classes"],
        image_size=sizes["image"])
    return _made("convnext", "ConvNextForImageClassification", config, _IMAGE[mode])


class FlavaClassifier(torch.nn.Module):
    """FLAVA's three encoders with a linear classifier on the joint summary."""

    def __init__(self, config: Any, num_classes: int) -> None:
        super().__init__()
        self.flava = _class("flava", "FlavaModel")(_without_masks(config))
        self.classifier = torch.nn.Linear(config.hidden_size, num_classes)

    def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor,
                labels: torch.Tensor | None = None) -> torch.Tensor:
        """Return the loss if ``labels`` are given, else the logits."""
        joint = self.flava(input_ids=input_ids, pixel_values=pixel_values).multimodal_output.last_hidden_state
        logits: torch.Tensor = self.classifier(joint[:, 0])
        return logits if labels is None else cross_entropy(logits, labels)


def _flava(sizes: Sizes, mode: Mode) -> torch.nn.Module:
    common = _encoder_sizes(sizes)
    config = _class("flava", "FlavaConfig")(
        text_config={**common, "vocab_size": sizes["vocab"], "max_position_embeddings": max(sizes["seq"], 2)},
        image_config={**common, "image_size": sizes["image"]},
        multimodal_config={**common, "num_hidden_layers": sizes["joint_layers"]}, hidden_size=sizes["hidden"])
    return FlavaClassifier(config, sizes["classes"])


_FAMILIES: Final[Mapping[str, Callable[[Sizes, Mode], torch.nn.Module]]] = {
    "gpt2": _gpt2, "llama": _llama, "mixtral": _mixtral, "opt": _opt, "bert": _bert, "t5": _t5, "mt5": _mt5,
    "whisper": _whisper, "vit": _vit, "swin": _swin, "resnet": _resnet, "convnext": _convnext, "flava": _flava,
}
