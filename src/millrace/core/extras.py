"""Packages that only some runs need. An extra of Millrace brings each, and a plain install has none."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from millrace.core.errors import ConfigError

EXTRAS = {
    "datasets": "data",
    "gguf": "gguf",
    "jsonschema": "json",
    "mlflow": "mlflow",
    "nixl": "nixl",
    "optuna": "optuna",
    "pandas": "data",
    "prometheus_client": "prometheus",
    "pyarrow": "data",
    "reasoning_gym": "gym",
    "scipy": "optuna",
    "tensorboard": "tensorboard",
    "torchao": "torchao",
    "trackio": "trackio",
    "wandb": "wandb",
}
"""Package -> the extra that brings it."""


def is_installed(package: str) -> bool:
    """The package is there. It is not imported."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None  # a folder without code is none, as W&B makes ./wandb


def refuse_missing(package: str, what: str, otherwise: str = "") -> None:
    """Raises: ConfigError: `what` needs a package of `EXTRAS` that is not installed. `otherwise` is another
    remedy, such as "leave the key out"."""
    if not is_installed(package):
        raise _missing(package, what, otherwise)


def in_words(error: ModuleNotFoundError) -> Exception:
    """A ConfigError where a package of `EXTRAS` was not found; else `error`."""
    package = (error.name or "").partition(".")[0]
    return _missing(package, "this") if package in EXTRAS else error


def _missing(package: str, what: str, otherwise: str = "") -> ConfigError:
    install = f"Run {sys.executable} -m pip install 'millrace[{EXTRAS[package]}]'"
    remedies = ", or ".join(filter(None, (install, otherwise)))
    return ConfigError(f"{what} needs the package {package}, which is not installed.\n  {remedies}")
