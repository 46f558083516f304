"""Self-contained pages: the frame that all reports share, the data of their chart, and the HTML of figures and tables.

A page loads nothing: style, script and data are inside it, and its content security policy admits exactly that style
and that script by their digests, so that even a name which got through unescaped could neither run nor fetch anything.
Every text goes through ``escape``.

The script gets charts in columns, as plain JSON values of linear size (``chart_data``):

    {"devices": [{"name": "d0", "capacity": 16e9}], "microbatches": 8,
     "what": [{"label": "F s0", "op": "compute", "phase": "F", "backward": false, "bytes": null}, ...],
     "program": {"rank_start": [0, 30, ...], "what": [0, 0, 1, ...], "microbatch": [0, 1, 0, ...]},
     "timelines": [{"title": "predicted", "unit_s": 1e-9, "start": [...], "duration": [...],
                    "memory": [{"at": [...], "bytes": [...]}, ...], ...}]}

Times are whole multiples of ``unit_s``, nine digits for the whole. Where the chart repeats, ``period`` is one period,
and a timeline's ``steady`` has the span for each row.

``PageServer`` serves one page on the loopback address. Only this machine can reach it, only ``/`` is there, and only
under the names that a browser on this machine uses for it: a foreign page that makes its own name point here gets
nothing.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from itertools import accumulate
from typing import Any, Final

import numpy as np

from weft.base.errors import InputError
from weft.model.graph import F64
from weft.show.chart import Chart, number, period_text
from weft.show.names import printable
from weft.show.tables import TextTable

_SCRIPTS: Final = ("report_draw.js", "report.js")
_PLACEHOLDER: Final = re.compile(r"\{\{(\w+)\}\}")
_HEADING: Final = re.compile(r'<h2 id="([a-z-]+)">([A-Za-z ]+)</h2>')
_MIN_LINKS: Final = 4
_IS_HTML: Final = ("tiles", "before", "sections")
MAX_ROWS: Final = 256
"""Longer tables are cut; the chart has all devices."""


def render_page(values: Mapping[str, str], data: Any) -> str:
    """Return the page's text: ``report.html`` with the values in their places and ``data`` for its script.

    Text are ``title``, ``mark`` (what sort of report), ``heading``, ``subtitle``, ``footer``, and of the table of
    instructions ``last_column`` and, if it is not of micro-batches, ``second_column``; the others are HTML: ``tiles``,
    ``sections``, and ``before``, what stands before the timeline, if anything does.
    """
    # the scripts are one block, so that they leave no global names
    style, script = _read("report.css"), '"use strict";\n{\n' + "\n".join(map(_read, _SCRIPTS)) + "}\n"
    texts = {name: value if name in _IS_HTML else escape(value) for name, value in values.items()}
    texts = {
        "second_column": "Micro-batch", "before": "", **texts, "navigation": _navigation(values["sections"]),
        "policy": f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
                  "base-uri 'none'; form-action 'none'", "style": style, "script": script, "data": embed_json(data)}
    # each place is filled once: what is inserted is not searched again
    return _PLACEHOLDER.sub(lambda match: texts[match[1]], _read("report.html"))


def _read(name: str) -> str:
    return (files("weft.show") / name).read_text(encoding="utf-8")


def _navigation(sections: str) -> str:
    """Return links to the sections, where there are enough of them to look for one."""
    found = _HEADING.findall(sections)
    items = "".join(f'<li><a href="#{name}">{title}</a></li>' for name, title in (("timeline", "Timeline"), *found))
    return f'<nav aria-label="Sections"><ul>{items}</ul></nav>' if len(found) >= _MIN_LINKS else ""


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def embed_json(value: Any) -> str:
    """Return the value as JSON that is safe inside a ``script`` element: ASCII without ``<``, ``>`` and ``&``."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# ---- data of the chart


