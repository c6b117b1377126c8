"""Compiled programs on disk: read when the process starts again, and left when they are damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from millrace.core.errors import ConfigError
from millrace.core.progress import CallProgress, CallVitals, current, of
from millrace_jax.devices import programs
from millrace_jax.devices.mesh import make_mesh, on_mesh
from millrace_jax.devices.programs import Programs
from millrace_jax.policy import compilations

PROGRAM = """
import json, sys
from collections import Counter
from pathlib import Path
import jax, jax.numpy as jnp
from millrace_jax.devices.mesh import make_mesh, on_mesh
from millrace_jax.devices.programs import Programs
heard = Counter()
jax.monitoring.register_event_listener(lambda event, **_: heard.update([event.rpartition("/")[2]]))
kept = Programs(Path(sys.argv[1]))
if "seal" not in sys.argv:
    kept.seal_each()
value = jax.jit(lambda x: jnp.tanh(x @ x).sum())(jnp.arange(64.0).reshape(8, 8) / 64)
if "seal" in sys.argv:
    kept.seal()
print(json.dumps({"value": float(value), "hits": heard["cache_hits"], "misses": heard["cache_misses"]}))
"""


def compiled(directory: Path, *, how: str = "seal") -> Any:
    command = [sys.executable, "-W", "error", "-c", PROGRAM, str(directory), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("kept") / "programs"
    return directory, compiled(directory)


def entries(directory: Path) -> list[Path]:
    return sorted(directory.glob("*/*-cache"))


def test_a_process_that_starts_again_compiles_nothing(first: tuple[Path, Any]) -> None:
    directory, due = first
    assert due["hits"] == 0 < due["misses"] == len(entries(directory))
    assert compiled(directory) == {"value": due["value"], "hits": due["misses"], "misses": 0}


def test_a_process_that_dies_in_its_first_step_leaves_the_programs_that_it_has_compiled(
    tmp_path: Path,
) -> None:
    due = compiled(tmp_path / "kept", how="each")
    again = compiled(tmp_path / "kept")
    assert again["hits"] == due["misses"] > 0 == again["misses"]


def flip(entry: Path) -> None:
    data = bytearray(entry.read_bytes())
    data[len(data) // 2] ^= 1
    entry.write_bytes(data)


@pytest.mark.parametrize("damage", [
    flip,
    lambda entry: os.truncate(entry, entry.stat().st_size // 2),
    lambda entry: entry.write_bytes(b""),
    lambda entry: programs._place(entry).unlink(),
], ids=["flipped", "truncated", "empty", "without digest"])  # fmt: skip
def test_a_damaged_entry_is_compiled_anew(damage: Callable[[Path], Any], first: tuple[Path, Any]) -> None:
    directory, due = first
    for entry in entries(directory):
        damage(entry)
    assert compiled(directory) == due
    assert compiled(directory)["misses"] == 0


def test_another_processor_does_not_see_them(monkeypatch: pytest.MonkeyPatch) -> None:
    here = programs._key()
    assert programs._key() == here
    monkeypatch.setattr(programs, "cpu_flags", lambda: {"avx2"})
    assert programs._key() != here


def test_a_directory_that_others_may_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match=r"`trainer.programs` .* another user may write there"):
        Programs(tmp_path)


def test_a_call_names_the_program_that_it_compiles_and_counts_it() -> None:
    seen = list[str]()

    def listener(event: str, *_: Any, **__: Any) -> None:
        if "backend_compile" in event:
            seen.append(current().vitals().activity)

    before = compilations().count
    jax.monitoring.register_scalar_listener(listener)  # behind that of `compilations`
    try:
        with of(CallProgress("step")) as progress:
            jax.jit(lambda x: x * 3 + before)(np.arange(4.0)).block_until_ready()
    finally:
        jax.monitoring.unregister_scalar_listener(listener)
    compiled = compilations().count - before
    assert compiled > 0 and progress.vitals() == CallVitals("step", compiled)
    assert seen[0].startswith(f"compiling program {before + 1} (jit") and len(seen) == compiled


def test_a_program_has_the_name_of_its_function() -> None:
    def doubled(x: Any, *, times: int) -> Any:
        return times * x

    mesh = make_mesh(1, 1, 1, jax.devices()[:1])
    for function in (partial(doubled, times=2), partial(partial(doubled), times=2)):
        lowered = jax.jit(on_mesh(mesh, function)).lower(np.arange(3.0))
        assert "module @jit_doubled" in lowered.as_text()
