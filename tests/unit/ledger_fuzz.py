"""Damage to a ledger file, seeded: what opening it makes of that.

    python tests/unit/ledger_fuzz.py 10000 [SEED]

Every mutation has one of four outcomes. `refused` and `equal` are right, `silent` and `raw` are not.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ledger_records import evaluation_of, grow, lease, make_group, ready_group, step_of

from millrace.core.errors import LedgerError
from millrace.core.types import BadPrompt, CheckpointInfo, State, VersionRecord
from millrace.ledger import SqliteLedger
from millrace.ledger.reading import LedgerReader

Content = list[Any]


def make_ledger(path: Path) -> None:
    """Every table has rows, every state of a trajectory is there, and the file was closed."""
    ledger = SqliteLedger(path, run={"seed": 7, "config_digest": "0123456789abcdef"})
    for version in range(1, 7):
        batch = [ready_group(10 * version + i, version - 1, num_tokens=40) for i in range(2)]
        ledger.admit(batch)
        ledger.record_version(VersionRecord(version - 1, f"digest-{version - 1}", "one CPU"))
        ledger.commit_step(step_of(version, *batch))
    ledger.commit_checkpoint(CheckpointInfo(4, str(path.parent), 0.25))
    ledger.evaluated(*evaluation_of(2))
    ended = ready_group(90)
    ledger.admit([ended])
    for member, state in zip(ended.members, [State.REJECTED, State.FAILED], strict=True):
        member.state, member.reason = state, f"the reward said {state}"
    ledger.update(ended.members)
    ledger.skip([BadPrompt(80 + i, f"row-{80 + i}", "the prompt is empty") for i in range(3)])
    growing = [make_group(100 + i) for i in range(20)]
    ledger.admit([*growing, ready_group(140, 6)])
    for round_of_tokens in range(3):
        for group in growing:
            lease(group.members[0])
            grow(group.members[0], 16, round_of_tokens)
        ledger.update([group.members[0] for group in growing])
        ledger.flush()
    ledger.close()


def recovered(path: Path) -> Content:
    """Everything that a resumed run takes from the file."""
    ledger = SqliteLedger(path, run={})
    try:
        found = ledger.recover()
        steps = ledger.steps_after(0)
        trained = [ledger.group(group_id) for step in steps for group_id in step.group_ids]
        return [
            ledger.run,
            ledger.accounting(),
            ledger.checkpoint(),
            ledger.evaluations(),
            [ledger.version_records(version) for version in range(8)],
            steps,
            trained,
            found.groups,
            (found.next_group_id, found.version, found.unused_group_ids, found.quarantined),
        ]
    finally:
        ledger.close()


def read(path: Path) -> Content:
    """Everything that a look at the run shows of single rows, and what is summed over all of them."""
    with LedgerReader(path) as reader:
        about = reader.overview()
        evaluated = [reader.evaluations(), reader.attempts("held-out", 2)]
        sums = [*evaluated, reader.reasons(), reader.lengths(), reader.staleness_histogram()]
        return [about.about, about.version, about.checkpoint, reader.steps(), list(reader.groups()), *sums]


def outcome(path: Path, look: Callable[[Path], Content], due: Content) -> str:
    try:
        return "equal" if look(path) == due else "silent"
    except LedgerError as error:
        return "refused" if str(path) in str(error) else "raw"
    except Exception as error:
        return f"raw {error!r}"


def flip(data: bytearray, random: random.Random) -> str:
    """One of four kinds of damage: mostly one bit, else a byte, a run of zeros, or the end cut off."""
    position = random.randrange(len(data))
    kind = random.choices(["bit", "byte", "zeros", "cut"], [85, 5, 5, 5])[0]
    if kind == "bit":
        data[position] ^= 1 << random.randrange(8)
    elif kind == "byte":
        data[position] = random.randrange(256)
    elif kind == "zeros":
        width = min(random.choice([4, 64, 512]), len(data) - position)
        data[position : position + width] = bytes(width)
    else:
        del data[position:]
    return f"{kind} at {position}"


def fuzz(directory: Path, num: int, seed: int) -> tuple[Counter[str], list[str]]:
    """(outcomes, what to look at) of `num` mutations, each seen by a resumed run and by a reader."""
    path = directory / "ledger.sqlite"
    make_ledger(path)
    recovered(path)  # gives up leases: from now on every recovery finds the same
    whole, draw = path.read_bytes(), random.Random(seed)
    due = {look: look(path) for look in (read, recovered)}
    outcomes, wrong = Counter[str](), []
    for _ in range(num):
        data = bytearray(whole)
        what = flip(data, draw)
        for look, content in due.items():
            path.write_bytes(data)
            for beside in directory.glob("ledger.sqlite-*"):
                beside.unlink()
            found = outcome(path, look, content)
            outcomes[f"{look.__name__}: {found.split()[0]}"] += 1
            if found not in ("equal", "refused"):
                wrong.append(f"{what}, {look.__name__}: {found}")
    return outcomes, wrong


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        outcomes, wrong = fuzz(Path(directory), int(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else 0)
        print(*(f"{name} {count}" for name, count in sorted(outcomes.items())), *wrong[:40], sep="\n")
