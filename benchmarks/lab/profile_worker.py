"""Runs on every host: times a model's operators while all other hosts do so too, and goes on until the last has done.

    python -m benchmarks.lab.profile_worker MODEL BATCH KIND STORE FOLDER RANK NUM_RANKS
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from weft.cost.profile import ProfileStore
from weft.cost.profiler import profile_model
from weft.model.load import trace_model


def main(arguments: list[str]) -> None:
    """Trace, wait for the others, profile into the store, and keep this core as busy until all have finished."""
    model, batch, kind, store, folder, rank, num_ranks = arguments
    place, count = Path(folder), int(num_ranks)
    traced = trace_model(model, batch=int(batch))
    (place / f"ready{rank}").touch()
    while len(list(place.glob("ready*"))) < count:
        time.sleep(0.02)
    profile_model(traced, "cpu", ProfileStore(store), threads=1, kind=kind)
    (place / f"done{rank}").touch()
    number = 0
    while len(list(place.glob("done*"))) < count:
        number += 1
        profile_model(traced, "cpu", ProfileStore(f"{store}.{number}"), threads=1, kind=kind, passes=1)


if __name__ == "__main__":
    main(sys.argv[1:])
