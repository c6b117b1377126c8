"""A data set of the Hugging Face hub, or of its mirror, as one Arrow file in the cache.

The first process that needs the rows has them fetched, and all processes of the host map the file. Later runs
read the file and ask no hub. `datasets` works in a process of its own: it can be told there to use its cache
alone, and ended when it takes too long.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import xxhash

from millrace.config.tables.task import HubTaskSection
from millrace.core.errors import DataError
from millrace.core.extras import refuse_missing
from millrace.tasks.arrow import cache_directory

ANSWER_S = 10.0
"""Deadline of the hub's first answer."""
FETCH_S = 3600.0
"""Deadline of a fetch. What has arrived stays in the cache of `datasets`, for the next try."""
CHILD = "millrace.tasks.fetch_rows"
_UNREACHABLE = {"TransportError", "ConnectionError", "OfflineModeIsEnabled", "LocalEntryNotFoundError"}


def hub_file(task: HubTaskSection) -> Path:
    """Where the rows of the task are kept once they are fetched."""
    which = json.dumps([task.name, task.subset, task.split, task.revision, task.rows_max])
    digest = xxhash.xxh3_64_hexdigest(which.encode())
    return cache_directory() / f"{task.name.replace('/', '--')}-{digest}.arrow"


def fetched_file(task: HubTaskSection) -> Path:
    """The file with the rows of the task. They are fetched if they never were.

    Raises: DataError: no hub can be reached and the rows are in no cache, or there are no such rows.
        ConfigError: the library `datasets` is not installed.
    """
    file = hub_file(task)
    if file.exists():
        return file
    unreachable = _unreachable(task)
    keys = task.model_dump(include={"subset", "split", "revision", "rows_max"})
    about = {"file": str(file), "name": task.name, **keys}
    refuse_missing("datasets", f"`task.name` ({task.name})")
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"} if unreachable is not None else {}
    first = _run_child(task, about, {**os.environ, **offline})
    if file.exists():
        return file
    if unreachable is not None:
        raise DataError(hub_reason(task.name, unreachable, data=True, cached=_libraries_cache()))
    named = ", ".join(f"`task.{key}` = {value!r}" for key, value in keys.items() if value is not None)
    raise DataError(f"{task.name} has no rows for {named}: {first}\n  Correct these keys")


def _unreachable(task: HubTaskSection) -> Exception | None:
    """The error, where no hub answers. Raises: DataError: the hub answers that there is no such data set."""
    import huggingface_hub

    try:
        huggingface_hub.HfApi().dataset_info(task.name, revision=task.revision, timeout=ANSWER_S)
    except Exception as error:
        if _kinds(error) & _UNREACHABLE:
            return error
        raise DataError(hub_reason(task.name, error, data=True)) from error
    return None


def _run_child(task: HubTaskSection, about: dict[str, Any], environment: dict[str, str]) -> str:
    """The text of the error; empty if there was none. Progress goes to stderr."""
    command = [sys.executable, "-m", CHILD, json.dumps(about)]
    try:
        ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=FETCH_S)
    except subprocess.TimeoutExpired:
        raise DataError(
            f"{task.name} was not fetched within {FETCH_S:.0f} s. Start again: what has arrived is kept. "
            "Or set `task.rows_max`, which fetches no more rows than that"
        ) from None
    lines = ended.stdout.splitlines()
    try:
        return str(json.loads(lines[-1]))
    except (IndexError, ValueError):
        return f"the process that fetches ended with {ended.returncode}"


def _kinds(error: Exception) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def _libraries_cache() -> str:
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    return f", and is not in the cache {os.environ.get('HF_DATASETS_CACHE', home)}"


def hub_reason(name: str, error: Exception, *, data: bool, cached: str = "", hint: str = "") -> str:
    """The message for an error of the hub. Each class of errors has its own remedy. `cached` names the cache
    that was tried too; `hint` is added where the hub has no such name."""
    kinds = _kinds(error)
    where = os.environ.get("HF_ENDPOINT", "the Hugging Face hub")
    noun, option = ("data set", "--repo-type dataset ") if data else ("model", "")
    if "GatedRepoError" in kinds:
        remedy = "Accept its terms on its page, then `hf auth login`, or set HF_TOKEN."
    elif "RevisionNotFoundError" in kinds:
        remedy = "There is no such revision: leave the revision out, or correct it."
    elif "RepositoryNotFoundError" in kinds:
        remedy = f"There is no such {noun}, or it is private: correct the name, or set HF_TOKEN{hint}."
    elif "OSError" in kinds and not kinds & {"ConnectionError", "HTTPError", "LocalEntryNotFoundError"}:
        remedy = "Free space or put the permissions right, then try again: whole files stay."
    else:
        remedy = (
            "Is there a network? A mirror is named with HF_ENDPOINT. Or, on a host that reaches the hub: "
            f"`hf download {option}{name} --local-dir DIRECTORY`, and copy that directory here."
        )
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{name} could not be fetched from {where}{cached}: {first}\n  {remedy}"
