"""What the benchmark reports of fusion, and what coarsening by rules must not load."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.bench_fusion import fusion_report


def test_the_report_counts_before_and_after():
    row, = fusion_report(["gpt2-tiny:layers=1"])
    assert row.num_rules < row.num_ops / 3
    assert row.num_constants > 0
    assert row.num_inductor is None


def test_coarsening_by_rules_needs_no_torch():
    code = "import sys, weft.coarsen.coarsen; sys.exit('torch' in sys.modules or 'onnxruntime' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
