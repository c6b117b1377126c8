"""Packages that only some runs need, each an extra of Millrace."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from millrace.core.errors import ConfigError

PACKAGES = {"wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio", "prometheus": "prometheus_client"}
"""Key of `[observe]`, which is also the extra's name -> package."""


def refuse_uninstalled(key: str, value: str) -> None:
    """Raises: ConfigError: the package behind `observe.KEY` is not installed. It is not imported."""
    package = PACKAGES[key]
    spec = find_spec(package)
    if spec is None or spec.origin is None:  # a folder without code, as W&B makes ./wandb
        raise ConfigError(
            f"`observe.{key}` ({value}) needs the {package} package, which is not installed.\n"
            f"  Run `{sys.executable} -m pip install {package.replace('_', '-')}` (the extra "
            f"millrace[{key}]), or leave the key out"
        )
