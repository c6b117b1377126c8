"""Rows and rewards of three tasks for a small model that follows instructions, such as SmolLM2-135M-Instruct.

arithmetic.toml, form.toml and tool.toml train on them. Each task has rows for training and held-out rows. No
prompt is in both. docs/real.md says which other tasks were tried, and why they were left out.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from millrace import Done, Observation

NUM_ROWS, NUM_HELD_OUT = 1000, 100
Row = dict[str, object]


def _drawn(row: Callable[[random.Random], Row]) -> list[Row]:
    """Rows with different prompts, the same ones at every call. The first of them are held out."""
    rng, rows = random.Random(0), dict[str, Row]()
    while len(rows) < NUM_ROWS + NUM_HELD_OUT:
        drawn = row(rng)
        rows.setdefault(str(drawn["prompt"]), drawn)
    return list(rows.values())


# ---------------------------------------------------------------- sums of two numbers


def _sum(rng: random.Random) -> Row:
    a, b = (rng.randrange(10 ** (digits - 1), 10**digits) for digits in rng.choices((1, 2), k=2))
    question = f"State the final answer to the following arithmetic problem: {a} + {b} ="
    return {"prompt": f"{question} Answer with the number only.", "answer": str(a + b)}


def sums() -> list[Row]:
    return _drawn(_sum)[NUM_HELD_OUT:]


def held_out_sums() -> list[Row]:
    return _drawn(_sum)[:NUM_HELD_OUT]


# ---------------------------------------------------------------- a list of so many things

THINGS = """
animals, fruits, colours, countries, cities, sports, tools, birds, trees, vegetables, drinks, rivers,
planets, metals, jobs, games, flowers, fish, insects, languages, toys, shoes, hats, cars, boats, songs,
books, spices, desserts, instruments, dances, shapes, cheeses, breads, mountains, lakes, islands, oceans,
rooms, pieces of furniture, fabrics, gemstones, stars, feelings, seasons, holidays, school subjects,
films, paintings, machines, vehicles, snacks, soups, nuts, herbs, berries, reptiles, dogs, cats, horses,
musicians, poets, painters, scientists, explorers, rulers, bridges, castles, deserts, forests, hobbies,
gifts, chores, kinds of weather, parts of the body, parts of a house, parts of a car, things in a
kitchen, things in a school, things in a garden, things in an office, things on a farm, things at a
beach, things made of wood, things made of glass, things made of paper, things that fly, things that are
round, things that are cold, things that are sweet, things that are red, things that make noise, good
habits, ways to travel, ways to relax, ways to save money, ways to learn, reasons to read, reasons to
walk, rules for a library, ideas for a party
"""


def _list(rng: random.Random) -> Row:
    number, things = rng.randrange(2, 7), rng.choice(" ".join(THINGS.split()).split(", "))
    wording = rng.choice(
        [
            "List {number} {things}, one on each line, numbered from 1.",
            "Give me a numbered list of {number} {things}, one on each line.",
            "Write {number} {things} as a list. Number the lines from 1.",
        ]
    )
    return {"prompt": wording.format(number=number, things=things), "number": number}


def lists() -> list[Row]:
    return _drawn(_list)[NUM_HELD_OUT:]


def held_out_lists() -> list[Row]:
    return _drawn(_list)[:NUM_HELD_OUT]


def is_list(completion: str, answer: None, number: int) -> float:
    """1 for so many lines with the numbers 1, 2, 3, ..., each with other words, and nothing else."""
    lines = [line for line in completion.strip().split("\n") if line.strip()]
    items = [re.fullmatch(rf"{i}[.)] (\S.*)", line.strip()) for i, line in enumerate(lines, 1)]
    words = {item[1].strip().lower() for item in items if item and re.search("[a-z]{2}", item[1].lower())}
    return float(len(lines) == len(words) == number)


# ---------------------------------------------------------------- a calculator that the model must call

EXAMPLES = [("What is 12 times 31?", "12 * 31", "372"), ("Take 25 away from 80.", "80 - 25", "55")]
QUESTIONS = {
    "+": [
        "What is {a} plus {b}?",
        "Add {b} to {a}.",
        "What is the sum of {a} and {b}?",
        "Tom has {a} coins and gets {b} more. How many coins has he now?",
    ],
    "-": [
        "What is {a} minus {b}?",
        "Take {b} away from {a}.",
        "Anna has {a} coins and spends {b} of them. How many are left?",
    ],
    "*": [
        "What is {a} times {b}?",
        "Multiply {a} by {b}.",
        "What is the product of {a} and {b}?",
        "A box holds {a} pens. How many pens do {b} boxes hold?",
    ],
}
COMPUTE = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


def _question(rng: random.Random) -> Row:
    sign = rng.choice(list(QUESTIONS))
    b, a = sorted(rng.sample(range(12, 1000), 2))
    asked = rng.choice(QUESTIONS[sign]).format(a=a, b=b)
    system = "Call the calculator with <tool>, then write what it answers."
    messages = [{"role": "system", "content": system}]
    for question, call, result in EXAMPLES:
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": f"<tool>{call}</tool>"},
            {"role": "user", "content": result},
            {"role": "assistant", "content": result},
        ]
    messages.append({"role": "user", "content": asked})
    return {"prompt": messages, "result": COMPUTE[sign](a, b)}


def questions() -> list[Row]:
    return _drawn(_question)[NUM_HELD_OUT:]


def held_out_questions() -> list[Row]:
    return _drawn(_question)[:NUM_HELD_OUT]


class Calculator:
    """`<tool>12 * 31</tool>` is answered with the product. Any other text ends the episode. It is worth 1 if
    it is the right number, and the calculator was called."""

    CALL = re.compile(r"<tool>\s*(\d{1,9}) ([-+*]) (\d{1,9})\s*</tool>")

    def reset(self, row: Row) -> None:
        self.result, self.calls = row["result"], 0

    def step(self, action: str) -> Observation | Done:
        call = self.CALL.fullmatch(action.strip())
        if call is None:
            right = self.calls > 0 and action.strip().rstrip(".") == str(self.result)
            return Done(float(right), metrics={"calls": self.calls})
        self.calls += 1
        return Observation(str(COMPUTE[call[2]](int(call[1]), int(call[3]))))
