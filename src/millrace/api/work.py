"""The process that works for the API: `python -m millrace.api.work` does one piece of work and answers.

The process reads one line of JSON from stdin, {"work": NAME, ...arguments}, and writes one line to stdout,
{"result": ...} or {"error": ..., "message": ...}. Its prints go to stderr. At the end of stdin the caller is
gone, or asks the process to end: a run finishes its step and saves, and other work ends at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from millrace.core.errors import MillraceError, alone
from millrace.core.wings import wing
from millrace.observe.terminal import Terminal
from millrace.run.interrupt import leave, run_stoppable
from millrace.run_directory.run_directory import RunDirectory
from millrace.runtime.process import survive_dumps


def train(run: str, from_version: int | None = None, notify: str | None = None) -> dict[str, Any]:
    """Train the run in a directory, or resume it. `notify` is the whole address, of which the directory has a
    part. In the answer, `ended` is False if the caller stopped the run."""
    from millrace.run import compose

    directory = RunDirectory(Path(run))
    config = directory.read_config()
    console = Terminal(file=sys.stderr, width=160)

    async def body(stop: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()

        def asker_is_gone() -> None:
            loop.remove_reader(sys.stdin.fileno())
            stop.set()

        loop.add_reader(sys.stdin.fileno(), asker_is_gone)
        used = config
        if notify is not None:
            observe = config.observe.model_copy(update={"notify": notify})
            used = config.model_copy(update={"observe": observe})
        await compose.train(used, directory, stop, console=console, from_version=from_version)

    return {"ended": run_stoppable(body, console.print, grace_s=config.supervision.stop_grace_s)}


def check(run: str) -> list[str]:
    """Try task and reward of the configuration in a directory once, and return the warnings.

    Raises: ConfigError: its algorithm cannot be trained."""
    from millrace.algorithms import of_run
    from millrace.checks.first_try import try_first, warnings

    config = RunDirectory(Path(run)).read_config()
    of_run(config)
    return list(warnings(config, try_first(config)))


def begin(run: str, parent: str, source: str, version: int, moments: bool) -> None:
    """Write the start of a new run into its directory. The directory is removed on an error."""
    from millrace.run.going_on import Start

    Start(RunDirectory(Path(parent)), Path(source), version, moments).write(RunDirectory(Path(run)))


def evaluate(run: str, held_out: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Evaluate the configuration in a directory, on other rows if its task can make other rows."""
    from millrace.evaluation.evaluate import evaluate, held_out_config
    from millrace.evaluation.evaluated_runs import keep_if_of_a_run, trained_on
    from millrace.run_directory.models import served_config

    config = RunDirectory(Path(run)).read_config()
    model = Path(held_out["model"] or config.model.path)
    with served_config(config, model) as (served, of):
        named = {name: held_out[name] for name in ("seed", "data_seed", "evaluation")}
        chosen = held_out_config(served, None, **named)
        trained = None if held_out["with_trained"] else trained_on(of, chosen)
        result = evaluate(chosen, **settings, trained=trained)
    if trained and trained.left_out:
        Terminal(stderr=True).print(f"{trained}.")
    if trouble := keep_if_of_a_run(of, result):
        Terminal(stderr=True).print(trouble)
    return result.to_json() | {"model": str(model)}


def export(run: str, version: int | None, out: str | None, adapter: bool) -> str:
    """The directory to which the model of a checkpoint was written."""
    from millrace.run_directory.models import export

    return str(export(RunDirectory(Path(run)), version, Path(out) if out else None, adapter=adapter)[1])


WORKS: dict[str, Callable[..., Any]] = {
    "train": train,
    "check": check,
    "begin": begin,
    "evaluate": evaluate,
    "export": export,
}
"""What the core does by itself. Other names are those of `core.wings`."""


def main() -> None:
    survive_dumps()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    request = json.loads(os.fdopen(os.dup(sys.stdin.fileno()), "rb", buffering=0).readline())
    work = request.pop("work")
    if work != "train":
        threading.Thread(target=_end_with_the_asker, daemon=True).start()
    with suppress(BrokenPipeError):  # the caller is gone
        answers.write(json.dumps(_answer(WORKS.get(work) or wing(work), request)) + "\n")
        answers.flush()
    leave(0)


def _answer(work: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"result": work(**arguments)}
    except Exception as raised:
        error = alone(raised)
        traceback.print_exception(raised)
        message = (
            str(error) if isinstance(error, MillraceError) else "".join(traceback.format_exception(raised))
        )
        return {"error": type(error).__name__, "message": message}


def _end_with_the_asker() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    main()
