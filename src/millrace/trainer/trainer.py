"""The optimizer steps of one batch. Synchronous and deterministic, without processes and network.

Shape suffixes: N = trained tokens of one row; C = completion tokens of the batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from millrace.algorithms import Algorithm, TokenLogprobs
from millrace.algorithms.proximal import interpolated
from millrace.config.tables.training import Optimizer
from millrace.core.errors import DigestMismatchError, TrainingError, WeightsError
from millrace.core.progress import count
from millrace.core.types import Batch, StepResult
from millrace.devices.gpu import on
from millrace.devices.threads import on_threads
from millrace.trainer.adapters.adapted_linear import switched_off, trained_weights
from millrace.trainer.batch.flat_batch import FlatBatch, flatten, mask_loss, penalties
from millrace.trainer.batch.packing import Row, pack
from millrace.trainer.batch.sequences import RowSequences
from millrace.trainer.checks.rejected import save_rejected
from millrace.trainer.kernels.row_threads import row_threads
from millrace.trainer.metrics import TokenStatistics, batch_metrics
from millrace.trainer.model import not_finite, row_logprobs, served_weights
from millrace.trainer.optimizer.gradients import clip_gradients, grad_norm
from millrace.trainer.optimizer.learning_rate import learning_rate
from millrace.trainer.optimizer.optimizer import make_optimizer
from millrace.trainer.ranks.mesh import ALONE, Ranks
from millrace.trainer.ranks.offload import computing_device, update_threads
from millrace.trainer.ranks.shares import rows_of_rank
from millrace.trainer.recorded.token_masks import TokenMasks
from millrace.trainer.value_head import ValueHead, value_metrics


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The settings that an optimizer step depends on. `token_budget` changes speed, never a gradient.
    `dtype`: of matmuls; `published`: of the weights that replicas sample with. A batch is divided into
    `minibatches`. Each minibatch gets one optimizer step in each of the `epochs`."""

    optimizer: Optimizer
    token_budget: int
    max_tokens: int
    temperature: float
    dtype: torch.dtype
    published: torch.dtype = torch.float32
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
    """A batch, and the rows of each minibatch: all rows, and the rows of this rank. `has_proximal`: the batch
    has the log-probs of every token at the beginning of the batch."""

    flat: FlatBatch
    rows: list[list[Row]]
    local_rows: list[list[Row]]
    has_proximal: bool


