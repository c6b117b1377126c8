"""Does NIXL work on this host? An agent pulls some bytes from another one, as relays do.

Run as `python -m millrace.weights.chain.nixl.trial`: NIXL may crash its process, or leave threads in it.
"""

from __future__ import annotations

import asyncio
import os
import sys

import numpy as np

from millrace.core.errors import WeightsError, leaves
from millrace.weights.chain.nixl.link import Agent
from millrace.weights.layout import Bytes, Memory, create

TRIED_BYTES = 1 << 20
WITHIN_S = 20.0


async def pull_some() -> None:
    """Raises: ConfigError: no NIXL, or no agent. WeightsError: no bytes arrive, or wrong bytes."""
    sent, received = _ring(), np.zeros(TRIED_BYTES, np.uint8)
    sent.data[0][:] = np.arange(TRIED_BYTES, dtype=np.uint32).astype(np.uint8)
    source, receiver = Agent("source", sent), Agent("receiver", _ring())

    def keep(data: Bytes) -> None:
        received[:] = data

    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(source.progress())
        with receiver.source(source.metadata, "this host", WITHIN_S) as pull:
            await pull(received, sent.data[0].ctypes.data, keep)
        serving.cancel()
    if not np.array_equal(received, sent.data[0]):
        raise WeightsError("other bytes came than were sent")


def _ring() -> Memory:
    fd, memory = create(1, TRIED_BYTES)
    os.close(fd)
    return memory


if __name__ == "__main__":
    try:
        asyncio.run(pull_some())
    except* Exception as failures:
        error = next(leaves(failures))
        sys.exit(f"{type(error).__name__}: {error}")
