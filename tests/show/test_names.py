from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.show.names import printable, short_list, short_modules, shorten


@pytest.mark.parametrize(("stages", "expected"), [
    ([["transformer.h.0.attn", "transformer.h.0.mlp", "transformer.h.1"], ["transformer.h.2"]], ("h.0 - h.1", "h.2")),
    ([["transformer.wte", "transformer.h.0", "transformer.h.1"], ["transformer.h.2", "transformer.ln_f", "lm_head"]],
     ("wte, h.0 - h.1", "h.2, ln_f, lm_head")),
    ([["encoder.block.0", "encoder.block.1"], ["decoder.block.0"]], ("encoder.block.0 - encoder.block.1", "decoder.block.0")),
    ([["a.head", "a.h.0"], ["head"]], ("a.head, a.h.0", "head")),
    # A layer that two stages divide is named one level deeper in both.
    ([["h.0.attn", "h.0.mlp", "h.1.attn"], ["h.1.mlp", "h.2.attn"]], ("h.0, h.1.attn", "h.1.mlp, h.2")),
    ([["layers.2.blocks.0.a", "layers.2.blocks.1.a"], ["layers.2.blocks.2.a", "layers.3.blocks.0.a"]],
     ("layers.2.blocks.0 - layers.2.blocks.1", "layers.2.blocks.2, layers.3")),
    # Two stages with the same modules are copies of each other: nothing is divided.
    ([["h.0", "h.1"], ["h.0", "h.1"]], ("h.0 - h.1", "h.0 - h.1")),
    ([["", ""], []], ("", "")),
    ([["h.9", "h.10", "h.12"]], ("h.9 - h.10, h.12",)),
])
def test_modules_are_shortened(stages, expected):
    assert short_modules(stages) == expected


def test_lists_join_runs_and_are_cut():
    assert short_list(["a0", "a1", "a2", "b7", "b9"]) == "a0 - a2, b7, b9"
    assert short_list([f"x{i}" for i in range(0, 40, 2)], limit=3) == "x0, x2, 18 more"
    assert short_list(["a", "a", "b"]) == "a, b"
    assert short_list([]) == ""


def test_long_names_lose_their_middle():
    assert shorten("transformer.layers.12", 12) == "trans..rs.12"
    assert shorten("short", 12) == "short"


@given(st.text())
def test_what_is_printed_is_printable(text):
    assert printable(text).isprintable()
    assert text != printable(text) or text.isprintable()


@given(st.lists(st.lists(st.text("ab0.", max_size=6), max_size=5), max_size=4))
def test_any_module_names_give_one_text_per_stage(stages):
    assert len(short_modules(stages)) == len(stages)
