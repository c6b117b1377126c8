"""Engines that do not sample as they say: each is an engine whose caller's wishes are changed on the way."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
from msgspec.structs import replace

from millrace.core.completion.columns import TokenColumns
from millrace.core.types import Progress, Sampling, Work
from millrace.rollout.noise import Noise
from millrace.rollout.protocol import Engine


class Categorical:
    """An honest engine whose model knows its prompts by heart: random logits for each, spread by `spread`.
    All of its tokens are sampled in one step. It has what a probe needs of an engine."""

    version, computes = 0, "nothing"
    has_finished = False

    def __init__(self, vocabulary: int, *, seed: int, spread: float) -> None:
        self._vocabulary, self._seed, self._spread = vocabulary, seed, spread
        self._works: list[Work] = []
        self._progress: list[Progress] = []

    @property
    def has_work(self) -> bool:
        return bool(self._works)

    def submit(self, works: Iterable[Work]) -> None:
        self._works += works

    def step(self) -> None:
        self._progress += map(self._sampled, self._works)
        self._works = []

    def take_progress(self, *, ended: bool = False) -> list[Progress]:
        taken, self._progress = self._progress, []
        return taken

    def release(self, trajectory_ids: Iterable[int]) -> list[Progress]:
        return []

    def _sampled(self, work: Work) -> Progress:
        logits = np.random.default_rng([self._seed, *work.prompt]).normal(0, self._spread, self._vocabulary)
        logprobs = self.sampled_from(logits, work.sampling)
        uniform = Noise([work.seed + self._seed], [work.trajectory_id]).uniforms([0], 1)[0, 0]
        token = min(int(np.searchsorted(np.cumsum(np.exp(logprobs)), uniform)), self._vocabulary - 1)
        logprob = self.reported(logits, logprobs, work.sampling)[token]
        return Progress(work.trajectory_id, work.lease, 0, TokenColumns.of([token], [float(logprob)], [0]))

    def sampled_from(self, logits: np.ndarray, sampling: Sampling) -> np.ndarray:
        """Log-probs of all tokens."""
        scaled = logits / (sampling.temperature or 1e-6)
        if 0 < sampling.top_k < len(logits):
            scaled = np.where(scaled >= np.sort(scaled)[-sampling.top_k], scaled, -np.inf)
        return log_softmax(scaled)

    def reported(self, logits: np.ndarray, logprobs: np.ndarray, sampling: Sampling) -> np.ndarray:
        return logprobs if sampling.temperature else log_softmax(logits)


class Rounds(Categorical):
    """Computes in bfloat16: an honest engine whose logits differ a little from step to step."""

    _draws = 0

    def sampled_from(self, logits: np.ndarray, sampling: Sampling) -> np.ndarray:
        self._draws += 1
        jitter = np.random.default_rng([self._seed, self._draws]).normal(0, 0.03, len(logits))
        return super().sampled_from(logits + jitter, sampling)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


class Dishonest:
    """`engine`, which is asked for other works than it is given."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, works: Iterable[Work]) -> None:
        self._engine.submit([self.changed(work) for work in works])

    def changed(self, work: Work) -> Work:
        return replace(work, sampling=self.changed_sampling(work.sampling))

    def changed_sampling(self, sampling: Sampling) -> Sampling:
        return sampling


class IgnoresTemperature(Dishonest):
    def changed_sampling(self, sampling: Sampling) -> Sampling:
        return replace(sampling, temperature=1.0 if sampling.temperature else 0.0)


class NoTopKIsOne(Dishonest):
    """`top_k` that is off becomes 1, as in a release of vLLM's plugin for TPUs."""

    def changed_sampling(self, sampling: Sampling) -> Sampling:
        return replace(sampling, top_k=sampling.top_k or int(sampling.temperature > 0))


class OneMore(Dishonest):
    def changed_sampling(self, sampling: Sampling) -> Sampling:
        return replace(sampling, top_k=sampling.top_k and sampling.top_k + 1)


class OneLess(Dishonest):
    def changed_sampling(self, sampling: Sampling) -> Sampling:
        return replace(sampling, top_k=max(sampling.top_k - 1, 0))


class IgnoresSeeds(Dishonest):
    """Each request has noise that depends on when it came."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._requests = itertools.count(1)

    def changed(self, work: Work) -> Work:
        return replace(work, seed=next(self._requests))


class IgnoresRunSeed(Dishonest):
    def changed(self, work: Work) -> Work:
        return replace(work, seed=0)


class OneNoiseForAll(Dishonest):
    """Reports of the trajectories of a prompt are copies of one of them."""

    def take_progress(self, *, ended: bool = False) -> list[Progress]:
        parts = self._engine.take_progress()
        return [replace(part, columns=parts[0].columns) for part in parts]


class IgnoresSamplingTemperature(Categorical):
    """Reports log-probs of the temperature, and samples at 1."""

    def sampled_from(self, logits: np.ndarray, sampling: Sampling) -> np.ndarray:
        return super().sampled_from(logits, replace(sampling, temperature=1.0 if sampling.temperature else 0))

    def reported(self, logits: np.ndarray, logprobs: np.ndarray, sampling: Sampling) -> np.ndarray:
        return (
            Categorical.sampled_from(self, logits, sampling) if sampling.temperature else log_softmax(logits)
        )


class ReportsRaw(Categorical):
    """Samples greedily and reports log-probs before top-k."""

    def sampled_from(self, logits: np.ndarray, sampling: Sampling) -> np.ndarray:
        return super().sampled_from(logits, replace(sampling, temperature=0.0))

    def reported(self, logits: np.ndarray, logprobs: np.ndarray, sampling: Sampling) -> np.ndarray:
        return log_softmax(logits / (sampling.temperature or 1.0))
