"""How `millrace scale` reaches a running run: two small files in the run directory, on shared storage or not.

    scale.ask.json   written by the command: how many replicas there shall be
    scale.json       written by the run: how many there shall be by now, and what became of the ask

Each is written whole, under another name, and then renamed; only its owner can read it. A run looks every
`LOOK_S` seconds, and so does a command, within a deadline. A run that is resumed begins with the number of
`scale.json`. An ask that no run has answered is forgotten then.
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
"""A run that has not noticed an ask by then is not going to."""
TIMEOUT_S = 900.0
REPLICAS_MAX = 1024
FILE_BYTES_MAX = 1 << 16

T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=0, le=REPLICAS_MAX)]


class ScalingRequest(msgspec.Struct, frozen=True):
    """`token` tells asks apart."""

    token: str
    replicas: Count


class Standing(msgspec.Struct, frozen=True):
    """What a run has made of asks. `replicas` there shall be, of which so many are `serving`. `over` is the
    number in the configuration that they go over. `token`: of the last ask. `settled`: all there shall be
    serve, and who leaves has left. `refusal`: why there are others than asked for."""

    replicas: Count
    over: int
    token: str = ""
    serving: int = 0
    settled: bool = False
    refusal: str = ""


# ------------------------------------------------------------ the run's side


def with_standing(config: Config, run: RunDirectory) -> tuple[Config, Standing]:
    """The configuration of a session, and how many replicas it begins with: those asked for last. A `config`
    with a number of its own, neither that nor the one that `scale` went over, is the newer wish.

    Raises: DataError: `scale.json` is damaged.
    """
    run.scale_ask.unlink(missing_ok=True)
    rollout, standing = config.rollout, _read(run.scale, Standing)
    newer = standing is not None and rollout.replicas not in (standing.over, standing.replicas)
    if standing is None or newer or rollout.servers:
        run.scale.unlink(missing_ok=True)
        return config, Standing(rollout.replicas, rollout.replicas)
    if standing.replicas:  # a configuration has at least one
        rollout = rollout.model_copy(update={"replicas": standing.replicas})
    return config.model_copy(update={"rollout": rollout}), Standing(standing.replicas, standing.over)


async def obey(run: RunDirectory, controller: Controller, events: Events, told: Standing) -> None:
    """Consumes asks until the run ends. Nothing that is wrong with these files ends it; each is told once."""
    warned = ""
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            told, warned = await _look(run, controller.replicas, told), ""
        except MillraceError as error:
            if str(error) != warned:
                warned = str(error)
                events.emit("warned", source="scale", reason=warned)
            with suppress(OSError):
                run.scale_ask.unlink(missing_ok=True)


async def _look(run: RunDirectory, fleet: LiveReplicas, told: Standing) -> Standing:
    """What is told now."""
    ask = _read(run.scale_ask, ScalingRequest)
    if ask is not None and ask.token != told.token:
        refusal = await _scaled(fleet, ask)
        told = msgspec.structs.replace(told, token=ask.token, refusal=refusal, settled=False)
    if not told.token or told.settled:
        return told
    now = msgspec.structs.replace(
        told,
        replicas=fleet.wanted,
        serving=fleet.num_serving,
        settled=fleet.settled or bool(told.refusal),
        refusal=told.refusal or fleet.trouble,
    )
    if now != told or ask is not None:
        _write(run.scale, now)
    return now


async def _scaled(fleet: LiveReplicas, ask: ScalingRequest) -> str:
    """Why not; empty: it is being done."""
    try:
        await fleet.look()
        fleet.scale(ask.replicas)
    except (ConfigError, WorkerError) as error:
        return str(error)
    return ""


# ------------------------------------------------------------ the command's side


def scale(
    run: RunDirectory,
    replicas: int,
    *,
    timeout_s: float = TIMEOUT_S,
    tell: Callable[[str], None] = lambda line: None,
) -> None:
    """Ask the run in `run` for so many replicas, and wait until they serve and nobody else is there. `tell`
    gets a line whenever that changes.

    Raises: ConfigError: no such number. WorkerError: the run is not running, ended meanwhile, refuses, or
    could not do it. DeadlineExceeded.
    """
    if not 0 <= replicas <= REPLICAS_MAX:
        raise ConfigError(f"{replicas} replicas: a run has 0 to {REPLICAS_MAX}")
    if not run.is_held():
        raise WorkerError(
            f"{run.path} is not running: only a running run can be scaled.\n"
            "  To go on with another number: `--resume` with `--set rollout.replicas=N`"
        )
    ask = ScalingRequest(token_hex(8), replicas)
    _write(run.scale_ask, ask)
    try:
        _follow(run, ask, timeout_s, tell)
    finally:
        if _read(run.scale_ask, ScalingRequest) == ask:
            run.scale_ask.unlink(missing_ok=True)


def _follow(run: RunDirectory, ask: ScalingRequest, timeout_s: float, tell: Callable[[str], None]) -> None:
    began_s, said, heard = time.monotonic(), "", False
    while True:
        time.sleep(LOOK_S)
        standing, waited_s = _read(run.scale, Standing), time.monotonic() - began_s
        if standing is not None and standing.token == ask.token:
            heard = True
            if standing.settled or standing.refusal:
                return _judge(run, standing)
            line = f"{standing.serving} of {standing.replicas} replicas serve"
            if line != said:
                tell(line)
            said = line
        elif heard or ((other := _read(run.scale_ask, ScalingRequest)) is not None and other != ask):
            raise WorkerError(f"{run.path}: somebody else asked for another number meanwhile")
        if not run.is_held():
            raise WorkerError(f"{run.path} ended before it had {ask.replicas} replicas")
        if waited_s > (timeout_s if heard else min(timeout_s, ANSWER_S)):
            raise DeadlineExceeded(
                f"{run.path}: no answer for {waited_s:.0f} s: does its controller run? See logs/"
                if not heard
                else f"{run.path}: after {waited_s:.0f} s {said}. It goes on; `millrace show` tells how far"
            )


def _judge(run: RunDirectory, standing: Standing) -> None:
    """Raises: WorkerError: it was refused, or there are fewer in the end."""
    if standing.refusal:
        raise WorkerError(f"{run.path} stays at {standing.replicas} replicas: {standing.refusal}")


# ------------------------------------------------------------ files


def _read(path: Path, kind: type[T]) -> T | None:
    """None: there is none. Raises: DataError: it is damaged, or not ours."""
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


def _write(path: Path, value: ScalingRequest | Standing) -> None:
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
