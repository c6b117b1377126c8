"""The optimizer steps of one batch in JAX. The statistics of a step's tokens are kept on the device over
sets of rows and read once.

Programs are compiled for each shape of a set of rows, and `row_arrays` has few shapes.
Shape suffixes: R rows, N trained tokens of a row, K the trained tokens of a set of rows, C completion tokens
of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from msgspec.structs import replace
from numpy.typing import NDArray

from millrace.algorithms import Algorithm
from millrace.core.errors import TrainingError
from millrace.core.progress import count, current
from millrace.core.types import Batch, StepResult
from millrace.trainer.batch.batch_step import BatchStep, GradientSummary, PreparedBatch, StepSettings
from millrace.trainer.batch.flat_batch import FlatBatch
from millrace.trainer.batch.packing import Row
from millrace.trainer.metrics import Statistics
from millrace_jax import optimizer
from millrace_jax.adapter_tree import adapter_shardings, beside, frozen_weights
from millrace_jax.decoder import Decoder
from millrace_jax.devices.mesh import make_mesh, on_mesh, replicated, rows_at_once
from millrace_jax.devices.programs import COMPILED
from millrace_jax.gradients import (
    MaskArrays,
    Outputs,
    Tokens,
    mask_arrays,
    row_outputs,
    rows_gradient,
    sequences,
    tokens_of,
)
from millrace_jax.row_arrays import NOTHING, RowArrays, arrays_of, even_rows
from millrace_jax.weights import LAYERS, Tree, shardings

Array = Any


class FrozenPolicy(NamedTuple):
    """A policy that others are compared with: the model that a run began with, or a teacher. `published`: the
    dtype that its weights are rounded to, as those of replicas are."""

    weights: Tree
    shape: Decoder
    published: Any


class JaxPolicy(BatchStep):
    """Weights and their optimizer in JAX. `settings.dtype` and `settings.published` are types of JAX.

    `weights`: float32, the masters. With `shape.merging` they are an adapter, and `base` the frozen weights,
    as published. `recompute`: only each layer's input is kept for the gradient. `mesh`: of `make_mesh`; None:
    one device. In several processes each calls the same methods with the same batches.

    Raises: ConfigError: the mesh does not divide the model, or another optimizer is asked for."""

    def __init__(
        self,
        shape: Decoder,
        weights: Tree,
        algorithm: Algorithm,
        settings: StepSettings,
        *,
        base: Tree | None = None,
        reference: FrozenPolicy | None = None,
        recompute: bool = False,
        mesh: Mesh | None = None,
    ) -> None:
        super().__init__(algorithm, settings)
        self._saves_rejected = jax.process_index() == 0
        self.before_update: Callable[[], None] = lambda: None  # an update gives the memory of the state away
        optimizer.refuse_other(settings.optimizer)
        compilations()  # those of the first weights count
        self.mesh = make_mesh(1, 1, 1, jax.devices()[:1]) if mesh is None else mesh
        self.shape, self.whole = shape, replicated(self.mesh)
        whole_model = shardings(shape, self.mesh)
        self.places = whole_model if base is None else adapter_shardings(weights[LAYERS], self.mesh)
        self.base = None if base is None else jax.device_put(base, whole_model)
        if reference is not None:
            places = shardings(reference.shape, self.mesh)
            self.reference = reference._replace(weights=jax.device_put(reference.weights, places))
        self._begin(jax.device_put(weights, self.places))
        self._define(recompute)

    def _begin(self, weights: Tree) -> None:
        """The state before the first update, and a gradient of 0."""
        config, critic = self.settings.optimizer, self.algorithm.critic
        begin = partial(optimizer.begin, config=config, critic=critic, hidden_size=self.shape.hidden_size)
        form = jax.eval_shape(begin, weights)
        self._state_places = optimizer.shardings(form, self.places, config, self.whole)
        rest = self._jit(lambda weights: begin(weights)[1:], self._state_places[1:])
        self.state = optimizer.TrainingState(weights, *rest(weights))
        self._gradient_places = self.places, self._state_places.head
        zeros = partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype), (form.weights, form.head))
        self._zeros = self._jit(zeros, self._gradient_places)
        self.gradient = self._zeros()

    def _define(self, recompute: bool) -> None:
        """The programs of a step."""
        critic, whole = self.algorithm.critic, self.whole
        options = {"shape": self.shape, "temperature": self.settings.temperature, "recompute": recompute}
        options["trunk"] = 0.0 if critic is None else critic.trunk
        self._outputs = self._jit(partial(self._forward, options=options), whole)
        self._reference_outputs = self._jit(partial(self._forward_reference, options=options), whole)
        self._accumulated = self._jit(
            partial(self._add, options=options),
            (self._gradient_places, whole, whole, whole),
            static_argnames="count",
            donate_argnums=1,
        )
        self._norm = self._jit(lambda gradient: tuple(map(optimizer.norm_of, gradient)), whole)
        head_lr = 0.0 if critic is None else critic.lr
        update = partial(optimizer.updated, config=self.settings.optimizer, head_lr=head_lr)
        self._updated = self._jit(update, self._state_places, donate_argnums=0)
        self._flags = self._jit(optimizer.not_finite, whole)

    def _jit(self, function: Callable[..., Any], places: Any, **options: Any) -> Callable[..., Any]:
        """`places`: the shardings of what the program returns."""
        return jax.jit(on_mesh(self.mesh, function), out_shardings=places, **options)

    def step(self, batch: Batch, *, rejected_dir: Path) -> StepResult:
        compiled = compilations()
        before = compiled.count, compiled.seconds
        result = super().step(batch, rejected_dir=rejected_dir)
        return replace(result, metrics=result.metrics | compiled.since(*before))

    # ------------------------------------------------------------ traced

    def _served(self, weights: Tree) -> Tree:
        """The weights that replicas sample with, in the type of matrix products. Those of an adapter are
        merged in their own type."""
        published = self.settings.published
        dtype = self.settings.dtype if self.base is None else None
        served = jax.tree.map(lambda x: x.astype(published).astype(dtype or x.dtype), weights)
        return jax.lax.with_sharding_constraint(served, self.places)

    def _forward(
        self,
        weights: Tree,
        head: Tree | None,
        base: Tree | None,
        rows: RowArrays,
        masks: MaskArrays | None,
        options: Any,
    ) -> Any:
        frozen = frozen_weights(base, weights, self.settings.dtype)
        return row_outputs(beside(frozen, self._served(weights)), head, rows, masks=masks, **options)

    def _forward_reference(
        self, weights: Tree, rows: RowArrays, masks: MaskArrays | None, options: Any
    ) -> Any:
        published, dtype = self.reference.published, self.settings.dtype
        served = jax.tree.map(lambda x: x.astype(published).astype(dtype), weights)
        return row_outputs(served, None, rows, masks=masks, **options | {"shape": self.reference.shape})

    def _add(
        self,
        state: tuple[Tree, Tree | None],
        gradient: tuple[Tree, Tree | None],
        rows: RowArrays,
        tokens: Any,
        progress: Array,
        base: Tree | None = None,
        masks: MaskArrays | None = None,
        *,
        options: Any,
        count: int,
    ) -> Any:
        """The gradient at the served weights is added to that of the masters."""
        loss, of_rows, outputs, of_gain = rows_gradient(
            self._served(state[0]),
            state[1],
            rows,
            tokens,
            progress,
            algorithm=self.algorithm,
            count=count,
            base=frozen_weights(base, state[0], self.settings.dtype),
            masks=masks,
            **options,
        )
        gradient = jax.tree.map(lambda total, g: total + g.astype(total.dtype), gradient, of_rows)
        return gradient, loss, outputs, of_gain

    # ------------------------------------------------------------ of `BatchStep`

    def _packed(self, flat: FlatBatch) -> list[list[Row]]:
        budget, at_once = self.settings.token_budget, rows_at_once(self.mesh)
        return [even_rows(trees, budget, at_once) for trees in flat.minibatches]

    def _sets(self, rows: Sequence[Row]) -> Iterator[RowArrays]:
        """Rows that are computed at once, one on each of the devices that divide rows. Rows of one set are of
        similar length, because they are padded to one shape."""
        ordered = sorted(rows, key=lambda row: len(row.tokens_T), reverse=True)
        size = rows_at_once(self.mesh)
        for begin in range(0, len(ordered), size):
            of_set = ordered[begin : begin + size]
            count(sum(len(row.tokens_T) for row in of_set))
            yield arrays_of(of_set + [NOTHING] * (size - len(of_set)))

    def _evaluate(
        self, rows: list[Row], flat: FlatBatch, *, reference: bool = False
    ) -> list[NDArray[np.floating[Any]]]:
        compute = partial(self._outputs, self.state.weights, self.state.head, self.base)
        if reference:
            compute = partial(self._reference_outputs, self.reference.weights)
        masks = partial(mask_arrays, flat.masks_C)
        computed = [(arrays, compute(arrays, masks(arrays.flat_RN))) for arrays in self._sets(rows)]
        columns_C = np.full(len(flat.behavior_C), np.nan), np.full(len(flat.behavior_C), np.nan)
        for arrays, outputs in computed:
            valid = arrays.flat_RN >= 0
            for into_C, column in zip(columns_C, (outputs.logprobs, outputs.values), strict=True):
                into_C[arrays.flat_RN[valid]] = np.asarray(column)[valid]
        has_values = self.state.head is not None and not reference
        return [*columns_C] if has_values else [columns_C[0]]

    def _accumulate(
        self, prepared: PreparedBatch, minibatch: int, progress: float, *, first: bool = True
    ) -> GradientSummary:
        flat, rows = prepared.flat, prepared.rows[minibatch]
        if self.reference is not None and self.algorithm.penalty is None:
            reference_C = self._evaluate(rows, flat, reference=True)[0]
            known = np.isfinite(reference_C)
            flat.reference_C[known] = reference_C[known]
        losses = []
        for arrays in self._sets(rows):
            tokens = tokens_of(flat, arrays, np.float32)
            self.gradient, loss, outputs, of_gain = self._accumulated(
                (self.state.weights, self.state.head),
                self.gradient,
                arrays,
                tokens,
                progress,
                self.base,
                mask_arrays(flat.masks_C, arrays.flat_RN),
                count=sequences(flat),
            )
            losses.append(loss)
            at_start = progress == 0
            prepared.statistics.add(tokens, outputs, of_gain, at_start=at_start, first=first)
        loss = math.fsum(map(float, losses))
        if not math.isfinite(loss):
            raise TrainingError(f"the loss is {loss}")
        return GradientSummary(loss, len(rows), sum(len(row.tokens_T) for row in rows))

    def _finite_norm(self) -> float:
        norm, of_head = map(float, self._norm(self.gradient))
        if not math.isfinite(of_head):
            raise TrainingError("the gradient of the value head is not finite")
        if not math.isfinite(norm):
            raise TrainingError(f"the gradient norm is {norm}")
        return norm

    def _update(self, lr: float, norm: float) -> None:
        self.before_update()
        self.state = self._updated(self.state, self.gradient, lr, norm)

    def _not_finite(self) -> list[str]:
        return [name for name, flag in self._flags(self.state.weights).items() if flag]

    def _statistics(self) -> JaxStatistics:
        return JaxStatistics(self.algorithm)

    def forget_gradient(self) -> None:
        self.gradient = None  # its memory is free before zeros get new memory
        self.gradient = self._zeros()


class Compilations:
    """The programs that this process has compiled or read from a cache since the object was made. The call
    that waits for a program says so, and each program is progress."""

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0
        jax.monitoring.register_scalar_listener(self._begun)
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _begun(self, event: str, _: float, **facts: Any) -> None:
        if event == COMPILED:
            current().activity = f"compiling program {self.count + 1} ({facts.get('fun_name', 'unnamed')})"

    def _heard(self, event: str, duration_s: float, **_: Any) -> None:
        if event == COMPILED:
            self.count, self.seconds = self.count + 1, self.seconds + duration_s
            current().activity = ""
            count()

    def since(self, count: int, seconds: float) -> dict[str, float]:
        """Metrics of the time since `count` and `seconds` were read."""
        return {"compilations": float(self.count - count), "compile_s": self.seconds - seconds}


@cache
def compilations() -> Compilations:
    """Those of this process. JAX keeps every listener, so there is one."""
    return Compilations()


# ---------------------------------------------------------------- statistics


class JaxStatistics:
    """The statistics of tokens that `algorithm` trains."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._cap, self._weight_of = algorithm.weight_cap, algorithm.weight_of
        self._has_reference = algorithm.needs_reference
        self._sets: list[tuple[Tokens, Outputs, Any, bool, bool]] = []

    def add(self, tokens: Tokens, outputs: Outputs, of_gain: Any, *, at_start: bool, first: bool) -> None:
        """`of_gain`: the gradient of the gain with respect to log-probs, (R, N). `at_start`: the outputs are
        those of the batch's beginning. `first`: the tokens have not been added yet."""
        self._sets.append((tokens, outputs, of_gain, at_start, first))

    def read(self) -> Statistics:
        judged, silenced = list[int](), list[int]()
        columns: list[dict[str, NDArray[Any]]] = []
        for tokens, outputs, of_gain, at_start, first in self._sets:
            valid, advantages = tokens.valid, tokens.advantages
            judged_RN = valid & (advantages != 0)
            judged.append(judged_RN.sum())
            silenced.append((judged_RN & (np.asarray(of_gain) == 0)).sum())
            if first:
                before = np.asarray(outputs.logprobs) if at_start else tokens.proximal
                columns.append(self._columns(tokens, before, np.asarray(outputs.entropies)))
        joined: dict[str, Any] = {
            name: np.concatenate([each[name] for each in columns]) for name in (columns or [{}])[0]
        }
        return Statistics(**joined, cap=self._cap, judged=np.array(judged), silenced=np.array(silenced))

    def _columns(
        self, tokens: Tokens, before_RN: NDArray[Any], entropy_RN: NDArray[Any]
    ) -> dict[str, NDArray[Any]]:
        valid = tokens.valid
        log_K = (before_RN - tokens.behavior)[valid]
        weight_K, sequence_K = log_K, tokens.sequence[valid]
        if self._weight_of != "token":
            weight_K = np.bincount(sequence_K, log_K)[sequence_K].astype(log_K.dtype)
            weight_K = weight_K if self._weight_of == "product" else weight_K / tokens.trained[valid]
        columns = {
            "log_ratio_N": log_K,
            "entropy_N": entropy_RN[valid],
            "staleness_N": tokens.staleness[valid].astype(np.int64),
            "after_swap_N": tokens.after_swap[valid] > 0,
            "log_weight_N": weight_K,
        }
        if self._has_reference:
            columns["reference_N"] = (before_RN - tokens.reference)[valid]
        return columns
