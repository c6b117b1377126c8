"""The optimizer steps of one batch in torch, without processes and network.

Shape suffixes: N = trained tokens of one row; C = completion tokens of the batch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from millrace.algorithms import Algorithm, TokenLogprobs
from millrace.algorithms.corrections import interpolated
from millrace.core.errors import TrainingError
from millrace.core.progress import count
from millrace.devices.gpu import on
from millrace.devices.threads import on_threads
from millrace.trainer.adapted_linear import switched_off, trained_weights
from millrace.trainer.batch.batch_step import BatchStep, GradientSummary, PreparedBatch, StepSettings
from millrace.trainer.batch.flat_batch import FlatBatch
from millrace.trainer.batch.packing import Row, pack, rows_of_rank
from millrace.trainer.kernels.row_threads import row_threads
from millrace.trainer.metrics import Statistics
from millrace.trainer.model import not_finite, row_logprobs, served_weights
from millrace.trainer.optimizer import clip_gradients, grad_norm, make_optimizer
from millrace.trainer.ranks.blocks import computing_device, update_threads
from millrace.trainer.ranks.mesh import ALONE, Ranks
from millrace.trainer.recorded import TokenMasks
from millrace.trainer.value_head import ValueHead


class PolicyTrainer(BatchStep):
    """A model and its optimizer in torch.

    `reference`: version 0, or `model` itself if `model` has an adapter, which is then switched off.

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
        super().__init__(algorithm, settings)
        self.model, self.ranks, self._saves_rejected = model, ranks, ranks.rank == 0
        several = reference is not model  # an adapter is switched off for all threads
        narrow = settings.dtype.itemsize < 4
        self._rows = row_threads(
            model, settings.token_budget, alone=ranks.alone, several=several, narrow=narrow
        )
        self.reference = reference
        device = computing_device(model)
        self.optimizer = make_optimizer(model, settings.optimizer)
        self._update_threads = update_threads(ranks, device)
        self._may_idle = ranks.alone  # ranks make equal calls
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

    def _local(self, rows: list[Row], flat: FlatBatch) -> list[Row]:
        """This rank's share of `rows`."""
        return [with_token_masks(row, flat.masks_C) for row in rows_of_rank(rows, self.ranks)]

    def _packed(self, flat: FlatBatch) -> list[list[Row]]:
        """Many trees without an advantage have rows of their own, because these need no backward pass."""
        packed = partial(pack, token_budget=self._rows.tokens, full=self._rows.full)
        sides = [flat.by_advantage(trees, self._rows.apart) for trees in flat.minibatches]
        return [[*packed(some), *packed(others)] for some, others in sides]

    def _evaluate(
        self, rows: list[Row], flat: FlatBatch, *, reference: bool = False
    ) -> list[NDArray[np.floating[Any]]]:
        """Equal on all ranks."""
        rows = self._local(rows, flat)
        with self._serving(), torch.no_grad():
            outputs = [self._forward(row, reference=reference) for row in rows]
        local = [torch.cat(tensors).cpu().numpy() for tensors in zip(*outputs, strict=True)]
        del local[1]  # entropies
        arrays_C = [np.full(len(flat.behavior_C), np.nan, each.dtype) for each in local]
        for flat_N, arrays_N in self.ranks.gather((np.concatenate([row.flat_N for row in rows]), local)):
            for values_C, values_N in zip(arrays_C, arrays_N, strict=True):
                values_C[flat_N] = values_N
        return arrays_C

    def _accumulate(
        self, prepared: PreparedBatch, minibatch: int, progress: float, *, first: bool = True
    ) -> GradientSummary:
        flat, rows = prepared.flat, prepared.rows[minibatch]
        backward = partial(self._backward, flat=flat, progress=progress, first=first)
        parameters = [*self.trained, *(self.value_head.parameters() if self.value_head is not None else ())]
        with self._serving():
            results = self._rows.run(backward, self._local(rows, flat), parameters)
        for _, columns in results:
            prepared.statistics.add(columns)
        # A rank that stopped at its own loss would leave the others waiting.
        loss = sum(self.ranks.gather(sum(loss.item() for loss, _ in results))) / self.ranks.tensor
        if not math.isfinite(loss):
            raise TrainingError(f"the loss is {loss}")
        return GradientSummary(loss, len(rows), sum(len(row.tokens_T) for row in rows))

    def _serving(self) -> AbstractContextManager[None]:
        settings = self.settings
        return served_weights(self.model, published=settings.published, computing=settings.dtype)

    def _forward(self, row: Row, *, reference: bool = False) -> tuple[torch.Tensor, ...]:
        """Log-probs, entropies, and values if there is a critic. `reference`: those of the reference, without
        values and gradient."""
        count(len(row.tokens_T))
        compute = partial(row_logprobs, temperature=self.settings.temperature, dtype=self.settings.dtype)
        if not reference:
            return compute(self.model, row, value_head=self.value_head)
        assert self.reference is not None
        if self.reference is not self.model:
            row = replace(row, routing_TW=None)  # another policy has a router of its own
        with torch.no_grad(), switched_off(self.reference):
            return compute(self.reference, row)

    def _backward(
        self, row: Row, flat: FlatBatch, progress: float, *, first: bool
    ) -> tuple[torch.Tensor, Columns]:
        """Add the gradient of one row. Returns its share of the loss, and the statistics of its tokens.

        The loss is differentiated first with respect to the outputs of the model. A row without an advantage
        has no slope there, so it needs no backward pass, and its forward pass keeps nothing.
        """

        def pick(values_C: NDArray[Any]) -> torch.Tensor:
            return on(current_N.device, values_C[row.flat_N]).to(current_N.dtype)

        reference_N = None
        if self.reference is not None and self.algorithm.penalty is None:
            reference_N = self._forward(row, reference=True)[0]
        idle = self._may_idle and not flat.advantages_C[row.flat_N].any()
        with torch.set_grad_enabled(not idle):
            outputs = self._forward(row)
        leaves = [x_N.detach().requires_grad_() for x_N in outputs]
        current_N, entropy_N, *values = leaves
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
        loss.backward()
        slopes = [leaf.grad for leaf in leaves]
        if idle and any(slope is not None and bool(slope.any()) for slope in slopes):
            idle = self._may_idle = False  # the loss has more than advantages: a penalty, or a critic
            outputs = self._forward(row)
        if not idle:
            sloped = [i for i, x in enumerate(outputs) if x.requires_grad and slopes[i] is not None]
            torch.autograd.backward([outputs[i] for i in sloped], [slopes[i] for i in sloped])
        columns: Columns = {}
        if current_N.grad is not None:
            columns |= silenced_columns(self._gain_gradient(logprobs, advantages_N, weights_N), advantages_N)
        if first:
            columns |= token_columns(self.algorithm, logprobs, before_N, entropy_N)
            columns["staleness_N"] = torch.from_numpy(flat.staleness_C[row.flat_N])
            columns["after_swap_N"] = torch.from_numpy(flat.after_swap_C[row.flat_N])
        return loss.detach(), columns

    def _gain_gradient(
        self, logprobs: TokenLogprobs, advantages_N: torch.Tensor, weights_N: torch.Tensor
    ) -> torch.Tensor:
        """The gradient with respect to the log-probs, without that of penalties."""
        if self.algorithm.gain is None:
            return logprobs.current_N.grad
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

    def _update(self, lr: float, norm: float) -> None:
        parameters, grad_clip = self.trained, self.settings.optimizer.grad_clip
        if grad_clip is not None:
            clip_gradients(parameters, torch.tensor(norm, device=parameters[0].device), grad_clip)
        for group in self.optimizer.param_groups:
            group["lr"] = lr if isinstance(group["lr"], float) else torch.tensor(lr)
        with on_threads(self._update_threads or torch.get_num_threads()):
            self.optimizer.step()
        if self.value_head is not None:  # after the optimizer's hooks: a checkpoint may be reading
            self.value_head.optimizer.step()

    def _not_finite(self) -> list[str]:
        head = {} if self.value_head is None else dict(self.value_head.named_parameters(prefix="value_head"))
        return not_finite(trained_weights(self.model) | head, self.ranks)

    def _statistics(self) -> TokenStatistics:
        return TokenStatistics(self.algorithm, self.ranks)

    def forget_gradient(self) -> None:
        self.optimizer.zero_grad(set_to_none=self.ranks.offload)  # a copy to the host cannot add
        if self.value_head is not None:
            self.value_head.zero_grad()


