"""A training checkpoint of the trainer in JAX: a directory that is complete or does not exist.

Orbax writes the arrays, each device's blocks from where they are. So they may be restored onto other devices.
Orbax detects no changed byte: the manifest has the digest of every file.

    v00000012/
      manifest.json   written last
      state/          what Orbax writes: the arrays of `named_arrays`
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from numpy.typing import NDArray

from millrace.core.errors import DataError, StorageError, boundary
from millrace.core.progress import count
from millrace.core.types import CheckpointInfo
from millrace.trainer.files.checkpoint_manifest import (
    EARLIER,
    JAX,
    NAME,
    CheckpointManifest,
    describe,
    directory_name,
    read_manifest,
    refuse_another_format,
    refuse_damaged,
    write_manifest,
)
from millrace.trainer.files.directories import atomic_directory, building
from millrace.trainer.publish.rechecked import Overlapped
from millrace.trainer.ranks.mesh import ALONE, Ranks, all_or_none
from millrace_jax.optimizer import TrainingState
from millrace_jax.policy import JaxPolicy

Arrays = Mapping[str, Any]
STATE = "state"
SAVE_S_MAX = 86_400  # of Orbax, which counts no progress; the controller sees a save that is stuck before
COUNT_S = 1.0


class JaxSaver:
    """Saves everything that the next step of a policy depends on, during that step.

    An update gives the memory of the state away. So it waits until the state is on the host: `wait_read`
    comes before each update. Everything behind that happens beside the steps.
    """

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self._overlapped = Overlapped[CheckpointInfo]("await_saved", ranks)

    def begin(self, policy: JaxPolicy, directory: str | Path, began_s: float | None = None) -> None:
        """Save the present state of `policy` as `directory`/v{version:08d}. The policy may go on at once.

        `began_s`: the time from which on the trainer waits, by `time.perf_counter`; None: now.
        """
        began_s = began_s or time.perf_counter()
        target = Path(directory) / directory_name(policy.version)
        arrays = named_arrays(policy.state)
        self._overlapped.begin(partial(self._save, policy.version, target, arrays, began_s), began_s)

    def wait_read(self) -> None:
        """Wait until the state is on the host."""
        self._overlapped.wait_read()

    def wait(self) -> None:
        """Wait until no checkpoint is being saved. An error is not raised here."""
        self._overlapped.wait()

    def result(self) -> CheckpointInfo:
        """Wait for the checkpoint that was begun last. Raises: StorageError: it cannot be written."""
        return self._overlapped.result()

    def _save(self, version: int, target: Path, arrays: Arrays, began_s: float) -> CheckpointInfo:
        stalls = list[float]()
        ranks = self._overlapped.ranks
        write_checkpoint(
            target, version, arrays, lambda: stalls.append(self._overlapped.release()), ranks=ranks
        )
        return CheckpointInfo(version, str(target), time.perf_counter() - began_s, stalls[0])


def write_checkpoint(
    target: Path,
    version: int,
    arrays: Arrays,
    on_host: Callable[[], Any] = lambda: None,
    *,
    ranks: Ranks = ALONE,
) -> None:
    """Write `arrays`, of JAX or numpy, as the checkpoint `target`. `on_host` is called when they are on the
    host. All processes write their blocks. An error of one ends it there at once: the others wait for it.

    Raises: StorageError; DataError: `target` is something else.
    """
    with ExitStack() as stack:
        if ranks.rank == 0:
            stack.enter_context(atomic_directory(target, marker=NAME))
        path = building(target)
        ranks.gather(None)  # the directory is there
        with boundary("trainer", f"write the checkpoint {target}", StorageError):
            _write_arrays(path / STATE, arrays, on_host, ranks)
        files = sorted(file for file in path.rglob("*") if file.is_file())
        mine = {
            file.relative_to(path).as_posix(): describe(file) for file in files[ranks.rank :: ranks.world]
        }
        described = dict(chain.from_iterable(each.items() for each in ranks.gather(mine)))
        if ranks.rank == 0:
            write_manifest(path, CheckpointManifest(JAX, version, described))
    ranks.gather(None)  # it is in its place


def _write_arrays(path: Path, arrays: Arrays, on_host: Callable[[], Any], ranks: Ranks) -> None:
    # Without the numbers of all processes Orbax would make them wait by a program on their devices.
    several = None if ranks.world == 1 else set(range(ranks.world))
    processes = ocp.options.MultiprocessingOptions(active_processes=several)
    handler = ocp.PyTreeCheckpointHandler(
        use_compression=False,  # 8 % fewer bytes took 5 times the CPU time
        multiprocessing_options=processes,
    )
    with (
        ocp.AsyncCheckpointer(handler, timeout_secs=SAVE_S_MAX, multiprocessing_options=processes) as writer,
        ThreadPoolExecutor(1) as thread,
    ):
        writer.save(path, args=ocp.args.PyTreeSave(arrays))
        on_host()
        writing, counted = thread.submit(writer.wait_until_finished), 0
        while wait([writing], timeout=COUNT_S).not_done:
            written = _bytes_below(path.parent)
            count(max(0, written - counted))
            counted = written
        writing.result()


def _bytes_below(path: Path) -> int:
    """Bytes of all files. Files may come and go meanwhile."""
    sizes = 0
    for file in path.rglob("*"):
        try:
            sizes += file.stat().st_size
        except FileNotFoundError:
            continue
    return sizes


def load_checkpoint(policy: JaxPolicy, path: str | Path, ranks: Ranks = ALONE) -> None:
    """Restore the state and the version into `policy`, onto the devices that its arrays have. These may be
    others than those that saved. Each process verifies its share of the files.

    Raises:
        DataError: the checkpoint is incomplete or damaged, has a weight that is not finite, or is of another
            model. `policy` is untouched unless the arrays themselves disagree.
    """
    path = Path(path)
    with all_or_none(ranks):
        version = verified(path, ranks)
    with boundary("trainer", f"load the checkpoint {path}", DataError):
        present, structure = named_arrays(policy.state), jax.tree.structure(policy.state)
        _refuse_another_model({name: x.shape for name, x in present.items()}, _shapes(path), path)
        args = {name: _onto(x) for name, x in present.items()}
        del present
        policy.state = None  # type: ignore[assignment]  # its memory is for what is restored
        restored = _restored(path, args)
        policy.state = structure.unflatten([jnp.array(restored.pop(name)) for name in args])
    if broken := policy._not_finite():
        raise DataError(f"{path} holds weights that are not finite: {broken[:5]}.\n{EARLIER}")
    policy.version = version


def named_arrays(state: TrainingState) -> dict[str, Any]:
    """The arrays of a state: `weights/{name}`, `moments/mu/{name}`, `moments/nu/{name}`, `moments/count`, and
    those of a critic as `head...`. Tensors of layers are stacked: `weights/model.layers/{name}`."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}


