"""AdamW's moments in 8 bits. Nothing here is compiled: a CPU computes them tensor by tensor."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from trainer_doubles import make_batch, make_trainer, save_checkpoint, tiny_model, weights_of

from millrace.config.tables.training import Optimizer
from millrace.core.errors import ConfigError
from millrace.trainer.files.checkpoint import load_checkpoint
from millrace.trainer.optimizer import make_adamw

EIGHT = Optimizer(lr=1e-3, grad_clip=None, states="8bit")
torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="needs the extra torchao")
pytestmark = pytest.mark.filterwarnings("ignore")  # torchao's own, at its import


def wide_trainer(states: str = "8bit", seed: int = 0):
    """A matrix of the tiny model has fewer numbers than torchao writes in 8 bits; these have enough."""
    model = tiny_model(seed=seed)
    model.resize_token_embeddings(256)
    return make_trainer(model=model, optimizer=EIGHT.model_copy(update={"states": states}))


@pytest.mark.skipif(find_spec("torchao") is not None, reason="torchao is here")
def test_8_bit_moments_without_their_library_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"`optimizer.states` \(\"8bit\"\): import torchao"):
        make_adamw([torch.nn.Parameter(torch.zeros(2))], EIGHT)


@torchao
def test_8_bit_moments_take_a_quarter_and_step_nearly_as_float32_does(tmp_path) -> None:
    eight, full = wide_trainer(), wide_trainer("float32")
    start = weights_of(full)
    for version in range(3):
        for trainer in (eight, full):
            trainer.step(make_batch(version), rejected_dir=tmp_path)
    embedding = eight.model.get_input_embeddings().weight
    moment = eight.optimizer.state[embedding]["exp_avg"]
    assert moment.codes.nbytes + moment.scale.nbytes < embedding.nbytes / 3.9
    moved = [(a - b).abs().max() for a, b in zip(weights_of(full), start, strict=True)]
    apart = [(a - b).abs().max() for a, b in zip(weights_of(eight), weights_of(full), strict=True)]
    assert max(apart) < 0.5 * max(moved)


@torchao
def test_the_learning_rate_rises_with_8_bit_moments_too(tmp_path) -> None:
    trainer = wide_trainer()
    rates = [trainer.step(make_batch(v), rejected_dir=tmp_path).metrics["lr"] for v in range(2)]
    assert rates == [1e-3, 1e-3]
    assert float(trainer.optimizer.param_groups[0]["lr"]) == pytest.approx(1e-3)


@torchao
def test_a_run_with_8_bit_moments_resumes_bit_for_bit(tmp_path) -> None:
    straight = wide_trainer()
    for version in range(2):
        straight.step(make_batch(version), rejected_dir=tmp_path)
    path = save_checkpoint(straight, tmp_path)
    resumed = wide_trainer(seed=9)
    load_checkpoint(resumed, path)
    for trainer in (straight, resumed):
        trainer.step(make_batch(2), rejected_dir=tmp_path)
    for one, other in zip(weights_of(straight), weights_of(resumed), strict=True):
        assert torch.equal(one, other)
