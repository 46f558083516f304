"""Cases of ``bench_golden``: command lines of ``weft plan`` whose predicted steps and peaks must not become worse."""

from __future__ import annotations

from typing import Final

ZOO: Final = "benchmarks/problems/zoo"
DEPLOY: Final = "benchmarks/problems/deploy"
HALF: Final = "--dtype float16"

CASES: Final[dict[str, str]] = {
    # equal devices, room enough
    "gpt2-box8": f"gpt2 {ZOO}/box8.yaml --batch 128 {HALF}",
    "gpt2-xl-box8": f"gpt2-xl {ZOO}/box8.yaml --batch 128 {HALF}",
    "bert-large-box4": f"bert-large {ZOO}/box4.yaml --batch 128 {HALF}",
    "t5-base-box8": f"t5-base {ZOO}/box8.yaml --batch 128 {HALF}",
    "resnet-50-box8": f"resnet-50 {ZOO}/box8.yaml --batch 512 {HALF}",
    "vgg-19-two-boxes": f"vgg-19 {ZOO}/two-boxes.yaml --batch 512 {HALF}",
    "vit-base-two-boxes": f"vit-base {ZOO}/two-boxes.yaml --batch 512 {HALF}",
    "whisper-base-box4": f"whisper-base {ZOO}/box4.yaml --batch 64 {HALF}",
    "lstm-box4": f"lstm {ZOO}/box4.yaml --batch 256 {HALF}",
    "opt-two-boxes": f"opt-1.3b {ZOO}/two-boxes.yaml --batch 64 {HALF}",
    "gpt2-float32": "gpt2 '8 x A100-40GB' --batch 64",
    "gpt2-sgd": "gpt2 '4 x V100-16GB' --batch 32 --optimizer sgd",
    # large
    "llama-7b-eight-boxes": f"llama-7b {ZOO}/eight-boxes.yaml --batch 64 {HALF}",
    "llama-70b-eight-boxes": f"llama-70b {ZOO}/eight-boxes.yaml --batch 64 {HALF}",
    "llama-3-8b-two-boxes": f"llama-3-8b {ZOO}/two-boxes.yaml --batch 64 {HALF}",
    "gpt-18b-256": "gpt2:layers=40,hidden=6144,heads=48,seq=2048,vocab=51200 '256 x A100-80GB' --batch 1024 "
                   "--dtype bfloat16",
    # mixed devices
    "gpt2-workstation": f"gpt2 {ZOO}/workstation.yaml --batch 128 {HALF}",
    "gpt2-xl-generations": f"gpt2-xl {ZOO}/generations.yaml --batch 128 {HALF}",
    "bert-large-three-kinds": f"bert-large {ZOO}/three-kinds.yaml --batch 128 {HALF}",
    "t5-large-tag-testbed": f"t5-large {DEPLOY}/tag-testbed.yaml --batch 128 {HALF}",
    "vgg-19-tag-testbed": f"vgg-19 {DEPLOY}/tag-testbed.yaml --batch 512 {HALF}",
    "swin-t-generations": f"swin-t {ZOO}/generations.yaml --batch 512 {HALF}",
    "mixtral-8x-workstation": f"mixtral-8x {ZOO}/workstation.yaml --batch 64 {HALF}",
    "inception-v3-two-sites": f"inception-v3 {DEPLOY}/two-sites.yaml --batch 256 {HALF}",
    "gpt2-slow-link": f"gpt2 {DEPLOY}/star-slow-link.yaml --batch 64 {HALF}",
    "convnext-t-racks": f"convnext-t {DEPLOY}/racks.yaml --batch 256 {HALF}",
    # tight memory, recomputation, headroom
    "gpt2-xl-v100-tight": "gpt2-xl '8 x V100-16GB' --batch 64 --dtype float16",
    "gpt2-xl-4-v100-recompute": "gpt2-xl '4 x V100-32GB' --batch 64 --dtype float16 --recompute",
    "gpt2-24-recompute-headroom-9": "gpt2:layers=24 '8 x V100-16GB' --batch 64 --microbatches 16 --strategy 1f1b-balanced "
                                    "--recompute --no-deploy --no-joint --headroom 9GiB",
    "gpt2-24-recompute-headroom-10": "gpt2:layers=24 '8 x V100-16GB' --batch 64 --microbatches 16 --strategy 1f1b-balanced "
                                     "--recompute --no-deploy --no-joint --headroom 10GiB",
    "llama-7b-box8-tight": f"llama-7b {ZOO}/box8.yaml --batch 32 {HALF} --headroom 50%",
    "bert-large-v100-recompute": "bert-large '2 x V100-16GB' --batch 64 --recompute",
    "llama-7b-3090": "llama-7b '8 x RTX3090' --batch 16 --dtype float16",
    "gpt2-xl-two-3090": "gpt2-xl '2 x RTX3090' --batch 8 --dtype float16",
    # single strategies and searched schedules
    "gpt2-1f1b": "gpt2 '4 x A100-40GB' --batch 64 --strategy 1f1b --microbatches 16",
    "gpt2-gpipe-balanced": "gpt2 '4 x A100-40GB' --batch 64 --strategy gpipe --strategy 1f1b-balanced",
    "gpt2-placement-v": "gpt2 '4 x A100-40GB' --batch 32 --microbatches 8 --strategy 1f1b --placement v --no-deploy "
                        "--no-joint",
    "mt5-base-placement-nn": "mt5-base '4 x A100-40GB' --batch 32 --microbatches 8 --strategy 1f1b --placement nn "
                             "--no-deploy --no-joint",
    "gpt2-data-parallel-by-speed": f"gpt2 {ZOO}/workstation.yaml --batch 128 --strategy data-parallel-by-speed",
    # inference, latency, targets
    "gpt2-xl-inference": "gpt2-xl '4 x A100-40GB' --batch 16 --mode inference --dtype float16",
    "inception-v3-latency": "inception-v3 '2 x A100-80GB, 2 x RTX3090' --objective latency",
    "bert-large-target": f"bert-large {ZOO}/box8.yaml --batch 128 --dtype float16 --target 300ms",
}
"""By name: the arguments of ``weft plan``, clusters by paths below the project's folder."""
