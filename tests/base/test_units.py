"""Units as people write and mistype them."""

from __future__ import annotations

import doctest
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weft.base.units
from weft.base.errors import InputError
from weft.base.units import (
    format_bytes,
    format_count,
    format_rate,
    format_time,
    parse_bytes,
    parse_flop_rate,
    parse_rate,
    parse_time,
)

PARSERS = (parse_bytes, parse_rate, parse_time, parse_flop_rate)


@pytest.mark.parametrize(("parse", "text", "value"), [
    (parse_bytes, "80GiB", 80 * 2**30), (parse_bytes, "80GB", 80 * 10**9), (parse_bytes, "80 GB", 80 * 10**9),
    (parse_bytes, " 1.5 MiB ", 1572864), (parse_bytes, "0B", 0), (parse_bytes, "64KiB", 65536),
    (parse_bytes, "64kB", 64000), (parse_bytes, "64KB", 64000), (parse_bytes, "1TB", 10**12), (parse_bytes, "1PiB", 2**50),
    (parse_bytes, 17, 17), (parse_bytes, 1e9, 10**9), (parse_bytes, "12", 12), (parse_bytes, ".5kB", 500),
    (parse_bytes, "1e3B", 1000), (parse_bytes, 2**62 + 1, 2**62 + 1),
    (parse_rate, "400Gbit/s", 50e9), (parse_rate, "400Gb/s", 50e9), (parse_rate, "400Gbps", 50e9),
    (parse_rate, "50GB/s", 50e9), (parse_rate, "50GBps", 50e9), (parse_rate, "1GiB/s", 2.0**30), (parse_rate, 5, 5.0),
    (parse_rate, "8bit/s", 1.0), (parse_rate, "3B/s", 3.0),
    (parse_time, "5us", 5e-6), (parse_time, "3ms", 3e-3), (parse_time, "7ns", 7e-9), (parse_time, "2 s", 2.0),
    (parse_time, "1.5min", 90.0), (parse_time, 0, 0.0), (parse_time, "0us", 0.0), (parse_time, "4", 4.0),
    (parse_flop_rate, "312TFLOP/s", 312e12), (parse_flop_rate, "312TFLOPS", 312e12),
    (parse_flop_rate, "312TFLOPs/s", 312e12), (parse_flop_rate, "989.5 TFLOP/s", 989.5e12), (parse_flop_rate, 1e12, 1e12),
    (parse_flop_rate, "5GFlop/s", 5e9),
])
def test_what_people_write(parse, text, value):
    assert parse(text) == value
    assert type(parse(text)) is (int if parse is parse_bytes else float)


