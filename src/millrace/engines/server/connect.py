"""Open a running server as an engine: which server answers, and what a run misses there.

The probe looks at

    routes      that the run needs
    settings    in the server's own words
    behaviour   whether the log-prob of a token is of the distribution that the token was sampled from
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from transformers import AutoConfig

from millrace.core.errors import ConfigError, WorkerError
from millrace.engines.server.client import Client, Streams
from millrace.engines.server.server_dialect import Dialect, Offer, Requirements
from millrace.engines.server.server_engine import Handover, ServerEngine
from millrace.engines.server.sglang_server import SglangServer
from millrace.engines.server.vllm_server import VllmServer
from millrace.engines.vllm.proof import Proof
from millrace.rollout.model_tokens import open_intake
from millrace.rollout.protocol import EngineOptions


def open_engine(options: EngineOptions) -> ServerEngine:
    """An engine on the server at `options.server`.

    Raises: ConfigError: the server cannot serve the model. WorkerError: no server answers in time."""
    server = wait_for(options.server, options.server_wait_s, seeded=options.seeded)
    assert options.shared_dir is not None, "a run says where servers find weights"
    offer = probe(server, _requirements(options))
    published: torch.dtype = getattr(torch, options.dtype)
    proof = Proof(options.model_path, published, tokens_max=options.max_sequence_tokens - 1)
    engine = ServerEngine(
        server,
        Streams(server),
        Handover(Path(options.shared_dir), with_head=offer.with_head),
        open_intake(options),
        proof,
        slots=options.slots,
        kv_capacity_tokens=offer.kv_capacity_tokens,
        computes=f"{options.dtype}; {server.program} {offer.release} at {server.url}, not exact",
    )
    server.check_logprobs(proof.tokens[:8])
    return engine


def refuse_unfit(options: EngineOptions) -> str:
    """Check the server, and change nothing there. Returns its program, "vLLM" or "SGLang".

    Raises: ConfigError: there is no server, or the server cannot serve the model."""
    try:
        server = find_server(options.server)
        try:
            probe(server, _requirements(options))
        finally:
            server.close()
    except WorkerError as error:
        raise ConfigError(f"`rollout.servers`: {error}\n  Start it first: docs/engine.md has how") from error
    return server.program


def _requirements(options: EngineOptions) -> Requirements:
    tied = bool(AutoConfig.from_pretrained(options.model_path).tie_word_embeddings)
    return Requirements(
        options.slots, options.max_sequence_tokens, options.dtype, tied, seeded=options.seeded
    )


# ---------------------------------------------------------------- the probe


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
