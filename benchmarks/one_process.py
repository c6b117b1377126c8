"""A run whose engine, environment and trainer take turns in one process: every token has the age that is
asked for, and nothing depends on speed. Each is the one of a real run; the controller is left out."""

from __future__ import annotations

import asyncio
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from millrace.algorithms import build
from millrace.config.schema import Config
from millrace.core.completion.columns import TokenColumns, token_array
from millrace.core.types import (
    Batch,
    Finish,
    Prompt,
    Sampling,
    Scored,
    ScoreRequest,
    TrainGroup,
    TrainSequence,
    Work,
)
from millrace.engines.own.load import load_engine
from millrace.engines.own.torch_engine import TorchEngine
from millrace.environments.reward_worker import TaskRewardWorker
from millrace.evaluation.evaluate import HELD_OUT_SEED, held_out_config
from millrace.trainer.model import load_model, named_weights
from millrace.trainer.publish.publisher import PublishBuffers
from millrace.trainer.trainer import PolicyTrainer, StepSettings

Weights = dict[str, bytes]


class OneProcess:
    """`config`: float32 on the CPU, and no reference model. `age`: of every token, after the first steps."""

    def __init__(self, config: Config, age: int) -> None:
        self._config, self._sampling = config, Sampling(**dict(config.sampling))
        self._trainer = _trainer(config)
        self._buffers = PublishBuffers(named_weights(self._trainer.model), torch.float32)
        self._versions: deque[Weights] = deque(maxlen=age + 1)
        rollout = config.rollout
        self._engine: TorchEngine = load_engine(
            config.model.path, slots=rollout.slots, max_sequence_tokens=rollout.max_sequence_tokens
        )
        self._scratch = tempfile.TemporaryDirectory()

    def run(self, *, held_out: int, samples: int) -> tuple[list[dict[str, Any]], float]:
        """Metrics of every step, and the mean reward of the final model on `held_out` other prompts."""
        return asyncio.run(self._run(held_out, samples))

    async def _run(self, held_out: int, samples: int) -> tuple[list[dict[str, Any]], float]:
        config, told = self._config, list[dict[str, Any]]()
        environment = TaskRewardWorker(config.model_dump(), limit_memory=False)
        shape = config.batch
        for step in range(config.steps):
            self._keep()
            self._serve(self._versions[0], step + 1 - len(self._versions))
            first = step * shape.prompts
            groups = await self._groups(environment, range(first, first + shape.prompts), shape.group_size)
            result = self._trainer.step(Batch(step, groups), quarantine=Path(self._scratch.name))
            told.append(result.metrics)
        self._keep()
        self._serve(self._versions[-1], config.steps)
        other = held_out_config(config, None, seed=0, data_seed=HELD_OUT_SEED)
        groups = await self._groups(
            TaskRewardWorker(other.model_dump(), limit_memory=False), range(held_out), samples
        )
        rewards = [sequence.reward for group in groups for sequence in group.sequences]
        return told, sum(rewards) / len(rewards)

    def _keep(self) -> None:
        self._versions.append({block.name: bytes(block.data) for block in self._buffers.fill()})

    def _serve(self, weights: Weights, version: int) -> None:
        for buffer in self._engine.standby_buffers():
            buffer.data[:] = torch.frombuffer(bytearray(weights[buffer.name]), dtype=torch.uint8).numpy()
        self._engine.swap(version)

    async def _groups(self, environment: TaskRewardWorker, ids: Sequence[int], size: int) -> list[TrainGroup]:
        prompts = [prompt for prompt in await environment.prompts(list(ids)) if isinstance(prompt, Prompt)]
        done = self._generate(prompts, size)
        requests = [
            ScoreRequest(i, prompts[i // size].group_id, columns.tokens, finish)
            for i, (columns, finish) in enumerate(done)
        ]
        scores = {i: score async for i, score in environment.score(requests)}
        groups = []
        for index, prompt in enumerate(prompts):
            own = range(index * size, (index + 1) * size)
            sequences = [
                TrainSequence(i, done[i][0], score.value, done[i][1] is Finish.LENGTH)
                for i in own
                if isinstance(score := scores[i], Scored)
            ]
            groups.append(TrainGroup(prompt.group_id, prompt.tokens, sequences))
        return groups

    def _generate(self, prompts: list[Prompt], size: int) -> list[tuple[TokenColumns, Finish]]:
        engine, seed, lease = self._engine, self._config.seed, self._engine.version
        works = [
            Work(
                prompt.group_id * size + k, prompt.group_id, lease, prompt.tokens, token_array(),
                self._sampling, seed,
            )
            for prompt in prompts
            for k in range(size)
        ]  # fmt: skip
        columns = {work.trajectory_id: TokenColumns() for work in works}
        ends: dict[int, Finish] = {}
        engine.submit(works)
        while engine.has_work or engine.has_finished:
            engine.step()
            for progress in engine.take_progress():
                columns[progress.trajectory_id].extend(progress.columns)
                if progress.finish is not None:
                    ends[progress.trajectory_id] = progress.finish
        return [(columns[work.trajectory_id], ends[work.trajectory_id]) for work in works]


def _trainer(config: Config) -> PolicyTrainer:
    settings = StepSettings(
        optimizer=config.optimizer,
        token_budget=config.batch.token_budget,
        max_tokens=config.sampling.max_tokens,
        temperature=config.sampling.temperature,
        dtype=torch.float32,
        minibatches=config.batch.minibatches,
        epochs=config.batch.epochs,
    )
    model = load_model(config.model.path, torch.device("cpu"))
    return PolicyTrainer(model, build(config.algorithm), settings)
