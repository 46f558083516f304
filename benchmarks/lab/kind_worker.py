"""Runs on one host of every core at once: prints what a core can do, measured as ``weft cluster probe`` does."""

from __future__ import annotations

import json

from weft.cluster.cluster_file import to_json
from weft.cluster.probe import probe


def main() -> None:
    """Print the cluster file of one device."""
    print(json.dumps(to_json(probe(1, device="cpu"))), flush=True)


if __name__ == "__main__":
    main()
