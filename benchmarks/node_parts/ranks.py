"""The trainer's ranks, without the rest of a run: gradients, speed and memory.

Each rank is a process with the trainer's role, as in a run. On a GPU ranks exchange tensors by NCCL, in a
rehearsal by gloo.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from ceilings import fastest, peak_rates
from memory import resident
from rank_memory import run_ranks, said

from gpu import flops_of, make_batch
from millrace.core.errors import ConfigError
from millrace.devices.device import torch_device
from millrace.trainer.role import TorchTrainer
from millrace.trainer.trainer import PolicyTrainer
from node_parts.setting import LARGE_PARAMETERS, Figures, Note, Setting

NODE = str(Path(__file__).parents[1] / "node.py")
RANKS = 4


@dataclass(frozen=True)
class Job:
    """The work of every rank. `gradient`: a file for the gradient of the batch; empty: none is written."""

    row_tokens: int
    num_rows: int
    rounds: int
    product: int
    gradient: str = ""


# ------------------------------------------------------------ parts


def fsdp_part(setting: Setting, note: Note) -> None:
    """A batch's loss and gradient on four ranks (FSDP) against one process; speed and MFU of both."""
    rows: dict[str, Figures] = {}
    gradients = {ranks: setting.scratch / f"gradient-{ranks}.pt" for ranks in (1, RANKS)}
    for ranks, gradient in gradients.items():
        job = job_of(
            setting,
            setting.sized(4096, 64),
            rounds=setting.sized(5, 1),
            rows_of_rank=setting.sized(4, 2),
            gradient=str(gradient),
        )
        rows[str(ranks)] = trained(setting, setting.small(), ranks, job)
        note({"ranks": rows})
    one, four = rows.values()
    note({
        "loss_difference": abs(four["loss"] - one["loss"]),
        "gradient_error": difference(*gradients.values()),
        "speedup": one["step_s"] / four["step_s"],
    })  # fmt: skip


def mfu_part(setting: Setting, note: Note) -> None:
    """The share of the GPUs' arithmetic that a step of the large model uses, on four ranks."""
    job = job_of(
        setting, setting.sized(4096, 64), rounds=setting.sized(3, 1), rows_of_rank=setting.sized(8, 1)
    )
    figures = trained(setting, setting.large(), RANKS, job)
    large = figures["parameters"] >= LARGE_PARAMETERS
    note(figures | ({"mfu_7b": figures["mfu"]} if large else {}))


def offload_part(setting: Setting, note: Note) -> None:
    """Memory of a trainer whose states lie on the host (`trainer.offload`): while it loads, between steps,
    and in a step. `planned_bytes`: what `--dry-run` says of the rank's peak. On a host without room for the
    large model, of the small one."""
    job = job_of(setting, setting.sized(4096, 64), rounds=setting.sized(2, 1), rows_of_rank=1)
    config = configuration(setting, setting.large(), 1, job) | {"trainer": {"offload": True}}
    try:
        planned = said(config)[0]
    except ConfigError as refusal:
        note({"large_does_not_fit": str(refusal)})
        config |= configuration(setting, setting.small(), 1, job) | {"trainer": {"offload": True}}
        planned = said(config)[0]
    note({"planned_bytes": planned})
    note(run(config, 1, job))


def job_of(
    setting: Setting, row_tokens: int, *, rounds: int, rows_of_rank: int = 4, gradient: str = ""
) -> Job:
    """`rows_of_rank`: of each of `RANKS`. One process has the rows of all."""
    return Job(row_tokens, rows_of_rank * RANKS, rounds, setting.sized(8192, 256), gradient)


def configuration(setting: Setting, model: Path, ranks: int, job: Job) -> Figures:
    """Every row of the batch is a micro-batch. Activations are kept."""
    return setting.configuration(
        model,
        ranks=ranks,
        model={"recompute": False},
        batch={"token_budget": job.row_tokens},
        sampling={"max_tokens": job.row_tokens},
        rollout={"max_sequence_tokens": 2 * job.row_tokens},
    )


