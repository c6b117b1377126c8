"""The optimizer steps of one batch, whatever computes them: `PolicyTrainer` in torch, `JaxPolicy` in JAX.

Here are also the learning rate of a step, which parameters have weight decay, and what cannot be trained on:
trajectories and batches, with their reasons, and files of such batches. The learning rate is pure: a repeated
step is the same step.

Synchronous and deterministic. Shape suffix: C = completion tokens of the batch.

Weight decay would pull biases, and the scales of norms, to 0.
"""

from __future__ import annotations

import math
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from millrace.algorithms import Algorithm
from millrace.config.tables.training import Optimizer
from millrace.core.completion.columns import LOGPROB_MAX, TokenColumns
from millrace.core.errors import DigestMismatchError, TrainingError, WeightsError, writing
from millrace.core.types import Batch, StepResult
from millrace.trainer.batch.flat_batch import FlatBatch, flatten, mask_loss, penalties
from millrace.trainer.batch.packing import Row
from millrace.trainer.metrics import Statistics, batch_metrics, value_metrics


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The settings that an optimizer step depends on. `token_budget` changes speed, never a gradient.
    `dtype`: of matmuls; `published`: of the weights that replicas sample with; both are types of the backend.
    A batch is divided into `minibatches`. Each minibatch gets one optimizer step in each of the `epochs`."""

    optimizer: Optimizer
    token_budget: int
    max_tokens: int
    temperature: float
    dtype: Any
    published: Any
    minibatches: int = 1
    epochs: int = 1


@dataclass(frozen=True, slots=True)
class GradientSummary:
    """The loss and the sizes of an accumulated gradient."""

    loss: float
    num_rows: int
    forwarded_tokens: int


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A batch, the rows of each minibatch, and the statistics of its tokens: a `TokenStatistics`, or what
    does its work for the backend. `has_proximal`: the batch has the log-probs of every token at the beginning
    of the batch."""

    flat: FlatBatch
    rows: list[list[Row]]
    has_proximal: bool
    statistics: Any


