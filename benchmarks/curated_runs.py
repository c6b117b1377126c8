"""What curation and screening save: generated tokens until a reward, against a run on all rows without them.

A tiny model (0.3 M parameters) spells words backwards. One third of the rows are words that it copies, which
it can do: too easy. One third are words longer than any it has seen: too hard. The middle third are words of
4 to 7 letters, of which it begins with about 0.3 right. `millrace curate` measures the rows with the start
model, and keeps those that are neither. The curated run trains on these rows with `batch.screen_samples`, the
screened run on all rows. Everything else is equal: the model, the seed, the schedule (synchronous), the
batch, the learning rate.

The reward is measured in all runs on the same held-out words of the middle third, by `[[evaluations]]`: the
share of right samples. Tokens are all that was generated for training until that version. The seed chooses
the order of the rows and the samples; the start model and the curated rows are the same for all seeds.
"""

from __future__ import annotations

import json
import random
import shutil
import string
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import run_logged, say, sized, train
from peers.start import untrained

from millrace.ledger.reading import LedgerReader

ROWS = sized(400, 8)  # of each third
SFT_STEPS, SAMPLES = sized(400, 3), sized(8, 2)
KEPT = sized((), ("--keep-hard",))  # a model of three steps has nothing right
FIRST = sized(4, 0)  # of a group of 16
HELD_OUT = sized(128, 4)  # words
WINDOW = sized(2, 1)  # evaluations, of which the mean counts
REWARD = sized(0.5, 0.0)  # the target
RIGHT, COPIED = 0.3, 0.5  # shares of demonstrations; in the rest two letters are swapped

ARMS = {
    "plain": ("rows.jsonl", 0, sized(200, 2)),
    "screened": ("rows.jsonl", FIRST, sized(140, 2)),
    "curated": ("curated/kept.jsonl", FIRST, sized(80, 2)),
}
"""Name -> rows, `batch.screen_samples`, steps."""

CONFIG = """
steps = {steps}
seed = {seed}
model.path = "{start}"
task = {{ kind = "file", path = "{rows}" }}
reward = {{ kind = "exact", workers = 1 }}
batch = {{ prompts = 8, group_size = 16, screen_samples = {screen_samples} }}
sampling.max_tokens = 18
optimizer = {{ lr = 1e-4, warmup_steps = 5 }}
schedule.kind = "synchronous"
rollout = {{ replicas = 1, slots = 128, max_sequence_tokens = 40, report_interval_s = 0.02 }}
checkpoints.every = 1000

[[evaluations]]
name = "held-out"
every = 4
prompts = {held_out}
samples = 2
task = {{ kind = "file", path = "{tests}" }}
share = 1.0
"""


@dataclass(frozen=True)
class Point:
    """A version: the tokens that were generated to make it, and its reward on the held-out words."""

    version: int
    tokens: int
    reward: float


def pairs(kind: str, draw: random.Random) -> tuple[str, str]:
    """A prompt of this kind, and its answer."""
    length = draw.randint(14, 16) if kind == "hard" else draw.randint(4, 7)
    word = "".join(draw.choices(string.ascii_lowercase, k=length))
    return (f"{word}=", word) if kind == "easy" else (f"{word}>", word[::-1])


def write_rows(directory: Path) -> None:
    """A third of each kind, mixed; and the held-out words."""
    draw = random.Random(3)
    rows = [pairs(kind, draw) for kind in ("easy", "middle", "hard") for _ in range(ROWS)]
    draw.shuffle(rows)
    tests = [pairs("middle", draw) for _ in range(HELD_OUT)]
    for name, each in (("rows", rows), ("tests", tests)):
        lines = [json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in each]
        (directory / f"{name}.jsonl").write_text("".join(lines))


def config(directory: Path, rows: Path, *, steps: int, seed: int, screen_samples: int) -> str:
    return CONFIG.format(
        steps=steps,
        seed=seed,
        start=make_start(directory),
        rows=rows,
        screen_samples=screen_samples,
        held_out=HELD_OUT,
        tests=directory / "tests.jsonl",
    )


def demonstrations() -> Iterator[tuple[str, str]]:
    """Copies are right. Of words spelled backwards most are wrong."""
    draw = random.Random(7)
    for _ in range(sized(20_000, 50)):
        prompt, answer = pairs(draw.choice(["easy", "middle"]), draw)
        if prompt.endswith(">") and (wrong := draw.random()) > RIGHT:
            i = draw.randrange(len(answer) - 1)
            swapped = answer[:i] + answer[i + 1] + answer[i] + answer[i + 2 :]
            answer = answer[::-1] if wrong < RIGHT + COPIED else swapped
        yield prompt, answer


