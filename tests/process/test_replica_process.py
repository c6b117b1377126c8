"""A replica in a process of its own, fed from a relay's memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch
from held_replica import STEPS
from test_replica_role import DEADLINE_S, model_of, tokens_of, until_finished, until_sampled, work

from millrace.core.digest import NamedBuffer, digest_buffers
from millrace.core.types import Progress
from millrace.rollout.protocol import EngineOptions
from millrace.runtime.local import LocalRuntime
from millrace.weights.relay import Relay
from millrace.weights.ring import open_writer


def buffers_of(seed: int) -> list[NamedBuffer]:
    return [
        NamedBuffer(name, "float32", tuple(p.shape), p.detach().view(-1).view(torch.uint8).numpy())
        for name, p in model_of(seed).named_parameters()
    ]


def test_a_killed_replicas_trajectory_goes_on_in_another_as_if_nothing_happened(
    warm: None, tmp_path: Path
) -> None:
    model_of(0).save_pretrained(tmp_path)
    kwargs = {
        "engine": "own",
        "options": EngineOptions(
            model_path=str(tmp_path), device="cpu", slots=4, max_sequence_tokens=320, prefill_chunk=64
        ),
        "report_interval_s": 0.02,
        "open_reader": "millrace.weights.ring:open_reader",
    }

    async def scenario() -> tuple[list[int], list[int]]:
        relay = Relay("relay", slots=2)
        published = buffers_of(0)
        endpoint = await relay.open(1 << 20)
        writer = open_writer(endpoint)
        writer.write(0, published)
        digest = digest_buffers(published)
        await relay.stage(0, digest)
        runtime = LocalRuntime(preload=("millrace.rollout.replica",))
        try:
            async with asyncio.timeout(DEADLINE_S):
                first, second = [
                    await runtime.spawn(name, target, {"name": name} | kwargs)
                    for name, target in (
                        ("r0", "held_replica:HeldReplica"),
                        ("r1", "millrace.rollout.replica:EngineReplica"),
                    )
                ]
                for handle in (first, second):
                    served = await handle.call("pull", 0, endpoint, timeout_s=DEADLINE_S)
                    assert served.digest == digest
                await first.call("submit", [work(0, 300)], timeout_s=DEADLINE_S)
                partial: list[Progress] = await until_sampled(first.stream("reports"), 10)
                first.kill()
                await first.dead
                known = tokens_of(partial, 0)
                assert 10 <= len(known) <= STEPS
                works = [work(0, 300, lease=1, tokens=known), work(1, 300, group_id=1)]
                await second.call("submit", works, timeout_s=DEADLINE_S)
                rest = await until_finished(second.stream("reports"), {0, 1})
                await second.call("submit", [work(0, 300, lease=2)], timeout_s=DEADLINE_S)
                whole = await until_finished(second.stream("reports"), {0})
            return tokens_of(whole, 0), known + tokens_of(rest, 0)
        finally:
            await runtime.close()
            writer.close()

    uninterrupted, resumed = asyncio.run(scenario())
    assert len(uninterrupted) == 300
    assert resumed == uninterrupted
