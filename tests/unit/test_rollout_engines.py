"""What an engine cannot do is refused before anything starts."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from millrace.config.schema import Config
from millrace.core.errors import ConfigError
from millrace.placement.memory import engine_memory
from millrace.rollout import engine_kinds
from millrace.rollout.engine_kinds import EngineKind, refuse_unable
from millrace.rollout.protocol import Capabilities


def config_of(**sections: object) -> Config:
    task, reward = {"kind": "gym", "name": "chain_sum"}, {"kind": "gym"}
    return Config.model_validate({"model": {"path": "m"}, "task": task, "reward": reward, **sections})


def test_a_setting_that_the_engine_does_not_know_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    can = Capabilities(frozenset({"sampling.top_p"}), shares_prefixes=False, chunks_prompts=True)
    plain = EngineKind("nowhere:open", can, engine_memory.server)
    monkeypatch.setitem(engine_kinds.ENGINES, "own", plain)
    refuse_unable(config_of(sampling={"top_p": 0.9, "temperature": 0.5, "max_tokens": 7}))
    asked = config_of(sampling={"top_k": 5, "top_p": 0.9}, rollout={"exact": True})
    with pytest.raises(
        ConfigError, match=r"\(own\) cannot do `rollout.exact` \(True\), `sampling.top_k` \(5\)"
    ):
        refuse_unable(asked)


def test_an_engine_in_one_process_refuses_a_divided_model() -> None:
    with pytest.raises(ConfigError, match=r"\(own\) cannot do `rollout.tensor` \(2\)"):
        refuse_unable(config_of(rollout={"tensor": 2}))
    refuse_unable(config_of(rollout={"tensor": 2, "engine": "vllm"}))


def test_the_modes_of_vllm_are_refused_for_another_engine() -> None:
    for key, value in (("stepwise", True), ("seeded", False)):
        with pytest.raises(ConfigError, match=rf"\(own\) cannot do `rollout.{key}` \({value}\)"):
            refuse_unable(config_of(rollout={key: value}))
        refuse_unable(config_of(rollout={key: value, "engine": "vllm"}))


FP8 = {"quantization": "fp8"}


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"engine": "own"}, r"\(own\) cannot do `rollout.quantization` \(fp8\)"),
        ({"servers": ["http://a"]}, r"\(server\) cannot do `rollout.quantization` \(fp8\)"),
        ({"engine": "vllm", "exact": True}, r"\(vllm\) cannot do `rollout.exact` \(True\)"),
    ],
)
def test_quantised_weights_are_refused_by_name_where_they_cannot_be(
    rollout: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        refuse_unable(config_of(rollout=rollout | FP8, model={"path": "m", "dtype": "bfloat16"}))


def test_only_weights_in_bfloat16_are_quantised() -> None:
    rollout = {"engine": "vllm", **FP8}
    refuse_unable(config_of(rollout=rollout, model={"path": "m", "dtype": "bfloat16"}))
    with pytest.raises(ConfigError, match=r"(?s)`rollout.quantization` \(fp8\).* Set `model.dtype` to"):
        refuse_unable(config_of(rollout=rollout))
    with pytest.raises(ValidationError, match="fp8"):
        config_of(rollout={"engine": "vllm", "quantization": "int4"})


def test_exactness_needs_the_cache_to_be_computed_again() -> None:
    with pytest.raises(ValidationError, match=r"`rollout.exact` \(true\) needs `rollout.recompute`"):
        config_of(rollout={"exact": True, "recompute": False})


def test_servers_decide_the_engine_and_the_number_of_replicas() -> None:
    servers = ["http://a:8000", "https://b:8000/", "http://c:1"]
    rollout = config_of(rollout={"servers": servers}).rollout
    assert (rollout.engine, rollout.replicas, rollout.servers) == ("server", 3, tuple(servers))
    again = Config.model_validate_json(config_of(rollout={"servers": servers}).model_dump_json(), strict=True)
    assert again.rollout == rollout


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"engine": "server"}, r"`rollout.engine` \(server\) does not go with 0 `rollout.servers`"),
        (
            {"engine": "vllm", "servers": ["http://a"]},
            r"`rollout.engine` \(vllm\) does not go with 1 ",
        ),
        ({"replicas": 2, "servers": ["http://a"]}, r"`rollout.replicas` \(2\) must be the number of"),
        ({"servers": ["http://a", "http://a/"]}, "names a server twice"),
        ({"servers": ["a:8000"]}, "should match pattern"),
        ({"servers": "http://a"}, "tuple"),
    ],
)
def test_servers_that_do_not_fit_the_rest_are_refused_by_name(
    rollout: dict[str, object], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        config_of(rollout=rollout)


def test_what_a_server_cannot_do_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"\(server\) cannot do `rollout.recompute` \(False\)"):
        refuse_unable(config_of(rollout={"servers": ["http://a"], "recompute": False}))


@pytest.mark.parametrize("setting", [{"top_p": 0.9}, {"min_p": 0.1}, {"allowed_token_ids": (5, 6)}])
def test_what_one_kind_of_server_cannot_do_is_refused_when_that_kind_answers(
    setting: dict[str, object],
) -> None:
    config = config_of(rollout={"servers": ["http://a"], "seeded": False}, sampling=setting)
    refuse_unable(config)
    refuse_unable(config, "vLLM")
    with pytest.raises(ConfigError, match=rf"\(SGLang\) cannot do `sampling.{next(iter(setting))}`"):
        refuse_unable(config, "SGLang")


@pytest.mark.parametrize("rollout", [{"engine": "vllm"}, {"servers": ["http://a"]}])
def test_a_temperature_above_vllms_is_refused(rollout: dict[str, object]) -> None:
    refuse_unable(config_of(rollout=rollout, sampling={"temperature": 2.0}))
    with pytest.raises(ConfigError, match=r"samples at temperatures up to 2, and .* is 2.5"):
        refuse_unable(config_of(rollout=rollout, sampling={"temperature": 2.5}))
