"""Self-contained pages: the frame that all reports share, and the pieces of HTML that they are made of.

A page loads nothing: style, script and data are inside it, and its content security policy admits exactly that style
and that script by their digests, so that even a name which got through unescaped could neither run nor fetch anything.
Every text goes through ``escape``.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any, Final

_SCRIPTS: Final = ("report_draw.js", "report.js")
_PLACEHOLDER: Final = re.compile(r"\{\{(\w+)\}\}")
_HEADING: Final = re.compile(r'<h2 id="([a-z-]+)">([A-Za-z ]+)</h2>')
_MIN_LINKS: Final = 4


def render_page(values: Mapping[str, str], data: Any) -> str:
    """Return the page's text: ``report.html`` with the values in their places and ``data`` for its script.

    The values are HTML: ``title``, ``mark`` (what sort of report), ``heading``, ``subtitle``, ``tiles``, ``sections``,
    ``footer``, and of the table of instructions ``last_column`` and, if it is not of micro-batches, ``second_column``.
    ``before`` is what stands before the timeline, if anything does.
    """
    style, script = _read("report.css"), _script()
    return _fill(_read("report.html"), {
        "second_column": "Micro-batch", "before": "", **values, "navigation": _navigation(values["sections"]),
        "policy": _policy(style, script), "style": style, "script": script, "data": embed_json(data)})


def _read(name: str) -> str:
    return (files("weft.show") / name).read_text(encoding="utf-8")


def _script() -> str:
    """Return the scripts as one, in a block of their own so that they leave no global names."""
    return '"use strict";\n{\n' + "\n".join(_read(name) for name in _SCRIPTS) + "}\n"


def _fill(template: str, values: Mapping[str, str]) -> str:
    """Return the template with each ``{{name}}`` replaced once; what is inserted is not searched again."""
    return _PLACEHOLDER.sub(lambda match: values[match[1]], template)


def _navigation(sections: str) -> str:
    """Return links to the sections, where there are enough of them to look for one."""
    found = _HEADING.findall(sections)
    if len(found) < _MIN_LINKS:
        return ""
    items = "".join(f'<li><a href="#{name}">{title}</a></li>' for name, title in (("timeline", "Timeline"), *found))
    return f'<nav aria-label="Sections"><ul>{items}</ul></nav>'


def _policy(style: str, script: str) -> str:
    return (f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
            "base-uri 'none'; form-action 'none'")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def embed_json(value: Any) -> str:
    """Return the value as JSON that is safe inside a ``script`` element: ASCII without ``<``, ``>`` and ``&``."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def escape(text: str) -> str:
    """Return the text as HTML; a percent sign stays with its number."""
    return html.escape(text).replace(" %", "&nbsp;%")


def tile(name: str, value: str, note: str) -> str:
    """Return one key figure."""
    return f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd>{escape(note)}</dd></div>"


def section(title: str, body: str, *, lead: str = "") -> str:
    """Return a section with a heading."""
    name = title.lower().replace(" ", "-")
    note = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{escape(title)}</h2>{note}{body}</section>'


def table(label: str, header: Iterable[str], body: Iterable[str]) -> str:
    """Return a table; a header that begins with ``#`` is of a column of numbers."""
    heads = "".join(f'<th scope="col" class="n">{escape(name[1:])}</th>' if name.startswith("#")
                    else f'<th scope="col">{escape(name)}</th>' for name in header)
    return (f'<div class="card scroll" tabindex="0" role="region" aria-label="{escape(label)}"><table>'
            f"<thead><tr>{heads}</tr></thead><tbody>{''.join(body)}</tbody></table></div>")


def row_header(text: str, *, tag: str = "") -> str:
    """Return the first cell of a row, with a small mark behind it."""
    mark = f'<span class="tag">{escape(tag)}</span>' if tag else ""
    return f'<th scope="row">{escape(text)}{mark}</th>'


def number_cells(texts: Iterable[str]) -> str:
    """Return cells of numbers."""
    return "".join(f'<td class="n">{escape(text)}</td>' for text in texts)


def share_bar(shares: Mapping[str, float]) -> str:
    """Return a bar of parts of a whole, by class of the style; the rest stays empty."""
    x, parts = 0.0, []
    for name, share in shares.items():
        parts.append(f'<rect class="{name}" x="{x:.2f}%" width="{100 * share:.2f}%" height="100%"/>')
        x += 100 * share
    return f'<svg class="parts" aria-hidden="true">{"".join(parts)}</svg>'


def colour_key(names: Mapping[str, str]) -> str:
    """Return what the colours of the style's classes mean."""
    items = (f'<li><svg class="{name}" aria-hidden="true"><rect width="100%" height="100%"/></svg>{escape(text)}</li>'
             for name, text in names.items())
    return f'<ul class="key">{"".join(items)}</ul>'


def definitions(items: Iterable[tuple[str, str]]) -> str:
    """Return names and what they are, side by side in a box."""
    parts = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in items)
    return f'<dl class="facts panel">{parts}</dl>'