class BatchStep(ABC):
    """Weights, their optimizer and an algorithm. `version` counts the batches applied.

    The proximal policy is the policy at the beginning of the batch. If a batch gets one optimizer step, the
    proximal policy is the current policy as a constant. If a batch gets several, a pass without gradients
    computes the proximal log-probs, or they are interpolated (`Algorithm.proximal`).

    `reference`: the policy of a KL penalty, in the form of the backend. None: batches have the reference
    log-probs, or the algorithm needs none.
    """

    reference: Any = None
    _saves_rejected = True

    def __init__(self, algorithm: Algorithm, settings: StepSettings) -> None:
        self.algorithm, self.settings, self.version = algorithm, settings, 0

    # ------------------------------------------------------------ of a backend

    @abstractmethod
    def _packed(self, flat: FlatBatch) -> list[list[Row]]:
        """The rows of each minibatch."""

    @abstractmethod
    def _evaluate(
        self, rows: list[Row], flat: FlatBatch, *, reference: bool = False
    ) -> list[NDArray[np.floating[Any]]]:
        """Log-probs of every token of `rows`, (C,), and values if there is a critic, without a gradient.
        Every other token has NaN. `reference`: the log-probs are those of `self.reference`."""

    @abstractmethod
    def _statistics(self) -> Any:
        """Empty statistics. Their method `read` gives the `Statistics` of the tokens of all processes."""

    @abstractmethod
    def _accumulate(
        self, prepared: PreparedBatch, minibatch: int, progress: float, *, first: bool = True
    ) -> GradientSummary:
        """Accumulate the gradient of a minibatch. `progress`: the share of the batch's optimizer steps that
        is done. `first`: the statistics get the tokens' log-probs at the beginning of the batch, which they
        get only once. Raises: TrainingError: the loss is not finite."""

    @abstractmethod
    def _finite_norm(self) -> float:
        """The norm of the whole gradient. Raises: TrainingError: it is not finite."""

    @abstractmethod
    def _update(self, lr: float, norm: float) -> None:
        """Clip the gradient, whose norm is `norm`, and make one optimizer step."""

    @abstractmethod
    def _not_finite(self) -> list[str]:
        """The names of weights that are not finite."""

    @abstractmethod
    def forget_gradient(self) -> None:
        """The accumulated gradient is 0 from now on."""

    # ------------------------------------------------------------ a batch

    def step(self, batch: Batch, *, rejected_dir: Path) -> StepResult:
        """Apply a batch: all of its optimizer steps, or none.

        Raises:
            TrainingError: the first loss or gradient is not finite. Weights, optimizer and version are
                untouched; the batch is saved in `rejected_dir`.
            WeightsError: the weights are not finite afterwards, or a later loss or gradient is not. Weights
                and optimizer are lost: load a checkpoint. The batch is saved in `rejected_dir`.
            DigestMismatchError: the weights changed in memory since they were published. No update was made.
            DataError: the batch is malformed.
        """
        began = time.perf_counter()
        try:
            step_metrics, num_trained, statistics = self._apply(batch)
        except DigestMismatchError:
            raise  # the batch is not at fault
        except (TrainingError, WeightsError) as error:
            saved = save_rejected(batch, rejected_dir) if self._saves_rejected else "rank 0 saves it"
            raise type(error)(f"step {batch.version} -> {batch.version + 1}: {error}; {saved}") from None
        finally:
            self.forget_gradient()
        metrics = statistics.metrics() | statistics.swap_gap() | batch_metrics(batch) | step_metrics
        return StepResult(
            version=self.version,
            metrics=metrics,
            logprob_gap=statistics.logprob_gap(),
            trained_tokens=num_trained,
            step_s=time.perf_counter() - began,
        )

    def _apply(self, batch: Batch) -> tuple[dict[str, float], int, Statistics]:
        """Returns metrics of the optimizer steps, trained tokens, and statistics of the tokens."""
        prepared = self._prepared(batch, self.settings.minibatches)
        flat, lr = prepared.flat, learning_rate(self.settings.optimizer, self.version)
        gradients, norms = list[GradientSummary](), list[float]()
        for _ in range(self.settings.epochs):
            for minibatch in range(len(prepared.rows)):
                if gradients:
                    self.forget_gradient()
                with lost_after(len(gradients)):
                    progress = len(gradients) / (len(prepared.rows) * self.settings.epochs)
                    first = not gradients or (prepared.has_proximal and len(gradients) < len(prepared.rows))
                    gradients.append(self._accumulate(prepared, minibatch, progress, first=first))
                    norms.append(self._finite_norm())
                self._update(lr, norms[-1])
        if broken := self._not_finite():
            raise WeightsError(f"the weights {broken[:4]} are not finite after the step")
        self.version += 1
        metrics = {
            "loss": math.fsum(gradient.loss for gradient in gradients) / max(len(gradients), 1),
            "grad_norm": max(norms, default=0.0),
            "lr": lr,
            "updates": float(len(gradients)),
            "micro_batches": float(sum(gradient.num_rows for gradient in gradients)),
            "forwarded_tokens": float(sum(gradient.forwarded_tokens for gradient in gradients)),
        }
        if self.algorithm.critic is not None:
            trained_C = flat.weights_C > 0
            metrics |= value_metrics(flat.values_C[trained_C], flat.returns_C[trained_C])
        return metrics, flat.num_trained, prepared.statistics.read()

    def measure(self, batch: Batch) -> tuple[GradientSummary, float]:
        """Accumulate the gradient of the whole batch, and its norm.

        Raises: TrainingError (loss or norm not finite), DataError (malformed).
        """
        return self.accumulate(batch), self._finite_norm()

    def accumulate(self, batch: Batch) -> GradientSummary:
        """Add the gradient of the batch's loss to the accumulated gradient.

        Raises: TrainingError (the loss is not finite), DataError (the batch is malformed).
        """
        prepared = self._prepared(batch, 1)
        return self._accumulate(prepared, 0, 0.0) if prepared.rows else GradientSummary(0.0, 0, 0)

    def _prepared(self, batch: Batch, minibatches: int) -> PreparedBatch:
        """Compute everything that depends on the whole batch, before the first gradient."""
        settings, algorithm = self.settings, self.algorithm
        lay_out = partial(flatten, batch, algorithm, max_tokens=settings.max_tokens, minibatches=minibatches)
        flat = lay_out()
        rows = self._packed(flat)
        recomputes = minibatches * settings.epochs > 1 and algorithm.proximal == "recompute"
        needs_proximal = algorithm.loss_mask or algorithm.penalty or algorithm.critic
        has_proximal = bool(rows and (recomputes or needs_proximal))
        if has_proximal:
            batch_rows = [row for of_minibatch in rows for row in of_minibatch]
            proximal_C, *values = self._evaluate(batch_rows, flat)
            reference_C: NDArray[Any] = flat.reference_C
            computed: dict[str, Any] = {}
            if algorithm.penalty is not None:
                if self.reference is not None:
                    reference_C = self._evaluate(batch_rows, flat, reference=True)[0]
                computed["penalties_S"] = penalties(flat, algorithm.penalty, proximal_C, reference_C)
            if values:
                computed["values_C"] = values[0].astype(float)
            if computed:
                flat = lay_out(**computed)
                rows = self._packed(flat)  # a penalty may change which trajectories are trained
            flat.reference_C[:], flat.proximal_C[:] = reference_C, proximal_C
            if algorithm.loss_mask is not None:
                mask_loss(flat, algorithm.loss_mask)
        return PreparedBatch(flat, rows, has_proximal, self._statistics())


