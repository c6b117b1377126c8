"""`millrace`: its commands, and the printing of errors.

Nothing here imports torch: `--help`, `--dry-run`, `show` and every configuration error are instant.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import pairwise
from threading import current_thread, main_thread
from typing import Annotated, NoReturn


def _leave_at_once(*_: object) -> NoReturn:
    os.write(2, b"\nInterrupted by the user; nothing was started.\n")
    os._exit(130)


@contextmanager
def _importing() -> Iterator[None]:
    """In the block an interrupt raises nothing: it would pass through libraries that are half imported."""
    own = signal.getsignal(signal.SIGINT) is signal.default_int_handler and current_thread() is main_thread()
    if own:
        signal.signal(signal.SIGINT, _leave_at_once)
    yield
    if own:
        signal.signal(signal.SIGINT, signal.default_int_handler)


with _importing():
    import typer

    import millrace
    from millrace.cli.options import answers_alone
    from millrace.core.errors import REMOTE_TRACEBACK, ConfigError, MillraceError, alone
    from millrace.core.extras import in_words
    from millrace.observe.terminal import Terminal
    from millrace.run.interrupt import leave
    from millrace.runtime.process import interrupt_on_signals, survive_dumps

app = typer.Typer(
    name="millrace",
    help="Asynchronous reinforcement learning for language models.",
    epilog="Any command takes --debug: show the full traceback of an error.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
COMMANDS = {
    "quickstart": "millrace.cli.quickstart:command",
    "train": "millrace.cli.train:command",
    "sweep": "millrace_sweeps.sweep_command:command",
    "check": "millrace.cli.check:command",
    "keys": "millrace.cli.keys:command",
    "fetch": "millrace.cli.fetch:command",
    "import": "millrace.cli.model_files:import_",
    "text-part": "millrace.cli.model_files:text_part",
    "dequantize": "millrace.cli.model_files:dequantize",
    "sft": "millrace.cli.sft:command",
    "eval": "millrace.cli.evaluate:command",
    "serve": "millrace.serve.serve_command:command",
    "export": "millrace.cli.model_files:export_model",
    "convert": "millrace.cli.model_files:convert_checkpoint",
    "show": "millrace_ui.commands.show:command",
    "scale": "millrace.cli.scale:command",
    "doctor": "millrace_ui.commands.doctor:command",
    "ui": "millrace_ui.commands.ui:command",
    "report": "millrace_ui.commands.report:command",
    "compare": "millrace_ui.commands.compare:command",
    "trace": "millrace.cli.trace:command",
    "try-task": "millrace.cli.try_task:command",
    "try-reward": "millrace.cli.try_task:command",
    "curate": "millrace_curation.curate_command:command",
    "chaos": "millrace_chaos.chaos_command:command",
    "simulate": "millrace_sim.simulate_command:command",
    "plan": "millrace_sim.plan_command:command",
}
"""Each command, in the order of `--help`, with its function: of the core, or of a package beside it."""

with _importing():
    for _name, _target in COMMANDS.items():
        _module, _, _function = _target.partition(":")
        _hidden = _name == "try-reward"  # the name of `try-task` before it played episodes
        app.command(_name, hidden=_hidden)(getattr(import_module(_module), _function))


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
    except KeyboardInterrupt:  # before the command began
        _leave_at_once()
    except Exception as raised:
        error = alone(raised)
        if isinstance(error, ModuleNotFoundError):
            error = in_words(error)
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
