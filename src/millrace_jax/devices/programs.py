"""Compiled programs on disk. A trainer that starts again reads them, and compiles none of the same shapes.

    programs/
      {key}/                 of what else decides whether a program may run here: see `_key`
        {name}-cache         what JAX writes
        {name}-cache.digest  its XXH3-128, written when it was compiled

JAX writes an entry in place and has no digest of it. What is read is run as code. So an entry without its
digest is removed before JAX looks there: it was cut off, or has changed.
"""

from __future__ import annotations

import platform
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from millrace.core import files
from millrace.core.errors import ConfigError, writing
from millrace.placement.number_format import cpu_flags, cpu_model
from millrace.trainer.files.checkpoint_manifest import describe

SUFFIX = "-cache"  # of what JAX writes
COMPILED = "/jax/core/compile/backend_compile_duration"
"""The event of JAX at the end of a program that was compiled, and written, or read."""


class Programs:
    """The programs in `directory`. It comes before the first program of this process, and after `join`.

    Raises: ConfigError: another user may write there. StorageError: it cannot be written."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / _key()
        with writing(self._directory):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._directory.mkdir(mode=0o700, exist_ok=True)
            if any(map(files.others_may_write, (directory, self._directory))):
                raise ConfigError(
                    f"`trainer.programs` ({directory}): another user may write there, and what it holds is "
                    'run as code.\n  Name a directory of your own, or set it to "none"'
                )
            for entry in self._directory.glob(f"*{SUFFIX}"):
                if _digest(entry) != _kept_digest(entry):
                    entry.unlink(missing_ok=True)
                    _place(entry).unlink(missing_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(self._directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

    def seal_each(self) -> None:
        """Seal each program as soon as it is compiled: who dies in a first step of minutes keeps the programs
        that it has. For the process that writes entries, once."""

        def heard(event: str, *_: Any, **__: Any) -> None:
            if event == COMPILED:
                self.seal()

        jax.monitoring.register_event_duration_secs_listener(heard)

    def seal(self) -> None:
        """Write the digests of new entries. A process that dies before loses them."""
        with writing(self._directory):
            for entry in self._directory.glob(f"*{SUFFIX}"):
                kept = _place(entry)
                if not kept.exists():
                    kept.write_text(_digest(entry))


def _key() -> str:
    """The versions, and what the programs run on. On a CPU they have its instructions: another processor,
    which sees the same directory, would not survive them."""
    device = jax.devices()[0]
    cpu = platform.machine(), cpu_model(), *sorted(cpu_flags())
    facts = jax.__version__, version("jaxlib"), device.platform, device.device_kind, *cpu
    return blake2b("\n".join(facts).encode(), digest_size=8).hexdigest()


def _place(entry: Path) -> Path:
    return entry.with_name(f"{entry.name}.digest")


def _digest(entry: Path) -> str:
    try:
        return describe(entry).digest
    except FileNotFoundError:  # another process removed it
        return ""


def _kept_digest(entry: Path) -> str | None:
    try:
        return _place(entry).read_text()
    except FileNotFoundError:
        return None
