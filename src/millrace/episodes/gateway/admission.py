"""What the headers of a request decide: which path, which episode, and whether the body is read at all.

On the loopback interface the Host header must be ours, and a body must say that it is JSON. So no page of a
browser can ask: the page would have to ask for leave first, and is not answered.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import unquote

from tornado.httputil import HTTPHeaders

from millrace.episodes.gateway.calls import RefusedCall

MODELS = "/v1/models"
SESSIONS = "/sessions/"


@dataclass(frozen=True)
class Target:
    """`keys`: every key that the request names, in the order in which they count."""

    method: str
    path: str
    keys: tuple[str, ...]

    @property
    def of_models(self) -> bool:
        return self.path == MODELS or self.path.startswith(f"{MODELS}/")


def target_of(method: str, target: str, headers: HTTPHeaders) -> Target:
    """The path is without the key. Headers that agents invent count for nothing."""
    path = target.partition("?")[0]
    keys = []
    if path.startswith(SESSIONS):
        key, _, rest = path.removeprefix(SESSIONS).partition("/")
        path, keys = f"/{rest}", [unquote(key)]
    kind, _, token = headers.get("Authorization", "").partition(" ")
    keys += [token.strip()] if kind.lower() == "bearer" else []
    keys += [headers.get(name, "") for name in ("x-api-key", "x-goog-api-key")]
    return Target(method, path, tuple(key for key in keys if key))


def check_host(headers: HTTPHeaders, hosts: Collection[str] | None) -> None:
    """Raises RefusedCall: the Host header is none of `hosts`. None permits all."""
    if hosts is not None and headers.get("Host", "").lower() not in hosts:
        raise RefusedCall("the Host header names another host", 403)


def check_target(
    target: Target, headers: HTTPHeaders, posted: Collection[str], told: Collection[str] = ()
) -> None:
    """Raises RefusedCall: there is no such path, method or content. `posted`: the paths of POST. `told`:
    those of GET, beside the models."""
    asked = f"{target.method} {target.path}"
    got = target.of_models or target.path in told
    if not got and target.path not in posted:
        known = [f"GET {path}" for path in sorted({MODELS, *told})]
        known += [f"POST {path}" for path in sorted(posted)]
        raise RefusedCall(f"{asked}: there is {', '.join(known)}", 404)
    method = "GET" if got else "POST"
    if target.method != method:
        raise RefusedCall(f"{asked}: the method must be {method}", 405)
    kind = headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if method == "POST" and kind != "application/json":
        raise RefusedCall("the Content-Type must be application/json", 415)
    if method == "POST" and headers.get("Content-Encoding", "identity").lower() != "identity":
        raise RefusedCall("the body must have no Content-Encoding", 415)


def is_retry(headers: HTTPHeaders) -> bool:
    """Whether the request may repeat an earlier one, as SDKs and callers say it."""
    count = headers.get("x-stainless-retry-count", "")
    return bool(headers.get("Idempotency-Key") or (count.isascii() and count.isdigit() and count.strip("0")))


def announced_bytes(headers: HTTPHeaders) -> int:
    """The length of the body, or 0 where the header does not say it. tornado refuses a malformed length."""
    length = headers.get("Content-Length", "")
    return int(length) if length.isascii() and length.isdigit() and len(length) < 20 else 0