def trained(setting: Setting, model: Path, ranks: int, job: Job) -> Figures:
    return run(configuration(setting, model, ranks, job), ranks, job)


def run(config: Figures, ranks: int, job: Job) -> Figures:
    """Figures of the first rank; of memory those of the fullest. Raises: RuntimeError: a rank failed."""
    try:
        figures = [json.loads(line) for line in run_ranks(NODE, config, ranks, json.dumps(asdict(job)))]
    except SystemExit as error:
        raise RuntimeError(str(error)) from None
    return {
        name: max(one[name] for one in figures) if name.endswith("_bytes") else value
        for name, value in figures[0].items()
    }


def difference(one: Path, other: Path) -> float:
    """|g - h| / |h| of two files of gradients."""
    due, found = (torch.load(path, mmap=True) for path in (one, other))
    assert due.keys() == found.keys()
    wrong = math.fsum(float((found[name] - due[name]).double().square().sum()) for name in due)
    return math.sqrt(wrong / math.fsum(float(due[name].double().square().sum()) for name in due))


# ------------------------------------------------------------ one rank


def one_rank(config: Figures, directory: Path, job: Job) -> None:
    """In a process of its own. Prints the figures."""
    name = config["model"]["device"]
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    name = f"cuda:{os.environ['LOCAL_RANK']}" if name == "cuda" and several else name
    figures = asyncio.run(work(config, directory, name, job))
    print(json.dumps(figures), flush=True)
    os._exit(0)  # gloo's threads outlive what they talk about


async def work(config: Figures, directory: Path, name: str, job: Job) -> Figures:
    role = TorchTrainer(config, str(directory / "run"), "millrace.weights.ring:open_writer", name)
    memory = Memory(torch_device(name))
    memory.restart()
    await role.load(None)
    figures: Figures = {"loading_peak_bytes": memory.peak_bytes, "asleep_bytes": memory.now_bytes}
    trainer = role._trainer
    assert trainer is not None
    memory.restart()
    return figures | measured(trainer, memory, directory, job)


def measured(trainer: PolicyTrainer, memory: Memory, directory: Path, job: Job) -> Figures:
    batch, ranks = make_batch(job.row_tokens, job.num_rows), trainer.ranks
    summary, norm = trainer.measure(batch)
    if job.gradient:
        save_gradient(trainer, Path(job.gradient))
    trainer.forget_gradient()
    step_s = fastest(
        lambda: trainer.step(batch, rejected_dir=directory), device=memory.device, rounds=job.rounds
    )
    flops, tokens = flops_of(trainer, batch, job.row_tokens)
    figures = {
        "loss": summary.loss,
        "grad_norm": norm,
        "step_s": step_s,
        "tokens_per_s": tokens / step_s,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "step_peak_bytes": memory.peak_bytes,
        "between_steps_bytes": memory.now_bytes,
    }
    rates, each = peak_rates(memory.device, job.product), flops / step_s / ranks.world
    return figures | {"mfu": each / rates["peak_flops"], "over_product": each / rates["product_flops"]}


def save_gradient(trainer: PolicyTrainer, path: Path) -> None:
    """Whole gradients in float32, by the first rank. A collective call."""
    gradients = {}
    for name, parameter in trainer.model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        if trainer.ranks.rank == 0:
            gradients[name] = whole.float().cpu()
    if trainer.ranks.rank == 0:
        torch.save(gradients, path)


class Memory:
    """Of a device: what this process has allocated there. Of the CPU: its resident memory beyond that at the
    beginning."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._before = 0 if device.type == "cuda" else resident("VmRSS")

    def restart(self) -> None:
        """The peak counts from here."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            Path("/proc/self/clear_refs").write_text("5")

    @property
    def peak_bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resident("VmHWM") - self._before

    @property
    def now_bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        return resident("VmRSS") - self._before
