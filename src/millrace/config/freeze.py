"""A loaded configuration as data: the content of `config.json`, and its digest."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import xxhash
from pydantic import ValidationError

from millrace.config import carried
from millrace.config.foreign import with_present_names
from millrace.config.problems import describe
from millrace.config.schema import Config
from millrace.config.tables.section import Section
from millrace.core.errors import ConfigError, writing

NOT_KEPT = "(not kept)"
"""The text in place of the rest of a URL."""


def dump(config: Section) -> dict[str, Any]:
    """Every key with its value, defaults included, as JSON types."""
    return config.model_dump(mode="json")


def recorded(config: Config) -> dict[str, Any]:
    """`dump` for files, services and workers: of a URL to notify, only scheme and host."""
    tree = dump(config)
    scheme, separator, rest = (config.observe.notify or "").partition("://")
    host, slash, _ = re.sub(r"[/?#]", "/", rest).partition("/")
    if separator and scheme in ("http", "https") and (slash or "@" in host):
        tree["observe"]["notify"] = f"{scheme}://{host.rpartition('@')[2]}/{NOT_KEPT}"
    return tree


def record(config: Config, file: Path) -> None:
    """Write the file that `restore` reads, atomically. Raises: StorageError."""
    tree = carried.relative(recorded(config), file.parent)
    partial = file.with_suffix(".json.partial")
    with writing(file):
        partial.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, file)


def restore(tree: dict[str, Any], file: Path) -> Config:
    """The configuration in a run's `file`."""
    present = with_present_names(carried.absolute(tree, file.parent))
    try:
        return Config.model_validate_json(json.dumps(present), strict=True)
    except ValidationError as error:
        raise ConfigError(f"{file}: {describe(Config, error, {})}") from None


def config_digest(config: Section) -> str:
    """XXH3-128 of the canonical JSON: equal exactly when every key is equal."""
    canonical = json.dumps(dump(config), sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(canonical.encode())
