"""What an agent is told: its row, as a file and in arguments, and environment variables without secrets."""

from __future__ import annotations

import json
import math
import os
import string
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from millrace.core.errors import ConfigError, DataError

PASSED = (
    *("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "USER", "LOGNAME", "SHELL", "TERM"),
    *("PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
)
"""What an agent sees of the worker's own variables. A proxy or an API key is not among them."""
NEAR = ("127.0.0.1", "localhost")


def plain_variables(environment: Mapping[str, str], worker: Mapping[str, str]) -> dict[str, str]:
    """The variables of a process that does not know the gateway.

    Args:
        environment: the user's own. They come before all others.
        worker: the variables of this process.
    Raises: ConfigError: a name or a value that no process can have.
    """
    for name, value in environment.items():
        if not isinstance(value, str) or not name or "=" in name or "\0" in name + value:
            raise ConfigError(
                f"the agent's environment variable {name!r} = {value!r} cannot be set: "
                "name and value are texts, without a zero byte, and the name without `=`"
            )
    own = os.path.dirname(sys.executable)
    variables = {"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": "/"}
    variables |= {name: worker[name] for name in PASSED if name in worker}
    if own not in variables["PATH"].split(":"):  # `python` is the Python of the run
        variables["PATH"] = f"{own}:{variables['PATH']}"
    return {**variables, "PYTHONUNBUFFERED": "1", **environment}


def agent_variables(
    environment: Mapping[str, str], worker: Mapping[str, str], *, base_url: str, key: str, row_path: str
) -> dict[str, str]:
    """The variables of an agent. Both SDKs find the gateway by them. Raises: as `plain_variables`."""
    base_url = base_url.rstrip("/")
    gateway = {
        "OPENAI_BASE_URL": f"{base_url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": base_url,
        "ANTHROPIC_API_KEY": key,
    }
    variables = plain_variables({**gateway, **environment}, worker)
    variables["MILLRACE_ROW"] = row_path
    past = environment.get("NO_PROXY", environment.get("no_proxy", "")).split(",")
    hosts = dict.fromkeys(filter(None, [*past, *NEAR, urlsplit(base_url).hostname]))
    variables["NO_PROXY"] = variables["no_proxy"] = ",".join(hosts)
    return variables


ARGUMENT_BYTES_MAX = 128 * 1024 - 1
"""The longest argument that Linux hands to a program."""


def row_json(row: Mapping[str, Any]) -> bytes:
    """A row as JSON. Raises: DataError: a value that JSON cannot write, and its column."""
    for column, value in row.items():
        _refuse_unwritable(column, value)
    return json.dumps(dict(row)).encode()


def _json(column: str, value: Any) -> str:
    _refuse_unwritable(column, value)
    return json.dumps(value, ensure_ascii=False)


def _refuse_unwritable(column: str, value: Any) -> None:
    if why := _unwritable(value, 0):
        raise DataError(
            f"the column `{column}` cannot be given to an agent: JSON cannot hold {why}. "
            "Write the column as text or numbers, or leave it out of the rows."
        )


def _unwritable(value: Any, depth: int) -> str:
    """What JSON cannot write in a value; empty: JSON can write all of it."""
    if depth > 64:
        return "lists nested more than 64 deep"
    match value:
        case None | bool() | str() | int():
            return ""
        case float():
            return "" if math.isfinite(value) else f"the number {value}"
        case list() | tuple():
            return next(filter(None, (_unwritable(one, depth + 1) for one in value)), "")
        case dict():
            strange = next((key for key in value if not isinstance(key, str)), None)
            if strange is not None:
                return f"the key {strange!r}, which is no text"
            return next(filter(None, (_unwritable(one, depth + 1) for one in value.values())), "")
    return f"a value of type {type(value).__name__}"


def filled(command: Sequence[str], row: Mapping[str, Any]) -> list[str]:
    """The command with the columns of a row: `{question}` becomes the text of that column.

    Doubled braces are literal. A value that is no text is written as JSON.

    Raises:
        ConfigError: the braces of an argument are not in order.
        DataError: the row has no such column, or its value cannot be an argument.
    """
    return [_filled(argument, row) for argument in command]


def _filled(argument: str, row: Mapping[str, Any]) -> str:
    try:
        parts = list(string.Formatter().parse(argument))
    except ValueError as error:
        raise ConfigError(
            f"the argument {argument!r} of the agent's command: {error}. "
            "Write `{column}` for a column, and `{{` and `}}` for braces."
        ) from None
    text = ""
    for literal, column, form, conversion in parts:
        text += literal
        if column is None:
            continue
        if form or conversion or not column:
            raise ConfigError(
                f"the argument {argument!r} of the agent's command: between braces stands the name of a "
                "column and nothing else. Write `{{` and `}}` for braces."
            )
        if column not in row:
            raise DataError(
                f"the argument {argument!r} of the agent's command names the column `{column}`, which the "
                f"row does not have. Its columns: {', '.join(sorted(row)) or 'none'}."
            )
        value = row[column]
        text += value if isinstance(value, str) else _json(column, value)
    _check_argument(argument, text)
    return text


def _check_argument(argument: str, text: str) -> None:
    size = len(text.encode(errors="surrogatepass"))
    if size > ARGUMENT_BYTES_MAX:
        raise DataError(
            f"the argument {argument[:80]!r} of the agent's command has {size:,} bytes with this row, and "
            f"an argument has at most {ARGUMENT_BYTES_MAX:,}: read the file that $MILLRACE_ROW names instead."
        )
    if "\0" in text:
        raise DataError(
            f"the argument {argument[:80]!r} of the agent's command has a zero byte with this row, which no "
            "argument can hold: read the file that $MILLRACE_ROW names instead."
        )


def absolute(command: Sequence[str], directory: Path) -> list[str]:
    """The command, with each argument that names a file below `directory` as that file's whole path.

    An agent works in a directory of its own. `["python", "agent.py"]` still means the file beside the run.
    """
    return [
        str(directory / argument).replace("{", "{{").replace("}", "}}")
        if _may_be_a_path(argument) and (directory / argument).is_file()
        else argument
        for argument in command
    ]


def _may_be_a_path(argument: str) -> bool:
    return 0 < len(argument) < 256 and argument[0] != "-" and not {"{", "}"} & set(argument)
