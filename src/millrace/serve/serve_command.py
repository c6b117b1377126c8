"""`millrace serve`: a model behind an OpenAI-compatible address, such as a judge. The gateway's HTTP server
answers, with its deadlines and limits, without keys.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from millrace.checks.model_problems import model_problems, positions
from millrace.conversations.tokenizer import load_tokenizer
from millrace.core.errors import ConfigError
from millrace.episodes.gateway.server import LOOPBACK, GatewayServer
from millrace.episodes.gateway.sessions import OpenSessions, Session
from millrace.episodes.gateway.surroundings import GatewayLimits
from millrace.placement.model_directory import read_model_config
from millrace.run_directory.models import model_directory
from millrace.runtime.process import FILES_BESIDE, allow_open_files, heeded
from millrace.serve.completions import Completions
from millrace.serve.shared_engine import SharedEngine

SEQUENCE_TOKENS = 4096
"""Of prompt and answer, where the model knows so many positions."""
REQUESTS_PER_SLOT = 8
"""Requests that run or wait, for each slot of the engine."""
ANSWER_S = 600.0
"""After so long a request fails."""


def command(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A model, a checkpoint or a run.", show_default=False)
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    host: Annotated[str, typer.Option(help="Who reaches another address than this may ask.")] = LOOPBACK,
    slots: Annotated[int, typer.Option(min=1, max=4096, help="Requests decoded together.")] = 32,
    max_sequence_tokens: Annotated[
        int | None, typer.Option(min=2, help=f"Of prompt and answer. Default: {SEQUENCE_TOKENS:,}, or less.")
    ] = None,
    device: Annotated[str, typer.Option(help="As `model.device`.")] = "auto",
    bfloat16: Annotated[bool, typer.Option("--bfloat16", help="In bfloat16: half the memory.")] = False,
    exact: Annotated[bool, typer.Option("--exact", help="As `rollout.exact`.")] = False,
) -> None:
    """Serve a model to OpenAI's clients, such as a judge. Ctrl-C ends it."""
    from millrace.engines.own.load_engine import load_engine

    with model_directory(model) as directory:
        max_sequence_tokens = _sequence_tokens(directory, max_sequence_tokens)
        engine = SharedEngine(
            load_engine(
                str(directory),
                device=device,
                dtype="bfloat16" if bfloat16 else "float32",
                slots=slots,
                max_sequence_tokens=max_sequence_tokens,
                exact=exact,
            ),
            requests_max=REQUESTS_PER_SLOT * slots,
            answer_s=ANSWER_S,
        )
        completions = Completions(
            engine, load_tokenizer(directory), model=str(model), max_sequence_tokens=max_sequence_tokens
        )
    _serve(engine, completions, (host, port))


def _serve(engine: SharedEngine, completions: Completions, address: tuple[str, int]) -> None:
    """Until an interrupt. This thread decodes, because an engine that is broken is to end the command."""
    try:
        endpoints = Endpoints(*address, completions, on_fault=partial(typer.echo, err=True))
    except OSError as error:
        raise ConfigError(f"{address[0]}:{address[1]} cannot be used: {error.strerror}") from error
    for number in heeded():
        signal.signal(number, lambda *_: engine.stop())
    typer.echo(f"{endpoints.url}/v1\nCtrl-C ends it.")
    try:
        engine.run()
    finally:
        endpoints.close()


def _sequence_tokens(directory: Path, wanted: int | None) -> int:
    """Raises: ConfigError: this is no model directory, or the model knows fewer positions."""
    for problem in model_problems(directory):
        raise ConfigError(problem.replace("`model.path`", "MODEL"))
    longest = positions(read_model_config(directory))
    if longest is not None and (wanted or 0) > longest:
        raise ConfigError(
            f"`--max-sequence-tokens` ({wanted}) is more than the {longest} positions that the model knows.\n"
            f"  Give at most {longest}"
        )
    return wanted or min(SEQUENCE_TOKENS, longest or SEQUENCE_TOKENS)


# ---------------------------------------------------------------- addresses


BODY_BYTES_MAX = 4 << 20
WAIT_S = 660.0
"""A request waits so long for an engine that hangs: the engine's own deadlines come first."""


class Endpoints:
    """Answers from the start until `close`. `url` is without `/v1`. `on_fault` gets the traceback of a bug.

    Raises: OSError: the port is taken, or the host is not here.
    """

    def __init__(
        self,
        host: str,
        port: int,
        completions: Completions,
        *,
        limits: GatewayLimits | None = None,
        on_fault: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._server = GatewayServer(
            _Everyone(),
            {},
            auxiliary={
                "/v1/chat/completions": lambda _, body: completions.chat(body),
                "/v1/completions": lambda _, body: completions.text(body),
            },
            told={"/health": completions.health, "/v1/models": completions.models},
            name="server",
            limits=limits or served_limits(),
            on_fault=on_fault,
        )
        self._server.start(host, port)
        self.url, self.port = self._server.url, self._server.port

    def close(self) -> None:
        """Refuse what waits, and end every connection and thread."""
        self._server.close()


class _Everyone(OpenSessions):
    """Who reaches the address may ask: no key is needed, and every request is of one session."""

    def __init__(self) -> None:
        super().__init__()
        self._only = self.open()

    def find(self, *keys: str) -> Session:
        return self._only


def served_limits() -> GatewayLimits:
    """The gateway's, with as many connections as this process may have open files."""
    allow_open_files(0)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = GatewayLimits.connections_max
    if files != resource.RLIM_INFINITY:
        most = max(1, min(most, files - FILES_BESIDE))
    return GatewayLimits(body_bytes_max=BODY_BYTES_MAX, connections_max=most, call_s=WAIT_S)
