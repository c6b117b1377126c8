"""A loaded configuration as data: what `config.json` holds, and its digest."""

from __future__ import annotations

import json
from typing import Any

import xxhash
from pydantic import ValidationError

from millrace.config.problems import describe
from millrace.config.schema import Config, Section
from millrace.core.errors import ConfigError


def dump(config: Section) -> dict[str, Any]:
    """Every key with its value, defaults included, as JSON types."""
    return config.model_dump(mode="json")


def restore(tree: dict[str, Any], origin: str) -> Config:
    """The configuration that `dump` wrote. `origin` names the file in errors."""
    try:
        return Config.model_validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        raise ConfigError(f"{origin}: {describe(Config, error, {})}") from None


def config_digest(config: Section) -> str:
    """XXH3-128 of the canonical JSON: equal exactly when every key is equal."""
    canonical = json.dumps(dump(config), sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(canonical.encode())
