"""Rows sorted by the expert that they fall on."""

from __future__ import annotations

from typing import Final

GROUPED_KINDS: Final = ("aten._grouped_mm", "transformers.grouped_mm_fallback")
"""Operators that multiply rows, sorted by expert, with the matrix of their expert."""
