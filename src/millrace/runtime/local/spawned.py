"""The first file of a worker whose place names a Python of its own.

That Python needs msgspec, and the imports of the worker's class. `millrace` and its wings are those of the
controller, so that both ends of the wire agree. All else comes from the interpreter and from PYTHONPATH,
as for any program that this interpreter runs.

Processes that the worker's class starts with `multiprocessing` get the same packages.

Run by `runtime.local.forkserver` as `PYTHON spawned.py FD NAME EPOCH SILENCE_S`, with FD the worker's socket
and SILENCE_S 0 for none.
"""

from __future__ import annotations

import importlib.util
import socket
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

PYTHON_MIN = (3, 11)


def main() -> None:
    fd, name, epoch, silence_s_max = sys.argv[1:]
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # this directory: its modules would hide others of the same names
    sys.meta_path.insert(0, _Carried)
    from millrace.runtime import process

    process.set_title(name)
    process.leave_signals()
    process.fork_ordinary_processes()
    try:
        if sys.version_info < PYTHON_MIN:
            raise ImportError(f"this is Python {sys.version.split()[0]}, and Millrace needs 3.11 or newer")
        from millrace.runtime.local import worker_process
    except ImportError as error:
        sys.stderr.write(f"{sys.executable} cannot run the worker {name}: {error}\n")
        raise SystemExit(process.UNSUITABLE_PYTHON) from error
    with process.ending_at_once():
        worker_process.main(socket.socket(fileno=int(fd)), name, int(epoch), float(silence_s_max) or None)


class _Carried:
    """Finds `millrace` and its wings in the directory of the controller's, whatever this interpreter has."""

    source = Path(__file__).resolve().parents[3]

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        directory = cls.source / name
        if name.partition("_")[0] != "millrace" or "." in name or not directory.is_dir():
            return None
        return importlib.util.spec_from_file_location(
            name, directory / "__init__.py", submodule_search_locations=[str(directory)]
        )


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # a process that `multiprocessing` spawns from the worker
    sys.meta_path.insert(0, _Carried)
