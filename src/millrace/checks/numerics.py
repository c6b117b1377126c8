"""Why log-probs disagree: where trainer and engine first differ from transformers in float64.

Sides are the trainer of a run, its engine, and what its replicas recorded. They compute one sequence, of the
run's record or of random tokens, one after the other on `model.device`, a trainer in torch without its ranks.
The trainer in JAX runs in the Python that has JAX, all others in this process. The first value of a forward
pass is named that is farther from the reference than rounding explains.

T: tokens of the sequence. A value of L layers grows its rounding error like a sum of L independent ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from millrace.config.schema import Config
from millrace.core import files
from millrace.core.errors import ConfigError, DataError
from millrace.core.types import Sampling
from millrace.core.wings import wing
from millrace.devices.inventory import computes_on_tpu, simulate_devices
from millrace.ledger.reading import LedgerReader
from millrace.placement.model_directory import read_model_config
from millrace.run_directory.models import has_jax, run_with_jax

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
    if config.trainer.quantization is not None:
        say("the trainer computes without `trainer.quantization`: of fp8 no bound is known here")
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


# ---------------------------------------------------------------- divergence


Values = Mapping[str, NDArray[np.floating[Any]]]

BOUNDS = {"float32": 1e-5, "bfloat16": 16 * 2.0**-8, "float16": 16 * 2.0**-11}
"""The relative distance that rounding explains in the first layer, by the format of matrix products."""

OPERATIONS = {
    "embedding": "the embedding of tokens",
    "input_norm": "the norm before attention",
    "q": "the query projection",
    "k": "the key projection",
    "v": "the value projection",
    "q_norm": "the norm of queries",
    "k_norm": "the norm of keys",
    "q_rope": "the rotary embedding of queries",
    "k_rope": "the rotary embedding of keys",
    "attention": "attention over keys and values",
    "o": "the output projection of attention",
    "o_norm": "the norm after attention",
    "residual": "the residual stream after attention",
    "mlp_norm": "the norm before the MLP",
    "gated": "gate and up projections",
    "down": "the down projection",
    "down_norm": "the norm after the MLP",
    "output": "the residual stream after the MLP",
    "norm": "the final norm",
    "logits": "logits",
    "logprobs": "log-probs",
}
"""The last part of a value's name, and the operation that computed it, in the order of a layer."""


@dataclass(frozen=True)
class Divergence:
    """A value beyond its bound. `layer` None: outside of the layers."""

    layer: int | None
    operation: str
    distance: float
    bound: float

    @property
    def place(self) -> str:
        return self.operation if self.layer is None else f"layer {self.layer}: {self.operation}"

    def __str__(self) -> str:
        numbers = f"off by {self.distance:.1e}, rounding explains {self.bound:.1e}"
        return f"{self.place}, {OPERATIONS[self.operation]}: {numbers}"


def first_divergence(reference: Values, side: Values, computing: str) -> Divergence | None:
    """The first of the values that both sides name, in the order in which the reference computed them, whose
    distance is over its bound; None: there is none. What comes after it is of no interest.

    `computing`: the format of the side's matrix products, a key of `BOUNDS`."""
    layer = 0
    for name, expected in reference.items():
        *of_layer, operation = name.removeprefix("layers.").split(".")
        layer = int(of_layer[0]) if of_layer else layer
        if name not in side:
            continue
        bound = BOUNDS[computing] * math.sqrt(1 + layer)
        distance = _distance(expected, side[name])
        if not distance <= bound:  # NaN is no number within it
            return Divergence(layer if of_layer else None, operation, distance, bound)
    return None


def _distance(expected: NDArray[Any], computed: NDArray[Any]) -> float:
    """The largest relative distance of a token: its difference by its length, (T, width). Of log-probs, (T,):
    in nats, or relative where they are below -1."""
    if expected.shape != computed.shape:
        return math.inf
    if expected.ndim == 1:
        return float(np.max(np.abs(computed - expected) / np.maximum(1, np.abs(expected))))
    lengths = np.linalg.norm(expected, axis=1)
    return float(np.max(np.linalg.norm(computed - expected, axis=1) / np.maximum(lengths, 1e-30)))


def logprob_gap(reference: Values, side: Values) -> tuple[float, float]:
    """The largest and the mean difference of the sequence's log-probs, in nats."""
    gaps = np.abs(side["logprobs"] - reference["logprobs"])
    return float(gaps.max()), float(gaps.mean())


# ---------------------------------------------------------------- sequence


@dataclass(frozen=True, eq=False)
class ProbedSequence:
    """`recorded`: log-probs that the engine of the run reported for the last tokens; None: nothing to compare
    with. `why`: the reason."""

    tokens: list[int]
    recorded: NDArray[np.float64] | None = None
    why: str = "the ledger has none of this version"


def random_sequence(config: Config, model: Path, num_tokens: int) -> ProbedSequence:
    """Uniformly random tokens, the same for the same seed of the run."""
    vocab = read_model_config(model).get("vocab_size")
    if not isinstance(vocab, int):
        raise DataError(f"{model / 'config.json'} has no `vocab_size`: give the directory of a decoder")
    return ProbedSequence(np.random.default_rng(config.seed).integers(0, vocab, num_tokens).tolist())


def recorded_sequence(config: Config, ledger: Path, version: int, num_tokens: int) -> ProbedSequence | None:
    """The first trajectory that `version` began, as far as it sampled it, and at most `num_tokens`.
    None: there is none."""
    with LedgerReader(ledger) as reader:
        for group in reader.groups():
            for member in group.members:
                tokens, logprobs = list(member.columns.tokens), member.columns.logprobs
                first, count = member.columns.runs[0] if tokens else (-1, 0)
                if first != version:
                    continue
                whole = [*group.prompt, *tokens[:count]][:num_tokens]
                if why := _incomparable(config, len(group.prompt), len(whole)):
                    return ProbedSequence(whole, None, why)
                num_sampled = len(whole) - len(group.prompt)
                return ProbedSequence(whole, np.asarray(logprobs[:num_sampled], np.float64))
    return None


def _incomparable(config: Config, prompt: int, tokens: int) -> str:
    sampling = Sampling(**dict(config.sampling))
    if sampling.cuts or sampling.edits:
        return "`sampling` changes the distribution by more than its temperature"
    if config.rollout.quantization is not None:
        return f"replicas compute with `rollout.quantization` ({config.rollout.quantization})"
    return "" if prompt < tokens else f"its prompt has {prompt} tokens: raise --tokens"