@pytest.mark.parametrize(("parse", "text", "sentence"), [
    (parse_bytes, "80G", "cannot read size '80G': write GB (10^n) or GiB (2^n)"),
    (parse_bytes, "80k", "cannot read size '80k': write kB (10^n) or KiB (2^n)"),
    (parse_bytes, "80P", "cannot read size '80P': write PB (10^n) or PiB (2^n)"),
    (parse_bytes, "400Gb", "'Gb' means bits; memory is given in bytes, such as '80GB' or '80GiB'"),
    (parse_bytes, "400Gbit", "'Gbit' means bits; memory is given in bytes"),
    (parse_bytes, "80gb", "'gb' means bits; memory is given in bytes"),
    (parse_bytes, "80GO", "cannot read size '80GO': units are B, kB, MB, GB, GiB, TB"),
    (parse_bytes, "eighty", "cannot read size 'eighty': write a number and a unit, such as '80GiB' or '80GB'"),
    (parse_bytes, "", "cannot read size '': write a number and a unit"),
    (parse_bytes, "GB", "cannot read size 'GB': write a number and a unit"),
    (parse_bytes, "1,5GB", "cannot read size '1,5GB': units are B, kB"),
    (parse_bytes, "1_000B", "cannot read size '1_000B': units are"),
    (parse_bytes, "-1GB", "size '-1GB' must be zero or more and finite"),
    (parse_bytes, -1, "size -1 must be zero or more and finite"),
    (parse_bytes, math.nan, "size nan must be zero or more and finite"),
    (parse_bytes, math.inf, "size inf must be zero or more and finite"),
    (parse_bytes, "nan", "cannot read size 'nan'"),
    (parse_bytes, "1e999B", "size '1e999B' must be zero or more and finite"),
    (parse_bytes, "1e30B", "size '1e30B' is more than 8 EiB"),
    (parse_bytes, 2**63, f"size {2**63} is more than 8 EiB"),
    pytest.param(parse_bytes, 10**5000, "size a number with more than 60 digits must be zero or more and finite",
                 id="5001 digits"),
    (parse_bytes, -(10**400), "must be zero or more and finite"),
    (parse_bytes, None, "size must be a number with a unit, not None"),
    (parse_bytes, True, "size must be a number with a unit, not True"),
    (parse_bytes, ["80GB"], "size must be a number with a unit, not ['80GB']"),
    (parse_bytes, "8" * 200, "cannot read size '888"),
    (parse_rate, "400Gb", "cannot read bandwidth '400Gb': say per second, such as '400Gbit/s' or '50GB/s' ('Gb' means "
                          "bits, 'GB' means bytes)"),
    (parse_rate, "400GB", "cannot read bandwidth '400GB': say per second"),
    (parse_rate, "400G", "cannot read bandwidth '400G': say per second"),
    (parse_rate, "400G/s", "cannot read bandwidth '400G/s': units are Gbit/s (bits) and GB/s (bytes)"),
    (parse_rate, "0GB/s", "bandwidth '0GB/s' must be more than zero and finite"),
    (parse_rate, 0, "bandwidth 0 must be more than zero and finite"),
    (parse_rate, "-5GB/s", "bandwidth '-5GB/s' must be more than zero and finite"),
    (parse_rate, math.nan, "bandwidth nan must be more than zero and finite"),
    (parse_rate, 10**400, "must be more than zero and finite"),
    (parse_time, "5 apples", "cannot read time '5 apples': units are s, ms, us, ns, min"),
    (parse_time, "5\u00b5s", "units are s, ms, us, ns, min"),
    (parse_time, "-5us", "time '-5us' must be zero or more and finite"),
    (parse_time, "5 u s", "cannot read time '5 u s': write a number and a unit, such as '5us'"),
    (parse_flop_rate, "312T", "cannot read compute rate '312T': write it as '312TFLOP/s'"),
    (parse_flop_rate, "312TOPS", "cannot read compute rate '312TOPS'"),
    (parse_flop_rate, 0, "compute rate 0 must be more than zero and finite"),
    (parse_flop_rate, "0TFLOP/s", "compute rate '0TFLOP/s' must be more than zero and finite"),
    (parse_flop_rate, "-1TFLOP/s", "must be more than zero and finite"),
    (parse_flop_rate, math.inf, "compute rate inf must be more than zero and finite"),
])
def test_typos_and_impossible_values(parse, text, sentence):
    with pytest.raises(InputError) as caught:
        parse(text)
    assert sentence in str(caught.value)
    assert len(str(caught.value)) < 250


exotic = (st.text(max_size=12) | st.text(alphabet="0123456789.eE+-GMKkTibBs/ pu\n\t", max_size=14) | st.integers()
          | st.integers(-(10**600), 10**600) | st.floats() | st.none() | st.booleans() | st.lists(st.integers(), max_size=2)
          | st.binary(max_size=4) | st.complex_numbers())


@settings(max_examples=600, deadline=None, derandomize=True)
@given(value=exotic)
def test_whatever_is_given_only_input_errors_come_back(value):
    for parse in PARSERS:
        try:
            result = parse(value)
        except InputError as error:
            str(error).encode()
        else:
            assert math.isfinite(result)
            assert result >= 0


@settings(max_examples=200, deadline=None, derandomize=True)
@given(value=st.integers(0, 10**6), unit=st.sampled_from(["B", "kB", "MB", "GB", "KiB", "MiB", "GiB"]))
def test_sizes_are_exact(value, unit):
    scale = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]
    assert parse_bytes(f"{value}{unit}") == value * scale


@pytest.mark.timeout(30)
def test_long_text_is_refused_at_once():
    """Was: the pattern tried every way to divide the digits, which took minutes for 2,000 of them."""
    for text in ("1" * 5000 + "\na\nb", "1" * 100_000, "9." * 50_000, " " * 100_000 + "x"):
        for parse in PARSERS:
            with pytest.raises(InputError, match="cannot read"):
                parse(text)


@pytest.mark.parametrize(("text", "expected"), [
    (format_bytes(0), "0 B"), (format_bytes(1023), "1023 B"), (format_bytes(1536), "1.5 KiB"),
    (format_bytes(80 * 2**30), "80 GiB"), (format_bytes(-2048), "-2 KiB"), (format_bytes(5e18), "4.547e+06 TiB"),
    (format_time(3.15e-3), "3.15 ms"), (format_time(0), "0 us"), (format_time(90), "90 s"), (format_time(2e-7), "0.2 us"),
    (format_rate(50e9), "50 GB/s"), (format_rate(1), "0.001 kB/s"), (format_rate(2e12), "2 TB/s"),
    (format_count(6.74e9), "6.74 G"), (format_count(12), "12"), (format_count(-5e6), "-5 M"),
])
def test_numbers_for_people(text, expected):
    assert text == expected


def test_examples_in_the_docstrings_are_true():
    assert doctest.testmod(weft.base.units).failed == 0
