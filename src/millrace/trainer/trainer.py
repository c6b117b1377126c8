"""One optimizer step on one batch. Synchronous and deterministic; knows no process and no network.

Shape suffixes: N = trained tokens of one row; C = completion tokens of the batch.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash
from numpy.typing import NDArray
from transformers import PreTrainedModel

from millrace.algorithms import Algorithm, TokenLogprobs
from millrace.config.training import Optimizer
from millrace.core.columns import TokenColumns
from millrace.core.errors import TrainingError, WeightsError, writing
from millrace.core.types import Batch, StepResult
from millrace.placement.gpu import on
from millrace.trainer.adamw import make_adamw
from millrace.trainer.flat_batch import FlatBatch, flatten
from millrace.trainer.gradients import clip_gradients, grad_norm
from millrace.trainer.mesh import ALONE, Ranks
from millrace.trainer.metrics import TokenStatistics, batch_metrics
from millrace.trainer.model import named_weights, not_finite, row_logprobs, served_weights
from millrace.trainer.packing import Row, pack
from millrace.trainer.sequences import RowSequences
from millrace.trainer.shares import own_rows

SAVED_MAX = 8  # rejected batches that a run directory keeps, the first ones


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What a step depends on beside weights and batch. `token_budget` changes speed, never a gradient.
    `dtype`: of matrix products; `published`: of the weights that replicas sample with."""

    optimizer: Optimizer
    token_budget: int
    max_tokens: int
    temperature: float
    dtype: torch.dtype
    published: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class Gradient:
    """What was seen while a batch's gradient was accumulated."""

    loss: float
    statistics: TokenStatistics
    trained_tokens: int
    num_rows: int
    forwarded_tokens: int


