"""A run whose engine, reward worker and trainer take turns in one process. Each is the one of a real run.

The controller is left out. A batch is sampled `staleness` versions before it is trained, so every token has
exactly this staleness after the first steps. Nothing depends on speed: a repeat is the same run.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from msgspec.structs import replace

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
    StepResult,
    TrainGroup,
    TrainSequence,
    Work,
)
from millrace.engines.own.load_engine import load_engine
from millrace.episodes.reward_worker import TaskRewardWorker
from millrace.evaluation.evaluate import HELD_OUT_SEED, held_out_config
from millrace.trainer.batch.batch_step import StepSettings
from millrace.trainer.model import load_model, named_weights
from millrace.trainer.publish.publisher import PublishBuffers
from millrace.trainer.trainer import PolicyTrainer

HELD_OUT, GREEDY = 1_000_000, 2_000_000
"""Trajectories of evaluations are numbered from here: their noise is that of no training batch."""


@dataclass(frozen=True)
class Evaluations:
    """Every `every` versions `prompts` held-out prompts are sampled once each, and `greedy` at the end."""

    every: int
    prompts: int
    greedy: int


@dataclass(frozen=True)
class Record:
    """`rewards`: mean held-out reward of version 0, `every`, 2 `every` and so on. `greedy`: the share of
    the final model's greedy completions with the full reward. `steps`: of each batch."""

    rewards: list[float]
    greedy: float
    steps: list[StepResult]


class OneProcess:
    """`config`: float32 on the CPU, without a reference model. Held-out prompts are those of its first entry
    of `[[evaluations]]`, or else of its task."""

    def __init__(self, config: Config, staleness: int) -> None:
        self._config, self._staleness = config, staleness
        self._sampling = Sampling(**dict(config.sampling))
        self._trainer = _trainer(config)
        self._buffers = PublishBuffers(named_weights(self._trainer.model), torch.float32)
        rollout = config.rollout
        self._engine = load_engine(
            config.model.path, slots=rollout.slots, max_sequence_tokens=rollout.max_sequence_tokens
        )
        self._rewards = TaskRewardWorker(config.model_dump(), limit_memory=False)
        name = config.evaluations[0].name if config.evaluations else None
        other = held_out_config(config, None, seed=0, data_seed=HELD_OUT_SEED, evaluation=name)
        self._held_out = TaskRewardWorker(other.model_dump(), limit_memory=False)

    def run(self, evaluations: Evaluations) -> Record:
        return asyncio.run(self._run(evaluations))

    async def _run(self, evaluations: Evaluations) -> Record:
        steps = self._config.steps
        sampled: deque[list[TrainGroup]] = deque()
        rewards, results, num_sampled = list[float](), list[StepResult](), 0
        with tempfile.TemporaryDirectory() as scratch:
            for version in range(steps + 1):
                self._serve(version)
                if version % evaluations.every == 0:
                    rewards.append(await self._evaluated(evaluations.prompts))
                while version < steps and num_sampled < min(steps, version + self._staleness + 1):
                    sampled.append(await self._sampled(num_sampled))
                    num_sampled += 1
                if version < steps:
                    batch = Batch(version, sampled.popleft())
                    results.append(self._trainer.step(batch, rejected_dir=Path(scratch)))
                    ages = set(results[-1].logprob_gap)
                    assert ages == {min(version, self._staleness)}, (version, ages)
        return Record(rewards, await self._greedy(evaluations.greedy), results)

    def _serve(self, version: int) -> None:
        data = {block.name: block.data for block in self._buffers.fill()}
        for buffer in self._engine.standby_buffers():
            buffer.data[:] = data[buffer.name]
        self._engine.swap(version)

    async def _sampled(self, index: int) -> list[TrainGroup]:
        """The batch that becomes version `index` + 1, by the weights that the engine serves."""
        shape = self._config.batch
        ids = range(index * shape.prompts, (index + 1) * shape.prompts)
        return await self._groups(self._rewards, ids, shape.group_size, self._sampling)

    async def _evaluated(self, prompts: int) -> float:
        groups = await self._groups(self._held_out, range(prompts), 1, self._sampling, first=HELD_OUT)
        rewards = [sequence.reward for group in groups for sequence in group.sequences]
        return sum(rewards) / len(rewards)

    async def _greedy(self, prompts: int) -> float:
        greedy = replace(self._sampling, temperature=0.0)
        groups = await self._groups(self._held_out, range(prompts), 1, greedy, first=GREEDY)
        return sum(sequence.reward >= 1 for group in groups for sequence in group.sequences) / prompts

    async def _groups(
        self, worker: TaskRewardWorker, ids: Sequence[int], size: int, sampling: Sampling, *, first: int = 0
    ) -> list[TrainGroup]:
        """`size` completions of each prompt with their rewards. `first`: the number of the first one's."""
        prompts = [prompt for prompt in await worker.prompts(list(ids)) if isinstance(prompt, Prompt)]
        completions = self._generate(prompts, size, sampling, first)
        requests = [
            ScoreRequest(i, prompts[i // size].group_id, columns.tokens, finish)
            for i, (columns, finish) in enumerate(completions)
        ]
        scores = {i: score async for i, score in worker.score(requests)}
        groups = []
        for index, prompt in enumerate(prompts):
            sequences = [
                TrainSequence(i, completions[i][0], score.value, completions[i][1] is Finish.LENGTH)
                for i in range(index * size, (index + 1) * size)
                if isinstance(score := scores[i], Scored)
            ]
            groups.append(TrainGroup(prompt.group_id, prompt.tokens, sequences))
        return groups

    def _generate(
        self, prompts: list[Prompt], size: int, sampling: Sampling, first: int
    ) -> list[tuple[TokenColumns, Finish]]:
        engine, seed, lease = self._engine, self._config.seed, self._engine.version
        works = [
            Work(number, prompt.group_id, lease, prompt.tokens, token_array(), sampling, seed)
            for prompt in prompts
            for number in range(first + prompt.group_id * size, first + (prompt.group_id + 1) * size)
        ]
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
        published=torch.float32,
    )
    return PolicyTrainer(
        load_model(config.model.path, torch.device("cpu")), build(config.algorithm), settings
    )
