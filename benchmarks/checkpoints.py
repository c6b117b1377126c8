"""What training waits for a checkpoint: written before the next step, and while it is computed.

    python benchmarks/checkpoints.py [--rounds 3] [--json]

One process with the trainer's role, a Qwen3 of 108 M parameters: 1.3 GB of weights and moments. `before_s`:
until the files are complete, which a trainer waits for that writes first and goes on then. `stall_s`: what it
waits when it goes on at once. `step_s` and `step_beside_s`: a step alone, and one with the writing beside it.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

from common import medians, parser_of, report, sized
from rank_memory import configuration, make_model

PROMPT, COMPLETION, GROUPS, GROUP = 8, 56, 2, 2


def batch(version: int) -> Any:
    from millrace.core.completion.columns import TokenColumns
    from millrace.core.types import Batch, TrainGroup, TrainSequence

    def sequence(index: int) -> TrainSequence:
        tokens = [7 * index + 3 * place for place in range(COMPLETION)]
        columns = TokenColumns.of(tokens, [-1.0] * COMPLETION, version)
        return TrainSequence(index, columns, float(index % 2), truncated=False)

    groups = [
        TrainGroup(number, [1] * PROMPT, [sequence(GROUP * number + i) for i in range(GROUP)])
        for number in range(GROUPS)
    ]
    return Batch(version, groups)


async def measure(rounds: int, place: Path) -> dict[str, float]:
    from millrace.trainer.role import TorchTrainer

    make_model(place)
    config = configuration(place, "plain", 1)
    role = TorchTrainer(config, str(place / "run"), "millrace.weights.ring:open_writer", "cpu")
    await role.load(None)
    version, found = 0, []

    async def step() -> float:
        nonlocal version
        began = time.perf_counter()
        await role.step(batch(version))
        version += 1
        return time.perf_counter() - began

    await step()
    for _ in range(rounds):
        await role.checkpoint(str(place / "checkpoints"))
        first = await role.saved()
        step_s = await step()
        await role.checkpoint(str(place / "checkpoints"))
        beside_s = await step()
        beside = await role.saved()
        found.append(
            {
                "before_s": first.save_s,
                "stall_s": beside.stall_s,
                "save_s": beside.save_s,
                "step_s": step_s,
                "step_beside_s": beside_s,
            }
        )
    return medians(found)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=sized(3, 1))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        report(asyncio.run(measure(options.rounds, Path(place))), as_json=options.json)


if __name__ == "__main__":
    main()
