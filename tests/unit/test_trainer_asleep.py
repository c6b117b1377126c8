"""A trainer that sleeps goes on as if it had not slept."""

from __future__ import annotations

import asyncio
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from trainer_doubles import WRITERS, make_batch, role_config, save_tiny_model

from millrace.core.errors import WorkerError
from millrace.core.types import Endpoint
from millrace.trainer.role import SharedTrainer

HERE = Endpoint("memory", "here", 2, 1 << 20)


@pytest.fixture
def make_role(tmp_path):
    WRITERS.clear()
    model = save_tiny_model(tmp_path / "model", intermediate_size=512)  # so that tensors have whole pages
    (model / "tokenizer.json").write_text("{}")
    (tmp_path / "run").mkdir()

    def make(**changes):
        config = role_config(model, **changes)
        return SharedTrainer(config, str(tmp_path / "run"), "trainer_doubles:open_memory_writer")

    return make


async def train(role, steps=3, sleeps=False):
    await role.load(None)
    published = []
    for version in range(steps):
        await role.publish(HERE)
        if sleeps:
            await role.sleep()
            await role.sleep()
            await role.wake()
            await role.wake()
        await role.step(make_batch(version))
        await role.publish(HERE)
        published.append((await role.await_published()).digest)
    return published, [p.detach().clone() for p in role._trainer.model.parameters()]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": {"dtype": "bfloat16"}},
        {"algorithm": {"kind": "grpo", "kl": 0.1}},
        pytest.param(
            {"optimizer": {"lr": 1e-3, "states": "8bit"}},
            marks=pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao"),
        ),
        {"adapter": {"rank": 2}},
    ],
    ids=["float32", "bfloat16", "reference", "8bit", "adapter"],
)
def test_its_steps_are_those_of_a_trainer_that_never_sleeps(make_role, changes):
    digests, weights = asyncio.run(train(make_role(**changes)))
    slept, others = asyncio.run(train(make_role(**changes), sleeps=True))
    assert slept == digests
    assert all(torch.equal(*pair) for pair in zip(weights, others, strict=True))


def anonymous_bytes():
    match = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    return int(match[1]) * 1024


def test_asleep_it_has_given_its_memory_to_the_kernel(make_role, tmp_path):
    large = save_tiny_model(tmp_path / "large", intermediate_size=40_000)
    (large / "tokenizer.json").write_text("{}")

    async def scenario():
        role = make_role(model={"path": str(large), "device": "cpu"})
        await role.load(None)
        await role.step(make_batch(0))
        weights_bytes = sum(p.nbytes for p in role._trainer.model.parameters())
        awake = anonymous_bytes()
        await role.sleep()
        assert awake - anonymous_bytes() > 3.5 * weights_bytes  # of 4: weights, gradients, both moments
        await role.wake()
        assert (await role.step(make_batch(1))).version == 2

    asyncio.run(scenario())


def test_asleep_it_refuses_work_and_loads(make_role):
    async def scenario():
        role = make_role()
        await role.sleep()  # it has nothing yet
        await role.wake()
        await role.load(None)
        await role.sleep()
        with pytest.raises(WorkerError, match="asleep: `wake` must come first"):
            await role.step(make_batch(0))
        await role.load(None)
        assert (await role.step(make_batch(0))).version == 1

    asyncio.run(scenario())


def test_it_sleeps_once_what_it_publishes_and_saves_is_whole(make_role, tmp_path):
    async def scenario():
        role = make_role()
        await role.load(None)
        await role.step(make_batch(0))
        await role.publish(HERE)
        await role.checkpoint(str(tmp_path / "checkpoints"))
        await role.sleep()
        assert (tmp_path / "checkpoints" / "v00000001" / "manifest.json").exists()
        assert (await role.await_published()).version == 1
        assert (await role.await_saved()).version == 1

    asyncio.run(scenario())
