"""Checks of a run after attacks of any kind."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from millrace.config.schema import Config
from millrace.core.events import Event
from millrace.engines.vllm.processes.vllm_sockets import DIRECTORY_PREFIX
from millrace.ledger.reading import LedgerReader
from millrace.observe.terminal import Check

SHARED_MEMORY = Path("/dev/shm")
GONE_S = 30.0


def check_ledger(ledger: Path, config: Config) -> list[Check]:
    """Prompts, training and accounts of a run that reached its last step."""
    with LedgerReader(ledger) as reader:
        state, steps = reader.overview(), reader.steps()
        skipped = {skip.group_id for skip in reader.skipped()}
        groups = reader.group_ids()
        unexplained = [key for key in reader.reasons() if _unexplained(*key)]
    versions = [step.version for step in steps]
    trained = [i for step in steps for i in step.trajectory_ids]
    trained_groups = sorted(group_id for step in steps for group_id in step.group_ids)
    known = groups | skipped
    gaps = sorted(set(range(max(known, default=-1) + 1)) - known)
    accounting = state.accounting
    checks = [
        Check("every step once", versions == list(range(1, config.steps + 1)), f"{len(versions)} steps"),
        Check("no prompt lost", not gaps, f"{len(known)} prompts drawn, missing: {gaps[:5]}"),
        Check("every end has a reason", not unexplained, f"without one: {unexplained}"),
        Check("nothing trained twice", len(trained) == len(set(trained)), f"{len(trained)} trajectories"),
        Check(
            "trained as counted", len(trained) == accounting.trained, f"{accounting.trained} in the accounts"
        ),
        Check("accounts close", accounting.balanced, _balance(accounting.admitted, accounting.in_flight)),
    ]
    if config.staleness_bound == 0 and set(reader_ends(state.states)) <= {"trained"}:
        due = list(range(config.steps * config.batch.prompts))
        checks.append(
            Check("the prompts of an undisturbed run", trained_groups == due, f"{len(trained_groups)} groups")
        )
    return checks


def check_served(events: Iterable[Event]) -> Check:
    """Every replica served a digest that was published or staged for the version."""
    published: set[tuple[int, str]] = set()
    served: set[tuple[int, str]] = set()
    for event in events:
        if event.kind in ("published", "staged", "pulled"):
            pair = (event.fields["version"], event.fields["digest"])
            (served if event.kind == "pulled" else published).add(pair)
    foreign = sorted(served - published)
    return Check("served what was published", not foreign, f"{len(served)} served, foreign: {foreign[:3]}")


def check_remains(orphans: list[int], memory_before: set[str]) -> list[Check]:
    """No process and no memory file is left. A file that a living process uses belongs to another run. When
    such a process ends, its files are gone within `GONE_S`."""
    until_s = time.monotonic() + GONE_S
    while (left := _unused(memory_before)) and time.monotonic() < until_s:
        time.sleep(0.1)
    return [
        Check("no orphan process", not orphans, f"left: {orphans[:5]}"),
        Check("no memory file", not left, f"left: {left[:5]}"),
    ]


def _unused(memory_before: set[str]) -> list[str]:
    fresh = shared_memory() - memory_before
    return sorted(fresh - _mapped()) if fresh else []


def check_sockets(listening: set[str], run_dir: Path) -> Check:
    """No process of the run listened on a port or socket, and its directory has no socket. Ranks of a trainer
    and vLLM are not checked, because they communicate over the loopback interface. Names of vLLM's sockets
    are in a directory that no other user can enter."""
    listening = {socket for socket in listening if f"/{DIRECTORY_PREFIX}" not in socket}
    left = {f"unix {path}" for path in run_dir.rglob("*") if path.is_socket()}
    return Check("no port or socket", not listening | left, f"found: {sorted(listening | left)[:5]}")


def shared_memory() -> set[str]:
    """Our named shared-memory files."""
    try:
        return {entry.name for entry in os.scandir(SHARED_MEMORY) if entry.stat().st_uid == os.getuid()}
    except OSError:
        return set()


def _mapped() -> set[str]:
    """Names of the shared-memory files that living processes have mapped."""
    names = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            names.update(re.findall(rf"{SHARED_MEMORY}/(\S+)", maps.read_text(errors="replace")))
    return names


def reader_ends(states: dict[str, int]) -> list[str]:
    """Terminal states that at least one trajectory reached."""
    terminal = ("trained", "rejected", "stale", "abandoned", "failed")
    return [state for state in terminal if states[state]]


def _unexplained(state: str, reason: str) -> bool:
    return state in ("rejected", "stale", "abandoned", "failed") and not reason


def _balance(admitted: int, in_flight: int) -> str:
    return f"{admitted} admitted, {in_flight} in flight at the end"
