"""Open a running server as an engine."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig

from millrace.core.errors import ConfigError, WorkerError
from millrace.engines.server.client import Server
from millrace.engines.server.handover import Handover
from millrace.engines.server.probe import Requirements, check_logprobs, probe, wait_for
from millrace.engines.server.server_engine import ServerEngine
from millrace.engines.server.streams import Streams
from millrace.engines.vllm.proof import Proof
from millrace.rollout.model_tokens import open_intake
from millrace.rollout.protocol import EngineOptions


def open_engine(options: EngineOptions) -> ServerEngine:
    """An engine on the server at `options.server`.

    Raises: ConfigError: the server cannot serve the model. WorkerError: no server answers in time."""
    server = Server(options.server)
    wait_for(server, options.server_wait_s)
    offer = probe(server, _requirements(options))
    published: torch.dtype = getattr(torch, options.dtype)
    proof = Proof(options.model_path, published, tokens_max=options.max_sequence_tokens - 1)
    engine = ServerEngine(
        server,
        Streams(server.url),
        Handover(Path(options.shared_dir), with_head=offer.with_head),
        open_intake(options),
        proof,
        slots=options.slots,
        kv_capacity_tokens=offer.kv_capacity_tokens,
        computes=f"{options.dtype}; vLLM {offer.release} at {server.url}, not exact",
    )
    check_logprobs(server, proof.tokens[:8])
    return engine


def refuse_unfit(options: EngineOptions) -> None:
    """Check the server, and change nothing there. Raises: ConfigError: there is no server, or the server
    cannot serve the model."""
    server = Server(options.server)
    try:
        probe(server, _requirements(options))
    except WorkerError as error:
        raise ConfigError(f"`rollout.servers`: {error}\n  Start it first: docs/engine.md has how") from error
    finally:
        server.close()


def _requirements(options: EngineOptions) -> Requirements:
    tied = bool(AutoConfig.from_pretrained(options.model_path).tie_word_embeddings)
    return Requirements(options.slots, options.max_sequence_tokens, options.dtype, tied)
