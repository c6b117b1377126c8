"""Rewards of a form: JSON with a schema, and a regular expression."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from millrace.config.tables.reward_kinds import JsonRewardSection, PatternRewardSection
from millrace.core.errors import ConfigError, DataError
from millrace.rewards.rewards import PatternReward

json_form = pytest.importorskip("millrace.rewards.json_form", exc_type=ImportError)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {"$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}, "$ref": "#/$defs/tree"}


def value(config, completion, **columns):
    return json_form.JsonReward(config)(completion, None, columns)["reward"]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ('{"name": "Ada", "age": 36}', 1.0),
        (' \n{"age": 36, "name": "Ada"}\n', 1.0),
        ('{"name": "Ada", "age": -1}', 0.25),
        ('{"name": "Ada"}', 0.25),
        ('{"name": "Ada", "age": 36, "x": 1}', 0.25),
        ("[]", 0.25),
        ('{"name": "Ada", "age": 36', 0.0),
        ('{"name": "Ada", "age": NaN}', 0.0),
        ("Infinity", 0.0),
        ('{"name": "Ada", "age": 36} // yes', 0.0),
        ("", 0.0),
        ("[" * 100_000, 0.0),
        ("[" * 65 + "]" * 65, 0.0),
        ("9" * 100_000, 0.0),
    ],
)
def test_json_that_matches_is_1_other_json_the_partial_credit_and_the_rest_0(completion, reward):
    assert value(JsonRewardSection(json_schema=json.dumps(SCHEMA), partial=0.25), completion) == reward


def test_the_schema_may_be_that_of_the_row_as_a_table_or_as_text():
    config = JsonRewardSection(schema_column="schema.of")
    for schema in (SCHEMA, json.dumps(SCHEMA)):
        assert value(config, '{"name": "Ada", "age": 1}', schema={"of": schema}) == 1.0
        assert value(config, "3", schema={"of": schema}) == 0.0


def test_without_a_schema_any_json_will_do_and_it_may_be_in_a_fence():
    config = JsonRewardSection(extract=r"(?s)```json\n(.*?)```")
    assert value(config, 'Here:\n```json\n{"a": 1}\n```') == 1.0
    assert value(config, '{"a": 1}') == 0.0


def test_a_schema_may_refer_to_itself():
    config = JsonRewardSection(json_schema=json.dumps(TREE))
    assert value(config, "[" * 64 + "]" * 64) == 1.0
    assert value(config, "[[3]]") == 0.0


@pytest.mark.parametrize("schema", ["{", '{"type": "objekt"}', "3", "NaN"])
def test_a_schema_that_is_none_is_an_error_at_the_start_or_a_failure_of_its_row(schema):
    with pytest.raises(ConfigError, match=r"`reward.json_schema` is no JSON"):
        json_form.JsonReward(JsonRewardSection(json_schema=schema))
    with pytest.raises(DataError, match="the schema in the column 'schema' is no JSON"):
        value(JsonRewardSection(schema_column="schema"), "{}", schema=schema)


def test_a_row_without_its_schema_is_a_failure():
    with pytest.raises(DataError, match=r"`reward.schema_column` names the column 'schema'"):
        value(JsonRewardSection(schema_column="schema"), "{}", other=1)


def test_another_document_is_not_fetched():
    schema = json.dumps({"$ref": "http://127.0.0.1:9/schema.json"})
    with pytest.raises(Exception, match=r"Unresolvable: http://127\.0\.0\.1:9"):
        value(JsonRewardSection(json_schema=schema), "{}")


# ---------------------------------------------------------------- a regular expression


@pytest.mark.parametrize(
    ("completion", "reward"), [("#12", 1.0), (" #12\n", 1.0), ("no #12", 0.0), ("#12 or 13", 0.0), ("", 0.0)]
)
def test_a_pattern_matches_the_whole_completion(completion, reward):
    assert PatternReward(PatternRewardSection(pattern=r"#\d+"))(completion, None, {}) == reward
    own = PatternReward(PatternRewardSection(pattern_column="form"))
    assert own(completion, None, {"form": r"#\d+"}) == reward


def test_a_pattern_that_is_none_is_an_error_at_the_start_or_a_failure_of_its_row():
    with pytest.raises(ConfigError, match=r"`reward.pattern` \('\('\) is not a regular expression"):
        PatternReward(PatternRewardSection(pattern="("))
    own = PatternReward(PatternRewardSection(pattern_column="form"))
    with pytest.raises(DataError, match="is not a regular expression"):
        own("", None, {"form": "("})
    with pytest.raises(DataError, match="names the column 'form'"):
        own("", None, {})


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        (JsonRewardSection, {"json_schema": "{}", "schema_column": "schema"}),
        (PatternRewardSection, {}),
        (PatternRewardSection, {"pattern": "a", "pattern_column": "b"}),
    ],
)
def test_two_forms_at_once_are_refused_and_so_is_a_pattern_that_is_none(section, keys):
    with pytest.raises(ValidationError, match="reward"):
        section(**keys)
