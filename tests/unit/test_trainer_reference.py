"""The reference in a process of its own: what it tells is what a copy in the trainer computes."""

from __future__ import annotations

import asyncio

import pytest
import torch
from msgspec.structs import replace
from trainer_doubles import make_batch, make_trainer, save_tiny_model, tiny_model

from millrace.config.algorithms import GRPO
from millrace.config.schema import Config
from millrace.core.errors import DigestMismatchError
from millrace.core.types import Batch
from millrace.trainer.reference import ReferenceWorker, reference_logprobs


def scored(batch, model):
    """As the controller has it done: group by group."""

    def with_logprobs(group):
        found = torch.tensor(
            reference_logprobs(model, group, token_budget=64, temperature=1.0, dtype=torch.float32)
        ).split([len(s.columns) for s in group.sequences])
        pairs = zip(group.sequences, found, strict=True)
        return replace(group, sequences=[replace(s, reference=each.tolist()) for s, each in pairs])

    return Batch(batch.version, list(map(with_logprobs, batch.groups)))


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_a_step_with_log_probs_of_the_batch_is_the_step_with_a_frozen_copy(kl_in, epochs, tmp_path):
    algorithm, batch = GRPO(kl=0.3, kl_in=kl_in), make_batch()
    copy, apart = (
        make_trainer(algorithm, model=tiny_model(), reference=held, epochs=epochs) for held in (True, False)
    )
    copied = copy.step(batch, quarantine=tmp_path)
    told = apart.step(scored(batch, tiny_model(seed=1)), quarantine=tmp_path)
    assert copied.metrics["kl_reference"] > 0.01
    assert told.metrics == pytest.approx(copied.metrics, rel=1e-5, abs=1e-6)


def test_log_probs_are_those_of_a_frozen_copy():
    batch, model = make_batch(), tiny_model(seed=1)
    trainer = make_trainer(GRPO(kl=0.3), reference=model)
    prepared = trainer._prepared(batch, 1)
    copied_C = trainer._told(model, [row for part in prepared.own for row in part], prepared.flat)[0]
    told = [s.reference for group in scored(batch, model).groups for s in group.sequences]
    told_C = torch.tensor([x for sequence in told for x in sequence]).numpy()
    assert told_C == pytest.approx(copied_C, rel=0, abs=1e-6, nan_ok=True)


def test_other_weights_than_those_of_version_0_are_refused(tmp_path):
    path = save_tiny_model(tmp_path / "model")
    config = Config.model_validate(
        {"model": {"path": str(path)}, "task": {"kind": "gym", "name": "x"}, "reward": {"kind": "gym"}}
    )
    worker = ReferenceWorker(config.model_dump(mode="json"), device="cpu")
    with pytest.raises(DigestMismatchError, match=r"the reference .* has digest (\w+), .* with other"):
        asyncio.run(worker.load("other"))
