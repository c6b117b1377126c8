"""Who asks the reference and gets the answer, when the worker or the trainer dies in between."""

from __future__ import annotations

import asyncio
from array import array
from types import SimpleNamespace

import pytest

from millrace.controller.reference_session import ReferenceSession
from millrace.controller.waits import Waits
from millrace.core.completion.columns import TokenColumns
from millrace.core.errors import WorkerDied
from millrace.core.pulse import Pulse
from millrace.core.types import Batch, TrainGroup, TrainSequence


def batch_of(version):
    sequences = [TrainSequence(i, TokenColumns.of([7, 8], [-1.0, -1.0], 0), 0.0, False) for i in range(2)]
    return Batch(version, [TrainGroup(0, array("i", [1]), sequences)])


class Worker:
    """Answers when it is let. Each log-prob is the version of the batch, which tells whose answer it is."""

    def __init__(self):
        self.asked, self.dies = [], False
        self.begun, self.let = asyncio.Event(), asyncio.Event()

    async def call(self, handle, method, argument):
        if method == "load":
            return "float32"
        self.asked.append(argument.version)
        self.begun.set()
        await self.let.wait()
        if self.dies:
            raise WorkerDied("killed")
        return [array("f", [argument.version] * len(s.columns)) for g in argument.groups for s in g.sequences]


def session_of(worker):
    ledger = SimpleNamespace(version_records=lambda version: [SimpleNamespace(digest="of version 0")])
    run = {"pulse": Pulse(), "waits": Waits(), "patience": worker, "ledger": ledger}
    return ReferenceSession(SimpleNamespace(**run, computes=lambda name, text: None))


def reference_values(batch):
    return {value for group in batch.groups for s in group.sequences for value in s.reference}


def test_a_batch_of_a_worker_that_died_is_scored_anew():
    async def body():
        worker = Worker()
        session = session_of(worker)
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(session.scored(batch_of(3)))
            worker.dies = True
            worker.let.set()
            with pytest.raises(WorkerDied):
                await session.run(None)
            worker.dies = False
            another = group.create_task(session.run(None))
            assert reference_values(await asked) == {3.0}
            another.cancel()
        assert worker.asked == [3, 3]

    asyncio.run(body())


def test_a_trainer_gets_no_answer_to_one_that_died():
    async def body():
        worker = Worker()
        session = session_of(worker)
        async with asyncio.TaskGroup() as group:
            dead = group.create_task(session.scored(batch_of(4)))
            running = group.create_task(session.run(None))
            await worker.begun.wait()
            dead.cancel()
            asked = group.create_task(session.scored(batch_of(2)))
            await asyncio.sleep(0)
            worker.let.set()
            assert reference_values(await asked) == {2.0}
            running.cancel()
        assert worker.asked == [4, 2]

    asyncio.run(body())
