"""Objects named by text, "package.module:name": a worker's class, a reader of weights, a user's function."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from millrace.core.errors import ConfigError, MillraceError

FORM = "`package.module:name`"


def find_object(
    path: str,
    called: str,
    *,
    form: str = FORM,
    load: Callable[[str], ModuleType] = importlib.import_module,
    kind: type[MillraceError] = ConfigError,
) -> tuple[Any, ModuleType]:
    """The object at `path`, and its module. `load` gets the text before the last ":".

    `called` names in errors what the path is for, and `form` how it must look.
    Raises: `kind` for a path of another form, or a module without that name; whatever `load` raises.
    """
    source, _, name = path.rpartition(":")
    if not source or not name:
        raise kind(f"{called} ({path!r}) must be {form}")
    module = load(source)
    if not hasattr(module, name):
        own = [n for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__]
        raise kind(f"{called} ({path!r}): {source} has no `{name}`; it has {', '.join(own) or 'nothing'}")
    return getattr(module, name), module
