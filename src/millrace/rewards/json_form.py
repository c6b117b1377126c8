"""The reward of JSON: it parses, and it matches a JSON Schema."""

from __future__ import annotations

import json
from typing import Any

from jsonschema import exceptions, validators
from referencing import Registry

from millrace.config.tables.reward_kinds import JsonRewardSection
from millrace.core.errors import ConfigError, DataError
from millrace.rewards.references import Extract
from millrace.tasks.rows import Row, find_column

DEPTH_MAX = 64
"""Deeper JSON does not parse here: a schema that refers to itself could not be checked on it."""


class JsonReward:
    """1 if the completion is JSON that matches the schema, `partial` if it is other JSON, else 0.

    JSON is that of RFC 8259: no NaN, no comments, no text around it. The metric `json_parsed` is 1 if it
    parses. A schema of a row that is none fails the reward. A reference to another document is not fetched,
    and fails it too.

    Raises: ConfigError: the schema of the configuration is none.
    """

    name, is_async = "JSON", False
    file: str | None = None

    def __init__(self, config: JsonRewardSection) -> None:
        self._config, self._extract = config, Extract(config.extract)
        try:
            self._validator = None if config.json_schema is None else _validator(config.json_schema)
        except DataError as error:
            raise ConfigError(f"`reward.json_schema` {error}") from error

    def __call__(self, completion: str, answer: Any, columns: Row) -> dict[str, float]:
        validator = self._validator
        if self._config.schema_column is not None:
            validator = self._of_row(columns)
        try:
            value = parse(self._extract(completion) or "")
        except ValueError:
            return {"reward": 0.0, "json_parsed": 0.0}
        matches = validator is None or validator.is_valid(value)
        return {"reward": 1.0 if matches else self._config.partial, "json_parsed": 1.0}

    def _of_row(self, columns: Row) -> Any:
        column = self._config.schema_column or ""
        schema = find_column(columns, column)
        if schema is None:
            raise DataError(f"the row has no schema: `reward.schema_column` names the column {column!r}")
        try:
            return _validator(schema)
        except DataError as error:
            raise DataError(f"the schema in the column {column!r} {error}") from error


def parse(text: str) -> Any:
    """The value of a JSON text. Raises: ValueError: it is none, or deeper than `DEPTH_MAX`."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("too deep") from None
    level = [value]
    for _ in range(DEPTH_MAX):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return value
    raise ValueError("too deep")


def _inside(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _validator(schema: Any) -> Any:
    """Raises: DataError: no JSON Schema."""
    try:
        tree = parse(schema) if isinstance(schema, str) else schema
        if not isinstance(tree, dict | bool):
            raise DataError("is no JSON Schema: it is neither an object nor true or false")
        kind = validators.validator_for(tree, default=validators.Draft202012Validator)
        kind.check_schema(tree)
    except ValueError as error:
        raise DataError(f"is no JSON: {error}") from error
    except exceptions.SchemaError as error:
        raise DataError(f"is no JSON Schema: {error.message}") from error
    return kind(tree, registry=Registry())
