"""Measures every family of reasoning-gym: what its scorer pays, and what its rows depend on.

    .venv/bin/python scripts/gym_families.py [NAME...]

writes src/millrace/tasks/families.json, which a run reads before it starts, and the table of
reports/gym-families.md. With names, only these families are measured anew. All of them take a quarter of an
hour on two cores. A family is measured in a process of its own, with the library's default options.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import reasoning_gym
from reasoning_gym.factory import DATASETS

from millrace.tasks.asked_row import row_digest
from millrace.tasks.families import DATA, Families, read_families

PAGE = Path(__file__).resolve().parents[1] / "reports/gym-families.md"
SEED, SCORED_ROWS, COMPARED_ROWS, DISTINCT_ROWS = 7, 50, 20, 500
ROWS_S, DISTINCT_S, COMPARED_S, FAMILY_S = 3, 5, 1, 60
"""CPU seconds for making rows, for all of `DISTINCT_ROWS`, and for a family. A slow one has fewer rows."""
PAID_FROM = 0.5
"""The default of `reward.threshold`."""
AT_ONCE = 6
WRONG = (
    *("", "0", "1", "-1", "nan", "inf", "yes", "no", "True", "False", "None", "[]", "{}", "A"),
    "lorem ipsum 42 )}]",
)
"""Texts that answer no question. They count only for rows whose reference is not in them."""

Text = Callable[[int, dict[str, Any]], str | None]
"""The text for a row, from its index and its columns; None: there is none."""


def measured(names: Sequence[str]) -> dict[str, Any]:
    """What each family is. Rows are made again under another hash seed, and compared."""
    facts, others = (_under(hash_seed, names) for hash_seed in ("0", "1"))
    for name, one in facts.items():
        if "failed" not in one:
            one["hash_seed"] = _num_other(one.pop("digests"), others[name].get("digests", []))
    return facts


def _under(hash_seed: str, names: Sequence[str]) -> dict[str, Any]:
    """The facts of `--part`, in a process with this hash seed."""
    with tempfile.TemporaryDirectory() as directory:  # into which a family writes files
        command = [sys.executable, __file__, "--part", *names]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        ended = subprocess.run(command, cwd=directory, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(ended.stdout.splitlines()[-1])


def part(names: Sequence[str]) -> dict[str, Any]:
    make = digests_alone if os.environ["PYTHONHASHSEED"] != "0" else family
    with multiprocessing.get_context("fork").Pool(AT_ONCE, maxtasksperchild=1) as pool:
        waiting = {name: pool.apply_async(_in_time, (make, name)) for name in names}
        facts = {}
        for name, one in waiting.items():
            facts[name] = one.get()
            print(name, json.dumps(facts[name]), file=sys.stderr, flush=True)
    return facts


def _in_time(make: Callable[[str], dict[str, Any]], name: str) -> dict[str, Any]:
    signal.signal(signal.SIGPROF, _late)
    signal.setitimer(signal.ITIMER_PROF, FAMILY_S)
    try:
        return make(name)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _late(*_: object) -> None:
    raise TimeoutError(f"longer than {FAMILY_S} s of CPU time")


def digests_alone(name: str) -> dict[str, Any]:
    return {"digests": list(map(row_digest, _rows(_dataset(name), COMPARED_ROWS, COMPARED_S)))}


def family(name: str) -> dict[str, Any]:
    """All but what needs another process."""
    dataset, began_s = _dataset(name), time.process_time()
    with _watched() as watch:
        rows = _rows(dataset, SCORED_ROWS)
        row_s = (time.process_time() - began_s) / len(rows)
        scores = Scores(dataset.score_answer, rows)
        facts = {
            "reference": scores.references(),
            "wrong": scores.best_paid(_wrong_texts(rows)),
            "near": scores.best_paid({"the answer with one more digit": _near}),
            "raises": dict(sorted(scores.raised.items())),
        }
    digests = _digests(rows[: min(COMPARED_ROWS, max(5, int(COMPARED_S / row_s)))])
    return facts | {
        "row_s": round(row_s, 4),
        "score_s": round(scores.longest_s, 3),
        "prompts": _distinct(dataset),
        "digests": digests,
        "order": _num_other(digests, _digests(_backwards(name, len(digests)))),
        "size": _num_other(digests, _digests(_rows(_dataset(name, 5000), len(digests)))),
        "global_state": _num_other(digests, _digests(_with_state(name, len(digests)))),
        "reseeds": sorted(watch.reseeded),
        "prints": watch.printed,
    }


class Scores:
    """Calls of a scorer. `raised`: how many wrong texts made it raise, by exception."""

    def __init__(self, score: Callable[..., float], rows: list[dict[str, Any]]) -> None:
        self._score, self._rows = score, rows
        self.raised = Counter[str]()
        self.longest_s = 0.0

    def references(self) -> dict[str, Any]:
        """How many rows have a reference, of how many, and what the least of these references scores."""
        has = [row for row in self._rows if row["answer"] is not None]
        scores = [self._call(str(row["answer"]), row) for row in has]
        numbers = [one for one in scores if one is not None]
        least = round(min(numbers), 3) if numbers else None
        return {"rows": [len(has), len(self._rows)], "least": least, "raised": len(has) - len(numbers)}

    def best_paid(self, texts: dict[str, Text]) -> dict[str, Any] | None:
        """The wrong text that earns most: the score that a tenth of the rows reach with it. None: nothing."""
        best: dict[str, Any] | None = None
        for kind, make in texts.items():
            tried = [(make(index, row), row) for index, row in enumerate(self._rows)]
            wrong = [(text, row) for text, row in tried if text is not None and not _has(text, row["answer"])]
            if kind.startswith("the answer with"):  # which has the answer
                wrong = [(text, row) for text, row in tried if text is not None]
            called = (self._call(text, row, counted=True) for text, row in wrong)
            scores = sorted((one or 0.0 for one in called), reverse=True)
            if len(scores) < 5:
                continue
            earned = round(scores[len(scores) // 10], 3)
            if earned > 0 and (best is None or earned > best["score"]):
                best = {"text": kind, "score": earned, "rows": len(scores)}
        return best

    def _call(self, text: str, row: dict[str, Any], counted: bool = False) -> float | None:
        began_s = time.process_time()
        try:
            return float(self._score(answer=text, entry=copy.deepcopy(row)))
        except TimeoutError:
            raise
        except Exception as error:
            self.raised[type(error).__name__] += counted
            return None
        finally:
            self.longest_s = max(self.longest_s, time.process_time() - began_s)


def _wrong_texts(rows: list[dict[str, Any]]) -> dict[str, Text]:
    def other(index: int, row: dict[str, Any]) -> str | None:
        """The answer of the next row, whose question is another one."""
        following = rows[(index + 1) % len(rows)]
        same = following["answer"] is None or following["question"] == row["question"]
        return None if same else str(following["answer"])

    def zeros(index: int, row: dict[str, Any]) -> str | None:
        """The form of the answer without its content, such as a board of dead cells."""
        answer = str(row["answer"])
        blank = re.sub(r"\d", "0", answer)
        return blank if blank != answer and not re.search("[a-z]", answer) else None

    constant: dict[str, Text] = {repr(text): lambda index, row, text=text: text for text in WRONG}
    return constant | {
        "the question": lambda index, row: row["question"],
        "another row's answer": other,
        "0 for each digit of the answer": zeros,
    }


def _near(index: int, row: dict[str, Any]) -> str | None:
    return f"{row['answer']}7" if re.fullmatch(r"-?\d+", str(row["answer"])) else None


def _has(text: str, answer: Any) -> bool:
    """Whether the reference is in a text, or is the same number, so that the text is not quite wrong."""
    said, reference = (" ".join(str(one).casefold().split()) for one in (text, answer))
    with contextlib.suppress(ValueError):
        if float(said) == float(reference):
            return True
    return bool(reference) and reference in said


def _dataset(name: str, size: int = DISTINCT_ROWS) -> Any:
    return reasoning_gym.create_dataset(name, size=size, seed=SEED)


def _rows(dataset: Any, num: int, seconds: float = ROWS_S) -> list[dict[str, Any]]:
    """The first rows, at least 5, as many as there is time for."""
    rows, until_s = [], time.process_time() + seconds
    while len(rows) < num and (len(rows) < 5 or time.process_time() < until_s):
        rows.append(dataset[len(rows)])
    return rows


def _distinct(dataset: Any) -> list[int]:
    """Distinct prompts, and of how many rows."""
    prompts = [row["question"] for row in _rows(dataset, DISTINCT_ROWS, DISTINCT_S)]
    return [len(set(prompts)), len(prompts)]


def _digests(rows: Sequence[dict[str, Any]]) -> list[str]:
    return list(map(row_digest, rows))


def _num_other(digests: list[str], others: list[str]) -> int:
    """How many rows are other rows."""
    return sum(a != b for a, b in zip(digests, others, strict=False))


def _backwards(name: str, num: int) -> list[dict[str, Any]]:
    dataset = _dataset(name)
    return [dataset[index] for index in reversed(range(num))][::-1]


def _with_state(name: str, num: int) -> list[dict[str, Any]]:
    """Rows that are made while the generators of `random` and numpy have another state."""
    dataset, rows = _dataset(name), []
    for index in range(num):
        random.seed(index + 1_000)
        np.random.seed(index + 1_000)
        rows.append(dataset[index])
    return rows


class Watch:
    """`printed`: whether the library printed. `reseeded`: the generators that are not as they were."""

    printed = False
    reseeded = frozenset[str]()


@contextlib.contextmanager
def _watched() -> Iterator[Watch]:
    watch, before = Watch(), _states()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        yield watch
    watch.printed = bool(printed.getvalue())
    watch.reseeded = frozenset(name for name, state in _states().items() if state != before[name])


def _states() -> dict[str, str]:
    return {"random": repr(random.getstate()), "numpy": repr(np.random.get_state())}


def main() -> None:
    names = sys.argv[1:]
    if names[:1] == ["--part"]:
        with contextlib.redirect_stdout(sys.stderr):
            facts = part(names[1:])
        print(json.dumps(facts))
        return
    known = read_families().families if names else {}
    _write(known | measured(names or sorted(DATASETS)))


def _write(families: dict[str, Any]) -> None:
    rows = ",\n".join(f"    {json.dumps(name)}: {json.dumps(families[name])}" for name in sorted(families))
    package = json.dumps(version("reasoning-gym"))
    DATA.write_text(f'{{\n  "version": {package},\n  "families": {{\n{rows}\n  }}\n}}\n')
    read_families.cache_clear()
    text, _, _ = PAGE.read_text().partition(f"| {COLUMNS[0]} | ")
    PAGE.write_text(text + "\n".join(table(read_families())) + "\n")


COLUMNS = "family", "reference", "wrong", "near", "prompts", "s", "notes"


def table(known: Families) -> Iterator[str]:
    """The table of the page. Its text is written by hand."""
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    for name, one in known.families.items():
        if "failed" in one:
            yield f"| `{name}` | | | | | | not measured: {one['failed']} |"
            continue
        reference, (distinct, num) = one["reference"], one["prompts"]
        score = f"{reference['least']:g}" if reference["rows"][0] else "none"
        wrong = f"{_paid(one['wrong'])}: {one['wrong']['text']}" if _paid(one["wrong"]) else ""
        seconds = f"{one['row_s']:.2g}, {one['score_s']:.1g}"
        cells = score, wrong, _paid(one["near"]), f"{distinct} of {num}", seconds, ", ".join(_notes(one))
        yield f"| `{name}` | {' | '.join(cells)} |"


def _paid(best: dict[str, Any] | None) -> str:
    return f"{best['score']:g}" if best and best["score"] >= PAID_FROM else ""


def _notes(one: dict[str, Any]) -> Iterator[str]:
    if one["raises"]:
        yield f"raises {', '.join(one['raises'])}"
    names = {"hash_seed": "hash seed", "global_state": "state", "order": "order", "size": "size"}
    yield from (said for key, said in names.items() if one[key])
    if one["reseeds"]:
        yield "seeds " + ", ".join(one["reseeds"])
    if one["prints"]:
        yield "prints"


if __name__ == "__main__":
    main()
