"""Models that Weft's zoo does not have, from the configuration classes of ``transformers``, tiny and with random weights.

Each name in ``ARCHITECTURES`` is a function of this file for Weft's commands:

    weft trace benchmarks/foreign_models.py:qwen3_moe
    weft trace benchmarks/foreign_models.py:bart:in_eval_mode

The module's forward takes plain tensors and returns the loss. Settings are the library's own but for sizes and dropout
(random numbers differ between one process and many). The library computes parts of many models in float32, whatever
their parameters are; the forward here computes those in float64 as well where the model is in float64. Else a router or
a norm would round what is compared at 1e-10 to seven digits.
"""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

BATCH, SEQ, VOCAB, IMAGE = 4, 8, 64, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One model: its classes, its sizes, and what goes in and comes out."""

    package: str
    config: str
    model: str
    kind: str = "decoder"
    """A name in ``_KINDS``: which inputs it takes, and how its loss is made."""
    sizes: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, tuple[str, str, Mapping[str, Any]]] = field(default_factory=dict)
    """Configurations inside the configuration: (package, class, sizes)."""
    in_eval_mode: bool = False
    """In training mode its forward looks at values or draws numbers to decide what to do."""
    microbatches: int = 2
    """1 where the loss mixes the samples of a batch."""
    note: str = ""


# ---- inputs and losses ---------------------------------------------------------------------------------------------


def _tokens(generator: torch.Generator, batch: int, low: int = 5, length: int = SEQ) -> Tensor:
    return torch.randint(low, VOCAB, (batch, length), generator=generator)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def _decoder(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    return _cross_entropy(model(input_ids=tokens, use_cache=False).logits, labels)


def _encoder(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    return _cross_entropy(model(input_ids=tokens).logits, labels)


def _electra(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(model(input_ids=tokens).logits, (labels % 2).to(torch.float64))


def _translator(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    return _cross_entropy(model(input_ids=tokens, decoder_input_ids=labels, use_cache=False).logits, tokens)


def _image(model: Any, image: Tensor, labels: Tensor) -> Tensor:
    return _cross_entropy(model(pixel_values=image).logits, labels)


def _segments(model: Any, image: Tensor, labels: Tensor) -> Tensor:
    return model(pixel_values=image).logits.square().mean() + 0.0 * labels.sum()


def _boxes(model: Any, image: Tensor, labels: Tensor) -> Tensor:
    found = model(pixel_values=image)
    return _cross_entropy(found.logits[:, 0], labels) + found.pred_boxes.square().mean()


def _contrast(model: Any, image: Tensor, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, pixel_values=image, return_loss=True).loss


def _speech(model: Any, sound: Tensor, labels: Tensor) -> Tensor:
    return _cross_entropy(model(input_features=sound, decoder_input_ids=labels, use_cache=False).logits, labels)


def _wave(model: Any, sound: Tensor, labels: Tensor) -> Tensor:
    return model(input_values=sound).logits.square().mean() + 0.0 * labels.sum()


def _seeing(model: Any, tokens: Tensor, image: Tensor, labels: Tensor) -> Tensor:
    return _cross_entropy(model(input_ids=tokens, pixel_values=image, use_cache=False).logits, labels)


def _typed(model: Any, tokens: Tensor, image: Tensor, labels: Tensor) -> Tensor:
    found = model(input_ids=tokens, pixel_values=image, token_type_ids=(tokens != 4).long(), use_cache=False)
    return _cross_entropy(found.logits, labels)


def _text_inputs(batch: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    return _tokens(generator, batch), _tokens(generator, batch)


def _image_inputs(batch: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 3, IMAGE, IMAGE, generator=generator),
            torch.randint(0, 4, (batch,), generator=generator))


def _image_and_text(batch: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    return torch.randn(batch, 3, IMAGE, IMAGE, generator=generator), _tokens(generator, batch)


def _seeing_inputs(batch: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Return texts that begin with the image's four patches (token 4), images and labels."""
    text = torch.cat([torch.full((batch, 4), 4), _tokens(generator, batch, length=SEQ - 4)], dim=1)
    return text, torch.randn(batch, 3, IMAGE, IMAGE, generator=generator), _tokens(generator, batch)


