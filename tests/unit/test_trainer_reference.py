"""The reference in a process of its own: what it tells is what a copy in the trainer computes."""

from __future__ import annotations

import asyncio
from itertools import islice

import pytest
from msgspec.structs import replace
from trainer_doubles import make_batch, make_trainer, save_tiny_model, tiny_model

from millrace.config.schema import Config
from millrace.core.errors import DigestMismatchError
from millrace.core.types import Batch
from millrace.trainer.role import ReferenceWorker, reference_logprobs


def config_for(path="m", **sections):
    task = {"kind": "gym", "name": "x"}
    values = {"model": {"path": str(path)}, "task": task, "reward": {"kind": "gym"}, **sections}
    return Config.model_validate(values | {"sampling": {"max_tokens": 24}})


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize(("kind", "kl_in"), [("grpo", "loss"), ("grpo", "reward"), ("raft", "reward")])
def test_a_step_with_log_probs_of_the_batch_is_that_with_a_frozen_copy(kind, kl_in, minibatches, tmp_path):
    config = config_for(
        algorithm={"kind": kind, "kl": 0.3, "kl_in": kl_in},
        batch={"token_budget": 64, "minibatches": minibatches},
    )
    batch = make_batch()
    found = iter(reference_logprobs(tiny_model(seed=1), batch, config).tolist())
    scored = Batch(
        batch.version,
        [
            replace(
                g, sequences=[replace(s, reference=[*islice(found, len(s.columns))]) for s in g.sequences]
            )
            for g in batch.groups
        ],
    )
    scored_metrics, copied_metrics = (
        make_trainer(
            config.algorithm, model=tiny_model(), reference=has_copy, token_budget=64, minibatches=minibatches
        )
        .step(given, rejected_dir=tmp_path)
        .metrics
        for given, has_copy in ((scored, False), (batch, True))
    )
    assert copied_metrics["kl_reference"] > 0.01
    assert scored_metrics == copied_metrics


def test_other_weights_than_those_of_version_0_are_refused(tmp_path):
    worker = ReferenceWorker(config_for(save_tiny_model(tmp_path / "model")).model_dump(mode="json"), "cpu")
    with pytest.raises(DigestMismatchError, match=r"the reference .* has digest (\w+), .* with other"):
        asyncio.run(worker.load("other"))


def test_what_nobody_can_have_sampled_has_no_reference_and_the_trainer_rejects_it():
    worker, batch = ReferenceWorker(config_for().model_dump(mode="json"), "cpu"), make_batch()
    worker._model = tiny_model()
    batch.groups[0].sequences[0].columns.tokens[0] = 10**6
    logprobs = asyncio.run(worker.score(batch))
    lengths = [len(s.columns) for g in batch.groups for s in g.sequences]
    assert [len(each) for each in logprobs] == lengths and all(
        each != each for part in logprobs for each in part
    )
