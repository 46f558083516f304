"""The cluster as a drawing for the page: a card for each host, a chip for each device, lines to the network.

Colours and fonts are the page's (``report.css``), so that the drawing follows its light and dark scheme; the colour of
a chip's edge is its kind's, which is written on it, too. Every text is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Final, NamedTuple

from weft.base.units import format_bytes, format_rate
from weft.show.cluster_facts import ChipFacts, ClusterFacts, HostFacts, chip_title
from weft.show.names import printable, short_list, shorten

NUM_COLOURS: Final = 8
_WIDTH: Final = 1120
_CHIP: Final = (126, 60)
_GAP: Final = 8
_PAD: Final = 14
_HEAD: Final = 34
_COLUMNS: Final = 4
_BUS: Final = 46
"""Between a row of hosts and the bar of the network below it."""
_BAR: Final = 24
_SPINE: Final = 22
"""Room for the lines that join the bars of several rows."""
_CHARACTER: Final = 8
"""Pixels of a wide character of a card's title."""
_WIDEST_HEAD: Final = 340
_CHARACTERS: Final = 16
"""That fit into a chip's line."""


class _Card(NamedTuple):
    host: HostFacts
    x: int
    width: int
    columns: int
    height: int


def cluster_svg(facts: ClusterFacts) -> str:
    """Return the drawing as an ``svg`` element."""
    kinds = {name: index % NUM_COLOURS for index, name in enumerate(facts.kinds)}
    rows = _rows(facts.hosts)
    left = _SPINE if len(rows) > 1 and facts.switches else 0
    parts: list[str] = []
    ends: dict[str, list[int]] = {}
    y = right = 0
    for row in rows:
        bottom = y + max(card.height for card in row)
        end = max(card.x + card.width for card in row)
        for card in row:
            parts += _card(card, y, kinds)
        bars = [name for name in facts.switches if any(name in card.host.outside for card in row)]
        for number, name in enumerate(bars):
            at = bottom + _BUS + number * (_BAR + _GAP)
            parts += _bar(name, number, row, y, at, end)
            ends.setdefault(name, []).append(at + _BAR // 2)
        y = (bottom + _BUS + len(bars) * (_BAR + _GAP) - _GAP if bars else bottom) + 20
        right = max(right, end)
    parts += _spines(ends, left)
    label = escape(f"Cluster of {sum(facts.kinds.values())} devices")
    return (f'<svg class="cluster" width="{right + left + 2}" height="{y - 18}" '
            f'viewBox="{-left - 1} -1 {right + left + 2} {y - 18}" role="img" aria-label="{label}">'
            f'{"".join(parts)}</svg>')


def _rows(hosts: Sequence[HostFacts]) -> list[list[_Card]]:
    """Return the hosts in rows that fit the page: in one row if narrower hosts make that possible."""
    widest = 2 * _COLUMNS if len(hosts) == 1 else _COLUMNS
    for columns in range(widest, 1, -1):
        rows = _fill_rows(hosts, columns)
        if len(rows) == 1:
            return rows
    return _fill_rows(hosts, widest)


def _fill_rows(hosts: Sequence[HostFacts], most: int) -> list[list[_Card]]:
    """Return the hosts in rows, with so many devices side by side at most."""
    rows: list[list[_Card]] = [[]]
    x = 0
    for host in hosts:
        columns = min(most, max(1, len(host.chips)))
        width = max(2 * _PAD + columns * (_CHIP[0] + _GAP) - _GAP, _head_width(host))
        lines = -(-len(host.chips) // columns)
        if rows[-1] and x + width > _WIDTH:
            rows.append([])
            x = 0
        rows[-1].append(_Card(host, x, width, columns, _HEAD + lines * (_CHIP[1] + _GAP) - _GAP + _PAD))
        x += width + 18
    return rows


def _spines(ends: dict[str, list[int]], left: int) -> Iterator[str]:
    """Yield for each switch the line that joins its bars of several rows."""
    for number, places in enumerate(ends.values()):
        if len(places) > 1:
            x = -left + 3 + 5 * number
            yield f'<line class="wire" x1="{x}" x2="{x}" y1="{places[0]}" y2="{places[-1]}"/>'
            yield from (f'<line class="wire" x1="{x}" x2="0" y1="{at}" y2="{at}"/>' for at in places)


def _head_width(host: HostFacts) -> int:
    """Return how wide a card must be for its title and rates, within reason."""
    num_characters = len("".join(_head(host)))
    return min(_WIDEST_HEAD, 2 * _PAD + 24 + _CHARACTER * num_characters)


def _head(host: HostFacts) -> tuple[str, str, str]:
    """Return the title of a card, how many hosts it is, and the rates inside."""
    times = f" \u00d7 {len(host.names)}" if len(host.names) > 1 else ""
    rates = ", ".join(format_rate(rate) for rate in host.inside[:2])
    return f"Host {short_list(map(printable, host.names), limit=2)}", times, rates


def _card(card: _Card, y: int, kinds: dict[str, int]) -> Iterator[str]:
    host = card.host
    num_hosts = len(host.names)
    title, times, rates = _head(host)
    yield f'<rect class="host" x="{card.x}" y="{y}" width="{card.width}" height="{card.height}" rx="9"/>'
    room = (card.width - 2 * _PAD - 24) // _CHARACTER - len(rates) - len(times)
    yield (f'<text class="strong" x="{card.x + _PAD}" y="{y + 22}">{escape(shorten(title, max(9, room)))}'
           f'<tspan class="times">{times}</tspan></text>')
    if rates:
        yield f'<text class="soft end" x="{card.x + card.width - _PAD}" y="{y + 22}">{escape(rates)}</text>'
    for index, chip in enumerate(host.chips):
        line, column = divmod(index, card.columns)
        yield from _chip(chip, num_hosts, card.x + _PAD + column * (_CHIP[0] + _GAP),
                         y + _HEAD + line * (_CHIP[1] + _GAP), kinds[chip.kind])


def _chip(chip: ChipFacts, num_hosts: int, x: int, y: int, colour: int) -> Iterator[str]:
    wide, tall = _CHIP
    memory = "" if chip.memory_bytes is None else f", {format_bytes(chip.memory_bytes)}"
    work = short_list(map(printable, chip.work), limit=2) if chip.work else "idle"
    name = printable(chip_title(chip, num_hosts))
    count = len(chip.names) // num_hosts
    full = f"{short_list(map(printable, chip.names))}: {printable(chip.kind)}{memory}; " + (
        short_list(map(printable, chip.work), limit=12) if chip.work else "no work")
    yield (f'<g><title>{escape(full)}</title>'
           f'<rect class="chip{"" if chip.work else " idle"}" x="{x}" y="{y}" width="{wide}" height="{tall}" rx="6"/>'
           f'<rect class="kind-{colour}" x="{x}" y="{y + 6}" width="4" height="{tall - 12}" rx="2"/>')
    times = f" \u00d7 {count}" if count > 1 else ""
    title = shorten(name, _CHARACTERS - len(times)) + times
    yield f'<text class="strong" x="{x + 12}" y="{y + 18}">{escape(title)}</text>'
    yield f'<text x="{x + 12}" y="{y + 35}">{escape(shorten(work, _CHARACTERS + 1))}</text>'
    yield f'<text class="soft small" x="{x + 12}" y="{y + 51}">{escape(shorten(printable(chip.kind), 19))}</text></g>'


def _bar(name: str, number: int, row: Sequence[_Card], y: int, bar: int, end: int) -> Iterator[str]:
    """Yield a switch that joins hosts: a bar below them, and a line from each with its rate."""
    for card in row:
        rate = card.host.outside.get(name)
        if rate is None:
            continue
        x = card.x + card.width // 2 + 90 * number
        yield f'<line class="wire" x1="{x}" x2="{x}" y1="{y + card.height}" y2="{bar}"/>'
        yield f'<text class="soft" x="{x + 8}" y="{bar - 12}">{escape(format_rate(rate))}</text>'
    yield f'<rect class="bar" x="0" y="{bar}" width="{end}" height="{_BAR}" rx="6"/>'
    yield (f'<text class="soft middle" x="{end / 2:.0f}" y="{bar + 16}">{escape(shorten(printable(name), 60))}'
           "</text>")
