"""A loaded configuration as data: what `config.json` holds, and its digest."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import xxhash
from pydantic import ValidationError

from millrace.config import carried
from millrace.config.problems import describe
from millrace.config.schema import Config, Section
from millrace.core.errors import ConfigError, writing


def dump(config: Section) -> dict[str, Any]:
    """Every key with its value, defaults included, as JSON types."""
    return config.model_dump(mode="json")


def record(config: Config, file: Path) -> None:
    """Write what `restore` reads, atomically. Raises: StorageError."""
    tree = carried.relative(dump(config), file.parent)
    partial = file.with_suffix(".json.partial")
    with writing(file):
        partial.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, file)


def restore(tree: dict[str, Any], file: Path) -> Config:
    """The configuration in a run's `file`."""
    try:
        return Config.model_validate_json(json.dumps(carried.absolute(tree, file.parent)), strict=True)
    except ValidationError as error:
        raise ConfigError(f"{file}: {describe(Config, error, {})}") from None


def config_digest(config: Section) -> str:
    """XXH3-128 of the canonical JSON: equal exactly when every key is equal."""
    canonical = json.dumps(dump(config), sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(canonical.encode())