def chart_data(charts: Mapping[str, Chart], *, devices: Sequence[Mapping[str, Any]], what: Sequence[Mapping[str, Any]],
               columns: Mapping[str, Sequence[int]], memory: Sequence[Sequence[tuple[F64, Sequence[float]]]] = (),
               **more: Any) -> dict[str, Any]:
    """Return what the page's script draws: charts of the same boxes by title.

    ``devices`` says what each row is, ``columns`` what each box is (``what`` has the entries), ``memory`` for each
    chart and row what is held from each time on.
    """
    first = next(iter(charts.values()))
    data = {"plain": first.to_text is number, "devices": list(devices), "what": list(what),
            "program": {"rank_start": np.cumsum([0, *(len(row.items) for row in first.rows)]).tolist(), **columns},
            "timelines": [_timeline(title, chart) for title, chart in charts.items()], **more}
    for timeline, rows in zip(data["timelines"], memory, strict=False):
        timeline["memory"] = [{"at": _whole(times, timeline["unit_s"]), "bytes": amounts} for times, amounts in rows]
    for chart in charts.values():
        if chart.steady is not None:
            data["period"] = {"from": chart.steady.period_start, "to": chart.steady.period_end,
                              "text": f"one {period_text(chart.steady, chart.to_text)}"}
    return data


def _timeline(title: str, chart: Chart) -> dict[str, Any]:
    unit = 10.0 ** (math.floor(math.log10(chart.span)) - 8) if chart.span > 0 else 1.0
    starts, ends = (np.concatenate([np.zeros(0), *times]) for times in (
        [row.starts for row in chart.rows], [row.ends for row in chart.rows]))
    steady = [row.steady and _whole(np.asarray(row.steady), unit) for row in chart.rows]
    return {"title": title, "step_time_s": chart.span, "unit_s": unit, "start": _whole(starts, unit),
            "duration": (np.round(ends / unit) - np.round(starts / unit)).astype(np.int64).tolist(),
            "busy": [round(row.share(chart.span), 6) for row in chart.rows],
            **({"steady": steady} if any(steady) else {})}


def _whole(times: F64, unit: float) -> list[int]:
    whole: list[int] = np.round(times / unit).astype(np.int64).tolist()
    return whole


# ---- figures and tables


class Html(str):
    """Text that is HTML already; all other text is escaped."""

    __slots__ = ()


def escape(text: str) -> str:
    """Return the text as HTML; a percent sign stays with its number."""
    return html.escape(text).replace(" %", "&nbsp;%")


def tiles(figures: Iterable[tuple[str, str, str]]) -> str:
    """Return key figures: each a name, a value and a note."""
    return "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd>{escape(note)}</dd></div>"
                   for name, value, note in figures)


def section(title: str, body: str, *, lead: str = "") -> str:
    """Return a section with a heading."""
    name = title.lower().replace(" ", "-")
    note = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{escape(title)}</h2>{note}{body}</section>'


def table(label: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, limit: int = MAX_ROWS,
          num_more: int | None = None, styles: Mapping[int, str] | None = None) -> str:
    """Return a table whose first column is the header of each row.

    A name in the header that begins with ``#`` is of a column of numbers, with ``~`` of one whose text is wrapped. The
    last cell of a row that is shorter takes what is left. ``styles`` are classes of rows. Of more rows than ``limit``
    the others are counted, as ``num_more`` if that is given.
    """
    kinds = [{"#": "n", "~": "wrap"}.get(name[:1], "") for name in header]
    heads = "".join(f'<th scope="col"{_class("n" if kind == "n" else "")}>{escape(name.lstrip("#~"))}</th>'
                    for name, kind in zip(header, kinds, strict=True))
    body = [_table_row(row, kinds, (styles or {}).get(index, "")) for index, row in enumerate(rows[:limit])]
    if len(rows) > limit:
        more = len(rows) - limit if num_more is None else num_more
        body.append(f'<tr><td colspan="{len(header)}" class="dim">{more} more</td></tr>')
    return (f'<div class="card scroll" tabindex="0" role="region" aria-label="{escape(label)}"><table>'
            f"<thead><tr>{heads}</tr></thead><tbody>{''.join(body)}</tbody></table></div>")


def table_section(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, lead: str = "",
                  after: str = "", **options: Any) -> str:
    """Return a section that is a table of that name, with the options of ``table``, and what comes ``after`` it."""
    return section(title, table(title, header, rows, **options) + after, lead=lead)


