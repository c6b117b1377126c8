"""A preset of `[algorithm]` is a set of defaults, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millrace.config.freeze import config_digest, dump, restore
from millrace.config.load import merge, read_mapping, validate
from millrace.config.schema import Config
from millrace.config.tables.algorithms import PRESETS, PolicyGradient
from millrace.core.errors import ConfigError

BASE: dict[str, Any] = {
    "model": {"path": "/m"},
    "task": {"kind": "gym", "name": "chain_sum"},
    "reward": {"kind": "gym"},
}


def config_of(**algorithm: Any) -> Config:
    return validate(Config, BASE | {"algorithm": algorithm}, {})


@pytest.mark.parametrize("kind", PRESETS)
def test_a_preset_changes_the_keys_that_its_row_names_and_no_other(kind: str) -> None:
    algorithm = dump(config_of(kind=kind).algorithm)
    base = dump(PolicyGradient())
    assert algorithm == base | PRESETS[kind].defaults | {"kind": kind}
    assert all(base[key] != value for key, value in PRESETS[kind].defaults.items())


def test_a_key_of_the_user_stands_over_the_preset_even_where_it_is_the_general_default() -> None:
    algorithm = config_of(kind="gspo", clip_high=0.2).algorithm
    assert isinstance(algorithm, PolicyGradient)
    assert (algorithm.clip_low, algorithm.clip_high) == (3e-4, 0.2)


def test_a_section_from_python_replaces_the_keys_that_it_sets_and_no_default_of_its_preset() -> None:
    below = BASE | {"algorithm": {"kind": "gspo", "clip_low": 0.1}}
    above = read_mapping(Config, {"algorithm": PolicyGradient(kind="gspo", kl=0.5)}, "train")
    algorithm = validate(Config, merge(Config, below, above.tree), {}).algorithm
    assert isinstance(algorithm, PolicyGradient)
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.kl) == (0.1, 4e-4, 0.5)


@pytest.mark.parametrize("kind", PRESETS)
def test_a_recorded_configuration_is_restored_and_an_absent_key_has_the_preset_s_default(kind: str) -> None:
    config = config_of(kind=kind)
    tree = json.loads(json.dumps(dump(config)))
    assert config_digest(restore(tree, Path("config.json"))) == config_digest(config)
    for key in PRESETS[kind].defaults:
        older = tree | {"algorithm": {name: v for name, v in tree["algorithm"].items() if name != key}}
        assert config_digest(restore(older, Path("config.json"))) == config_digest(config)


def test_an_unknown_key_of_a_preset_is_refused_under_the_name_of_this_preset() -> None:
    with pytest.raises(ConfigError, match=r"unknown key `algorithm.clip_lo` for kind 'gspo'.*\n.*clip_low`"):
        config_of(kind="gspo", clip_lo=0.1)
    with pytest.raises(
        ConfigError, match=r"`algorithm.kind` \('gspa'\) is not known.\n  Did you mean 'gspo'"
    ):
        config_of(kind="gspa")