def make_start(directory: Path) -> Path:
    """The start model, made once."""
    from millrace.conversations.tokenizer import load_tokenizer, make_character_tokenizer
    from millrace.sft.supervised import sft

    base, out = directory / "base", directory / "start"
    if not (out / "model.safetensors").exists():
        base.mkdir(exist_ok=True)
        make_character_tokenizer(base, string.ascii_lowercase + ">=")
        tokenizer = load_tokenizer(base)
        untrained(tokenizer, hidden=96, layers=3).save_pretrained(base)
        end = tokenizer.eos_token_id
        examples = [(tokenizer.encode(p), [*tokenizer.encode(c), end]) for p, c in demonstrations()]
        sft(base, examples, out_dir=out, steps=SFT_STEPS, lr=4e-3, batch_tokens=1500, optimizer="muon")
    return out


def make_curated(directory: Path) -> dict[str, Any]:
    """Write the rows, and what `millrace curate` keeps of them with the start model, once. Its summary."""
    rows, out = directory / "rows.jsonl", directory / "curated"
    if not (out / "curation.json").exists():
        write_rows(directory)
        (directory / "curate.toml").write_text(config(directory, rows, steps=1, seed=0, screen_samples=0))
        words = "curate", directory / "curate.toml", "--out", out, "--samples", SAMPLES, "--near", 1, *KEPT
        run_logged([sys.executable, "-m", "millrace", *map(str, words)], directory / "curate.log")
    summary: dict[str, Any] = json.loads((out / "curation.json").read_text())
    return summary


def sampled_tokens(curated: Path) -> int:
    """Tokens of all samples of a curation."""
    with LedgerReader(curated / "attempts.sqlite") as ledger:
        names = [one.name for one in ledger.evaluations() if one.name.startswith("samples")]
        return sum(len(attempt.tokens) for name in names for attempt in ledger.attempts(name, 0))


def points(run: Path) -> list[Point]:
    """One for each evaluated version after the start, in order."""
    tokens = dict[int, int]()  # by the version that sampled them
    with LedgerReader(run / "ledger.sqlite") as ledger:
        for group in ledger.groups():
            for member in group.members:
                for version, num in member.columns.runs:
                    tokens[version] = tokens.get(version, 0) + num
        return [
            Point(
                record.version,
                sum(num for version, num in tokens.items() if version < record.version),
                record.metrics["sampled_accuracy"],
            )
            for record in ledger.evaluations()
            if record.version and not record.reason
        ]


def tokens_to(reward: float, curve: list[Point]) -> int | None:
    """Tokens until the mean of a window of evaluations is at this reward; None: none is."""
    for end in range(WINDOW, len(curve) + 1):
        if sum(point.reward for point in curve[end - WINDOW : end]) / WINDOW >= reward:
            return curve[end - 1].tokens
    return None


def curve(arm: str, seed: int, directory: Path) -> list[Point]:
    """Of a run that is made, if it is not kept."""
    out = directory / f"{arm}-{seed}"
    if not (out / "run" / "summary.json").exists():
        shutil.rmtree(out, ignore_errors=True)
        rows, first, steps = ARMS[arm]
        train(config(directory, directory / rows, steps=steps, seed=seed, screen_samples=first), out)
        say(f"{arm}, seed {seed}: made")
    return points(out / "run")


def speedup(seeds: int, directory: Path) -> dict[str, Any]:
    """Tokens that the plain run needs over tokens that the curated run needs, as a mean over seeds.

    A run that does not get there counts with all of its tokens. Of plain runs the figure is then a lower
    bound; `runs_that_arrive` says how many did. A curated run that does not is an error.
    `speedup_with_curation`: the samples of the curation count as tokens of every curated run.
    `speedup_of_screening`: of screened runs on all rows.
    """
    directory = directory / "curated-runs"
    directory.mkdir(exist_ok=True)
    summary, spent = make_curated(directory), sampled_tokens(directory / "curated")
    tokens, arrived = {arm: list[int]() for arm in ARMS}, dict.fromkeys(ARMS, 0)
    for seed in range(seeds):
        for arm in ARMS:
            run = curve(arm, seed, directory)
            needed = tokens_to(REWARD, run)
            if needed is None and arm == "curated":
                raise SystemExit(f"{arm}, seed {seed}: does not reach {REWARD}: give it more steps")
            tokens[arm].append(needed or run[-1].tokens)
            arrived[arm] += needed is not None
    ratios = {arm: [p / t for p, t in zip(tokens["plain"], tokens[arm], strict=True)] for arm in ARMS}
    return {
        "rows_of_pass_rates": summary["num_rows"],
        "rows_kept": summary["num_kept"],
        "runs_that_arrive": arrived,
        "tokens": tokens,
        "tokens_of_curation": spent,
        "speedups": ratios["curated"],
        "speedup_to_reward": sum(ratios["curated"]) / seeds,
        "speedup_of_screening": sum(ratios["screened"]) / seeds,
        "speedup_with_curation": sum(tokens["plain"]) / (sum(tokens["curated"]) + seeds * spent),
    }
