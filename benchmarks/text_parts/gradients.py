"""The gradients of both trainers, for a Python that has JAX: of one batch, by tensor.

    python gradients.py JOB

JOB is a JSON file: `model`, and `groups`, each a prompt and its completions as [tokens, log-probs, reward].
The last line of the output has `gradient_norm_difference`, of the norms as the trainers compute them,
relative to torch's, and the same in float64; `gradient_difference`, the norm of the difference over the norm
of torch's; and the same of the tensor for which it is largest.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

MAX_TOKENS, BUDGET = 256, 4096


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    batch, model = batch_of(job["groups"]), Path(job["model"])
    theirs, norm = torch_gradient(model, batch)
    ours, jax_norm = jax_gradient(model, batch)
    print(json.dumps(compared(theirs, norm, ours, jax_norm)), flush=True)


def batch_of(groups: list[Any]) -> Any:
    from millrace.core.completion.columns import TokenColumns, token_array
    from millrace.core.types import Batch, TrainGroup, TrainSequence

    made, number = list[Any](), 0
    for prompt, completions in groups:
        sequences = list[Any]()
        for tokens, logprobs, reward in completions:
            columns = TokenColumns.of(tokens, logprobs, 0)
            sequences.append(TrainSequence(number, columns, reward=reward, truncated=False))
            number += 1
        made.append(TrainGroup(len(made), token_array(prompt), sequences))
    return Batch(0, made)


def settings_of(dtype: Any) -> Any:
    from millrace.config.tables.training import Optimizer
    from millrace.trainer.batch.batch_step import StepSettings

    return StepSettings(Optimizer(lr=1e-6), BUDGET, MAX_TOKENS, 1.0, dtype, dtype)


def torch_gradient(path: Path, batch: Any) -> tuple[dict[str, Any], float]:
    import torch

    from millrace.algorithms import build
    from millrace.config.tables.algorithms import PolicyGradient
    from millrace.trainer.model import load_model
    from millrace.trainer.trainer import PolicyTrainer

    model = load_model(path, torch.device("cpu"))
    _, norm = PolicyTrainer(model, build(PolicyGradient()), settings_of(torch.float32)).measure(batch)
    return {name: one.grad.numpy() for name, one in model.named_parameters()}, norm


def jax_gradient(path: Path, batch: Any) -> tuple[dict[str, Any], float]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from millrace.algorithms import build
    from millrace.config.tables.algorithms import PolicyGradient
    from millrace_jax.decoder import read_architecture
    from millrace_jax.devices.mesh import make_mesh
    from millrace_jax.policy import JaxPolicy
    from millrace_jax.weights import read_weights, slices

    shape, mesh = read_architecture(path), make_mesh(1, 1, 1, jax.devices()[:1])
    weights = read_weights(path, shape, mesh)
    policy = JaxPolicy(shape, weights, build(PolicyGradient()), settings_of(jnp.float32), mesh=mesh)
    _, norm = policy.measure(batch)
    return {name: np.asarray(one) for name, one in slices(policy.gradient[0], shape)}, norm


def compared(theirs: dict[str, Any], norm: float, ours: dict[str, Any], jax_norm: float) -> dict[str, Any]:
    import numpy as np

    pairs = {name: (one.astype(np.float64), ours[name].astype(np.float64)) for name, one in theirs.items()}
    norms = {name: [np.linalg.norm(one) for one in pair] for name, pair in pairs.items()}
    apart = {name: np.linalg.norm(one - other) for name, (one, other) in pairs.items()}
    largest = max(norms, key=lambda name: apart[name] / norms[name][0])
    exact, jax_exact = np.linalg.norm([*norms.values()], axis=0)
    return {
        "gradient_norm": norm,
        "gradient_norm_difference": abs(jax_norm - norm) / norm,
        "gradient_norm_difference_float64": float(abs(jax_exact - exact) / exact),
        "gradient_difference": float(np.linalg.norm([*apart.values()]) / exact),
        "gradient_difference_max": float(apart[largest] / norms[largest][0]),
        "gradient_difference_max_of": largest,
    }


if __name__ == "__main__":
    main()
