"""A run of a mixture of experts keeps the routing that was sampled, and trains with it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.long import long
from tests.runs import summary, train
from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from millrace.checks.model_problems import check_model
from millrace.config.load import load
from millrace.core.errors import ConfigError
from millrace.ledger.reading import LedgerReader
from millrace.rollout.engine_kinds import refuse_unable

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
REPLAY = "sampling.routing=true"


@pytest.fixture(scope="module")
def mixture(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of the small run, beside a mixture of experts."""
    directory = tmp_path_factory.mktemp("mixture")
    shutil.copytree(start.parent / "start", directory / "start")
    shutil.copy(start, directory)
    dense = AutoConfig.from_pretrained(directory / "start").to_dict()
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**{key: dense[key] for key in dense if key != "model_type"}, **EXPERTS)
    Qwen3MoeForCausalLM(config).save_pretrained(directory / "start")
    return directory / start.name


@long
def test_the_ledger_keeps_the_experts_and_the_weights_are_those_of_a_run_without(mixture, warm, tmp_path):
    replayed = train(mixture, tmp_path / "replayed", REPLAY, "steps=2")
    plain = train(mixture, tmp_path / "plain", "steps=2")
    with LedgerReader(replayed.ledger) as reader:
        columns = [reader.trajectory(index).columns for index in range(32)]
    for one in columns:
        assert one.routing is not None and one.routing.width == 2 * 2
        assert np.asarray(one.routing.experts).max() < 4  # no token without a record
    assert summary(replayed)["logprob_gap_staleness0"]["max"] < 1e-4
    found, due = (load_file(run.model / "model.safetensors") for run in (replayed, plain))
    assert found.keys() == due.keys()
    for name, tensor in due.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


def test_a_model_without_experts_and_an_engine_that_cannot_record_are_refused_by_name(start, mixture):
    with pytest.raises(ConfigError, match=r"`sampling.routing` \(true\): the model in .* has no experts"):
        check_model(load(start, (REPLAY,)))
    check_model(load(mixture, (REPLAY,)))
    refuse_unable(load(mixture, (REPLAY,)))
    with pytest.raises(
        ConfigError, match=r"`rollout.engine` \(vllm\) cannot do .*`sampling.routing` \(True\)"
    ):
        refuse_unable(load(mixture, (REPLAY, "rollout.engine=vllm", "rollout.exact=false")))
