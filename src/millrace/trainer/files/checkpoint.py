"""A training checkpoint: a directory that is complete or does not exist.

`manifest.json` has the version, and the size and digest of every other file. So a damaged checkpoint is
refused. A checkpoint does not record which rank had which block: any number of ranks may go on from it.

    v00000012/
      manifest.json
      model.safetensors      float32 master weights; with an adapter, only the adapter's
      optimizer.safetensors  `{state}/{parameter}` per tensor; also the critic's
      rng.safetensors        torch's generators; those of rank 1 as `cpu.1`

Files of more than 4 GB are divided in Hugging Face's way: model-00001-of-00002.safetensors.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import torch
import xxhash

from millrace.core.errors import DataError, boundary
from millrace.core.progress import count
from millrace.core.types import CheckpointInfo
from millrace.devices.parallel import each
from millrace.trainer.adapters.adapted_linear import trained_weights
from millrace.trainer.files.directories import atomic_directory
from millrace.trainer.files.snapshot import Snapshot
from millrace.trainer.files.tensor_files import TensorFile, file_names, fill, lay_out, make, open_tensors
from millrace.trainer.model import not_finite, rounded_weights
from millrace.trainer.optimizer.adamw import plain_tensors, rebuild_moments
from millrace.trainer.publish.overlapped import Overlapped
from millrace.trainer.ranks.blocks import OwnedBlock, copy_into, owned_blocks
from millrace.trainer.ranks.mesh import ALONE, Ranks, agreed, all_or_none
from millrace.trainer.trainer import PolicyTrainer
from millrace.trainer.value_head import PREFIX

FORMAT = 1
KINDS = ("model", "optimizer", "rng")
READ_BYTES = 1 << 22
SLACK_BYTES = 64 << 20  # for generators, a critic, and the alignment of blocks in a copy
_EARLIER = (
    "  Delete this directory, then `millrace train --resume`: the run goes back to the checkpoint before it "
    "(or to the start) and does the steps since then again"
)


class _File(msgspec.Struct, frozen=True):
    num_bytes: int
    digest: str  # XXH3-128


class _Manifest(msgspec.Struct, frozen=True):
    format: int
    version: int
    files: dict[str, _File]


class Saver:
    """Saves everything that the next step of a trainer depends on, during that step.

    Nothing changes weights and optimizer until the next update. A large state is copied in memory until then
    (`snapshot`), and written from the copy. A small state is written without a copy, and so is one without
    room for a copy: an update waits if it comes before the last byte is written. Weights that a step rounds
    are always copied before the step.
    Source: DataStates-LLM, arXiv:2406.10707 (lazy copies).
    """

    def __init__(self, optimizer: torch.optim.Optimizer, ranks: Ranks = ALONE) -> None:
        self._overlapped = Overlapped[CheckpointInfo](optimizer, ranks, "await_saved")
        self._copies: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self._snapshot = Snapshot(ranks)
        self._updated = False
        optimizer.register_step_post_hook(lambda *_: self._after_update(optimizer))

    def _after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """The first update makes the moments, so the size of the state is known from then on."""
        if not self._updated:
            blocks = owned_blocks(_state_of(optimizer))
            self._snapshot.reserve(sum(owned.block.nbytes for owned in blocks) + SLACK_BYTES)
        self._updated = True

    def begin(self, trainer: PolicyTrainer, directory: str | Path, began_s: float | None = None) -> None:
        """Save the present state of `trainer` as `directory`/v{version:08d}. The trainer may go on at once.

        `began_s`: the time from which on the trainer waits, by `time.perf_counter`; None: now.
        """
        began_s = began_s or time.perf_counter()
        self.wait()
        target = Path(directory) / _name(trainer.version)
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
        with atomic_directory(target, marker="manifest.json", ranks=ranks) as path:
            with all_or_none(ranks):
                if ranks.rank == 0:
                    make(path, files)
            with all_or_none(ranks):
                fill(path, files, blocks)
            stall_s = self._overlapped.release()
            of_rank = [path / file.name for file in files[ranks.rank :: ranks.world]]
            of_ranks = agreed(ranks, lambda: dict(each(lambda file: (file.name, _describe(file)), of_rank)))
            described = {name: file for share in of_ranks for name, file in share.items()}
            if ranks.rank == 0:
                manifest = _Manifest(FORMAT, version, dict(sorted(described.items())))
                (path / "manifest.json").write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
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
        _restore_optimizer(trainer, saved["optimizer"])
        _restore_generators(saved["rng"], ranks)
    if broken := not_finite(trained_weights(trainer.model), ranks):
        raise DataError(f"{path} holds weights that are not finite: {broken[:5]}.\n{_EARLIER}")
    trainer.version = version


def prune_checkpoints(
    directory: str | Path, *, newest: int, keep: int, spared: Collection[int] = ()
) -> list[Path]:
    """Remove all but the last `keep` checkpoints up to version `newest`, and the checkpoints of versions
    `spared`. Returns the removed directories.

    At least two stay: the ledger may not have the newest yet, and then resumes from the checkpoint before.
    """
    there = (
        path for path in Path(directory).glob(f"v{'[0-9]' * 8}") if path.is_dir() and not path.is_symlink()
    )
    saved = sorted(path for path in there if int(path.name[1:]) <= newest)
    removed = [path for path in saved[: -max(keep, 2)] if int(path.name[1:]) not in spared]
    for path in removed:
        shutil.rmtree(path)
    return removed


def _name(version: int) -> str:
    return f"v{version:08d}"


def _describe(file: Path) -> _File:
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while chunk := stream.read(READ_BYTES):
            digest.update(chunk)
            count(len(chunk))
    return _File(file.stat().st_size, digest.hexdigest())


def verified(path: Path, ranks: Ranks = ALONE) -> tuple[int, dict[str, list[Path]]]:
    """The version of a checkpoint, and its files of each kind. Every rank digests a share of the files.

    Raises: DataError: the checkpoint is incomplete or damaged.
    """
    manifest = _read_manifest(path)
    names = sorted(manifest.files)
    with all_or_none(ranks):
        for name in names[ranks.rank :: ranks.world]:
            file, expected = path / name, manifest.files[name]
            described = _describe(file) if file.is_file() else None
            if described != expected:
                raise DataError(f"{file} is damaged: expected {expected}, found {described}.\n{_EARLIER}")
    return manifest.version, {kind: [path / n for n in names if n.startswith(kind)] for kind in KINDS}


def _read_manifest(path: Path) -> _Manifest:
    try:
        manifest = msgspec.json.decode((path / "manifest.json").read_bytes(), type=_Manifest)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} is not a complete checkpoint: its manifest.json: {error}\n{_EARLIER}"
        ) from error
    if manifest.format != FORMAT:
        raise DataError(f"{path} has checkpoint format {manifest.format}, this trainer reads {FORMAT}")
    named = set(manifest.files)
    expected = {name for kind in KINDS for name in file_names(kind, sum(n.startswith(kind) for n in named))}
    if path.name != _name(manifest.version) or named != expected:
        raise DataError(
            f"{path} is damaged: its manifest.json is of version {manifest.version} and of the files "
            f"{sorted(named)}, not {sorted(expected)}.\n{_EARLIER}"
        )
    return manifest


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
    """The optimizer's tensors, and all tensors of the critic, which no replica gets."""
    return _moments(trainer) | ({} if trainer.value_head is None else trainer.value_head.tensors())


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


def _restore_optimizer(trainer: PolicyTrainer, tensors: Mapping[str, torch.Tensor]) -> None:
    parameters = dict(trainer.model.named_parameters())
    trainer.optimizer.state.clear()
    of_critic = {name: tensor for name, tensor in tensors.items() if f"/{PREFIX}" in name}
    tensors = {name: tensor for name, tensor in tensors.items() if name not in of_critic}
    if trainer.value_head is not None:
        trainer.value_head.restore(of_critic)
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