@contextmanager
def lost_after(updates: int) -> Iterator[None]:
    """An update cannot be undone, so a failure after the first update loses the weights."""
    try:
        yield
    except TrainingError as error:
        if not updates:
            raise
        raise WeightsError(f"{error} after {updates} of its updates: the weights are lost") from None


# ---------------------------------------------------------------- learning rate and weight decay


def learning_rate(config: Optimizer, version: int) -> float:
    """The learning rate of the step from `version` to the next. All optimizer steps of a batch have the same.

    warm-up    lr (version + 1) / warmup_steps
    after it   constant: lr.  With p = (version - warmup_steps) / (decay_steps - warmup_steps) up to 1:
               linear: lr (1 - p (1 - lr_end));  cosine: lr (lr_end + (1 - lr_end) (1 + cos(pi p)) / 2)
    """
    if version < config.warmup_steps:
        return config.lr * (version + 1) / config.warmup_steps
    if config.decay_steps is None:
        return config.lr
    decay_steps = max(1, config.decay_steps - config.warmup_steps)
    progress = min(1.0, (version - config.warmup_steps) / decay_steps)
    scale = 1.0 - progress if config.decay == "linear" else (1.0 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.lr_end + (1.0 - config.lr_end) * scale)


_ROLES = r"biase?s?|ln|sinks?|scales?|gamma|beta|magnitude|[a-z]*norm"
_BIAS_OR_SCALE = re.compile(rf"(^|[._])({_ROLES})\d*(_[^.]*)?(\.[^.]*)?$|(^|\.)(a_log|d)$", re.IGNORECASE)


def decays(name: str, ndim: int) -> bool:
    """Whether the parameter `name` of one layer, which has `ndim` dimensions there, has weight decay.

    It is a matrix, and no bias or scale by its own name or by that of its module. Dimensions do not tell: the
    biases of all experts, or the norms of all heads, may be one matrix. `A_log` and `D` are of state space
    models."""
    return ndim > 1 and not _BIAS_OR_SCALE.search(name)


# ---------------------------------------------------------------- what cannot be trained on


SAVED_MAX = 8  # a run directory keeps the first rejected batches


def impossible_trajectories(batch: Batch, vocabulary: int) -> dict[int, str]:
    """Trajectories that no engine can have sampled, and the reasons. An id beyond the vocabulary would count
    as another position's token."""
    reasons: dict[int, str] = {}
    for sequence in (sequence for group in batch.groups for sequence in group.sequences):
        tokens, logprobs = np.asarray(sequence.columns.tokens), np.asarray(sequence.columns.logprobs)
        for outside in tokens[(tokens < 0) | (tokens >= vocabulary)][:1]:
            reasons[sequence.trajectory_id] = f"token {outside} is outside the vocabulary of {vocabulary}"
        trained = logprobs if sequence.mask is None else logprobs[np.asarray(sequence.mask, bool)]
        for wrong in trained[~(np.isfinite(trained) & (trained <= LOGPROB_MAX))][:1]:
            reasons[sequence.trajectory_id] = f"{wrong:g} is the log-prob of no sampled token"
    return reasons


def save_rejected(batch: Batch, directory: Path) -> str:
    """Save a batch that cannot be trained on. Returns a sentence with the file's name. A repeat has the same
    file. At most SAVED_MAX batches are saved."""
    ids = [s.trajectory_id for group in batch.groups for s in group.sequences]
    name = f"rejected_v{batch.version}_{xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(ids))}.msgpack"
    others = [path for path in directory.glob("rejected_v*.msgpack") if path.name != name]
    if len(others) >= SAVED_MAX:
        return f"the batch is not saved: {SAVED_MAX} are"
    with writing(directory / name):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(msgspec.msgpack.encode(batch, enc_hook=_plain))
    return f"the batch is saved as {name}"


def _plain(columns: Any) -> Any:
    """Plain data for types that msgpack does not know: token columns, and arrays of token ids."""
    if isinstance(columns, TokenColumns):
        shown = {"tokens": columns.tokens, "logprobs": columns.logprobs, "versions": columns.runs}
        return {**shown, "forks": columns.forks} if columns.forks else shown
    return columns.tolist()