def _speech_inputs(batch: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    return torch.randn(batch, 8, 32, generator=generator), _tokens(generator, batch)


def _wave_inputs(batch: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    return torch.randn(batch, 256, generator=generator), _tokens(generator, batch)


_Loss = Callable[..., Tensor]
_Inputs = Callable[[int, torch.Generator], tuple[Tensor, ...]]
_KINDS: Final[Mapping[str, tuple[_Loss, _Inputs]]] = {
    "decoder": (_decoder, _text_inputs), "encoder": (_encoder, _text_inputs), "electra": (_electra, _text_inputs),
    "translator": (_translator, _text_inputs), "image": (_image, _image_inputs),
    "segments": (_segments, _image_inputs), "boxes": (_boxes, _image_inputs),
    "contrast": (_contrast, _image_and_text), "speech": (_speech, _speech_inputs), "wave": (_wave, _wave_inputs),
    "seeing": (_seeing, _seeing_inputs), "typed": (_typed, _seeing_inputs)}


class _Wide(TorchFunctionMode):
    """Computes in float64 what the code inside asks to be computed in float32."""

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        def widened(item: Any) -> Any:
            return torch.float64 if item is torch.float32 else item

        if func is torch.Tensor.float:
            return args[0].to(torch.float64)
        return func(*map(widened, args), **{key: widened(item) for key, item in (kwargs or {}).items()})


class Plain(torch.nn.Module):
    """A model whose forward takes plain tensors and returns the loss."""

    def __init__(self, model: torch.nn.Module, loss: _Loss) -> None:
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the loss, in float64 throughout if the parameters are."""
        if next(self.model.parameters()).dtype is not torch.float64:
            return self._loss(self.model, *inputs)
        with _Wide():
            return self._loss(self.model, *inputs)


# ---- the models ----------------------------------------------------------------------------------------------------

_LLAMA: Final = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 32, "pad_token_id": 0,
                 "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0}
_BERT: Final = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_TEXT: Final = {**_BERT, "vocab_size": VOCAB, "max_position_embeddings": 32, "pad_token_id": 0}
_BART: Final = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
                "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": VOCAB,
                "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
_VISION: Final = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                  "image_size": IMAGE, "patch_size": 16}
_T5: Final = {"num_layers": 2, "num_decoder_layers": 2, "d_model": 32, "num_heads": 4, "d_kv": 8, "d_ff": 48,
              "vocab_size": VOCAB, "dropout_rate": 0.0}
_FEW: Final = {"num_experts_per_tok": 2}
_PALIGEMMA: Final = {"image_token_id": 4, "projection_dim": 32}
_PALIGEMMA_PARTS: Final = {"text_config": ("gemma", "GemmaConfig", {**_LLAMA, "head_dim": 8}),
                           "vision_config": ("siglip", "SiglipVisionConfig", {**_VISION, "projection_dim": 32})}
_GPT: Final = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": VOCAB, "n_positions": 32, "resid_pdrop": 0.0,
               "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}


def _of(package: str, prefix: str, head: str, kind: str = "decoder", **more: Any) -> Architecture:
    return Architecture(package=package, config=f"{prefix}Config", model=f"{prefix}{head}", kind=kind, **more)


_CAUSAL: Final = "ForCausalLM"
_VISION_CLASSES: Final = {"num_labels": 4}
REQUIRED: Final[Mapping[str, Architecture]] = {
    "qwen3_moe": _of("qwen3_moe", "Qwen3Moe", _CAUSAL, sizes={
        **_LLAMA, **_FEW, "num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8}),
    "mixtral": _of("mixtral", "Mixtral", _CAUSAL, sizes={**_LLAMA, **_FEW, "num_local_experts": 4}),
    "deepseek_v3": _of("deepseek_v3", "DeepseekV3", _CAUSAL, sizes={
        **_LLAMA, **_FEW, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
        "moe_intermediate_size": 24, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1}),
    "olmoe": _of("olmoe", "Olmoe", _CAUSAL, sizes={**_LLAMA, **_FEW, "num_experts": 4}),
    "gpt_oss": _of("gpt_oss", "GptOss", _CAUSAL, sizes={
        **_LLAMA, **_FEW, "num_local_experts": 4, "head_dim": 8, "sliding_window": 4}),
    "jamba": _of("jamba", "Jamba", _CAUSAL, sizes={
        **_LLAMA, **_FEW, "num_hidden_layers": 4, "num_experts": 4, "mamba_d_state": 4, "mamba_dt_rank": 4,
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "use_mamba_kernels": False}),
    "llava": Architecture(
        package="llava", config="LlavaConfig", model="LlavaForConditionalGeneration", kind="seeing",
        sizes={"image_token_id": 4, "vision_feature_select_strategy": "default"},
        parts={"text_config": ("llama", "LlamaConfig", _LLAMA),
               "vision_config": ("clip", "CLIPVisionConfig", {**_VISION, "projection_dim": 32})}),
    "llama4": Architecture(package="llama4", config="Llama4TextConfig", model="Llama4ForCausalLM", sizes={
        **_LLAMA, "num_local_experts": 4, "intermediate_size_mlp": 48, "head_dim": 8, "attention_chunk_size": 4}),
    "bart": _of("bart", "Bart", "ForConditionalGeneration", "translator", in_eval_mode=True, sizes=_BART),
    "opt": _of("opt", "OPT", _CAUSAL, in_eval_mode=True, sizes={
        "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB,
        "max_position_embeddings": 32, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "whisper": _of("whisper", "Whisper", "ForConditionalGeneration", "speech", in_eval_mode=True, sizes={
        **_BART, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}),
    "detr": _of("detr", "Detr", "ForObjectDetection", "boxes", in_eval_mode=True, sizes={
        **_BART, "num_queries": 3, "num_labels": 4, "use_timm_backbone": False, "use_pretrained_backbone": False},
        parts={"backbone_config": ("resnet", "ResNetConfig", {
            "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "out_features": ["stage2"]})}),
}
"""The twelve."""

MORE: Final[Mapping[str, Architecture]] = {
    "recurrent_gemma": _of("recurrent_gemma", "RecurrentGemma", _CAUSAL, note="own backward of its root: refused", sizes={
        **_LLAMA, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8}),
    "gemma3": Architecture(package="gemma3", config="Gemma3TextConfig", model="Gemma3ForCausalLM",
                           sizes={**_LLAMA, "head_dim": 8, "sliding_window": 4}),
    "phi": _of("phi", "Phi", _CAUSAL, sizes={**_LLAMA, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "falcon": _of("falcon", "Falcon", _CAUSAL, sizes={
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB}),
    "bloom": _of("bloom", "Bloom", _CAUSAL, note="own backward of its GELU: refused", sizes={
        "hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB}),
    "t5": _of("t5", "T5", "ForConditionalGeneration", "translator", sizes=_T5),
    "mt5": _of("mt5", "MT5", "ForConditionalGeneration", "translator", sizes=_T5),
    "deberta": _of("deberta", "Deberta", "ForMaskedLM", "encoder", sizes={
        **_TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "electra": _of("electra", "Electra", "ForPreTraining", "electra", sizes={**_TEXT, "embedding_size": 16}),
    "vit": _of("vit", "ViT", "ForImageClassification", "image", sizes={**_BERT, **_VISION, **_VISION_CLASSES}),
    "swin": _of("swin", "Swin", "ForImageClassification", "image", sizes={
        "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "image_size": IMAGE, "patch_size": 4, "window_size": 4,
        "drop_path_rate": 0.0, **_VISION_CLASSES}),
    "clip": Architecture(
        package="clip", config="CLIPConfig", model="CLIPModel", kind="contrast", microbatches=1,
        note="its loss compares all samples of a batch: one micro-batch", sizes={"projection_dim": 16},
        parts={"text_config": ("clip", "CLIPTextConfig", {**_VISION, "vocab_size": VOCAB, "eos_token_id": 2,
                                                         "max_position_embeddings": 16, "projection_dim": 16}),
               "vision_config": ("clip", "CLIPVisionConfig", {**_VISION, "projection_dim": 16})}),
    "deepseek_v2": _of("deepseek_v2", "DeepseekV2", _CAUSAL, sizes={
        **_LLAMA, **_FEW, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
        "moe_intermediate_size": 24, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1, "topk_method": "greedy"}),
    "granitemoe": _of("granitemoe", "GraniteMoe", _CAUSAL, sizes={**_LLAMA, **_FEW, "num_local_experts": 4}),
    "phimoe": _of("phimoe", "Phimoe", _CAUSAL, in_eval_mode=True, sizes={**_LLAMA, **_FEW, "num_local_experts": 4}),
    "mamba": _of("mamba", "Mamba", _CAUSAL, sizes={
        "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCAB, "state_size": 4, "time_step_rank": 4}),
    "convnext": _of("convnext", "ConvNext", "ForImageClassification", "image", sizes={
        "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "image_size": IMAGE, **_VISION_CLASSES}),
    "segformer": _of("segformer", "Segformer", "ForSemanticSegmentation", "segments", in_eval_mode=True, sizes={
        "hidden_sizes": [8, 16], "depths": [1, 1], "num_encoder_blocks": 2, "sr_ratios": [2, 1],
        "num_attention_heads": [1, 2], "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2],
        "decoder_hidden_size": 16, "drop_path_rate": 0.0, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0, "classifier_dropout_prob": 0.0}),
    "wav2vec2": _of("wav2vec2", "Wav2Vec2", "ForCTC", "wave", in_eval_mode=True, sizes={
        **_BERT, "hidden_dropout": 0.0, "activation_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0,
        "final_dropout": 0.0, "vocab_size": VOCAB, "conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3],
        "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2,
        "mask_time_prob": 0.0}),
    "gemma2": _of("gemma2", "Gemma2", _CAUSAL, sizes={**_LLAMA, "head_dim": 8, "sliding_window": 4}),
    "qwen2_moe": _of("qwen2_moe", "Qwen2Moe", _CAUSAL, sizes={
        **_LLAMA, **_FEW, "num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}),
    "gpt_neox": _of("gpt_neox", "GPTNeoX", _CAUSAL, sizes=_LLAMA),
    "gptj": _of("gptj", "GPTJ", _CAUSAL, sizes={**_GPT, "rotary_dim": 4}),
    "mpt": _of("mpt", "Mpt", _CAUSAL, sizes={"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": VOCAB,
                                            "max_seq_len": 32}),
    "roberta": _of("roberta", "Roberta", "ForMaskedLM", "encoder", sizes=_TEXT),
    "albert": _of("albert", "Albert", "ForMaskedLM", "encoder", sizes={**_TEXT, "embedding_size": 16}),
    "pegasus": _of("pegasus", "Pegasus", "ForConditionalGeneration", "translator", in_eval_mode=True, sizes=_BART),
    "resnet": _of("resnet", "ResNet", "ForImageClassification", "image", sizes={
        "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], **_VISION_CLASSES},
        note="batch norm: statistics of each part"),
    "dinov2": _of("dinov2", "Dinov2", "ForImageClassification", "image", sizes={**_BERT, **_VISION, **_VISION_CLASSES}),
    "mamba2": _of("mamba2", "Mamba2", _CAUSAL, sizes={
        "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCAB, "state_size": 4, "num_heads": 8, "head_dim": 8,
        "n_groups": 2, "chunk_size": 4}),
    "fnet": _of("fnet", "FNet", "ForMaskedLM", "encoder", sizes={**_TEXT, "tpu_short_seq_length": SEQ}),
    "ernie4_5_moe": _of("ernie4_5_moe", "Ernie4_5_Moe", _CAUSAL, sizes={
        **_LLAMA, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 1}),
    "paligemma": Architecture(
        package="paligemma", config="PaliGemmaConfig", model="PaliGemmaForConditionalGeneration", kind="seeing",
        note="without token_type_ids it has a causal mask while it is traced and none in a plain call: weft plan and "
             "weft.parallelize refuse it",
        sizes=_PALIGEMMA, parts=_PALIGEMMA_PARTS),
    "paligemma_typed": Architecture(
        package="paligemma", config="PaliGemmaConfig", model="PaliGemmaForConditionalGeneration", kind="typed",
        sizes=_PALIGEMMA, parts=_PALIGEMMA_PARTS),
}
"""Others."""

ARCHITECTURES: Final[Mapping[str, Architecture]] = {**REQUIRED, **MORE}


def build(name: str, *, batch: int = BATCH, seed: int = 0) -> tuple[torch.nn.Module, tuple[Tensor, ...]]:
    """Return the module and its inputs."""
    kind = ARCHITECTURES[name]
    loss, inputs = _KINDS[kind.kind]
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        parts = {key: _class(package, config)(**sizes) for key, (package, config, sizes) in kind.parts.items()}
        config = _class(kind.package, kind.config)(**kind.sizes, **parts)
        model = _class(kind.package, kind.model)(config)
    return Plain(model, loss), inputs(batch, torch.Generator().manual_seed(seed))


def _class(package: str, name: str) -> Any:
    found = getattr(importlib.import_module(f"transformers.models.{package}"), name)
    _write_out_scripts(sys.modules[found.__module__])
    return found


def _write_out_scripts(module: Any) -> None:
    """Replace functions that TorchScript has compiled by what they were: ``_Wide`` does not reach into them."""
    for name, value in list(vars(module).items()):
        if isinstance(value, torch.jit.ScriptFunction):
            setattr(module, name, value._torchdynamo_inline)


def __getattr__(name: str) -> Any:
    """Return the function that builds an architecture."""
    if name not in ARCHITECTURES:
        raise AttributeError(name)
    return partial(build, name)
