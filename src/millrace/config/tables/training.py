"""`[model]`, `[trainer]`, `[batch]`, `[optimizer]`: what is trained, from what, and how."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import Field, model_validator

from millrace.config.tables.section import COUNT_MAX, Count, CountOrZero, Decay, Device, Section
from millrace.core.errors import ConfigError


class Model(Section):
    path: str
    """A Hugging Face model directory: config, safetensors weights, tokenizer. Or a run, or a checkpoint of
    one: see docs/sweeps.md."""
    date: str | None = Field(default=None, pattern=r"^\d{4}-\d{2}-\d{2}$")
    """The date that a chat template writes, as `2026-11-28`. `"none"`: the day on which the run began. It is
    recorded with the run, so prompts stay equal after midnight and when the run is resumed."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of published weights and of products. Without bfloat16 instructions a CPU computes
    products in float32. The trainer's master weights are always float32."""
    device: Device = "auto"
    """`cpu`, `cuda`, `cuda:N` (GPU number N alone, from 0), or `auto`: cuda where there is a GPU."""
    recompute: bool = False
    """The trainer keeps only each layer's input, and computes the rest again for the gradient. The gradient
    is the same. Memory falls to a fraction, and work rises by a third."""


class Adapter(Section):
    rank: int | None = Field(default=None, ge=1, le=4096)
    """Train an adapter of this rank instead of the weights, and publish it alone. `"none"`: all weights are
    trained. Not with `trainer.tensor`, but in JAX."""
    kind: Literal["lora", "dora"] = "lora"
    """`"lora"`: the product of two thin matrices beside each weight. `"dora"`: the length of each row too."""
    alpha: float = Field(default=32.0, gt=0, le=1e6)
    """The product counts `alpha` / `rank` times."""
    targets: tuple[str, ...] = ()
    """Matrices that get one, by the end of their names: `["q_proj", "v_proj"]`. Empty: all of the layers."""

    @property
    def scale(self) -> float | None:
        """None: there is no adapter."""
        return None if self.rank is None else self.alpha / self.rank

    def layers(self, matrices: Iterable[str]) -> list[str]:
        """Those of a model's matrices in layers that get an adapter. Raises: ConfigError: it has experts, or
        none of a name that `targets` says."""
        names = [name for name in matrices if ".layers." in name]
        if any(".experts." in name for name in names):
            raise ConfigError(
                f"`adapter.rank` ({self.rank}): this model has experts, which get no adapters.\n"
                '  Set it to "none"'
            )
        there = {name.rpartition(".")[2] for name in names}
        if unknown := sorted(set(self.targets) - there):
            raise ConfigError(
                f"`adapter.targets`: no layer of this model has {', '.join(unknown)}.\n"
                f"  Layers have {', '.join(sorted(there))}"
            )
        wanted = set(self.targets) or there
        return [name for name in names if name.rpartition(".")[2] in wanted]


class TrainerSection(Section):
    backend: Literal["torch", "jax"] = "torch"
    """What computes. `"jax"`: on TPUs, and on CPUs and GPUs too. See docs/jax.md."""
    python: str | None = None
    """Path of the Python that runs a trainer in JAX. It needs no torch. `"none"`: Millrace's Python."""
    programs: str | None = "programs"
    """Directory in which a trainer in JAX keeps its compiled programs: in the run directory, or anywhere, for
    several runs. So a resume compiles little. `"none"`: they are not kept."""
    shard: int = Field(default=1, ge=1, le=4096)
    """Ranks among which weights, optimizer and the rows of a batch are divided (FSDP). A rank has a
    device of its own. The trainer has `shard` x `tensor` x `sequence` of them. They change rounding,
    speed and memory, and no gradient."""
    tensor: int = Field(default=1, ge=1, le=64)
    """Ranks among which each matrix and the vocabulary are divided (tensor parallelism)."""
    sequence: int = Field(default=1, ge=1, le=64)
    """Ranks among which the tokens of each row are divided (Ulysses), for long sequences."""

    hosts: int = Field(default=1, ge=1, le=4096)
    """Hosts among which the ranks are divided evenly. Ranks that share a layer are neighbours, and neighbours
    share a host. Each host's relay gets what its own ranks hold."""

    quantization: Literal["fp8"] | None = None
    """`"fp8"`: the matrices of the layers compute in float8_e4m3fn, forward and for the gradients of their
    inputs. Gradients of weights stay in bfloat16. For one rank, `model.dtype` bfloat16, and a GPU of compute
    capability 8.9 or more; not with an adapter, experts or `trainer.offload`. See reports/fp8.md."""
    offload: bool = False
    """Weights, gradients and optimizer lie in the host's memory, and the CPU makes the update. A GPU holds
    what it computes with. Without a GPU this saves nothing."""
    standby: bool = False
    """A second trainer starts beside the first, and goes on from the checkpoint when that dies. Until then it
    has its process, its device and its communicators, and no weights. See reports/goodput.md."""

    @property
    def ranks(self) -> int:
        return self.shard * self.tensor * self.sequence

    @property
    def ranks_of_host(self) -> int:
        return self.ranks // self.hosts

    @property
    def processes_of_host(self) -> int:
        """JAX has one process for all devices of a host, torch a process a device."""
        return self.ranks_of_host if self.backend == "torch" else 1

    @model_validator(mode="after")
    def _divides(self) -> TrainerSection:
        if self.ranks % self.hosts:
            raise ValueError(
                f"`trainer.hosts` ({self.hosts}) must divide the trainer's {self.ranks} ranks: "
                "`trainer.shard` x `trainer.tensor` x `trainer.sequence`"
            )
        return self


