from __future__ import annotations

import asyncio
import math

import msgspec
import pytest
import torch
from trainer_doubles import VOCAB, WRITERS, make_batch, role_config, save_tiny_model
from transformers import AutoModelForCausalLM

from millrace.core.digest import digest_buffers
from millrace.core.errors import DataError, DigestMismatchError, WorkerError
from millrace.core.types import Batch, Endpoint, StepRejected
from millrace.trainer.kernels.fp8_matmul import DESCRIPTION
from millrace.trainer.model import named_weights
from millrace.trainer.publish.publisher import PublishBuffers
from millrace.trainer.role import TorchTrainer

HERE, THERE = Endpoint("memory", "here", 2, 1 << 20), Endpoint("memory", "there", 2, 1 << 20)


@pytest.fixture
def make_role(tmp_path):
    WRITERS.clear()
    model = save_tiny_model(tmp_path / "model")
    (model / "tokenizer.json").write_text("{}")

    def make(**changes):
        config = role_config(model, **changes)
        return TorchTrainer(config, str(tmp_path / "run"), "trainer_doubles:open_memory_writer")

    return make


def weights(role):
    return {name: tensor.clone() for name, tensor in named_weights(role._trainer.model).items()}


def test_a_repeated_step_returns_its_result_and_changes_nothing(make_role):
    async def scenario():
        role = make_role()
        await role.load(None)
        first = await role.step(make_batch(0))
        after = weights(role)
        assert await role.step(make_batch(0)) is first
        assert first.version == 1
        assert all(torch.equal(after[name], tensor) for name, tensor in weights(role).items())
        assert (await role.step(make_batch(1))).version == 2

    asyncio.run(scenario())


def test_a_repeated_publish_writes_nothing_again(make_role):
    async def scenario():
        role = make_role()
        await role.load(None)
        await role.publish(HERE)
        first = await role.await_published()
        await role.publish(HERE)
        assert await role.await_published() is first
        assert len(WRITERS[0].written) == 1
        await role.step(make_batch(0))
        await role.publish(HERE)
        assert (await role.await_published()).version == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("version", [1, 5])
def test_a_batch_of_another_version_is_refused_with_both_versions(make_role, version):
    async def scenario():
        role = make_role()
        await role.load(None)
        with pytest.raises(
            DataError, match=f"version {version} cannot be applied to the trainer's version 0"
        ):
            await role.step(make_batch(version))

    asyncio.run(scenario())


def test_commands_sent_together_run_one_after_another(make_role):
    async def scenario():
        role = make_role()
        await role.load(None)
        results = await asyncio.gather(*(role.step(make_batch(0)) for _ in range(3)))
        assert [result.version for result in results] == [1, 1, 1]

    asyncio.run(scenario())


def test_the_loop_answers_while_a_step_runs(make_role):
    async def scenario():
        role, beats = make_role(), 0
        await role.load(None)
        step = asyncio.ensure_future(role.step(make_batch(0, groups=12)))
        while not step.done():
            await asyncio.sleep(0)
            beats += 1
        assert step.result().version == 1
        assert beats > 3

    asyncio.run(scenario())


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2)])
def test_what_is_published_are_the_current_weights_in_the_published_dtype(make_role, dtype, width):
    async def scenario():
        role = make_role(model={"dtype": dtype})
        state = await role.load(None)
        for version in range(2):
            await role.publish(HERE)
            published = await role.await_published()
            wanted = {n: t.to(getattr(torch, dtype)) for n, t in weights(role).items()}
            assert "lm_head.weight" not in wanted  # tied
            assert published.version == version
            assert WRITERS[0].written[version] == (
                version,
                {name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in wanted.items()},
            )
            assert published.weights_bytes == width * sum(tensor.numel() for tensor in wanted.values())
            assert state.slot_bytes == published.weights_bytes
            await role.step(make_batch(version))
        assert WRITERS[0].written[0] != WRITERS[0].written[1]
        assert len(WRITERS) == 1

    asyncio.run(scenario())


