"""A training checkpoint: a directory that is complete or does not exist. Its blocks are copied in memory
first, so that no update waits for the disk.

`manifest.json` has the version, and the size and digest of every other file. So a damaged checkpoint is
refused. A checkpoint does not record which rank had which block: any number of ranks may go on from it.

    v00000012/
      manifest.json
      model.safetensors      float32 master weights; with an adapter, only the adapter's
      optimizer.safetensors  `{state}/{parameter}` per tensor; also the critic's and the drafter's
      rng.safetensors        torch's generators; those of rank 1 as `cpu.1`

Files of more than 4 GB are divided in Hugging Face's way: model-00001-of-00002.safetensors.

A copy takes a tenth of the time of a write. It is made during the forward passes of the next step, of a state
of `COPIED_BYTES_MIN` or more, where the host has room for it. A CPU computes a step for longer than it writes
the state: there is no copy.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread

import torch

from millrace.core.errors import DataError, boundary
from millrace.core.progress import count
from millrace.core.supported import DRAFTER
from millrace.core.types import CheckpointInfo
from millrace.devices.inventory import read_memory
from millrace.devices.large_memory import allocate, each
from millrace.trainer.adapted_linear import trained_weights
from millrace.trainer.drafter_training import DraftingTrainer
from millrace.trainer.files.checkpoint_manifest import (
    EARLIER,
    NAME,
    TORCH,
    CheckpointManifest,
    describe,
    directory_name,
    file_names,
    read_manifest,
    refuse_another_format,
    refuse_damaged,
    write_manifest,
)
from millrace.trainer.files.directories import atomic_directory
from millrace.trainer.files.tensor_files import TensorFile, fill, lay_out, make, open_tensors
from millrace.trainer.model import not_finite, rounded_weights
from millrace.trainer.optimizer import plain_tensors, rebuild_moments
from millrace.trainer.publish.rechecked import Overlapped
from millrace.trainer.ranks.blocks import OwnedBlock, copy_into, owned_blocks
from millrace.trainer.ranks.mesh import ALONE, Ranks, agreed, all_or_none
from millrace.trainer.trainer import PolicyTrainer
from millrace.trainer.value_head import PREFIX

LOG = logging.getLogger(__name__)

KINDS = ("model", "optimizer", "rng")
SLACK_BYTES = 64 << 20  # for generators, a critic, and the alignment of blocks in a copy


class Saver:
    """Saves everything that the next step of a trainer depends on, during that step.

    Nothing changes weights and optimizer until the next update. A large state of a GPU is copied in memory
    until then (`snapshot`), and written from the copy. Other states are written without a copy, and so is one
    without room for a copy: an update waits if it comes before the last byte is written. Weights that a step
    rounds are always copied before the step.
    Source: DataStates-LLM, arXiv:2406.10707 (lazy copies).
    """

    def __init__(self, optimizer: torch.optim.Optimizer, ranks: Ranks = ALONE) -> None:
        self._overlapped = Overlapped[CheckpointInfo]("await_saved", ranks)
        optimizer.register_step_pre_hook(lambda *_: self._overlapped.wait_read())
        self._copies: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self._snapshot = Snapshot(ranks)
        self._updated = False
        optimizer.register_step_post_hook(lambda *_: self._after_update(optimizer))

    def _after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """The first update makes the moments, so the size of the state is known from then on."""
        if not self._updated:
            self._snapshot.reserve(owned_blocks(_state_of(optimizer)), SLACK_BYTES)
        self._updated = True

    def begin(self, trainer: PolicyTrainer, directory: str | Path, began_s: float | None = None) -> None:
        """Save the present state of `trainer` as `directory`/v{version:08d}. The trainer may go on at once.

        `began_s`: the time from which on the trainer waits, by `time.perf_counter`; None: now.
        """
        began_s = began_s or time.perf_counter()
        self.wait()
        target = Path(directory) / directory_name(trainer.version)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the thread has a stream of its own
        files, blocks = _state(trainer, self._overlapped.ranks)
        blocks = self._without_rounded(trainer, blocks)
        self._overlapped.begin(partial(self._save, trainer.version, target, files, blocks, began_s), began_s)

    def _without_rounded(self, trainer: PolicyTrainer, blocks: list[OwnedBlock]) -> list[OwnedBlock]:
        settings, unchanging = trainer.settings, list[OwnedBlock]()
        rounded = rounded_weights(trainer.model, published=settings.published, computing=settings.dtype)
        for owned in blocks:
            if owned.name in rounded:
                key = owned.name, owned.start
                if key not in self._copies:
                    self._copies[key] = torch.empty_like(owned.block, device="cpu")
                owned = replace(owned, block=self._copies[key].copy_(owned.block))
            unchanging.append(owned)
        return unchanging

    def wait(self) -> None:
        """Wait until no checkpoint is being saved. An error is not raised here."""
        self._overlapped.wait()

    def forget(self) -> None:
        """Wait, and give back the memory of copies. The next checkpoint allocates new memory."""
        self.wait()
        self._copies.clear()
        self._snapshot.forget()

    def result(self) -> CheckpointInfo:
        """Wait for the checkpoint that was begun last.

        Raises: StorageError, or any other error that stopped the write, on this rank or another.
        """
        return self._overlapped.result()

    def _save(
        self, version: int, target: Path, files: list[TensorFile], blocks: list[OwnedBlock], began_s: float
    ) -> CheckpointInfo:
        ranks = self._overlapped.ranks
        if (copies := self._snapshot.of(blocks)) is not None:
            blocks = copies
            self._overlapped.release()
        with atomic_directory(target, marker=NAME, ranks=ranks) as path:
            with all_or_none(ranks):
                if ranks.rank == 0:
                    make(path, files)
            with all_or_none(ranks):
                fill(path, files, blocks)
            stall_s = self._overlapped.release()
            of_rank = [path / file.name for file in files[ranks.rank :: ranks.world]]
            of_ranks = agreed(ranks, lambda: dict(each(lambda file: (file.name, describe(file)), of_rank)))
            described = {name: file for share in of_ranks for name, file in share.items()}
            if ranks.rank == 0:
                write_manifest(path, CheckpointManifest(TORCH, version, dict(sorted(described.items()))))
        return CheckpointInfo(version, str(target), time.perf_counter() - began_s, stall_s)


def load_checkpoint(trainer: PolicyTrainer, path: str | Path, ranks: Ranks = ALONE) -> None:
    """Restore weights, optimizer, version and generators into `trainer`. A collective call of all `ranks`,
    which may be others than those that saved.

    Raises:
        DataError: the checkpoint is incomplete or damaged, has a weight that is not finite, or is of another
            model. `trainer` is untouched unless the tensors themselves disagree.
    """
    path = Path(path)
    version, files = verified(path, ranks)
    with boundary("trainer", f"load the checkpoint {path}", DataError):
        saved = {kind: open_tensors(files[kind]) for kind in KINDS}
        weights = trained_weights(trainer.model)
        refuse_another_model(weights, saved["model"], path)
        copy_into(owned_blocks(weights, copies=True), saved["model"])
        restore_optimizer(trainer, saved["optimizer"])
        _restore_generators(saved["rng"], ranks)
    if broken := not_finite(trained_weights(trainer.model), ranks):
        raise DataError(f"{path} holds weights that are not finite: {broken[:5]}.\n{EARLIER}")
    trainer.version = version


def verified(path: Path, ranks: Ranks = ALONE) -> tuple[int, dict[str, list[Path]]]:
    """The version of a checkpoint, and its files of each kind. Every rank digests a share of the files.

    Raises: DataError: the checkpoint is incomplete or damaged.
    """
    manifest = read_manifest(path)
    refuse_another_format(path, manifest, TORCH)
    names = sorted(manifest.files)
    expected = {name for kind in KINDS for name in file_names(kind, sum(n.startswith(kind) for n in names))}
    if set(names) != expected:
        raise DataError(
            f"{path} is damaged: its {NAME} is of the files {names}, not {sorted(expected)}.\n{EARLIER}"
        )
    with all_or_none(ranks):
        refuse_damaged(path, manifest, names[ranks.rank :: ranks.world])
    return manifest.version, {kind: [path / n for n in names if n.startswith(kind)] for kind in KINDS}


def refuse_another_model(
    model: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor], path: Path
) -> None:
    """Raises: DataError: the tensors saved in `path` are not exactly those of `model`."""
    wrong = sorted(saved.keys() ^ model.keys())
    wrong += sorted(n for n in saved.keys() & model.keys() if saved[n].shape != model[n].shape)
    if wrong:
        raise DataError(f"{path} is of another model: tensors {wrong[:5]} are missing, left over or reshaped")


def _state(trainer: PolicyTrainer, ranks: Ranks) -> tuple[list[TensorFile], list[OwnedBlock]]:
    """The files of a checkpoint, and the blocks that this rank writes."""
    model, optimizer = trained_weights(trainer.model), _optimizer_tensors(trainer)
    generators = _generators()
    of_all = {_of_rank(n, rank): state for rank in range(ranks.world) for n, state in generators.items()}
    files = [*lay_out("model", model), *lay_out("optimizer", optimizer), *lay_out("rng", of_all)]
    states = [OwnedBlock(_of_rank(n, ranks.rank), tuple(s.shape), (0,), s) for n, s in generators.items()]
    return files, [*owned_blocks(model), *owned_blocks(optimizer), *states]


def _optimizer_tensors(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    """The optimizer's tensors, and all tensors of the critic and of the drafter."""
    tensors = _moments(trainer) | ({} if trainer.value_head is None else trainer.value_head.tensors())
    return tensors | trainer.drafter.tensors() if isinstance(trainer, DraftingTrainer) else tensors


