"""A process that writes a ledger without end and says what it has been promised is kept.

    python ledger_writer.py PATH [BYTES_MAX]

Goes on from what the ledger holds. After every flush and step it prints "admitted trained version".
Tokens are a function of trajectory and position. BYTES_MAX limits the size of every file it writes.
"""

from __future__ import annotations

import resource
import signal
import sys

from millrace.core.completion.columns import token_array
from millrace.core.errors import LedgerError
from millrace.core.types import Finish, Group, State, StepRecord, Trajectory
from millrace.ledger import SqliteLedger

GROUP_SIZE, TOKENS, CHUNK = 4, 24, 8


def token(trajectory_id: int, position: int) -> int:
    return 1000 * trajectory_id + position


def grow(trajectory: Trajectory, version: int) -> None:
    start = len(trajectory.columns)
    for position in range(start, min(start + CHUNK, TOKENS)):
        trajectory.columns.append(token(trajectory.trajectory_id, position), -float(position), version)
    trajectory.state, trajectory.replica = State.LEASED, "replica-0"
    if len(trajectory.columns) == TOKENS:
        trajectory.state, trajectory.finish = State.BUFFERED, Finish.STOP


def make_group(group_id: int) -> Group:
    members = [Trajectory(group_id * GROUP_SIZE + i, group_id) for i in range(GROUP_SIZE)]
    return Group(group_id, f"row-{group_id}", token_array([1, 2, 3]), "prompt", members)


def write(ledger: SqliteLedger) -> None:
    recovered = ledger.recover()
    live, next_group_id, version = recovered.groups, recovered.next_group_id, recovered.version
    while True:
        while len(live) < 3:
            live.append(make_group(next_group_id))
            ledger.admit([live[-1]])
            next_group_id += 1
        growing = [t for group in live for t in group.members if t.finish is None]
        for trajectory in growing:
            grow(trajectory, version)
        ledger.update(growing)
        ledger.flush()
        say(ledger, version)
        ready = live.pop(0)
        if any(t.finish is None for t in ready.members):
            live.append(ready)
            continue
        version += 1
        ids = [t.trajectory_id for t in ready.members]
        ledger.commit_step(StepRecord(version, [ready.group_id], ids, {}))
        say(ledger, version)


def say(ledger: SqliteLedger, version: int) -> None:
    accounting = ledger.accounting()
    print(accounting.admitted, accounting.trained, version, flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limit = int(sys.argv[2])
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        write(SqliteLedger(sys.argv[1], run={"writer": "test"}))
    except LedgerError as error:
        sys.exit(f"LedgerError: {error}")
