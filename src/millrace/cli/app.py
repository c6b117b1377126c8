"""`millrace`: its commands, and the printing of errors.

Nothing here imports torch: `--help`, `--dry-run`, `show` and every configuration error are instant.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import typer

import millrace
from millrace.cli import (
    chaos,
    check,
    compare,
    convert,
    curate,
    doctor,
    evaluate,
    export,
    fetch,
    model_files,
    plan,
    quickstart,
    report,
    scale,
    sft,
    show,
    simulate,
    trace,
    train,
    try_task,
    ui,
)
from millrace.cli.options import answers_alone
from millrace.compose.leave import leave
from millrace.core.errors import REMOTE_TRACEBACK, ConfigError, MillraceError, alone
from millrace.observe.terminal import Terminal
from millrace.runtime.process import interrupt_on_signals
from millrace.runtime.stacks import survive_dumps
from millrace.serve import command as serve
from millrace.sweeps import command as sweep

app = typer.Typer(
    name="millrace",
    help="Asynchronous reinforcement learning for language models.",
    epilog="Any command takes --debug: show the full traceback of an error.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command("quickstart")(quickstart.command)
app.command("train")(train.command)
app.command("sweep")(sweep.command)
app.command("check")(check.command)
app.command("fetch")(fetch.command)
app.command("import")(model_files.import_)
app.command("text-part")(model_files.text_part)
app.command("dequantize")(model_files.dequantize)
app.command("sft")(sft.command)
app.command("eval")(evaluate.command)
app.command("serve")(serve.command)
app.command("export")(export.command)
app.command("convert")(convert.command)
app.command("show")(show.command)
app.command("scale")(scale.command)
app.command("doctor")(doctor.command)
app.command("ui")(ui.command)
app.command("report")(report.command)
app.command("compare")(compare.command)
app.command("trace")(trace.command)
app.command("try-task")(try_task.command)
app.command("try-reward", hidden=True)(try_task.command)  # its name before it played episodes
app.command("curate")(curate.command)
app.command("chaos")(chaos.command)
app.command("simulate")(simulate.command)
app.command("plan")(plan.command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"millrace {millrace.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main() -> None:
    survive_dumps()
    interrupt_on_signals()
    for stream in sys.stdout, sys.stderr:
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal without UTF-8 gets a ?
    if {"--json", "--log=json"} & set(sys.argv) or ("--log", "json") in pairwise(sys.argv):
        answers_alone()
    try:
        code = run(sys.argv[1:])
    except Exception as bug:
        sys.excepthook(type(bug), bug, bug.__traceback__)
        code = 1
    leave(code)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code: 0, 1 (an error of ours), 2 (configuration or
    usage), 130 (interrupted). An error that is not ours keeps its traceback, because it is a bug."""
    debug = "--debug" in arguments
    try:
        _refuse_unset(arguments)
        app([argument for argument in arguments if argument != "--debug"], prog_name="millrace")
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except Exception as raised:
        error = alone(raised)
        if debug or not isinstance(error, MillraceError):
            raise
        print_error(error)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def _refuse_unset(arguments: Sequence[str]) -> None:
    """Raises: ConfigError: a key of the configuration is given without `--set`."""
    for before, word, then in zip(("", *arguments), arguments, (*arguments[1:], ""), strict=False):
        value = "VALUE" if not then or then.startswith("-") else then
        key = re.fullmatch(r"(?:--)?([a-z_]\w*(?:\.\w+)+)(?:=(.*))?", word)
        if before == "--set" and "=" not in word:
            raise ConfigError(f"`--set {word}` has no `=`.\n  Write --set {word}={value}")
        mistaken = key and (word.startswith("--") or (key[2] and not before.startswith("-")))
        if key and mistaken and _is_key(key[1]) and not os.path.exists(word):
            raise ConfigError(
                f"`{word}` is a key of the configuration, and no {'option' if word[0] == '-' else 'file'}.\n"
                f"  Write --set {key[1]}={key[2] or value}"
            )


def _is_key(word: str) -> bool:
    """The word is a key of the configuration. A run may have the name `lr.x=1` too."""
    from millrace.config.schema import Config

    return word.partition(".")[0] in Config.model_fields


def print_error(error: MillraceError) -> None:
    """Print one message to stderr: the error, the worker that raised it, and what failed after it."""
    console = Terminal(stderr=True, soft_wrap=True)
    console.print(f"{type(error).__name__}:", style="bold red", end=" ")
    console.print(str(error))
    for note in getattr(error, "__notes__", ()):
        if not note.startswith(REMOTE_TRACEBACK):
            console.print(f"  {note}")