class PolicyTrainer:
    """A model, its optimizer and an algorithm. `version` counts the batches applied.

    The proximal policy is the policy at the beginning of the batch. If a batch gets one optimizer step, the
    proximal policy is the current policy as a constant. If a batch gets several, a pass without gradients
    computes the proximal log-probs, or they are interpolated (`Algorithm.proximal`).

    `reference`: version 0, or `model` itself if `model` has an adapter, which is then switched off.
    None: batches have the reference log-probs, or the algorithm needs none.

    `ranks`: this process among the processes that make the step together. Each process gets the whole batch,
    makes the same calls, and gets the same result or error. The models are divided among the processes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        algorithm: Algorithm,
        settings: StepSettings,
        *,
        reference: PreTrainedModel | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.model, self.algorithm, self.settings, self.ranks = model, algorithm, settings, ranks
        several = reference is not model  # an adapter is switched off for all threads
        self._rows = row_threads(model, settings.token_budget, alone=ranks.alone, several=several)
        self.version = 0
        self.reference = reference
        device = computing_device(model)
        self.optimizer = make_optimizer(model, settings.optimizer)
        self._update_threads = update_threads(ranks, device)
        self.value_head: ValueHead | None = None
        if algorithm.critic is not None:
            hidden_size = model.get_output_embeddings().weight.shape[-1]
            self.value_head = ValueHead(algorithm.critic, hidden_size, device)
        if not ranks.offload:
            for parameter in self.trained:  # allocated once: gradients allocated in every step would lie
                parameter.grad = torch.zeros_like(parameter)  # scattered among activations

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """The parameters that are not frozen."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

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
            saved = "rank 0 saves it" if self.ranks.rank else save_rejected(batch, rejected_dir)
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

    def _apply(self, batch: Batch) -> tuple[dict[str, float], int, TokenStatistics]:
        """Returns metrics of the optimizer steps, trained tokens, and statistics of the tokens."""
        prepared = self._prepared(batch, self.settings.minibatches)
        flat, lr = prepared.flat, learning_rate(self.settings.optimizer, self.version)
        algorithm, gradients, norms = self.algorithm, list[GradientSummary](), list[float]()
        statistics = TokenStatistics(algorithm.weight_cap, algorithm.weight_of)
        for _ in range(self.settings.epochs):
            for minibatch in range(len(prepared.rows)):
                if gradients:
                    self.forget_gradient()
                with lost_after(len(gradients)):
                    progress = len(gradients) / (len(prepared.rows) * self.settings.epochs)
                    first = not gradients or (prepared.has_proximal and len(gradients) < len(prepared.rows))
                    gradients.append(self._accumulate(prepared, minibatch, progress, statistics, first=first))
                    norms.append(self._finite_norm())
                self._clip(norms[-1])
                self._update(lr)
        if broken := not_finite(self._weights(), self.ranks):
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
        if self.value_head is not None:
            trained_C = flat.weights_C > 0
            metrics |= value_metrics(flat.values_C[trained_C], flat.returns_C[trained_C])
        return metrics, flat.num_trained, statistics.of_all(self.ranks)

    def measure(self, batch: Batch) -> tuple[GradientSummary, float]:
        """Accumulate the gradient of the whole batch, and its norm.

        Raises: TrainingError (loss or norm not finite), DataError (malformed).
        """
        return self.accumulate(batch), self._finite_norm()

    def accumulate(self, batch: Batch) -> GradientSummary:
        """Add the gradient of the batch's loss to the parameters' `.grad`, one row at a time.

        Raises: TrainingError (the loss is not finite), DataError (the batch is malformed).
        """
        prepared = self._prepared(batch, 1)
        return self._accumulate(prepared, 0, 0.0, None) if prepared.rows else GradientSummary(0.0, 0, 0)

    def _prepared(self, batch: Batch, minibatches: int) -> PreparedBatch:
        """Compute everything that depends on the whole batch, before the first gradient."""
        settings, algorithm = self.settings, self.algorithm
        lay_out = partial(flatten, batch, algorithm, max_tokens=settings.max_tokens, minibatches=minibatches)
        flat = lay_out()
        rows, local_rows = self._packed(flat)
        recomputes = minibatches * settings.epochs > 1 and algorithm.proximal == "recompute"
        needs_proximal = algorithm.loss_mask or algorithm.penalty or algorithm.critic
        has_proximal = bool(rows and (recomputes or needs_proximal))
        if has_proximal:
            batch_rows = [row for of_minibatch in local_rows for row in of_minibatch]
            proximal_C, *values = self._evaluate(self.model, batch_rows, flat)
            reference_C: NDArray[Any] = flat.reference_C
            computed: dict[str, Any] = {}
            if algorithm.penalty is not None:
                if self.reference is not None:
                    with switched_off(self.reference):
                        reference_C = self._evaluate(self.reference, batch_rows, flat)[0]
                computed["penalties_S"] = penalties(flat, algorithm.penalty, proximal_C, reference_C)
            if values:
                computed["values_C"] = values[0].astype(float)
            if computed:
                flat = lay_out(**computed)
                rows, local_rows = self._packed(flat)  # a penalty may change which trajectories are trained
            flat.reference_C[:], flat.proximal_C[:] = reference_C, proximal_C
            if algorithm.loss_mask is not None:
                mask_loss(flat, algorithm.loss_mask)
        return PreparedBatch(flat, rows, local_rows, has_proximal)

    def _packed(self, flat: FlatBatch) -> tuple[list[list[Row]], list[list[Row]]]:
        """The rows of each minibatch: all rows, and the rows of this rank."""
        rows = [pack(trees, self._rows.tokens) for trees in flat.minibatches]
        local_rows = [rows_of_rank(of_minibatch, self.ranks) for of_minibatch in rows]
        return rows, [[with_token_masks(row, flat.masks_C) for row in minibatch] for minibatch in local_rows]

    def _evaluate(
        self, model: PreTrainedModel, rows: list[Row], flat: FlatBatch
    ) -> list[NDArray[np.floating[Any]]]:
        """Log-probs of every token of all ranks' rows, and values if `model` has a critic, without a
        gradient. Every other token has NaN. Equal on all ranks."""
        with self._serving(), torch.no_grad():
            outputs = [self._forward(model, row) for row in rows]
        local = [torch.cat(tensors).cpu().numpy() for tensors in zip(*outputs, strict=True)]
        del local[1]  # entropies
        arrays_C = [np.full(len(flat.behavior_C), np.nan, each.dtype) for each in local]
        for flat_N, arrays_N in self.ranks.gather((np.concatenate([row.flat_N for row in rows]), local)):
            for values_C, values_N in zip(arrays_C, arrays_N, strict=True):
                values_C[flat_N] = values_N
        return arrays_C

    def _accumulate(
        self,
        prepared: PreparedBatch,
        minibatch: int,
        progress: float,
        statistics: TokenStatistics | None,
        *,
        first: bool = True,
    ) -> GradientSummary:
        """Accumulate the gradient of a minibatch. `progress`: the share of the batch's optimizer steps that
        is done. `first`: `statistics` get the tokens' log-probs at the beginning of the batch, which they get
        only once."""
        flat, rows = prepared.flat, prepared.rows[minibatch]

        def backward(row: Row) -> tuple[torch.Tensor, TokenStatistics | None]:
            of_row = None if statistics is None else statistics.of_row()
            return self._backward(row, flat, progress, of_row, first=first), of_row

        parameters = [*self.trained, *(self.value_head.parameters() if self.value_head is not None else ())]
        with self._serving():
            results = self._rows.run(backward, prepared.local_rows[minibatch], parameters)
        for _, of_row in results:
            if statistics is not None and of_row is not None:
                statistics.extend(of_row)
        # A rank that stopped at its own loss would leave the others waiting.
        loss = sum(self.ranks.gather(sum(loss.item() for loss, _ in results))) / self.ranks.tensor
        if not math.isfinite(loss):
            raise TrainingError(f"the loss is {loss}")
        return GradientSummary(loss, len(rows), sum(len(row.tokens_T) for row in rows))

    def _serving(self) -> AbstractContextManager[None]:
        settings = self.settings
        return served_weights(self.model, published=settings.published, computing=settings.dtype)

    def _forward(self, model: PreTrainedModel, row: Row) -> tuple[torch.Tensor, ...]:
        """Log-probs, entropies, and values if `model` has a critic."""
        count(len(row.tokens_T))
        head = {"value_head": self.value_head} if self.value_head and model is self.model else {}
        settings = self.settings
        if model is not self.model:
            row = replace(row, routing_TW=None)  # another policy has a router of its own
        return row_logprobs(model, row, temperature=settings.temperature, dtype=settings.dtype, **head)

    def _backward(
        self, row: Row, flat: FlatBatch, progress: float, statistics: TokenStatistics | None, *, first: bool
    ) -> torch.Tensor:
        """Add the gradient of one row and return its share of the loss."""

        def pick(values_C: NDArray[Any]) -> torch.Tensor:
            return on(current_N.device, values_C[row.flat_N]).to(current_N.dtype)

        reference_N = None
        if self.reference is not None and self.algorithm.penalty is None:
            with torch.no_grad(), switched_off(self.reference):
                reference_N = self._forward(self.reference, row)[0]
        current_N, entropy_N, *values = self._forward(self.model, row)
        fixed_N, behavior_N = current_N.detach(), pick(flat.behavior_C)
        if reference_N is None and self.algorithm.needs_reference:
            reference_N = pick(flat.reference_C)
        before_N = fixed_N if progress == 0 else pick(flat.proximal_C)
        proximal_N = before_N
        if progress > 0 and self.algorithm.proximal == "interpolate":
            proximal_N = interpolated(fixed_N, behavior_N, pick(flat.staleness_C), progress)
        sequences = RowSequences(
            flat.sequence_C[row.flat_N], flat.trained_S, current_N.device, self.ranks.group("sequence")
        )
        logprobs = TokenLogprobs(
            current_N, fixed_N, behavior_N, proximal_N, reference_N, sequences, entropy_N
        )
        advantages_N = pick(flat.advantages_C)
        weights_N = pick(flat.weights_C)
        objective_N = self.algorithm.objective(torch, logprobs, advantages_N)
        if values and self.algorithm.critic is not None:
            returns_N, values_N = pick(flat.returns_C), pick(flat.values_C)
            objective_N = objective_N + self.algorithm.critic.loss(torch, values[0], values_N, returns_N)
        loss = (objective_N * weights_N).sum()
        current_N.retain_grad()
        loss.backward()
        if statistics is not None and current_N.grad is not None:
            gradient_N = self._gain_gradient(logprobs, advantages_N, weights_N)
            statistics.silence(current_N.grad if gradient_N is None else gradient_N, advantages_N)
        if statistics is not None and first:
            after_swap_N = flat.after_swap_C[row.flat_N]
            statistics.add(logprobs, before_N, entropy_N, flat.staleness_C[row.flat_N], after_swap_N)
        return loss.detach()

    def _gain_gradient(
        self, logprobs: TokenLogprobs, advantages_N: torch.Tensor, weights_N: torch.Tensor
    ) -> torch.Tensor | None:
        """The gradient of the gain with respect to the log-probs, without penalties. None: the objective has
        no gain."""
        if self.algorithm.gain is None:
            return None
        leaf_N = logprobs.fixed_N.clone().requires_grad_()
        gain_N = self.algorithm.gain(torch, replace(logprobs, current_N=leaf_N), advantages_N)
        (gradient_N,) = torch.autograd.grad((gain_N * weights_N).sum(), leaf_N)
        return gradient_N

    def _finite_norm(self) -> float:
        if self.value_head is not None:
            self.value_head.share_gradient(self.ranks)
        norm = grad_norm(self.trained, self.ranks).item()
        if not math.isfinite(norm):
            raise TrainingError(f"the gradient norm is {norm}")
        return norm

    def _clip(self, norm: float) -> None:
        parameters = self.trained
        if self.settings.optimizer.grad_clip is not None:
            total_norm = torch.tensor(norm, device=parameters[0].device)
            clip_gradients(parameters, total_norm, self.settings.optimizer.grad_clip)

    def _update(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr if isinstance(group["lr"], float) else torch.tensor(lr)
        with on_threads(self._update_threads or torch.get_num_threads()):
            self.optimizer.step()
        if self.value_head is not None:  # after the optimizer's hooks: a checkpoint may be reading
            self.value_head.optimizer.step()

    def _weights(self) -> dict[str, torch.Tensor]:
        """All weights that an update changes."""
        head = {} if self.value_head is None else dict(self.value_head.named_parameters(prefix="value_head"))
        return trained_weights(self.model) | head

    def forget_gradient(self) -> None:
        self.optimizer.zero_grad(set_to_none=self.ranks.offload)  # a copy to the host cannot add
        if self.value_head is not None:
            self.value_head.zero_grad()


def with_token_masks(row: Row, masks_C: TokenMasks | None) -> Row:
    return row if masks_C is None else replace(row, masks_N=masks_C.of(row.flat_N))


@contextmanager
def lost_after(updates: int) -> Iterator[None]:
    """An update cannot be undone, so a failure after the first update loses the weights."""
    try:
        yield
    except TrainingError as error:
        if not updates:
            raise
        raise WeightsError(f"{error} after {updates} of its updates: the weights are lost") from None