class PolicyTrainer:
    """A model, its optimizer and an algorithm. `version` counts the optimizer steps applied.

    The proximal policy is the policy at the beginning of the step. One optimizer step is made per
    batch, so that is the current policy as a constant, and no extra forward pass is needed for it.

    `ranks`: which process this is of several that make the step together. Each is given the whole batch,
    makes the same calls, and gets the same result or error. The models are divided among them.
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
        self.version = 0
        self._reference = reference
        self.optimizer = make_adamw(model.parameters(), settings.optimizer)
        if not ranks.offload:
            for parameter in model.parameters():  # allocated once: made anew in every step, it would lie
                parameter.grad = torch.zeros_like(parameter)  # scattered among activations, and hold pages

    def step(self, batch: Batch, *, quarantine: Path) -> StepResult:
        """Apply one optimizer step.

        Raises:
            TrainingError: the loss or the gradient is not finite. Weights, optimizer and version are
                untouched; the batch is saved in `quarantine`.
            WeightsError: the step made weights that are not finite. They, and the optimizer, are lost: load
                a checkpoint. The batch is saved in `quarantine`.
            DataError: the batch is malformed.
        """
        began = time.perf_counter()
        try:
            gradient, norm = self.measure(batch)
            self._clip(norm)
            lr = self._apply()
        except (TrainingError, WeightsError) as error:
            saved = "rank 0 saves it" if self.ranks.rank else save_rejected(batch, quarantine)
            raise type(error)(f"step {batch.version} -> {batch.version + 1}: {error}; {saved}") from None
        finally:
            self.optimizer.zero_grad(set_to_none=self.ranks.offload)  # a copy to the host cannot add
        metrics = gradient.statistics.metrics() | gradient.statistics.swap_gap() | batch_metrics(batch)
        metrics |= {"loss": gradient.loss, "grad_norm": norm, "lr": lr}
        metrics |= {
            "micro_batches": float(gradient.num_rows),
            "forwarded_tokens": float(gradient.forwarded_tokens),
        }
        return StepResult(
            version=self.version,
            metrics=metrics,
            logprob_gap=gradient.statistics.logprob_gap(),
            trained_tokens=gradient.trained_tokens,
            step_s=time.perf_counter() - began,
        )

    def measure(self, batch: Batch) -> tuple[Gradient, float]:
        """Accumulate the batch's gradient, and its norm.

        Raises: TrainingError (loss or norm not finite), DataError (malformed).
        """
        gradient = self.accumulate(batch)
        norm = grad_norm(self.model.parameters(), self.ranks).item()
        if not math.isfinite(norm):
            raise TrainingError(f"the gradient norm is {norm}")
        return gradient, norm

    def accumulate(self, batch: Batch) -> Gradient:
        """Add the gradient of the batch's loss to the parameters' `.grad`, one row at a time.

        Raises: TrainingError (the loss is not finite), DataError (the batch is malformed).
        """
        flat = flatten(batch, self.algorithm, max_tokens=self.settings.max_tokens)
        rows = pack(flat.trees, self.settings.token_budget)
        statistics = TokenStatistics(self.algorithm.weight_cap)
        settings = self.settings
        with served_weights(self.model, published=settings.published, computing=settings.dtype):
            losses = [self._backward(row, flat, statistics) for row in own_rows(rows, self.ranks)]
        # A rank that stopped at its own loss would leave the others waiting.
        loss = sum(self.ranks.gather(sum(each.item() for each in losses))) / self.ranks.tensor
        if not math.isfinite(loss):
            raise TrainingError(f"the loss is {loss}")
        forwarded = sum(len(row.tokens_T) for row in rows)
        return Gradient(loss, statistics.of_all(self.ranks), flat.num_trained, len(rows), forwarded)

    def _backward(self, row: Row, flat: FlatBatch, statistics: TokenStatistics) -> torch.Tensor:
        """Add the gradient of one row and return its share of the loss."""
        settings = self.settings

        def pick(values_C: NDArray[Any]) -> torch.Tensor:
            return on(current_N.device, values_C[row.flat_N]).to(current_N.dtype)

        def forward(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
            return row_logprobs(model, row, temperature=settings.temperature, dtype=settings.dtype)

        reference_N = None
        if self._reference is not None:
            with torch.no_grad():
                reference_N, _ = forward(self._reference)
        current_N, entropy_N = forward(self.model)
        fixed_N = current_N.detach()
        sequences = RowSequences(
            flat.sequence_C[row.flat_N], flat.trained_S, current_N.device, self.ranks.group("sequence")
        )
        logprobs = TokenLogprobs(
            current_N, fixed_N, pick(flat.behavior_C), fixed_N, reference_N, sequences, entropy_N
        )
        objective_N = self.algorithm.objective(torch, logprobs, pick(flat.advantages_C))
        loss = (objective_N * pick(flat.weights_C)).sum()
        loss.backward()
        statistics.add(logprobs, entropy_N, flat.staleness_C[row.flat_N], flat.after_swap_C[row.flat_N])
        return loss.detach()

    def _clip(self, norm: float) -> None:
        parameters = list(self.model.parameters())
        if self.settings.optimizer.grad_clip is not None:
            whole = torch.tensor(norm, device=parameters[0].device)
            clip_gradients(parameters, whole, self.settings.optimizer.grad_clip)

    def _apply(self) -> float:
        """Make the optimizer step and return its learning rate, a pure function of the version.

        Raises: WeightsError (a weight is not finite after it).
        """
        config = self.settings.optimizer
        lr = config.lr * min(1.0, (self.version + 1) / max(config.warmup_steps, 1))
        for group in self.optimizer.param_groups:
            group["lr"] = lr if isinstance(group["lr"], float) else torch.tensor(lr)
        self.optimizer.step()
        if broken := not_finite(named_weights(self.model), self.ranks):
            raise WeightsError(f"the weights {broken[:4]} are not finite after it")
        self.version += 1
        return lr


def save_rejected(batch: Batch, directory: Path) -> str:
    """Save a batch that cannot be trained on, and say where. A repeat is the same file; at most SAVED_MAX."""
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
    """Of what msgpack does not know: token columns, and arrays of token ids."""
    if isinstance(columns, TokenColumns):
        return {"tokens": columns.tokens, "logprobs": columns.logprobs, "versions": columns.runs}
    return columns.tolist()
