"""Pickles a function of a script or notebook, or raises an error that names what cannot be pickled.

cloudpickle writes functions of `__main__`, lambdas and closures by value. A function of a module that can be
imported is written by name.
"""

from __future__ import annotations

import inspect
import io
import sys
from collections.abc import Iterator
from typing import Any

import cloudpickle

from millrace.config.carried import pack
from millrace.core.errors import ConfigError


def pickled(name: str, thing: Any) -> bytes:
    """The bytes that `config.carried.load_carried` reads in another process.

    Raises: ConfigError: a variable of `thing` cannot be pickled. The message names the variable and the
    reason.
    """
    try:
        return pack(_dump(thing))
    except Exception as error:
        variable, why = next(_offenders(thing), ("something", _why(None, error)))
        raise ConfigError(
            f"`{name}` ({_called(thing)}) cannot be carried into the run's processes: {variable} is {why}.\n"
            "  Open, create or load it inside the function (once, in a global variable that starts as None), "
            "or in a module that the function imports"
        ) from None


class _Pickler(cloudpickle.Pickler):
    def persistent_id(self, thing: Any) -> None:
        """Refuse files and device memory. A file would be pickled with its present content, and device memory
        as bytes that load only on such a device. A user expects neither."""
        if _is_on_device(thing) or _is_file(thing):
            raise TypeError(_why(thing, TypeError()))


def _dump(thing: Any) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream).dump(thing)
    return stream.getvalue()


def _offenders(thing: Any) -> Iterator[tuple[str, str]]:
    """(variable, reason) of each value of a function or object that cannot be pickled."""
    for name, value in _referred(thing):
        try:
            _dump(value)
        except Exception as error:
            yield f"`{name}`", _why(value, error)


def _referred(thing: Any) -> Iterator[tuple[str, Any]]:
    function = inspect.unwrap(thing) if callable(thing) else thing
    if inspect.ismethod(function):
        yield from ((f"self.{name}", value) for name, value in vars(function.__self__).items())
        function = function.__func__
    if inspect.isfunction(function):
        variables = inspect.getclosurevars(function)
        yield from {**variables.nonlocals, **variables.globals}.items()
        defaults = inspect.signature(function).parameters.values()
        yield from ((p.name, p.default) for p in defaults if p.default is not p.empty)
    else:
        yield from getattr(function, "__dict__", {}).items()


def _why(value: Any, error: Exception) -> str:
    if _is_file(value):
        return f"an open file ({getattr(value, 'name', type(value).__name__)})"
    if type(value).__module__ in ("_thread", "threading"):
        return f"a lock ({type(value).__name__})"
    if _is_on_device(value):
        return f"a tensor on {value.device}; `.cpu()` can be carried"
    said = str(error).removeprefix("cannot pickle ").strip() or type(error).__name__
    return said if value is None else f"of type {type(value).__name__}, which holds what cannot ({said})"


def _is_file(value: Any) -> bool:
    """A file on disk. The streams of the terminal are pickled as their names."""
    on_disk = isinstance(value, io.TextIOWrapper | io.FileIO | io.BufferedIOBase)
    return on_disk and not isinstance(value, io.BytesIO) and value not in (sys.stdin, sys.stdout, sys.stderr)


def _is_on_device(thing: Any) -> bool:
    device = getattr(thing, "device", None) if type(thing).__module__.startswith("torch") else None
    return device is not None and getattr(device, "type", "cpu") != "cpu" and hasattr(thing, "data_ptr")


def _called(thing: Any) -> str:
    return getattr(thing, "__qualname__", type(thing).__name__)
