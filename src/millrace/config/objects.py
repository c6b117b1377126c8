"""Objects named by text: a user's own reward, rows, algorithm or schedule, or the class of a worker."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from millrace.config.carried import is_carried_object, load_carried
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


def load_object(key: str, path: str) -> tuple[Any, str | None]:
    """The object at `file.py:name` or `package.module:name`, or carried; and the file that defines it.

    A file's directory becomes importable, as when Python runs that file. `key` is the configuration key
    that errors name.

    Raises:
        ConfigError: it cannot be imported, or has no such name.
    """
    if is_carried_object(path):
        value = load_carried(key, path)
        return value, getattr(getattr(value, "__code__", None), "co_filename", None)
    form = f"`file.py:name` or {FORM}"
    value, module = find_object(path, f"`{key}`", form=form, load=lambda source: _module(key, source))
    return value, getattr(module, "__file__", None)


def load_function(key: str, path: str) -> tuple[Callable[..., Any], str | None]:
    """As `load_object`, for something that can be called."""
    function, file = load_object(key, path)
    if not callable(function):
        raise ConfigError(f"`{key}` ({path!r}) is of type {type(function).__name__}, not a function")
    return function, file


def _module(key: str, source: str) -> ModuleType:
    try:
        return _from_file(key, source) if source.endswith(".py") else importlib.import_module(source)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"`{key}`: importing {source} failed: {type(error).__name__}: {error}. "
            "Run it with python to see the whole traceback."
        ) from error


def _from_file(key: str, source: str) -> ModuleType:
    file = Path(source).resolve()
    if not file.is_file():
        raise ConfigError(f"`{key}`: no file {source} (looked in {Path.cwd()}): check the path")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    name = _name_of(file)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"`{key}`: {source} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up here
    spec.loader.exec_module(module)
    return module


def _name_of(file: Path) -> str:
    """The name that a process knows the file by which the file's functions spawn. Where this name means
    another module, such as an installed one, a name of its own."""
    with suppress(ImportError, ValueError, AttributeError):  # no name of a module
        found = importlib.util.find_spec(file.stem)
        if found is not None and found.origin is not None and Path(found.origin) == file:
            return file.stem
    return f"millrace_own_{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"
