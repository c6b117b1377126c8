"""`millrace ui` as a local web server: loopback only, a secret in every address, nothing but GET.

Any program on this machine can connect to a port. So every address begins with a random token. A page of
another site can send requests through a browser. So the Host header must be ours, and no page may be framed.
Text of a run is escaped, and the content security policy permits only the page's own scripts.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets
from tornado.web import Application, HTTPError, RequestHandler

from millrace.core.errors import MillraceError
from millrace_ui import page
from millrace_ui.curves.cards import TYPES, CurveFile
from millrace_ui.site import Site, trouble

LOOPBACK = "127.0.0.1"
ANSWER_S = 20.0
"""After so long a page says that the machine is too busy."""
_DAY_S = 86_400


class Ui:
    """A server of the runs below a directory. Open `url`. `close` ends the server."""

    def __init__(self, make_site: Callable[[str], Site], port: int = 0) -> None:
        """Raises OSError: the port is taken."""
        token = secrets.token_urlsafe(16)
        sockets = bind_sockets(port, LOOPBACK)
        self.port = sockets[0].getsockname()[1]
        self.url = f"http://{LOOPBACK}:{self.port}/{token}/"
        # One thread, so that queries of a run follow each other. A slow file does not stop the loop.
        self._pool = ThreadPoolExecutor(1, "queries")
        self._site = make_site(f"/{token}/")
        context = {"site": self._site, "pool": self._pool, "token": token, "port": self.port}
        pages = [
            (r"/([^/]+)/page\.js", _Script, context),
            (r"/([^/]+)/(?:([a-z]+)(?:/(.*))?)?", _Page, context),
        ]
        self._server = HTTPServer(Application(pages, default_handler_class=_Nothing, log_function=_quiet))
        self._server.add_sockets(sockets)

    def close(self) -> None:
        self._server.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)


class _Guarded(RequestHandler):
    def initialize(self, site: Site, pool: ThreadPoolExecutor, token: str, port: int) -> None:
        self._site, self._pool, self._token, self._port = site, pool, token, port

    def prepare(self) -> None:
        if self.request.host not in {f"{LOOPBACK}:{self._port}", f"localhost:{self._port}"}:
            raise HTTPError(403)
        if not hmac.compare_digest(self.path_args[0].encode(), self._token.encode()):
            raise HTTPError(404)
        policy = "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; "
        policy += "img-src data: blob:; font-src data:; connect-src 'self'; form-action 'self'; "
        self.set_header("Content-Security-Policy", policy + "base-uri 'none'; frame-ancestors 'none'")
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Referrer-Policy", "no-referrer")
        self.set_header("Cache-Control", "no-store")
        self.clear_header("Server")

    def write_error(self, status_code: int, **_: Any) -> None:
        self.set_header("Content-Type", "text/plain")
        self.finish(f"{status_code}\n")


class _Page(_Guarded):
    async def get(self, _: str, view: str | None = None, name: str | None = None) -> None:
        query = {key: self.get_query_arguments(key) for key in self.request.query_arguments}
        site = self._site
        views: dict[str | None, Callable[[], page.PageContent]] = {
            None: lambda: site.runs(query),
            "run": lambda: site.run(name or "", query),
            "speed": lambda: site.speed(name or "", query),
            "samples": lambda: site.samples(name or "", query),
            "group": lambda: site.group(name or "", query),
            "curves": lambda: site.curves(name or "", query),
            "config": lambda: site.config(name or "", query),
            "compare": lambda: site.compare(query),
            "curation": lambda: site.curation(name or ""),
        }
        if view == "data":
            self.finish(await self._data(lambda: site.data(name or "", query)))
        elif view in TYPES:
            await self._file(lambda: site.curve_file(view, query))
        elif view in views:
            live = f"{self.request.uri}".replace("/run/", "/data/", 1) if view == "run" else ""
            # A page with a forecast is slow by itself: to load it again would keep the one thread busy.
            again = "outlook" not in query
            html = await self._document(views[view], name or "Millrace", live, again)
            self.finish(html.encode(errors="replace"))  # a file's name may have bytes that are no character
        else:
            raise HTTPError(404)

    async def _document(self, ask: Callable[[], page.PageContent], title: str, live: str, again: bool) -> str:
        try:
            drawn = await self._ask(ask)
        except (MillraceError, OSError, TimeoutError) as error:
            # The script of a live page asks again.
            drawn = page.PageContent(trouble(error, again=again), again=again and not live)
        head = page.AGAIN if drawn.again else ""
        own = f'<script src="/{self._token}/page.js"></script>'
        return page.document(title, self._site.home() + drawn.html + own, head=head, live=live)

    async def _file(self, ask: Callable[[], CurveFile]) -> None:
        try:
            file: CurveFile = await self._ask(ask)
        except (MillraceError, OSError, TimeoutError) as error:
            self.set_status(404)
            file = CurveFile("", "text/plain", f"{error}\n".encode(errors="replace"))
        self.set_header("Content-Type", file.content_type)
        if file.name:
            self.set_header("Content-Disposition", f'attachment; filename="{file.name}"')
        self.finish(file.content)

    async def _data(self, ask: Callable[[], dict[str, Any]]) -> bytes:
        self.set_header("Content-Type", "application/json")
        try:
            answer = await self._ask(ask)
        except (MillraceError, OSError, TimeoutError) as error:
            answer = {"html": {"notice": trouble(error)}, "next_s": 5.0}
        return msgspec.json.encode(answer)

    async def _ask(self, ask: Callable[[], Any]) -> Any:
        async with asyncio.timeout(ANSWER_S):
            return await asyncio.get_running_loop().run_in_executor(self._pool, ask)


class _Script(_Guarded):
    def get(self, _: str) -> None:
        self.set_header("Content-Type", "text/javascript")
        self.set_header("Cache-Control", f"private, max-age={_DAY_S}")
        self.finish(page.SCRIPT)


class _Nothing(RequestHandler):
    def prepare(self) -> None:
        raise HTTPError(404)


def _quiet(_: RequestHandler) -> None:
    """Addresses are not logged, because they have the token."""
