"""The runtime needs PyTorch, numpy and numba, and nothing else that has to be installed."""

from __future__ import annotations

import subprocess
import sys

import pytest


def loaded_by(module: str) -> set[str]:
    code = f"import sys, {module}; print(' '.join(name for name in sys.modules if '.' not in name))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100).stdout.split())


@pytest.mark.parametrize("module", ["weft.run.worker", "weft.run.selftest"])
def test_a_rank_imports_no_planner_libraries(module):
    loaded = loaded_by(module)
    assert "torch" in loaded
    assert not loaded & {"ortools", "typer", "rich", "yaml", "rustworkx", "transformers", "onnx", "msgspec", "pydantic",
                         "safetensors"}


@pytest.mark.parametrize("module", ["weft.run.launch", "weft.run.__main__"])
def test_the_launcher_imports_no_framework(module):
    assert not loaded_by(module) & {"torch", "numba", "ortools", "transformers"}


def test_training_scripts_import_the_planner_only_when_they_plan():
    assert "ortools" not in loaded_by("weft.training.parallelize")