def with_token_masks(row: Row, masks_C: TokenMasks | None) -> Row:
    return row if masks_C is None else replace(row, masks_N=masks_C.of(row.flat_N))


Columns = dict[str, torch.Tensor]
"""Columns of `Statistics`, by name, of one row."""


def token_columns(
    algorithm: Algorithm, logprobs: TokenLogprobs, before_N: torch.Tensor, entropy_N: torch.Tensor
) -> Columns:
    """`before_N`: log-probs under the weights at the batch's beginning."""
    log_N = before_N - logprobs.behavior_N
    columns = {"log_ratio_N": log_N, "log_weight_N": log_N, "entropy_N": entropy_N.detach()}
    if algorithm.weight_of != "token":
        combined = logprobs.sequences.total if algorithm.weight_of == "product" else logprobs.sequences.mean
        columns["log_weight_N"] = combined(log_N)
    if logprobs.reference_N is not None:
        columns["reference_N"] = before_N - logprobs.reference_N
    return columns


def silenced_columns(gradient_N: torch.Tensor, advantages_N: torch.Tensor) -> Columns:
    """Count the tokens of an optimizer step with an advantage, and those of them without a gradient.
    `gradient_N` is without the gradient of a penalty."""
    judged_N = advantages_N != 0
    return {"judged": judged_N.sum()[None], "silenced": (judged_N & (gradient_N == 0)).sum()[None]}


