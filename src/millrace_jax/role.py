"""The trainer in JAX as a worker. JAX is imported when the first weights are loaded, with the devices of this
process. On several hosts each has one process, which gets the same commands in the same order as the others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from millrace import __version__
from millrace.core import model_version
from millrace.core.types import Endpoint, TrainerState
from millrace.devices.inventory import computes_on_tpu, simulate_devices
from millrace.devices.low_rank import BASE
from millrace.placement.number_format import cpu_model
from millrace.trainer.files.companion_files import read_tokenizer
from millrace.trainer.files.directories import atomic_directory, sweep
from millrace.trainer.ranks.mesh import ALONE, Ranks, agreed, first_alone
from millrace.trainer.worker import CHECKPOINTS, TrainerWorker

if TYPE_CHECKING:
    from millrace_jax.devices.programs import Programs


NO_ARITHMETIC = "python", "programs"
"""Settings of the trainer that change no rounding."""


class JaxTrainer(TrainerWorker[Any]):
    """`device`: "cpu", or JAX chooses. On a CPU a process simulates the devices of its host. A placement
    knows no TPUs. It says "cpu" of a host with TPUs, and JAX takes them if `model.device` is "auto".
    `device_share`: of the memory of each device. Other arguments: see `TrainerWorker`."""

    def __init__(
        self,
        config: dict[str, Any],
        run_dir: str,
        open_writer: str,
        device: str = "auto",
        device_share: float = 1.0,
    ) -> None:
        super().__init__(config, run_dir, open_writer)
        if computes_on_tpu(self._config.model.device):
            add_flags(TPU_VARIABLE, TPU_FLAGS)
        elif device == "cpu":
            simulate_devices(self._config.trainer.ranks_of_host)
        else:
            add_flags(GPU_VARIABLE, GPU_FLAGS)
            limit_memory(device_share)
            if self._config.model.dtype == "float32":  # JAX's own is TF32, and replicas compute in float32
                os.environ.setdefault(PRECISION, "highest")
        self._ranks: Ranks = ALONE
        self._programs: Programs | None = None
        self._tokenizer: dict[str, bytes] = {}
        self._constants: dict[str, Any] = {}  # tensors that every version has, beside the trained weights

    def _load(self, checkpoint: str | None) -> TrainerState:
        import jax

        from millrace_jax.adapter_tree import base_digits, version_dims
        from millrace_jax.devices.processes import join
        from millrace_jax.devices.programs import Programs
        from millrace_jax.files.checkpoint import JaxSaver, load_checkpoint
        from millrace_jax.files.load_policy import load_policy
        from millrace_jax.publisher import JaxPublisher
        from millrace_jax.weights import shapes

        self._unload()
        self._ranks = ranks = join(self._config.trainer.hosts)
        self._prunes = ranks.rank == 0
        if self._config.trainer.programs is not None and self._programs is None:
            self._programs = Programs(self._run_dir / self._config.trainer.programs)
            if ranks.rank == 0:  # the process that writes them
                self._programs.seal_each()
        config = self._config
        self._tokenizer = self._tokenizer or read_tokenizer(config.model.path)
        agreed(ranks, self._sweep)
        trainer = load_policy(config)
        if checkpoint is not None:
            load_checkpoint(trainer, Path(checkpoint), ranks)
        self._trainer, self._saver = trainer, JaxSaver(ranks)
        published, computing = trainer.settings.published, trainer.settings.dtype
        dims, self._constants = shapes(trainer.shape), {}
        if trainer.base is not None:
            digits = base_digits(trainer.base, trainer.shape, published.name)
            dims = version_dims(trainer.shape, config.adapter)
            self._constants = {BASE: jax.device_put(digits)}
        self._publisher = publisher = JaxPublisher(dims, published, ranks, current=self._published_weights)
        trainer.before_update = self._before_update
        text = f"{published.name}, products in {computing.name}; JAX {jax.__version__}"
        return TrainerState(trainer.version, publisher.weights_bytes, text, self._arithmetic())

    def _sweep(self) -> None:
        """Sweep in the first process. Other processes begin to write after the sweep."""
        for directory in (self._run_dir, self._run_dir / CHECKPOINTS) if self._prunes else ():
            sweep(directory)

    def _before_update(self) -> None:
        self._saver.wait_read()
        self._publisher.before_update()

    def _published_weights(self) -> Any:
        return self._ready().state.weights | self._constants

    def _arithmetic(self) -> str:
        """See `trainer.role.arithmetic`. Empty on accelerators: the order of their sums is chance."""
        import jax

        if jax.default_backend() != "cpu":
            return ""
        facts = f"Millrace {__version__}", f"JAX {jax.__version__}", cpu_model()
        settings = (f"trainer.{k} {value}" for k, value in self._config.trainer if k not in NO_ARITHMETIC)
        budget = f"batch.token_budget {self._config.batch.token_budget}"
        return ", ".join((*facts, *settings, budget, f"model.recompute {self._config.model.recompute}"))

    def _publish(self, endpoints: Sequence[Endpoint]) -> None:
        trainer, endpoint = self._ready(), endpoints[self._ranks.host]
        self._publisher.begin(
            lambda: self._writer_to(endpoint),
            endpoint,
            trainer.version,
            self._published_weights(),
        )

    def _checkpoint(self, directory: str) -> None:
        trainer, began_s = self._ready(), time.perf_counter()
        agreed(self._ranks, lambda: self._refuse_changed(trainer.version))
        self._saver.begin(trainer, Path(directory), began_s)

    def _export(self, directory: str) -> None:
        from millrace_jax.adapter_tree import whole_model
        from millrace_jax.files.model_directory import save_model
        from millrace_jax.weights import on_host

        trainer, model = self._ready(), self._config.model
        weights = on_host(trainer.state.weights, trainer.mesh, self._ranks)

        def write() -> None:
            tensors = whole_model(trainer.base, weights, trainer.shape)
            with atomic_directory(Path(directory), marker="config.json") as path:
                save_model(tensors, self._tokenizer, path, model_path=Path(model.path), dtype=model.dtype)
                model_version.write(path, trainer.version)

        first_alone(self._ranks, write)

    def _vocabulary(self) -> int:
        return int(self._ready().shape.vocab)


TPU_VARIABLE, GPU_VARIABLE = "LIBTPU_INIT_ARGS", "XLA_FLAGS"


class Flag(NamedTuple):
    name: str
    value: str
    reason: str


TPU_FLAGS = (
    Flag("xla_enable_async_all_gather", "true", "a gather starts early, and its end is waited for late"),
    Flag("xla_tpu_enable_async_collective_fusion", "true", "collectives are fused with products beside them"),
    Flag("xla_tpu_enable_async_collective_fusion_fuse_all_gather", "true", "gathers too"),
    Flag("xla_tpu_enable_async_collective_fusion_multiple_steps", "true", "one gather spans products"),
    Flag("xla_tpu_overlap_compute_collective_tc", "true", "the tensor core computes meanwhile"),
)
GPU_FLAGS = (Flag("xla_gpu_enable_triton_gemm", "false", "30 kernels a product are compiled and tried"),)
"""Not measured on a GPU. The autotuner took 3.7 minutes for 12 products on an H100 with 4 threads
(https://github.com/openxla/xla/pull/13108). Without these kernels the products are cuBLAS's."""


def add_flags(variable: str, flags: Sequence[Flag]) -> None:
    """Add `flags` to this variable of the environment. JAX must not be imported yet.

    A flag that the user has set keeps its value. With the variable set and empty, no flag is added."""
    given = os.environ.get(variable)
    if given is not None and not given.strip():
        return
    words = (given or "").split()
    named = {word.lstrip("-").partition("=")[0] for word in words}
    ours = [f"--{flag.name}={flag.value}" for flag in flags if flag.name not in named]
    os.environ[variable] = " ".join([*words, *ours])


FRACTIONS = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"  # the new name and the old one
PREALLOCATE, PRECISION = "XLA_PYTHON_CLIENT_PREALLOCATE", "JAX_DEFAULT_MATMUL_PRECISION"
POOL_SHARE, POOL_SHARE_MAX = 0.95, 0.9  # of its share, and of a GPU


def limit_memory(device_share: float) -> None:
    """Let JAX take its share of a GPU, and no more. JAX must not be imported yet.

    Alone, JAX takes the memory at once. Beside replicas it takes memory as it needs it. The rest of a share
    is for CUDA and for programs, which are outside of JAX's pool. What the user has set stays. JAX refuses
    both names of the fraction together."""
    if not any(name in os.environ for name in FRACTIONS):
        os.environ[FRACTIONS[0]] = f"{min(POOL_SHARE * device_share, POOL_SHARE_MAX):.3f}"
    if device_share < 1:
        os.environ.setdefault(PREALLOCATE, "false")
