"""The sides of a run beside the reference: its trainer, its engine, and what its replicas recorded.

Sides are computed one after the other on `model.device`, a trainer in torch without its ranks. The trainer in
JAX runs in the Python that has JAX, all others in this process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from millrace.checks.numerics.divergence import Divergence, Values, first_divergence, logprob_gap
from millrace.checks.numerics.sequence import ProbedSequence
from millrace.config.schema import Config
from millrace.core import files
from millrace.core.errors import ConfigError, DataError
from millrace.core.wings import wing
from millrace.devices.tpu import computes_on_tpu, simulate_devices
from millrace.placement.model_directory import read_model_config
from millrace.run_directory.jax_python import has_jax, run_with_jax

INPUTS_BYTES_MAX = 1 << 24


@dataclass(frozen=True)
class SideVerdict:
    """`gap_max` and `gap_mean`: of log-probs, in nats, over the sequence. `first` None: every value is within
    its bound."""

    side: str
    computing: str
    gap_max: float
    gap_mean: float
    first: Divergence | None


def examine_sides(
    config: Config, model: Path, sequence: ProbedSequence, say: Callable[[str], None]
) -> Iterator[SideVerdict]:
    """`model`: the directory of the weights. `say` gets a line before each computation.

    Raises: DataError: a side cannot read or compute the model. ConfigError: torch or JAX is missing."""
    if find_spec("torch") is None:
        raise ConfigError(
            "`millrace doctor --numerics` needs torch for its reference.\n"
            "  Use the Python that Millrace is installed in; `trainer.python` is started from there"
        )
    _refuse_experts(model)
    from millrace.trainer.hooked_values import reference_values

    temperature = config.sampling.temperature or 1.0  # of greedy tokens log-probs are recorded at 1
    sampled: dict[str, Any] = {"published": config.model.dtype, "temperature": temperature}
    say(f"the reference: transformers in float64, {len(sequence.tokens)} tokens")
    reference, _ = reference_values(model, sequence.tokens, **sampled)
    for side, compute in _sides(config, model, sequence, sampled).items():
        say(side)
        values, computing = compute()
        first = first_divergence(reference, values, computing)
        yield SideVerdict(side, computing, *logprob_gap(reference, values), first)
    if sequence.recorded is None:
        say(f"log-probs of replicas ({config.rollout.engine}) are not compared: {sequence.why}")
        return
    of_record = {"logprobs": reference["logprobs"][-len(sequence.recorded) :]}
    recorded = {"logprobs": sequence.recorded}
    first = first_divergence(of_record, recorded, config.model.dtype)
    side = f"replicas ({config.rollout.engine}), recorded"
    yield SideVerdict(side, config.model.dtype, *logprob_gap(of_record, recorded), first)


def _sides(
    config: Config, model: Path, sequence: ProbedSequence, sampled: dict[str, Any]
) -> dict[str, Callable[[], tuple[Values, str]]]:
    device, tokens = config.model.device, sequence.tokens

    def engine() -> tuple[Values, str]:
        from millrace.engines.own.engine_values import engine_values

        return engine_values(model, tokens, **sampled, device=device, exact=config.rollout.exact)

    def torch_trainer() -> tuple[Values, str]:
        from millrace.trainer.hooked_values import trainer_values

        return trainer_values(model, tokens, **sampled, device=device)

    def jax_trainer() -> tuple[Values, str]:
        return _jax_values(config, {"path": str(model), "tokens": tokens, **sampled})

    trainer = jax_trainer if config.trainer.backend == "jax" else torch_trainer
    sides = {f"trainer ({config.trainer.backend})": trainer}
    return sides | ({"torch engine": engine} if config.rollout.engine == "own" else {})


def _refuse_experts(model: Path) -> None:
    tree = read_model_config(model)
    if tree.get("num_experts") or tree.get("num_local_experts"):
        raise DataError(
            f"{model} is a mixture of experts: rounding changes which experts a token gets, so its values "
            "have no bound.\n  Use a dense model of the same family"
        )


def _jax_values(config: Config, inputs: dict[str, Any]) -> tuple[Values, str]:
    """In this process if it has JAX, or else in `trainer.python`."""
    from millrace.devices.device import torch_device

    trainer, asked = config.trainer, config.model.device
    device = "tpu" if computes_on_tpu(asked) else torch_device(asked).type
    inputs |= {"mesh": [trainer.shard, trainer.tensor, trainer.sequence], "device": device}
    with TemporaryDirectory(prefix="millrace-") as scratch:
        request, answer = Path(scratch) / "inputs.json", Path(scratch) / "values.safetensors"
        request.write_text(json.dumps(inputs))
        if has_jax():
            computing = write_jax_values(request, answer)
        else:
            computing = run_with_jax(trainer.python, "doctor", request, "--numerics", "--values", answer)
        return load_file(answer), computing.split()[-1]


def write_jax_values(request: Path, answer: Path) -> str:
    """Writes the values of the trainer in JAX for the request of `_jax_values`, and returns the format of its
    matrix products. Needs no torch."""
    inputs = files.read_json(request, INPUTS_BYTES_MAX)
    mesh, path, tokens = (inputs.pop(name) for name in ("mesh", "path", "tokens"))
    if inputs.pop("device") == "cpu":
        simulate_devices(int(np.prod(mesh)))
    values, computing = wing("jax.traced_values")(Path(path), tokens, **inputs, mesh=tuple(mesh))
    save_file(values, answer)
    return computing
