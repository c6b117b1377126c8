"""What is asked of the servers of a run before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_sglang_server import fake_sglang
from fake_vllm_server import fake_vllm
from test_preflight import config_for, make_directory

from millrace.checks.preflight import preflight
from millrace.core.errors import ConfigError


def test_a_server_that_is_missing_or_lacks_something_is_told_before_the_start(
    tmp_path: Path,
) -> None:
    model = make_directory(tmp_path / "model")
    servers = {"servers": ["http://127.0.0.1:9"]}
    with pytest.raises(ConfigError, match=r"`rollout.servers`: server http://127.0.0.1:9: GET /version"):
        preflight(config_for(model, rollout=servers), tmp_path)
    sampling = {"max_tokens": 16}
    with fake_vllm() as fake:
        rollout = {"servers": [fake.url], "slots": 8, "max_sequence_tokens": 64}
        preflight(config_for(model, rollout=rollout, sampling=sampling), tmp_path)
        assert not {"/pause", "/resume", "/collective_rpc"} & set(fake.calls)
        with pytest.raises(ConfigError, match=r"start it with --max-num-seqs 33"):
            preflight(config_for(model, rollout=rollout | {"slots": 32}, sampling=sampling), tmp_path)


def test_a_setting_that_the_server_which_answers_does_not_know_is_refused_by_name(
    tmp_path: Path,
) -> None:
    """Another server may know it."""
    model = make_directory(tmp_path / "model")
    sampling = {"max_tokens": 16, "repetition_penalty": 1.1}
    with fake_vllm() as vllm, fake_sglang() as sglang:
        rollout = {"servers": [vllm.url], "slots": 8, "max_sequence_tokens": 64}
        preflight(config_for(model, rollout=rollout, sampling=sampling), tmp_path)
        rollout["servers"].append(sglang.url)
        with pytest.raises(ConfigError, match=r"\(SGLang\) cannot do `sampling.repetition_penalty` \(1.1\)"):
            preflight(config_for(model, rollout=rollout, sampling=sampling), tmp_path)
        preflight(config_for(model, rollout=rollout, sampling={"max_tokens": 16}), tmp_path)
        assert not set(sglang.loading) & set(sglang.calls)
