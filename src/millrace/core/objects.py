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

    Errors name the purpose of the path (`called`) and the `form` that it must have.
    Raises: `kind` for a path of another form, or a module without that name; the errors of `load`.
    """
    source, _, name = path.rpartition(":")
    if not source or not name:
        raise kind(f"{called} ({path!r}) must be {form}")
    module = load(source)
    if not hasattr(module, name):
        names = [n for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__]
        raise kind(f"{called} ({path!r}): {source} has no `{name}`; it has {', '.join(names) or 'nothing'}")
    return getattr(module, name), module
