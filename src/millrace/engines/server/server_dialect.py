"""The one thing that differs between servers: what is said to them, and what they answer. Names no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from millrace.rollout.continuation import Continuation


class Requirements(NamedTuple):
    """A run's requirements of each server. `dtype`: of published weights. `tied`: the model's head is its
    embedding. `seeded`: trajectories have noise of their own."""

    slots: int
    max_sequence_tokens: int
    dtype: str
    tied: bool
    seeded: bool = True


class Offer(NamedTuple):
    """`with_head`: the server has a head of its own, although the model's head is tied. `missing`: what the
    run misses, each with what to do."""

    release: str
    kv_capacity_tokens: int
    with_head: bool
    missing: Sequence[str] = ()


class Token(msgspec.Struct):
    """A sampled token. `logprob`: NaN if the server has no number."""

    token_id: int
    logprob: float


class Sampled(msgspec.Struct, frozen=True):
    """A part of a stream: new tokens, and `labels` of the weights that sampled them, where it tells them.
    `finish_reason` with the last part: "abort" if the request was ended from outside."""

    tokens: Sequence[Token] = ()
    finish_reason: str | None = None
    labels: Sequence[str] = ()


ReadPart = Callable[[str], Sampled]
"""Reads the parts of one stream, in order. Raises: ValueError: a part names an error; MsgspecError: it is no
part."""


class Dialect(Protocol):
    """A server. Every method raises WorkerError if the server gives no answer in time, or an error.

    `program`: its software. `generate`: the route of requests that stream tokens. `docs`: the page that has
    the whole command line.
    """

    program: str
    generate: str
    url: str

    def close(self) -> None: ...

    def check_started(self) -> None:
        """Check that the server takes requests, or could. A pause that was left behind may end."""

    def check_alive(self) -> None:
        """Check that a server without a pause can compute."""

    def offer(self, requirements: Requirements) -> Offer:
        """What the server offers. Changes nothing. Raises also ConfigError: it tells its settings in another
        form."""

    def check_logprobs(self, tokens: Sequence[int]) -> None:
        """Check that log-probs are of the distribution that is sampled from. Weights of an earlier run that
        give no numbers pass. Raises also ConfigError."""

    # ------------------------------------------------------------ weights

    def pause(self) -> None:
        """Every request ends with its tokens so far; new requests wait. The caches are empty."""

    def resume(self) -> None: ...

    def load(self, directory: Path, label: str) -> None:
        """Load weights from the safetensors files in `directory`. From then on the server calls them
        `label`."""

    # ------------------------------------------------------------ work

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs of all tokens but the first."""

    def request(self, continuation: Continuation, label: str) -> dict[str, Any]:
        """The request for the rest of `continuation`, whose prompt shares cached keys and values with others
        of the same `label` alone. Raises also ConfigError: the server cannot sample so."""

    def open_reader(self) -> ReadPart:
        """For one stream."""
