"""The frame of a report: style, script and the pieces every page has. No network, no dependency, one file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from stretto.page.text import shown

STYLE = Path(__file__).with_name("report.css").read_text()
SCRIPT = Path(__file__).with_name("report.js").read_text()
# Where no script runs nothing searches or sorts, and nothing looks as if it did.
STILL = "<noscript><style>input{display:none}th{cursor:auto}</style></noscript>"


def page(title: str, subtitle: str, parts: Sequence[str]) -> str:
    """A whole document."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>{STILL}</head><body><h1>{escape(title)}</h1>"
        f'<p class="dim">{escape(subtitle)}</p>{"".join(parts)}<script>{SCRIPT}</script></body></html>\n'
    )


def numbers(facts: dict[str, str]) -> str:
    """A row of large numbers, each with its name."""
    return '<div class="numbers">' + "".join(
        f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in facts.items()
    ) + "</div>"  # fmt: skip


def card(title: str, body: str, caption: str = "") -> str:
    """A titled box. caption: what is to be seen in it."""
    said = f'<p class="dim caption">{escape(caption)}</p>' if caption else ""
    return f'<section class="card"><h2>{escape(title)}</h2>{said}{body}</section>'


def grid(cards: Sequence[str]) -> str:
    """Boxes side by side where there is room."""
    return f'<div class="grid">{"".join(cards)}</div>'


def items(sentences: Sequence[str]) -> str:
    """A list of sentences."""
    if not sentences:
        return "<p>nothing to say</p>"
    return "<ul>" + "".join(f"<li>{escape(s)}</li>" for s in sentences) + "</ul>"


LONG = 40  # characters


def _cell(value: Any, column: str) -> str:
    text = escape(shown(value, column))
    number = value[0] if isinstance(value, tuple) else value
    if isinstance(number, (int, float)) and not isinstance(number, bool):
        sorts = f' data-value="{_sorts_as(number)}"' if text else ""
        return f'<td class="num"{sorts}>{text}</td>'
    # On a phone the browser would make a long text a column of single words.
    return f"<td{' class=long' if len(text) > LONG else ''}>{text}</td>"


def _sorts_as(value: float) -> str:
    """The number as the script reads it: Python's word for what is not finite is none of its own."""
    return repr(float(value)).replace("inf", "Infinity")


def table(name: str, rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    """A table that sorts by a click on a heading and filters by what is typed above it."""
    if not rows:
        return "<p>nothing to show</p>"
    numeric = {
        c for c in columns if all(isinstance(r.get(c), (int, float)) and not isinstance(r.get(c), bool) for r in rows)
    }
    head = "".join(f'<th scope="col" class="{"num" if c in numeric else ""}">{escape(c)}</th>' for c in columns)
    body = "".join("<tr>" + "".join(_cell(row.get(c), c) for c in columns) + "</tr>" for row in rows)
    return (
        f'<input type="search" data-for="{name}" placeholder="search {len(rows)} rows" aria-label="search {name}">'
        f'<div class="scroll" tabindex="0" role="region" aria-label="table of {name}">'
        f'<table id="{name}" data-sort><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )
