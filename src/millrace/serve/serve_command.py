"""`millrace serve`: a model behind an OpenAI-compatible address, such as a judge."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from millrace.checks.model_problems import model_problems, positions
from millrace.conversations.tokenizer import load_tokenizer
from millrace.core.errors import ConfigError
from millrace.episodes.gateway.server import LOOPBACK
from millrace.placement.model_directory import read_model_config
from millrace.run_directory.models import model_directory
from millrace.runtime.process import heeded
from millrace.serve.completions import Completions
from millrace.serve.endpoints import Endpoints
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