class TokenStatistics:
    """Columns of the trained tokens of a batch."""

    def __init__(self, algorithm: Algorithm, ranks: Ranks) -> None:
        self._cap, self._ranks = algorithm.weight_cap, ranks
        self._columns = defaultdict[str, list[torch.Tensor]](list)

    def add(self, of_row: Columns) -> None:
        for name, column in of_row.items():
            self._columns[name].append(column)

    def read(self) -> Statistics:
        """All columns of every rank's tokens on the host, the same on every rank. A collective call."""
        local = {name: torch.cat(columns).cpu().numpy() for name, columns in self._columns.items()}
        # Ranks of a tensor group have the same tokens.
        of_ranks = self._ranks.gather(local if self._ranks.tensor_index == 0 else {})
        names = {name for of_rank in of_ranks for name in of_rank}
        columns: dict[str, Any] = {
            name: np.concatenate([each[name] for each in of_ranks if name in each]) for name in names
        }
        return Statistics(**columns, cap=self._cap)


class RowSequences:
    """`algorithms.logprobs.Sequences` of a row.

    `ids_N`: the sequence of each token in the batch; `lengths_S`: trained tokens of each sequence.
    """

    def __init__(
        self,
        ids_N: NDArray[np.int64],
        lengths_S: NDArray[np.int64],
        device: torch.device,
        group: ProcessGroup | None,
    ) -> None:
        self._ids_N, self._lengths_S, self._device, self._group = ids_N, lengths_S, device, group

    def total(self, x_N: torch.Tensor) -> torch.Tensor:
        ids, order, counts, _ = self._on_device
        sums_S = torch.segment_reduce(x_N.detach()[order], "sum", lengths=counts, initial=0, unsafe=True)
        if self._group is not None:
            from torch import distributed

            distributed.all_reduce(sums_S, group=self._group)
        return sums_S[ids]

    def mean(self, x_N: torch.Tensor) -> torch.Tensor:
        return self.total(x_N) / self._on_device[3]

    @cached_property
    def _on_device(self) -> tuple[torch.Tensor, ...]:
        """On the device, at first use: the sequence of each token, the tokens in order of sequences, the
        tokens of each sequence on this rank, and for each token all tokens of its sequence."""
        ids = self._ids_N
        arrays = (
            ids,
            np.argsort(ids, kind="stable"),
            np.bincount(ids, minlength=len(self._lengths_S)),
            self._lengths_S[ids],
        )
        return tuple(on(self._device, array) for array in arrays)
