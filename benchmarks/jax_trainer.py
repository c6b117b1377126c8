"""The trainer in JAX beside the trainer in torch, on the same batches of the quickstart's shape.

    .venv-jax/bin/python benchmarks/jax_trainer.py [--model 128x4] [--steps 6] [--rounds 3] [--json]

step_over_torch    seconds of a step in JAX over those in torch, medians of interleaved rounds. torch has the
                   threads that OMP_NUM_THREADS says, JAX has all cores
compilations       programs that were compiled for all steps; compile_s: seconds of it
torch_error_max    largest distance of a weight from torch's after `--steps` steps
mesh_error_max     the same between one device and eight simulated devices (shard 4 x tensor 2)
publish_over_copy  seconds of a publication until training may go on, over those of a plain copy of the bytes,
                   with a model of PUBLISHED; publish_s: seconds of it with `--model`
restart_s          seconds from a new process to its first step, with the programs of this one kept on disk
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common import median, parser_of, report, require, say, sized

PROMPTS, GROUP, PROMPT, COMPLETION = sized((16, 8, 12, 14), (2, 4, 6, 8))
WEIGHTS, MESH = "one_device.npz", "mesh_error_max"
VOCAB, PUBLISHED = 64, sized("1024x8", "64x2")


def make_batch(version: int) -> Any:
    """Groups of random completions, as a relay's replicas would send them."""
    import numpy as np

    from millrace.core.completion.columns import TokenColumns
    from millrace.core.types import Batch, TrainGroup, TrainSequence

    random = np.random.default_rng(version)

    def sequence(number: int) -> TrainSequence:
        length = int(random.integers(2, COMPLETION + 1))
        tokens = random.integers(0, VOCAB, length).tolist()
        columns = TokenColumns.of(tokens, random.uniform(-5, -3, length).tolist(), [version] * length)
        return TrainSequence(number, columns, mask=None, reward=float(random.integers(0, 2)), truncated=False)

    groups = []
    for group in range(PROMPTS):
        prompt = random.integers(0, VOCAB, PROMPT).tolist()
        groups.append(TrainGroup(group, prompt, [sequence(group * GROUP + i) for i in range(GROUP)]))
    return Batch(version, groups)


def settings_of(dtype: Any) -> Any:
    from millrace.config.tables.training import Optimizer
    from millrace.trainer.batch.batch_step import StepSettings

    return StepSettings(Optimizer(lr=1e-3, eps=1e-4), 8192, COMPLETION, 1.0, dtype, dtype)


def torch_trainer(path: Path) -> Any:
    import torch

    from millrace.algorithms import build
    from millrace.config.tables.algorithms import PolicyGradient
    from millrace.trainer.model import load_model
    from millrace.trainer.trainer import PolicyTrainer

    model = load_model(path, torch.device("cpu"))
    return PolicyTrainer(model, build(PolicyGradient()), settings_of(torch.float32))


def jax_policy(path: Path, shard: int = 1, tensor: int = 1) -> Any:
    import jax
    import jax.numpy as jnp

    from millrace.algorithms import build
    from millrace.config.tables.algorithms import PolicyGradient
    from millrace_jax.decoder import read_architecture
    from millrace_jax.devices.mesh import make_mesh
    from millrace_jax.policy import JaxPolicy
    from millrace_jax.weights import read_weights

    shape, mesh = read_architecture(path), make_mesh(shard, tensor, 1, jax.devices()[: shard * tensor])
    weights = read_weights(path, shape, mesh)
    return JaxPolicy(shape, weights, build(PolicyGradient()), settings_of(jnp.float32), mesh=mesh)


def step_s(trainer: Any, version: int, directory: Path) -> float:
    batch = make_batch(version)
    began_s = time.perf_counter()
    trainer.step(batch, rejected_dir=directory)
    return time.perf_counter() - began_s


def weights_of(policy: Any) -> dict[str, Any]:
    import numpy as np

    from millrace_jax.weights import slices

    return {name: np.asarray(x) for name, x in slices(policy.state.weights, policy.shape)}


