"""What an engine cannot do is refused before anything starts."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from millrace.config.schema import Config
from millrace.core.errors import ConfigError
from millrace.rollout import engines
from millrace.rollout.engines import EngineKind, refuse_unable
from millrace.rollout.protocol import Capabilities


def config_of(**sections: object) -> Config:
    task, reward = {"kind": "gym", "name": "chain_sum"}, {"kind": "gym"}
    return Config.model_validate({"model": {"path": "m"}, "task": task, "reward": reward, **sections})


def test_a_setting_that_the_engine_does_not_know_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    can = Capabilities(frozenset({"sampling.top_p"}), shares_prefixes=False, chunks_prompts=True)
    plain = EngineKind("nowhere:open", can)
    monkeypatch.setitem(engines.ENGINES, "own", plain)
    refuse_unable(config_of(sampling={"top_p": 0.9, "temperature": 0.5, "max_tokens": 7}))
    asked = config_of(sampling={"top_k": 5, "top_p": 0.9}, rollout={"exact": True})
    with pytest.raises(
        ConfigError, match=r"\(own\) cannot do `rollout.exact` \(True\), `sampling.top_k` \(5\)"
    ):
        refuse_unable(asked)


def test_exactness_needs_the_cache_to_be_computed_again() -> None:
    with pytest.raises(ValidationError, match=r"`rollout.exact` \(true\) needs `rollout.recompute`"):
        config_of(rollout={"exact": True, "recompute": False})
