"""What the core takes from the packages beside it, by name.

The core imports none of them. It asks here, at the moment of need. No command waits for what it leaves out.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from millrace.core.errors import ConfigError

TARGETS: dict[str, str] = {
    "ui.drawing": "millrace_ui.notebook:GrowingCurves",
    "ui.html": "millrace_ui.notebook:html",
    "ui.report": "millrace_ui.report:report_runs",
    "ui.side_by_side": "millrace_ui.side_by_side:side_by_side",
    "ui.tables": "millrace_ui.side_by_side:tables",
}
"""What the core asks for, with its module and its name there."""


def wing(name: str) -> Any:
    """The object `name` of `TARGETS`, imported now. Raises: ConfigError: its package is not installed."""
    module, _, attribute = TARGETS[name].partition(":")
    package = module.partition(".")[0]
    try:
        return getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ConfigError(
            f"`{name}` needs the package `{package}`, which is not installed.\n"
            "  It is a part of Millrace: install Millrace again, whole"
        ) from None
