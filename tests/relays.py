"""A relay in a process of its own, for tests and benchmarks: on this host, or on one of `namespaces`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from millrace.core import errors
from millrace.core.types import Endpoint, Staged
from millrace.weights.relay import RelayWorker

SECRET = "MILLRACE_TEST_SECRET"


class RelayProcess:
    """One relay. It does what it is asked, one thing after the other, and answers each."""

    def __init__(
        self,
        address: str,
        slot_bytes: int,
        *,
        prefix: Sequence[str] = (),
        slots: int = 3,
        transport: str = "tcp",
    ) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, __file__, address, str(slots), transport],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {SECRET: "of this test", "UCX_LOG_FILE": "stderr"},  # answers go to stdout
        )
        self.ask("open", slot_bytes)
        self.endpoint: Endpoint = self.answer(Endpoint)

    def ask(self, method: str, *args: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode([method, args]) + b"\n")
        self.process.stdin.flush()

    def answer(self, kind: Any = Staged) -> Any:
        """Raises: what the relay raised."""
        assert self.process.stdout is not None
        error, text, result = msgspec.json.decode(
            self.process.stdout.readline(), type=tuple[str, str, kind | None]
        )
        if error:
            raise getattr(errors, error)(text)
        return result

    def call(self, method: str, *args: Any) -> Any:
        self.ask(method, *args)
        return self.answer()

    def kill(self) -> None:
        """kill -9, and wait. Idempotent."""
        self.process.kill()
        self.process.communicate()


def serve(address: str, slots: int, transport: str) -> None:
    """The process: commands on stdin, until it ends."""
    from cables import believed  # beside this script

    relay = RelayWorker("relay", slots, address=address, secret=os.environ[SECRET], transport=transport)

    async def obey() -> None:
        while line := await asyncio.to_thread(sys.stdin.readline):
            method, args = msgspec.json.decode(line)
            try:
                answer = "", "", await getattr(relay, method)(*args)
            except errors.MillraceError as error:
                answer = type(error).__name__, str(error), None
            print(msgspec.json.encode(answer).decode(), flush=True)

    with believed():
        asyncio.run(obey())


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), sys.argv[3])
