"""Named values inside the trainer's own program, while it computes the log-probs of one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from millrace.trainer.batch.packing import Branch, pack
from millrace.trainer.batch.packing import Tree as Tokens
from millrace_jax.decoder import read_architecture
from millrace_jax.devices.mesh import make_mesh, on_mesh, replicated, rows_at_once
from millrace_jax.forward import watching
from millrace_jax.gradients import row_outputs
from millrace_jax.row_arrays import NOTHING, RowArrays, arrays_of
from millrace_jax.weights import LAYERS, Tree, read_weights

Values = dict[str, NDArray[np.floating[Any]]]


def traced_values(
    path: Path, tokens: Sequence[int], *, published: str, temperature: float, mesh: tuple[int, int, int]
) -> tuple[Values, str]:
    """Values of the tokens but the last, (T, width) each, log-probs (T,) of the tokens behind them, and the
    format of matrix products. `mesh`: `trainer.shard`, `tensor` and `sequence`, over all devices.

    Raises: DataError: the model cannot be read. ConfigError: the mesh does not divide it or the devices."""
    shape, devices, count = read_architecture(path), make_mesh(*mesh, jax.devices()), len(tokens) - 1
    dtype = "float32" if jax.default_backend() == "cpu" else published
    branch = Branch(tokens[1:], np.ones(count, np.bool_), 0)
    (row,) = pack([Tokens(tokens[:1], [branch])], len(tokens))
    arrays = arrays_of([row] + [NOTHING] * (rows_at_once(devices) - 1))

    def program(weights: Tree, rows: RowArrays) -> Any:
        served = jax.tree.map(lambda x: x.astype(published).astype(dtype), weights)
        with watching() as values:
            outputs = row_outputs(served, None, rows, shape, temperature=temperature, recompute=False)
        return outputs.logprobs, values

    compute = jax.jit(on_mesh(devices, program), out_shardings=replicated(devices))
    logprobs, traced = compute(read_weights(path, shape, devices), arrays)

    def flat(x: Any) -> NDArray[np.floating[Any]]:
        """Of the first row, without padding."""
        return np.asarray(x[0, :count].astype(jnp.float32), np.float64).reshape(count, -1)

    layers = {
        f"layers.{index}.{name}": flat(x[index])
        for name, x in traced.pop(LAYERS).items()
        for index in range(shape.num_layers)
    }
    of_sequence = np.asarray(logprobs)[0, arrays.flat_RN[0] >= 0].astype(np.float64)
    return {name: flat(x) for name, x in traced.items()} | layers | {"logprobs": of_sequence}, dtype
