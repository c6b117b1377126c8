"""Which server answers, and what a run misses there. Names no torch. The probe looks at

routes      that the run needs
settings    in the server's own words
behaviour   whether the log-prob of a token is of the distribution that the token was sampled from
"""

from __future__ import annotations

import time

from millrace.core.errors import ConfigError, WorkerError
from millrace.engines.server.client import Client
from millrace.engines.server.server_dialect import Dialect, Offer, Requirements
from millrace.engines.server.sglang_server import SglangServer
from millrace.engines.server.vllm_server import VllmServer

DOCUMENTED = "docs/engine.md has the whole command line"
PAUSE_BETWEEN_S = 0.5


def find_server(url: str, *, seeded: bool = True) -> Dialect:
    """The server at `url`, by the one route that others have not. Raises: ConfigError: another program
    answers; WorkerError: none answers."""
    client = Client(url)
    try:
        if client.has("/version"):
            return VllmServer(url, seeded=seeded)
        if client.has("/model_info"):
            return SglangServer(url, seeded=seeded)
    finally:
        client.close()
    raise ConfigError(
        f"`rollout.servers`: {url} is no server that Millrace knows: it has no route /version, as vLLM has, "
        "and no route /model_info, as SGLang has"
    )


def wait_for(url: str, wait_s: float, *, seeded: bool = True) -> Dialect:
    """Wait until a server takes requests. Raises: WorkerError: it does not within `wait_s`; ConfigError."""
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            return _started(find_server(url, seeded=seeded))
        except WorkerError:
            if time.monotonic() >= deadline_s:
                raise
        time.sleep(PAUSE_BETWEEN_S)


def _started(server: Dialect) -> Dialect:
    try:
        server.check_started()
    except WorkerError:
        server.close()
        raise
    return server


def probe(server: Dialect, requirements: Requirements) -> Offer:
    """The server's offer. Raises: ConfigError, which names everything that is missing; WorkerError: the
    server does not answer."""
    offer = server.offer(requirements)
    if offer.missing:
        raise ConfigError(
            f"`rollout.servers`: {server.url} cannot serve this run:\n  "
            + "\n  ".join(offer.missing)
            + f"\n  {DOCUMENTED}"
        )
    return offer
