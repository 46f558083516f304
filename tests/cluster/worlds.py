"""Cluster file values that several tests start from."""

from __future__ import annotations

from typing import Any


def header(**fields: Any) -> dict[str, Any]:
    return {"format": "weft.cluster", "version": 1, **fields}


def short_form() -> dict[str, Any]:
    return header(
        hosts=[
            {"name": "a", "count": 2, "devices": "4 x A100-80GB", "intra": "nvlink3"},
            {"name": "b", "devices": "2 x RTX3090", "intra": "pcie4"},
        ],
        network={"bandwidth": "100Gbit/s", "latency": "10us"},
    )


def long_form() -> dict[str, Any]:
    return header(
        name="bench",
        contention="link",
        kinds={"npu": {"flops": {"float32": "10TFLOP/s", "bf16": "80TFLOP/s"}, "memory": "32GiB",
                       "memory_bandwidth": "1TB/s", "overhead": "3us", "source": "vendor"}},
        devices=[
            {"name": "n0", "kind": "npu", "host": "h0"},
            {"name": "n1", "kind": "npu", "host": "h0", "memory": "16GiB"},
            {"name": "g0", "kind": "T4", "host": "h1"},
            {"name": "x0", "kind": "mine", "memory": "8GB", "flops": {"float32": 1e12}, "memory_bandwidth": "100GB/s"},
        ],
        switches=["s"],
        links=[
            {"from": "n0", "to": "n1", "bandwidth": "50GB/s", "latency": "2us"},
            {"from": "n0", "to": "s", "bandwidth": "12GB/s", "latency": "5us", "shared": "bus"},
            {"from": "n1", "to": "s", "bandwidth": "12GB/s", "latency": "5us", "shared": "bus"},
            {"from": "g0", "to": "s", "bandwidth": "12GB/s", "latency": "5us"},
            {"from": "s", "to": "x0", "bandwidth": "1GB/s", "directed": True},
            {"from": "x0", "to": "s", "bandwidth": "2GB/s", "directed": True},
        ],
    )


def mixed_form() -> dict[str, Any]:
    return header(
        hosts=[{"name": "a", "devices": ["2 x V100-16GB", "1 x T4"],
                "intra": {"bandwidth": "10GB/s", "latency": "4us", "shared": True}}],
        devices=[{"name": "c", "kind": "xeon-32c", "host": "a"}, {"name": "lone", "kind": "H100"}],
        network="ethernet25",
        contention="port",
    )


def times_only() -> dict[str, Any]:
    return header(devices=[{"name": "d0", "kind": "d0", "memory": 14.0}, {"name": "d1", "kind": "d1", "memory": 16.0}],
                  contention="port")