def _moments(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    return {
        f"{key}/{name}": value
        for name, parameter in trainer.model.named_parameters()
        if parameter.requires_grad
        for key, value in sorted(plain_tensors(trainer.optimizer.state[parameter]).items())
    }


def _state_of(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The parameters and what the optimizer keeps of them, under names of their own."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {f"{index}": parameter for index, parameter in enumerate(parameters)}
    for index, parameter in enumerate(parameters):
        kept = plain_tensors(optimizer.state[parameter]) if parameter in optimizer.state else {}
        state |= {f"{key}/{index}": value for key, value in kept.items()}
    return state


def restore_optimizer(trainer: PolicyTrainer, tensors: Mapping[str, torch.Tensor]) -> None:
    """`tensors`: of a checkpoint's optimizer, by `{state}/{parameter}`. They may be mapped files."""
    parameters = dict(trainer.model.named_parameters())
    trainer.optimizer.state.clear()
    of_critic, of_drafter = (
        {name: tensor for name, tensor in tensors.items() if f"/{prefix}" in name}
        for prefix in (PREFIX, DRAFTER)
    )
    tensors = {n: tensor for n, tensor in tensors.items() if n not in of_critic | of_drafter}
    if trainer.value_head is not None:
        trainer.value_head.restore(of_critic)
    if isinstance(trainer, DraftingTrainer):
        trainer.drafter.restore(of_drafter)
    for key_and_name, saved in tensors.items():
        key, name = key_and_name.split("/", 1)
        of = parameters[name]
        like = of if saved.shape == of.shape else torch.empty(saved.shape, device=of.device)
        trainer.optimizer.state[of][key] = torch.zeros_like(like, dtype=saved.dtype, requires_grad=False)
    copy_into(owned_blocks(_moments(trainer), copies=True), tensors)
    for state in trainer.optimizer.state.values():
        rebuild_moments(state)


def _generators() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_generators(saved: Mapping[str, torch.Tensor], ranks: Ranks) -> None:
    """Restore this rank's generators. A rank without saved generators gets those of the first rank."""
    for name, restore in (("cpu", torch.set_rng_state), ("cuda", torch.cuda.set_rng_state)):
        if name in saved and (name == "cpu" or torch.cuda.is_available()):
            restore(saved.get(_of_rank(name, ranks.rank), saved[name]).clone())


def _of_rank(name: str, rank: int) -> str:
    return f"{name}.{rank}" if rank else name


with suppress(ImportError):  # another version of transformers: each load does it
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.models.qwen3 import modeling_qwen3  # noqa: F401  it imports what all families share

    get_checkpoint_conversion_mapping("")  # compiles the patterns of all families, and keeps them


# ---------------------------------------------------------------- a copy in memory


COPIED_BYTES_MIN = 10**9  # of a rank; a smaller state is written to the page cache during a step
COPIED_FROM = {"cuda"}  # devices of the trainer
FREE_SHARE = 0.5  # of the host's free memory, for the copies of all ranks
ALIGNMENT = 64


class Snapshot:
    """Memory that is kept from checkpoint to checkpoint, because fresh pages take ten times as long."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks_here, self._offload = ranks.world // ranks.hosts, ranks.offload
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._refused = False
        self._reserving = Thread()

    def reserve(self, blocks: Collection[OwnedBlock], more_bytes: int) -> None:
        """Allocate the memory of `blocks`, and `more_bytes`, in a thread, before the first checkpoint needs
        it."""
        num_bytes = sum(owned.block.nbytes for owned in blocks) + more_bytes
        if self._copies(blocks, num_bytes):
            self._reserving = Thread(target=self._has, args=(num_bytes,), name="snapshot", daemon=True)
            self._reserving.start()

    def forget(self) -> None:
        """Give the memory back, until `reserve` or `of` needs memory again."""
        if self._reserving.ident is not None:
            self._reserving.join()
        self._memory = torch.empty(0, dtype=torch.uint8)

    def of(self, blocks: Collection[OwnedBlock]) -> list[OwnedBlock] | None:
        """Copies of `blocks`, which stay until the next call. None: the state is small, or a CPU's, or the
        host has no room."""
        places, num_bytes = list[slice](), 0
        for owned in blocks:
            places.append(slice(num_bytes, num_bytes + owned.block.nbytes))
            num_bytes += -(-owned.block.nbytes // ALIGNMENT) * ALIGNMENT
        if self._reserving.ident is not None:
            self._reserving.join()
        if not self._copies(blocks, num_bytes) or not self._has(num_bytes):
            return None
        memory, on_gpu = self._memory, any(owned.block.is_cuda for owned in blocks)

        def copy(block_and_place: tuple[OwnedBlock, slice]) -> OwnedBlock:
            owned, place = block_and_place
            copied = memory[place].view(owned.block.dtype).view(owned.block.shape)
            with torch.no_grad():
                copied.copy_(owned.block)
            count(owned.block.nbytes)
            return replace(owned, block=copied)

        pairs = zip(blocks, places, strict=True)
        if not on_gpu:
            return each(copy, pairs, threads_min=2)
        with torch.cuda.stream(torch.cuda.Stream()):  # beside what the next step computes
            return [copy(pair) for pair in pairs]

    def _copies(self, blocks: Collection[OwnedBlock], num_bytes: int) -> bool:
        devices = {"cuda"} if self._offload else {owned.block.device.type for owned in blocks}
        return num_bytes >= COPIED_BYTES_MIN and not devices.isdisjoint(COPIED_FROM)

    def _has(self, num_bytes: int) -> bool:
        """Whether the memory is there. The first time it is allocated."""
        if len(self._memory) >= num_bytes:
            return True
        _, free_bytes = read_memory()
        if num_bytes * self._ranks_here > FREE_SHARE * free_bytes:
            if not self._refused:
                LOG.warning(
                    "a checkpoint of %.1f GB has no room for a copy in memory (%.1f GB are free, and half of "
                    "them may be taken): the first update after a checkpoint waits until its files are "
                    "written. A larger `checkpoints.every` makes that rarer",
                    num_bytes * self._ranks_here / 1e9,
                    free_bytes / 1e9,
                )
            self._refused = True
            return False
        self._memory = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
        allocate(self._memory.numpy())
        return True