def error_max(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(float(abs(one[name] - other[name]).max()) for name in one)


def published_and_copied_s(policy: Any) -> tuple[float, float]:
    """Seconds of a publication into a relay's slot in this process, and of a copy of as many bytes."""
    import asyncio

    import numpy as np

    from millrace.weights.relay import RelayWorker
    from millrace.weights.ring import open_writer
    from millrace_jax.publisher import JaxPublisher
    from millrace_jax.weights import shapes

    publisher, relay = JaxPublisher(shapes(policy.shape), "float32"), RelayWorker("relay", slots=3)
    endpoint = asyncio.run(relay.open(publisher.weights_bytes))
    writer = open_writer(endpoint)
    source, into = (np.ones(publisher.weights_bytes, np.uint8) for _ in range(2))

    def seconds(work: Callable[[], object]) -> float:
        began_s = time.perf_counter()
        work()
        return time.perf_counter() - began_s

    published, copied = list[float](), list[float]()
    weights = policy.state.weights
    for version in range(sized(15, 3)):
        published.append(seconds(partial(publisher.begin, lambda: writer, endpoint, version, weights)))
        publisher.result()
        copied.append(seconds(lambda: np.copyto(into, source)))
    return median(published), median(copied)


def on_mesh(path: Path, directory: Path, steps: int) -> None:
    """Write the largest distance from the weights of one device."""
    import numpy as np

    policy = jax_policy(path, 4, 2)
    for version in range(steps):
        step_s(policy, version, directory)
    with np.load(directory / WEIGHTS) as found:
        (directory / MESH).write_text(str(error_max(dict(found), weights_of(policy))))


def restart_s(path: Path, cache: Path) -> float:
    """The seconds of a new process until it has made a step."""
    began_s = time.perf_counter()
    subprocess.run([sys.executable, __file__, "--first-step", str(path), str(cache)], check=True, timeout=600)
    return time.perf_counter() - began_s


def first_step(path: Path, cache: Path) -> None:
    from millrace_jax.devices.programs import Programs

    programs = Programs(cache)
    step_s(jax_policy(path), 0, cache)
    programs.seal()


def measure(path: Path, directory: Path, steps: int, rounds: int) -> dict[str, float]:
    import numpy as np

    from millrace_jax.policy import compilations

    counted = compilations()
    ours, torch_s, ours_s = jax_policy(path), list[float](), list[float]()
    theirs = torch_trainer(path)
    for version in range(steps):
        step_s(theirs, version, directory)
        step_s(ours, version, directory)
    named = {name: x.detach().numpy().copy() for name, x in theirs.model.named_parameters()}
    compiled, compile_s = counted.count, counted.seconds
    found = weights_of(ours)
    for index in range(rounds):
        for version in range(steps * (index + 1), steps * (index + 2)):
            torch_s.append(step_s(theirs, version, directory))
            ours_s.append(step_s(ours, version, directory))
        say(f"round {index + 1} of {rounds}")
    np.savez(directory / WEIGHTS, **found)
    return {
        "step_over_torch": median(ours_s) / median(torch_s),
        "step_s": median(ours_s),
        "torch_step_s": median(torch_s),
        "compilations": compiled,
        "compile_s": compile_s,
        "torch_error_max": error_max(named, found),
        "publish_s": published_and_copied_s(ours)[0],
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default=sized("128x4", "32x1"), help="hidden size x layers")
    parser.add_argument("--steps", type=int, default=sized(6, 2))
    parser.add_argument("--rounds", type=int, default=sized(3, 1))
    parser.add_argument("--first-step", nargs=2, type=Path, help="one step of the model in a directory")
    parser.add_argument("--on-mesh", nargs=2, type=Path, help="a model's steps on eight simulated devices")
    options = parser.parse_args()
    from millrace.devices.inventory import simulate_devices

    require(find_spec("jax"), "JAX is not here: use the Python that `make setup-jax` makes")
    if options.first_step:
        first_step(*options.first_step)
        return
    if options.on_mesh:
        simulate_devices(8)
        on_mesh(*options.on_mesh, options.steps)
        return
    with tempfile.TemporaryDirectory() as name:
        path, directory = Path(name) / "model", Path(name)
        make_model(path, *map(int, options.model.split("x")))
        result = measure(path, directory, options.steps, options.rounds)
        again = [sys.executable, __file__, "--steps", str(options.steps), "--on-mesh", str(path), name]
        subprocess.run(again, check=True, timeout=600)
        result["mesh_error_max"] = float((directory / MESH).read_text())
        make_model(path.with_name("published"), *map(int, PUBLISHED.split("x")))
        published_s, copied_s = published_and_copied_s(jax_policy(path.with_name("published")))
        result["publish_over_copy"] = published_s / copied_s
        first = restart_s(path, directory / "programs")
        result |= {"first_start_s": first, "restart_s": restart_s(path, directory / "programs")}
    report(result, as_json=options.json)


def make_model(path: Path, hidden: int, layers: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)


if __name__ == "__main__":
    main()