class BatchShape(Section):
    prompts: Count = 8
    """Groups per version."""
    group_size: int = Field(default=8, ge=2, le=COUNT_MAX)
    """Trajectories per group."""
    screen_samples: CountOrZero = 0
    """Screening: a group starts with this number of trajectories, 2 or more. Its rest starts only if their
    rewards differ. 0: a group starts with all of its trajectories. See docs/data.md."""
    token_budget: int = Field(default=8192, ge=64, le=COUNT_MAX)
    """Tokens per packed micro-batch in the trainer. The budget changes speed and memory, never a gradient."""
    minibatches: int = Field(default=1, ge=1, le=4096)
    """Parts of a batch, of whole groups. Each gets an optimizer step of its own, and all together make one
    version. With several steps the clip of an algorithm acts."""
    epochs: int = Field(default=1, ge=1, le=100)
    """How often a batch is trained on before the version is published."""

    @model_validator(mode="after")
    def _leaves_a_rest(self) -> BatchShape:
        if self.screen_samples and not 2 <= self.screen_samples < self.group_size:
            raise ValueError(
                f"`batch.screen_samples` ({self.screen_samples}) must be 0, or at least 2 and less than "
                f"`batch.group_size` ({self.group_size}): one reward says nothing, and a group needs a rest"
            )
        return self


class Optimizer(Section):
    rule: Literal["adamw", "muon"] = "adamw"
    """`"muon"`: for the matrices of the layers, with AdamW for the rest. One rank only."""
    lr: float = Field(default=1e-6, ge=0, le=1)
    """Learning rate after the warm-up. 0 trains nothing and is for measurements only."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after the warm-up, until version `decay_steps`."""
    decay_steps: Count | None = None
    """The version from which the rate is `lr` x `lr_end`. It is not `steps`, which may grow on a resume.
    `"none"`: the rate stays."""
    lr_end: float = Field(default=0.0, ge=0, le=1)
    """The last learning rate, as a fraction of `lr`."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """AdamW's decay of the first and of the second moment."""
    eps: float = Field(default=1e-8, ge=1e-30, le=1)
    """AdamW's epsilon."""
    weight_decay: float = Field(default=0.0, ge=0, le=1)
    """Decoupled weight decay, on matrices. Norms, biases, sinks and other scales have none, also where those
    of several experts or heads are one matrix."""
    warmup_steps: CountOrZero = 0
    """Versions over which the learning rate rises linearly."""
    grad_clip: float | None = Field(default=1.0, ge=1e-6, le=1e6)
    """Largest global gradient norm. `"none"`: no clipping."""
    states: Literal["float32", "8bit"] = "float32"
    """AdamW's moments: 8 bytes a parameter, or 2 with `"8bit"` (extra `millrace[torchao]`, one rank). Master
    weights and gradients stay float32."""

    @model_validator(mode="after")
    def _falls(self) -> Optimizer:
        if (self.decay == "constant") != (self.decay_steps is None):
            steps = '"none"' if self.decay_steps is None else self.decay_steps
            raise ValueError(
                f'`optimizer.decay` ("{self.decay}") and `optimizer.decay_steps` ({steps}) belong together.\n'
                "  Set both, or neither"
            )
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"`optimizer.decay_steps` ({self.decay_steps}) must be more than `optimizer.warmup_steps` "
                f"({self.warmup_steps}): the rate rises before it falls"
            )
        if self.rule == "muon" and self.states != "float32":
            raise ValueError(
                f'`optimizer.states` ("{self.states}") is for `optimizer.rule` "adamw", and it is "muon"'
            )
        return self
