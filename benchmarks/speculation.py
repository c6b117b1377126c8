"""What drafts without a draft model would be worth: completions of the short task are recorded with the
engine, then decoded again on paper, several tokens a step.

    python benchmarks/speculation.py                    # the start model of `loop_vs_trl.py`
    python benchmarks/speculation.py --model DIRECTORY  # a later one, by `millrace export`

Noise is a pure function of the position. So a drafted token is right exactly if it is the token that was
recorded, and speculation changes the number of steps, not the tokens. Drafts come from the last tokens before
them (the longest context of four to one that is known), and are made of what followed

    siblings  in the same group, as far as its members have come
    own       in the same prompt and completion
    all       in every completion so far, most often; with a share of at least 0.6 along the draft

`computed` are positions forwarded for each token kept: 1.0 without drafts.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch, whose threads spin at barriers

from common import kept_directory, parser_of, report, sized, table
from peers.start import TASKS, make_start, write_prompts
from transformers import AutoTokenizer

from millrace.core.completion.columns import token_array
from millrace.core.types import Sampling, Work
from millrace.engines.own.load import load_engine

GROUPS = GROUP_SIZE = 8
WARM_UP = 2  # batches that fill the table of `all` and are not counted
LONGEST, CONTEXTS = 4, (4, 3, 2, 1)
SHARE, DOUBT = 0.6, 3  # of `all`: what a draft needs, and how many unseen tokens a context is given


@dataclass
class Row:
    """A completion under way: `done` of its tokens are sampled."""

    group: int
    prompt: list[int]
    completion: list[int]
    done: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.completion[: self.done]


@dataclass
class Table:
    """What followed a context: how often each token, and which was the last."""

    counts: dict[tuple[int, ...], Counter[int]] = field(default_factory=dict)
    last: dict[tuple[int, ...], int] = field(default_factory=dict)

    def add(self, tokens: list[int], token: int) -> None:
        for length in CONTEXTS:
            context = tuple(tokens[-length:])
            self.counts.setdefault(context, Counter())[token] += 1
            self.last[context] = token

    def newest(self, tokens: list[int]) -> tuple[int | None, float]:
        known = (self.last.get(tuple(tokens[-length:])) for length in CONTEXTS[:-1])
        return next((token for token in known if token is not None), None), 1.0

    def likeliest(self, tokens: list[int]) -> tuple[int | None, float]:
        best: tuple[int | None, float] = None, 0.0
        for length in CONTEXTS:
            if counts := self.counts.get(tuple(tokens[-length:])):
                token, count = counts.most_common(1)[0]
                best = max(best, (token, count / (counts.total() + DOUBT)), key=lambda pair: pair[1])
        return best


def record(model: Path, batches: int) -> list[list[Row]]:
    """Batches as a version of a run samples them: all groups at once, until the last has ended."""
    task, size = TASKS["short"], GROUPS * GROUP_SIZE
    with tempfile.TemporaryDirectory() as directory:
        write_prompts(task, file := Path(directory) / "prompts", count=GROUPS * batches, seed=0)
        rows = [json.loads(line)["prompt"] for line in file.read_text().splitlines()]
    prompts = AutoTokenizer.from_pretrained(model)(rows)["input_ids"]
    engine = load_engine(str(model), device="cpu", slots=128, max_sequence_tokens=task.max_sequence_tokens)
    found = [Row(i // GROUP_SIZE, prompts[i // GROUP_SIZE], []) for i in range(size * batches)]
    sampling = Sampling(max_tokens=task.max_tokens)
    for i, row in enumerate(found):
        engine.submit([Work(i, row.group, 0, token_array(row.prompt), token_array(), sampling, seed=7)])
    while engine.has_work or engine.has_finished:
        engine.step()
        for progress in engine.take_progress():
            found[progress.trajectory_id].completion += progress.columns.tokens
    return [found[start : start + size] for start in range(0, len(found), size)]


def draft(row: Row, guess: Callable[[list[int]], tuple[int | None, float]], most: int) -> list[int]:
    found: list[int] = []
    tokens, share = row.tokens[-len(CONTEXTS) :], 1.0
    while len(found) < most:
        token, sure = guess(tokens)
        share *= sure
        if token is None or share < SHARE:
            break
        found.append(token)
        tokens = [*tokens, token]
    return found


def decode(batches: list[list[Row]], source: str, few: int) -> dict[str, float]:
    """Drafts only while at most `few` rows are active."""
    every, steps, computed, kept, offered, right = Table(), 0, 0, 0, 0, 0
    for number, batch in enumerate(batches):
        rows = [Row(row.group, row.prompt, row.completion) for row in batch]
        tables = _tables(rows, source, every)
        while active := [i for i, row in enumerate(rows) if row.done < len(row.completion)]:
            most = LONGEST if len(active) <= few and source != "none" else 0
            news = []
            for i in active:
                guess = tables[i].likeliest if source == "all" else tables[i].newest
                drafted = draft(rows[i], guess, most)
                same = _same(drafted, rows[i].completion[rows[i].done :])
                news.append((i, len(drafted), same))
            for i, _, same in news:
                _go_on(rows[i], tables[i], same + 1)
            if number >= WARM_UP:
                steps, offered = steps + 1, offered + sum(length for _, length, _ in news)
                computed, right = computed + sum(1 + n for _, n, _ in news), right + sum(s for *_, s in news)
        kept += sum(len(row.completion) for row in rows) * (number >= WARM_UP)
    return {
        "steps": steps / (len(batches) - WARM_UP),
        "computed": computed / kept,
        "right": right / max(1, offered),
    }


def _tables(rows: list[Row], source: str, every: Table) -> list[Table]:
    """Of each row."""
    groups = {row.group: Table() for row in rows}
    shared = {"all": lambda _: every, "siblings": lambda row: groups[row.group]}
    return [shared.get(source, lambda _: Table())(row) for row in rows]


def _same(drafted: list[int], tokens: list[int]) -> int:
    """How many of the first ones agree."""
    pairs = enumerate(zip(drafted, tokens, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(drafted), len(tokens)))


def _go_on(row: Row, table: Table, count: int) -> None:
    for token in row.completion[row.done : row.done + count]:
        table.add(row.tokens, token)
        row.done += 1


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, help="default: the start model")
    parser.add_argument("--batches", type=int, default=sized(8, 3), help="of 64 completions")
    options = parser.parse_args()
    batches = record(options.model or make_start(TASKS["short"], kept_directory()), options.batches)
    rows = {"none": decode(batches, "none", 0)}
    for source in ("siblings", "own", "all"):
        for few in (16, GROUPS * GROUP_SIZE):
            rows[f"{source}, up to {few} rows"] = decode(batches, source, few)
    table(rows)
    report({"rows": rows}, as_json=options.json)


if __name__ == "__main__":
    main()
