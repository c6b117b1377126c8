"""Open a running server as an engine."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig

from millrace.core.errors import ConfigError, WorkerError
from millrace.engines.server.handover import Handover
from millrace.engines.server.server_dialect import Requirements
from millrace.engines.server.server_engine import ServerEngine
from millrace.engines.server.server_probe import find_server, probe, wait_for
from millrace.engines.server.streams import Streams
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