def test_a_quantised_trainer_says_so_and_publishes_in_bfloat16(make_role):
    async def scenario():
        plain = await make_role(model={"dtype": "bfloat16"}).load(None)
        role = make_role(model={"dtype": "bfloat16"}, trainer={"quantization": "fp8"})
        state = await role.load(None)
        assert state.computes == f"{plain.computes}{DESCRIPTION}"
        assert state.slot_bytes == plain.slot_bytes
        assert "trainer.quantization fp8" in state.arithmetic
        result = await role.step(make_batch(0))
        assert result.version == 1 and math.isfinite(result.metrics["loss"])

    asyncio.run(scenario())


def test_a_relay_that_moved_gets_a_new_writer(make_role):
    async def scenario():
        role = make_role()
        await role.load(None)
        await role.publish(HERE)
        await role.publish(THERE)
        assert [(w.endpoint.path, w.closed) for w in WRITERS] == [("here", True), ("there", False)]

    asyncio.run(scenario())


def test_buffers_are_filled_in_place_and_digested_like_the_weights():
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}
    buffers = PublishBuffers(tensors, torch.bfloat16)
    first = buffers.fill()
    places = [buffer.data.ctypes.data for buffer in first]
    before = digest_buffers(first)
    tensors["a"][0, 0] = 7.0
    second = buffers.fill()
    assert [buffer.data.ctypes.data for buffer in second] == places
    assert digest_buffers(second) != before
    assert [(b.name, b.dtype, b.shape) for b in second] == [
        ("a", "bfloat16", (2, 3)),
        ("b", "bfloat16", (4,)),
    ]


def test_a_checkpoint_is_loaded_by_a_new_incarnation_and_old_ones_are_pruned(make_role, tmp_path):
    async def scenario():
        role = make_role(checkpoints={"keep": 2})
        await role.load(None)
        for version in range(3):
            await role.step(make_batch(version))
            await role.checkpoint(str(tmp_path / "checkpoints"))
            info = await role.await_saved()
        assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["v00000002", "v00000003"]
        reborn = make_role()
        state = await reborn.load(info.path)
        assert state.version == info.version == 3
        assert all(torch.equal(weights(role)[name], tensor) for name, tensor in weights(reborn).items())
        one, other = await role.step(make_batch(3)), await reborn.step(make_batch(3))
        assert (one.metrics, one.logprob_gap) == (other.metrics, other.logprob_gap)

    asyncio.run(scenario())


def test_the_export_is_a_model_directory_with_its_tokenizer(make_role, tmp_path):
    async def scenario():
        role = make_role()
        await role.load(None)
        await role.step(make_batch(0))
        (tmp_path / "model").rename(tmp_path / "gone")  # what an export needs was taken at the start
        await role.export(str(tmp_path / "exported"))
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
        found = model.state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in weights(role).items())
        assert (tmp_path / "exported" / "tokenizer.json").is_file()

    asyncio.run(scenario())


def test_the_reference_is_the_initial_model(make_role):
    async def scenario():
        role = make_role(algorithm={"kind": "grpo", "kl": 0.1})
        await role.load(None)
        drift = [(await role.step(make_batch(v))).metrics["kl_reference"] for v in range(2)]
        assert drift[0] == 0.0
        assert drift[1] != 0.0

    asyncio.run(scenario())


def test_a_command_before_the_weights_are_loaded_is_refused(make_role):
    with pytest.raises(WorkerError, match="`load` must come first"):
        asyncio.run(make_role().step(make_batch(0)))


def test_a_missing_model_directory_is_named(make_role):
    with pytest.raises(DataError, match=r"nowhere\) is not a model directory"):
        asyncio.run(make_role(model={"path": "/nowhere"}).load(None))


def test_loading_sweeps_what_a_dead_trainer_was_writing(make_role, tmp_path):
    role = make_role()
    halves = [tmp_path / "run/checkpoints/.v00000003.building", tmp_path / "run/.model.building"]
    for half in halves:
        half.mkdir(parents=True)
    asyncio.run(role.load(None))
    assert not any(half.exists() for half in halves)


