"""What the core takes from the packages beside it, by name.

The core imports none of them. It asks here, at the moment of need. No command waits for what it leaves out.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from millrace.core.errors import ConfigError
from millrace.core.extras import in_words

TARGETS: dict[str, str] = {}
"""What the core asks for, with its module and its name there."""


def wing(name: str) -> Any:
    """The object `name` of `TARGETS`, imported now. Raises: ConfigError: its package is not installed."""
    module, _, attribute = TARGETS[name].partition(":")
    package = module.partition(".")[0]
    try:
        return getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise in_words(error) from None
        raise ConfigError(
            f"`{name}` needs the package `{package}`, which is not installed.\n"
            "  It is a part of Millrace: install Millrace again, whole"
        ) from None
