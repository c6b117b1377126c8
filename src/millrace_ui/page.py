"""The frame of every page: style, script, contents. The browser chooses dark or light."""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape, unescape
from importlib.resources import files

from millrace_ui.drawing.colours import LEVELS, TONES, VERSION_COLORS
from millrace_ui.drawing.fragments import safe

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
    """With `again` the page loads itself again soon."""

    html: str
    again: bool = False


def place(name: str, html: str) -> str:
    """An element whose HTML a live page replaces. `name` is its id."""
    return f'<div id="{escape(name)}">{html}</div>'


def whole_file(title: str, html: str) -> str:
    """One HTML document that loads nothing from anywhere."""
    return document(title, f"{html}<script>{SCRIPT}</script>")


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
