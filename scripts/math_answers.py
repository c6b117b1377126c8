"""What the reward `math` pays on public test sets: right answers, two answers in one, and answers of models.

    git clone https://github.com/QwenLM/Qwen2.5-Math
    git clone https://github.com/openai/grade-school-math
    .venv/bin/python scripts/math_answers.py Qwen2.5-Math grade-school-math

writes the table of reports/math-answers.md. It takes ten minutes on one core. A right answer is the reference
in a box, behind "The answer is", and in `<answer>`. For two answers a reference is joined to that of another
row, which alone earns 0. The answers of models have verdicts in these repositories.
"""

from __future__ import annotations

import json
import random
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from millrace.core.errors import DataError
from millrace.rewards.mathematics.final_answer import boxes
from millrace.rewards.mathematics.math_reward import MathReward, Words, read_reference
from millrace.rewards.mathematics.plain_numbers import PlainNumber

PAGE = Path(__file__).resolve().parents[1] / "reports/math-answers.md"
SETS = {
    **dict.fromkeys(("aime24", "amc23", "asdiv", "carp_en", "cmath", "cn_middle_school"), "answer"),
    **dict.fromkeys(("college_math", "gaokao2023en", "gaokao2024_mix", "gaokao_math_cloze"), "answer"),
    **{"gsm8k": "answer", "mawps": "target", "minerva_math": "solution", "olympiadbench": "final_answer"},
    **{"svamp": "Answer", "aqua": "correct", "gaokao_math_qa": "label", "sat_math": "Answer"},
}
"""Test sets of `evaluation/data`, and the column of the reference."""
PAIRS, LENGTH_MAX, DEADLINE_S = 300, 80, 10
REWARD = MathReward()


def pays(completion: str, reference: Any) -> bool:
    """A call that is late pays nothing, as in a run."""
    signal.alarm(DEADLINE_S)
    try:
        return REWARD(completion, reference, {}) == 1.0
    except TimeoutError:
        print(f"late: {reference!r}: {completion!r}", file=sys.stderr)
        return False
    finally:
        signal.alarm(0)


def _late(*_: object) -> None:
    raise TimeoutError


def right(text: str) -> dict[str, str]:
    marked = text if "$" in text else f"${text}$"
    return {
        "box": f"So we have it.\n\n\\boxed{{{text}}}",
        "sentence": f"First, $1 + 1 = 2$.\n\nThe answer is {marked}.",
        "tag": f"<think>Perhaps 17.</think>\n<answer>{text}</answer>",
    }


def two(one: str, other: str) -> list[str]:
    return [
        f"The answer is ${one}$ or ${other}$.",
        f"The answer is ${other}$ or perhaps ${one}$.",
        f"\\boxed{{{other} \\text{{ or }} {one}}}",
        f"<answer>{one} or {other}</answer>",
    ]


def written(reference: Any) -> str:
    """A reference as a model writes it: of a solution the answer alone."""
    text = str(reference).removesuffix(".0") if isinstance(reference, float) else str(reference)
    if "####" in text or "\\boxed" in text:
        text = ([*boxes(text)] or [text.rpartition("####")[2]])[-1]
    whole = re.fullmatch(r"\$([^$]+)\$", text.strip())
    return whole[1] if whole else text.strip()


def figures_of(path: Path, column: str) -> dict[str, str]:
    """One row of the table: counts and shares by name, as text."""
    counts, known = Counter[str](), list[tuple[str, str]]()
    for line in path.read_text().splitlines():
        value = json.loads(line)[column]
        reference = value[0] if isinstance(value, list) else value
        text = written(reference)
        counts["rows"] += 1
        try:
            kind = type(read_reference(str(reference)))
        except DataError:
            counts["unreadable"] += 1
            continue
        counts["numbers"] += kind is PlainNumber
        counts["words"] += kind is Words
        for name, completion in right(text).items():
            counts[name] += pays(completion, reference)
        if kind is not Words and len(text) <= LENGTH_MAX and not re.search(r"[$\n,;]", text):
            known.append((str(reference), text))
    random.Random(7).shuffle(known)
    for (reference, text), (_, other) in pairwise(known[:PAIRS]):
        if not pays(f"\\boxed{{{other}}}", reference):
            counts["pairs"] += 1
            counts["two"] += any(pays(completion, reference) for completion in two(text, other))
    readable = counts["rows"] - counts["unreadable"]
    shares = {name: f"{counts[name] / readable:.3f}" for name in ("box", "sentence", "tag")}
    paid = f"{counts['two']} of {counts['pairs']}"
    return (
        {name: f"{counts[name]:,}" for name in ("rows", "unreadable", "numbers", "words")}
        | shares
        | {"two answers paid": paid}
    )


def verdicts(qwen: Path, gsm8k: Path) -> Iterator[tuple[str, str, bool, bool]]:
    """Whose verdicts, the end of the completion, what they say, what the reward says."""
    for line in (gsm8k / "grade_school_math/data/example_model_solutions.jsonl").read_text().splitlines():
        row = json.loads(line)
        reference = row["ground_truth"].rpartition("A:")[2].strip()
        for one in row.values():
            if isinstance(one, dict):
                solution = one["solution"]
                yield "GSM8K, of 6 B and 175 B", solution, one["is_correct"], pays(solution, reference)
    path = qwen / "evaluation/data/eval_rm_maj_example/math_cot_100.jsonl"
    for line in path.read_text().splitlines():
        row = json.loads(line)
        for solution, verdict in zip(row["code"], row["score"], strict=True):
            yield "MATH, of Qwen2.5-Math", solution, verdict, pays(solution, row["answer"])


def main() -> None:
    signal.signal(signal.SIGALRM, _late)
    qwen, gsm8k = map(Path, sys.argv[1:])
    rows = {name: figures_of(qwen / f"evaluation/data/{name}/test.jsonl", one) for name, one in SETS.items()}
    names = ["set", *next(iter(rows.values()))]
    lines = [names, ["---"] * len(names), *([name, *row.values()] for name, row in rows.items())]
    counts, agreed = Counter[str](), Counter[str]()
    for whose, solution, verdict, paid in verdicts(qwen, gsm8k):
        counts[whose] += 1
        agreed[whose] += verdict == paid
        if verdict != paid:
            print(f"{whose}: {verdict} there, {paid} here: {solution[-80:]!r}", file=sys.stderr)
    lines += [[], ["verdicts", "completions", "the same"], ["---"] * 3]
    lines += [[whose, f"{num:,}", f"{agreed[whose]:,}"] for whose, num in counts.items()]
    table = "\n".join(f"| {' | '.join(line)} |" if line else "" for line in lines)
    before = PAGE.read_text().partition("\n| set |")[0].rstrip("\n")
    PAGE.write_text(f"{before}\n\n{table}\n")


if __name__ == "__main__":
    main()