def verified(path: Path, ranks: Ranks = ALONE) -> int:
    """The version of a checkpoint. Raises: DataError: it is incomplete, or this process's share of its files
    is damaged."""
    manifest = read_manifest(path)
    refuse_another_format(path, manifest, JAX)
    refuse_damaged(path, manifest, sorted(manifest.files)[ranks.rank :: ranks.world])
    return manifest.version


def read_arrays(path: Path, prefix: str = "") -> dict[str, NDArray[Any]]:
    """The arrays of a verified checkpoint whose names begin with `prefix`, on the host."""
    args = {
        name: ocp.RestoreArgs(restore_type=np.ndarray) for name in _shapes(path) if name.startswith(prefix)
    }
    return _restored(path, args)


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    with ocp.PyTreeCheckpointer() as reader:
        return {name: tuple(x.shape) for name, x in reader.metadata(path / STATE).item_metadata.tree.items()}


def _restored(path: Path, args: Mapping[str, ocp.RestoreArgs]) -> dict[str, Any]:
    with ocp.PyTreeCheckpointer() as reader:
        restore = ocp.args.PyTreeRestore(item=dict(args), restore_args=dict(args), partial_restore=True)
        arrays: dict[str, Any] = reader.restore(path / STATE, args=restore)
    count(sum(x.nbytes for x in arrays.values()))
    return arrays


def _onto(array: Any) -> ocp.RestoreArgs:
    """Where `array` is. An array without a place of its own gets none: JAX moves it to where it is used."""
    if not array.committed:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=array.sharding, global_shape=array.shape, dtype=array.dtype)


def _refuse_another_model(
    present: Mapping[str, tuple[int, ...]], saved: Mapping[str, tuple[int, ...]], path: Path
) -> None:
    wrong = sorted(name for name in present.keys() | saved.keys() if present.get(name) != saved.get(name))
    if wrong:
        raise DataError(f"{path} is of another model: tensors {wrong[:5]} are missing, left over or reshaped")
