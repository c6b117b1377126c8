"""How `millrace scale` reaches a running run: two small files in the run directory, on shared storage or not.

    scale.ask.json   written by the command: how many replicas the user wants
    scale.json       written by the run: how many replicas it wants now, and the answer to the request

Each file is written under another name and then renamed; only its owner can read it. The run and the command
look every `LOOK_S` seconds, the command within a deadline. A run that is resumed begins with the number in
`scale.json`, and deletes a request that no run has answered.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Annotated, TypeVar

import msgspec

from millrace.config.schema import Config
from millrace.controller.controller import Controller
from millrace.controller.fleet.live_replicas import LiveReplicas
from millrace.core.errors import (
    ConfigError,
    DataError,
    DeadlineExceeded,
    MillraceError,
    WorkerError,
    writing,
)
from millrace.core.events import Events
from millrace.run_directory.run_directory import RunDirectory

LOOK_S = 0.25
ANSWER_S = 30.0
"""A run that has not noticed a request by then will not notice it."""
TIMEOUT_S = 900.0
REPLICAS_MAX = 4096
FILE_BYTES_MAX = 1 << 16

T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=0, le=REPLICAS_MAX)]


class ScalingRequest(msgspec.Struct, frozen=True):
    """`token` distinguishes requests."""

    token: str
    replicas: Count


class ScalingState(msgspec.Struct, frozen=True):
    """How far a run is with its requests. It wants `replicas`, of which so many are `serving`. `over`: the
    number in the configuration that `replicas` overrides. `token`: of the last request. `settled`: all wanted
    replicas serve, and all others have left. `refusal`: why the number is not the requested one."""

    replicas: Count
    over: int
    token: str = ""
    serving: int = 0
    settled: bool = False
    refusal: str = ""


# ------------------------------------------------------------ the run's side


def with_scaling(config: Config, run: RunDirectory) -> tuple[Config, ScalingState]:
    """The configuration of a session, and its number of replicas: that of the last request. A third number in
    `config`, neither that of `scale.json` nor the one that it overrides, is newer than the request and wins.

    Raises: DataError: `scale.json` is damaged.
    """
    run.scale_ask.unlink(missing_ok=True)
    rollout, state = config.rollout, _read(run.scale, ScalingState)
    newer = state is not None and rollout.replicas not in (state.over, state.replicas)
    if state is None or newer or rollout.servers:
        run.scale.unlink(missing_ok=True)
        return config, ScalingState(rollout.replicas, rollout.replicas)
    if state.replicas:  # a configuration has at least one
        rollout = rollout.model_copy(update={"replicas": state.replicas})
    return config.model_copy(update={"rollout": rollout}), ScalingState(state.replicas, state.over)


async def obey(run: RunDirectory, controller: Controller, events: Events, state: ScalingState) -> None:
    """Consume requests until the run ends. A damaged file does not end the run; each problem is reported
    once."""
    warned = ""
    while True:
        await asyncio.sleep(LOOK_S)
        asked = run.scale_ask.read_bytes() if run.scale_ask.is_file() else b""
        try:
            state, warned = await _look(run, controller.replicas, state), ""
        except MillraceError as error:
            if str(error) != warned:
                warned = str(error)
                events.emit("warned", source="scale", reason=warned)
            with suppress(OSError):
                _forget(run, asked)


def _forget(run: RunDirectory, asked: bytes) -> None:
    """Remove the request that was looked at. A newer one stays."""
    taken = run.scale_ask.with_suffix(".taken")
    run.scale_ask.rename(taken)
    if taken.read_bytes() == asked:
        taken.unlink()
    else:
        taken.rename(run.scale_ask)


async def _look(run: RunDirectory, fleet: LiveReplicas, state: ScalingState) -> ScalingState:
    """The state now, also written to `scale.json`."""
    request = _read(run.scale_ask, ScalingRequest)
    if request is not None and request.token != state.token:
        refusal = await _refusal(fleet, request)
        state = msgspec.structs.replace(state, token=request.token, refusal=refusal, settled=False)
    if not state.token or state.settled:
        return state
    now = msgspec.structs.replace(
        state,
        replicas=fleet.wanted,
        serving=fleet.num_serving,
        settled=fleet.settled or bool(state.refusal),
        refusal=state.refusal or fleet.trouble,
    )
    if now != state or request is not None:
        _write(run.scale, now)
    return now


async def _refusal(fleet: LiveReplicas, request: ScalingRequest) -> str:
    """Scale. Returns why the run refuses; empty: it scales."""
    try:
        await fleet.look()
        fleet.scale(request.replicas)
    except (ConfigError, WorkerError) as error:
        return str(error)
    return ""


# ------------------------------------------------------------ the command's side


def scale(
    run: RunDirectory,
    replicas: int,
    *,
    timeout_s: float = TIMEOUT_S,
    report: Callable[[str], None] = lambda line: None,
) -> None:
    """Ask the run in `run` for this number of replicas, and wait until exactly these replicas serve. `report`
    gets a line at each change.

    Raises: ConfigError: no such number. WorkerError: the run is not running, ended meanwhile, refuses, or
    failed. DeadlineExceeded.
    """
    if not 0 <= replicas <= REPLICAS_MAX:
        raise ConfigError(f"{replicas} replicas: a run has 0 to {REPLICAS_MAX}")
    if not run.is_owned():
        raise WorkerError(
            f"{run.path} is not running: only a running run can be scaled.\n"
            "  To go on with another number: `--resume` with `--set rollout.replicas=N`"
        )
    request = ScalingRequest(token_hex(8), replicas)
    _write(run.scale_ask, request)
    try:
        _follow(run, request, timeout_s, report)
    finally:
        if _read(run.scale_ask, ScalingRequest) == request:
            run.scale_ask.unlink(missing_ok=True)


def _follow(
    run: RunDirectory, request: ScalingRequest, timeout_s: float, report: Callable[[str], None]
) -> None:
    began_s, reported, answered = time.monotonic(), "", False
    while True:
        time.sleep(LOOK_S)
        state, waited_s = _read(run.scale, ScalingState), time.monotonic() - began_s
        if state is not None and state.token == request.token:
            answered = True
            if state.settled or state.refusal:
                return _refuse_shortfall(run, state)
            line = f"{state.serving} of {state.replicas} replicas serve"
            if line != reported:
                report(line)
            reported = line
        elif answered or ((other := _read(run.scale_ask, ScalingRequest)) is not None and other != request):
            raise WorkerError(f"{run.path}: somebody else asked for another number meanwhile")
        if not run.is_owned():
            raise WorkerError(f"{run.path} ended before it had {request.replicas} replicas")
        if waited_s > (timeout_s if answered else min(timeout_s, ANSWER_S)):
            raise DeadlineExceeded(
                f"{run.path}: no answer for {waited_s:.0f} s: does its controller run? See logs/"
                if not answered
                else f"{run.path}: after {waited_s:.0f} s {reported}. It goes on; see `millrace show`"
            )


def _refuse_shortfall(run: RunDirectory, state: ScalingState) -> None:
    """Raises: WorkerError: the run refused, or has fewer replicas in the end."""
    if state.refusal:
        raise WorkerError(f"{run.path} stays at {state.replicas} replicas: {state.refusal}")


# ------------------------------------------------------------ files


def _read(path: Path, kind: type[T]) -> T | None:
    """None: there is no file. Raises: DataError: the file is damaged, or not ours."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Remove it") from None
    with open(fd, "rb") as file:
        if os.fstat(fd).st_uid != os.geteuid():
            raise DataError(f"{path} belongs to somebody else. Remove it")
        try:
            return msgspec.json.decode(file.read(FILE_BYTES_MAX), type=kind)
        except (msgspec.MsgspecError, OSError, UnicodeError) as error:
            raise DataError(f"{path} is damaged: {error}\n  Remove it, and ask again") from None


def _write(path: Path, value: ScalingRequest | ScalingState) -> None:
    """Atomically, readable by its owner only. Raises: StorageError."""
    partial = path.with_name(f"{path.name}.{token_hex(4)}.partial")
    with writing(path, "Make room, or see who may write there"):
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "wb") as file:
                file.write(msgspec.json.encode(value))
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