def test_a_bad_batch_is_rejected_however_often_and_the_next_one_is_trained(make_role, tmp_path):
    async def scenario():
        role = make_role(algorithm={"kind": "grpo", "scale": "none"})
        await role.load(None)
        before, good = weights(role), make_batch(0)
        bad = Batch(0, [_with_reward(good.groups[0], 1e300), *good.groups[1:]])
        rejected = await role.step(bad)
        assert rejected == await role.step(bad)
        assert isinstance(rejected, StepRejected)
        assert rejected.trajectory_ids == [s.trajectory_id for s in bad.groups[0].sequences]
        assert len(list((tmp_path / "run").glob("rejected_v0_*.msgpack"))) == 1
        assert all(torch.equal(before[name], tensor) for name, tensor in weights(role).items())
        assert (await role.step(good)).version == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("column", "value"), [("tokens", VOCAB), ("tokens", -1), ("logprobs", math.nan), ("logprobs", 0.5)]
)
def test_a_trajectory_that_nobody_can_have_sampled_is_rejected_before_it_trains_a_neighbour(
    make_role, column, value
):
    async def scenario():
        role = make_role()
        await role.load(None)
        before, batch = weights(role), make_batch(0)
        bad = batch.groups[1].sequences[2]
        getattr(bad.columns, column)[bad.mask.index(True)] = value
        rejected = await role.step(batch)
        assert isinstance(rejected, StepRejected) and rejected.unfit
        assert rejected.trajectory_ids == [bad.trajectory_id]
        assert f"trajectory {bad.trajectory_id}: " in rejected.reason and f"{value}" in rejected.reason
        assert all(torch.equal(before[name], tensor) for name, tensor in weights(role).items())

    asyncio.run(scenario())


def test_a_trainer_whose_weights_broke_wants_to_load_again(make_role):
    async def scenario():
        role = make_role()
        await role.load(None)

        def breaks():
            with torch.no_grad():
                role._trainer.model.get_input_embeddings().weight[0, 0] = float("inf")

        role._trainer.optimizer.step = breaks
        rejected = await role.step(make_batch(0))
        assert (rejected.weights_lost, len(rejected.trajectory_ids)) == (True, 12)
        with pytest.raises(WorkerError, match="`load` must come first"):
            await role.publish(HERE)
        await role.load(None)
        assert (await role.step(make_batch(0))).version == 1

    asyncio.run(scenario())


def _with_reward(group, reward):
    first = msgspec.structs.replace(group.sequences[0], reward=reward)
    return msgspec.structs.replace(group, sequences=[first, *group.sequences[1:]])


def test_weights_that_changed_in_memory_since_they_were_published_are_never_saved(make_role, tmp_path):
    async def scenario():
        role = make_role()
        await role.load(None)
        await role.publish(HERE)
        await role.checkpoint(str(tmp_path / "whole"))
        await role.await_saved()
        with torch.no_grad():
            role._trainer.model.get_input_embeddings().weight[3, 5] += 1e-3
        with pytest.raises(DigestMismatchError, match="trainer's weights of version 0 changed in memory"):
            await role.checkpoint(str(tmp_path / "changed"))
        assert not (tmp_path / "changed").exists()

    asyncio.run(scenario())


def test_weights_that_changed_in_memory_since_they_were_published_are_never_trained_on(make_role, tmp_path):
    async def scenario():
        role = make_role()
        await role.load(None)
        await role.publish(HERE)
        await role.await_published()
        with torch.no_grad():
            role._trainer.model.get_input_embeddings().weight[3, 5] += 1e-3
        with pytest.raises(DigestMismatchError, match="trainer's weights of version 0 changed in memory"):
            await role.step(make_batch(0))
        assert not list((tmp_path / "run").glob("rejected_*"))
        with pytest.raises(WorkerError, match="`load` must come first"):
            await role.step(make_batch(0))

    asyncio.run(scenario())
