"""Weft's main job from start to end on this machine: measure, plan, show, run on four processes, verify.

    make demo        or        .venv/bin/python examples/demo.py --out out/demo
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from weft.base.units import format_time
from weft.cli.main import main as weft
from weft.plan.plan import load_plan
from weft.simulate.timeline_file import load_timeline

MODEL = "gpt2:layers=8,hidden=128,heads=4,vocab=512,seq=64"
"""GPT-2 in small, so that four processes on a laptop train it in a moment."""


def step(title: str, *arguments: object) -> None:
    """Show and run one ``weft`` command; end the demonstration with its exit code if it fails."""
    words = [str(argument) for argument in arguments]
    print(f"\n== {title}\n$ weft {shlex.join(words)}", flush=True)
    code = weft(words)
    sys.stdout.flush()
    if code:
        sys.exit(code)


def main() -> None:
    """Run the demonstration."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for everything that is written")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    cluster, profile, plan = out / "cluster.json", out / "profile.sqlite", out / "plan.json"
    report, trace, run = out / "report.html", out / "trace.json.gz", out / "run"

    step("measure this machine, as four devices", "cluster", "probe", "--devices", 4, "--device", "cpu", "-o", cluster)
    step("time the model's operators", "profile", MODEL, "--store", profile, "--batch", 4, "--quiet")
    step("plan: compare the strategies", "plan", MODEL, cluster, "--batch", 32, "--microbatches", 8,
         "--profile", profile, "-o", out / "best.json", "--html", out / "comparison.html", "--quiet")
    step("plan: a pipeline of four stages", "plan", MODEL, cluster, "--batch", 32, "--microbatches", 8,
         "--profile", profile, "--strategy", "1f1b-balanced", "-o", plan, "--trace", trace, "--quiet")
    step("run it on four processes and compare loss and gradients with one", "run", plan, MODEL, "--verify",
         "--warmup", 2, "--steps", 5, "-o", run)
    step("show the plan, predicted and measured", "show", plan, "--profile", profile,
         "--timeline", run / "timeline.json.gz", "--html", report)

    predicted = load_plan(plan).search.step_time
    measured = load_timeline(run / "timeline.json.gz").step_time_s
    assert predicted is not None
    print(f"\npredicted step {format_time(predicted)}, measured {format_time(measured)} "
          f"(median of 5; predicted / measured = {predicted / measured:.2f})")
    print(f"written: {plan}, {trace}, {report} and {run}/")


if __name__ == "__main__":
    main()