def _table_row(row: Sequence[str], kinds: Sequence[str], style: str) -> str:
    first, *others = (cell if isinstance(cell, Html) else escape(cell) for cell in row)
    cells = [f"<td{_class(kind)}>{cell}</td>" for cell, kind in zip(others, kinds[1:], strict=False)]
    if len(row) < len(kinds):
        cells[-1] = f'<td colspan="{len(kinds) - len(row) + 1}" class="wrap">{others[-1]}</td>'
    return f'<tr{_class(style)}><th scope="row">{first}</th>{"".join(cells)}</tr>'


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


def html_table(item: TextTable, header: Sequence[str] = ()) -> str:
    """Return a table of the terminal as HTML, under other names if a ``header`` is given."""
    names = header or [name.capitalize() for name in item.header]
    marks = ("#" if index and index in item.numeric else "~" if index else "" for index in range(len(names)))
    return table(item.title, [mark + name for mark, name in zip(marks, names, strict=True)],
                 [tuple(map(printable, row)) for row in item.rows],
                 styles=dict.fromkeys(item.marked, "chosen"))


def tagged(text: str, tag: str = "") -> Html:
    """Return a row's header with a small mark behind it."""
    return Html(escape(text) + (f'<span class="tag">{escape(tag)}</span>' if tag else ""))


def with_bar(text: str, shares: Mapping[str, float]) -> Html:
    """Return a cell of text over a bar of parts of a whole, by class of the style; the rest stays empty."""
    begins = accumulate(shares.values(), initial=0.0)
    parts = "".join(f'<rect class="{name}" x="{100 * begin:.2f}%" width="{100 * share:.2f}%" height="100%"/>'
                    for (name, share), begin in zip(shares.items(), begins, strict=False))
    before = text if isinstance(text, Html) else escape(text)
    return Html(f'{before}<svg class="parts" aria-hidden="true">{parts}</svg>')


def colour_key(names: Mapping[str, str]) -> str:
    """Return what the colours of the style's classes mean."""
    items = (f'<li><svg class="{name}" aria-hidden="true"><rect width="100%" height="100%"/></svg>{escape(text)}</li>'
             for name, text in names.items())
    return f'<ul class="key">{"".join(items)}</ul>'


def definitions(items: Iterable[tuple[str, str]]) -> str:
    """Return names and what they are, side by side in a box."""
    parts = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in items)
    return f'<dl class="facts panel">{parts}</dl>'


ADDRESS: Final = "127.0.0.1"
_HEADERS: Final = {
    "Content-Type": "text/html; charset=utf-8", "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer", "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin"}


class PageServer(ThreadingHTTPServer):
    """Serves one page until it is closed or interrupted."""

    daemon_threads = True

    def __init__(self, text: str, *, port: int = 0) -> None:
        """Bind to the port; 0 takes a free one. Raise ``InputError`` where that is not possible."""
        if not 0 <= port <= 65535:
            raise InputError(f"port {port} does not exist: give one from 0 to 65535 (0 takes a free one)")
        self.page = text.encode()
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as problem:
            raise InputError(f"cannot listen on {ADDRESS}:{port}: {problem.strerror}. Try another --port, or 0 for "
                             "any free one") from problem

    @property
    def address(self) -> str:
        """Return where the page is: ``http://127.0.0.1:40123/``."""
        return f"http://{ADDRESS}:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    """Answers with the page, or with an empty refusal."""

    server: PageServer
    server_version = "weft"
    sys_version = ""
    timeout = 30

    def do_GET(self) -> None:
        status = self._status()
        body = self.server.page if status is HTTPStatus.OK else b""
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def _status(self) -> HTTPStatus:
        if self.headers.get("Host", "") not in (f"{name}:{self.server.server_port}" for name in (ADDRESS, "localhost")):
            return HTTPStatus.FORBIDDEN
        return HTTPStatus.OK if self.path == "/" else HTTPStatus.NOT_FOUND

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name in the base class
        """Say nothing."""
