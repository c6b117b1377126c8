"""The frame of every page: style, charts in a grid, one document. The browser chooses dark or light."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape, unescape
from importlib.resources import files
from typing import Any

from bokeh.document import Document
from bokeh.embed import components
from bokeh.resources import Resources

from millrace_ui.drawing.fragments import Raw, safe
from millrace_ui.drawing.shades import LEVELS, TONES, VERSION_COLORS

Section = tuple[str, str, Any]
"""A heading, an explanation and a plot."""

_SHADES = "".join(f"i.p{n}{{--shade:{n / LEVELS:.2f}}}" for n in range(LEVELS + 1))
_HUES = "".join(f"i.v{n}{{--hue:{210 + n * 360 // VERSION_COLORS}}}" for n in range(VERSION_COLORS))
_TONES = "".join(
    f"i.a{TONES + sign * n}{{--tone:rgb({rgb} / {0.55 * n / TONES:.2f})}}"
    for sign, rgb in ((-1, "214 106 20"), (1, "30 120 230"))
    for n in range(1, TONES + 1)
)
STYLE = (files("millrace_ui") / "page.css").read_text(encoding="utf-8") + _SHADES + _HUES + _TONES

SCRIPT = (files("millrace_ui") / "page.js").read_text(encoding="utf-8")

_HEADING = re.compile(r'<(h[12])(?: id="([a-z-]+)")?>([^<]*)</h[12]>')
CONTENTS_MIN = 4
"""A page of more headings has a table of contents."""

AGAIN = '<meta http-equiv="refresh" content="5">'
"""In the head of a page that loads itself again after 5 s."""


@dataclass(frozen=True, slots=True)
class PageContent:
    """HTML with plots, and the script that draws them. With `again` the page loads itself again soon."""

    html: str
    script: str = ""
    again: bool = False


def charts(sections: Sequence[Section], *, whole: Sequence[str] = ()) -> PageContent:
    """Plots in a grid. A plot whose heading is in `whole` has a row of its own."""
    if not sections:
        return PageContent("")
    together = Document()
    with together.models.freeze():  # models are collected once, not again for each plot
        for _, _, plot in sections:
            together.add_root(plot)
    script, divisions = components([plot for _, _, plot in sections], wrap_script=False)
    cards = (
        f'<section class="chart{" whole" if heading in whole else ""}"><h2>{safe(heading)}</h2>'
        f"{_explained(explanation)}{division}</section>"
        for (heading, explanation, _), division in zip(sections, divisions, strict=True)
    )
    return PageContent(f'<div class="charts">{"".join(cards)}</div>', script)


def _explained(text: str) -> str:
    return text if isinstance(text, Raw) or not text else f"<p>{safe(text)}</p>"


def place(name: str, html: str) -> str:
    """An element whose HTML a live page replaces. `name` is its id."""
    return f'<div id="{escape(name)}">{html}</div>'


def whole_file(title: str, bodies: Sequence[PageContent]) -> str:
    """One HTML document that loads nothing from anywhere."""
    plots = any(one.script for one in bodies)
    library = Resources(mode="inline", components=["bokeh"]).render() if plots else ""
    scripts = "".join(f"<script>{script}</script>" for script in (*(one.script for one in bodies), SCRIPT))
    return document(title, "".join(body.html for body in bodies) + scripts, head=library)


def _contents(html: str) -> tuple[str, str]:
    """The headings as a folded list of links, which a wide window shows beside the page; empty: the page has
    few. And the page, with an id in each heading."""
    ids: dict[str, str] = {}

    def named(heading: re.Match[str]) -> str:
        level, own, text = heading.groups()
        name = own or re.sub(r"[^a-z0-9]+", "-", unescape(text).lower()).strip("-")
        while not own and (not name or name in ids or f'id="{name}"' in html):  # each id is of one element
            name += "-x"
        ids[name] = f'<a class="{level}" href="#{name}">{text}</a>'
        return f'<{level} id="{name}">{text}</{level}>'

    html = _HEADING.sub(named, html)
    links = f"<nav>{''.join(ids.values())}</nav>"
    folded = f'<details class="contents"><summary>Contents</summary>{links}</details>'
    return folded if len(ids) > CONTENTS_MIN else "", html


def document(title: str, body: str, *, head: str = "", live: str = "") -> str:
    """One HTML document, with its contents if it is long. `live` is the address of its newest data."""
    html, script, rest = body.partition("<script")
    contents, html = _contents(html)
    data = f' data-live="{escape(live)}"' if live else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{safe(title)}</title><style>{STYLE}</style>{head}</head>"
        f"<body{data}>{contents}<main>{html}{script}{rest}</main></body></html>\n"
    )
