"""Two tasks of several turns that a tiny model learns here in minutes.

    python examples/turns.py search        # find a secret letter: the environment answers lower or higher
    python examples/turns.py calculator    # products that the model cannot compute, and a tool that can

First a model of 0.4 M parameters learns from demonstrations, which mostly guess. Then reinforcement learning
finds out what the answers of the environment are good for, from the reward alone.
Everything is in runs/turns-search or runs/turns-calculator. The last line says how to look at it.
"""

import argparse
import random
import string
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from rich.console import Console

import millrace
from millrace import Done, Observation
from millrace.conversations.tokenizer import END
from millrace.quickstart.start_model import learn

LETTERS = string.ascii_lowercase[:16]
CAREFUL = 0.4  # share of the guesses of a demonstration that obey the answers so far
NUM_DEMONSTRATIONS = 20_000


# ---------------------------------------------------------------- a search


class Search:
    """The secret is a letter. After a guess the environment says where the secret is."""

    def reset(self, row):
        self.secret, self.malformed = row["secret"], 0

    def step(self, action):
        guess = action.strip()
        if guess == self.secret:
            return Done(1.0)
        if len(guess) != 1 or guess not in LETTERS:
            self.malformed += 1
            return Observation("?", metrics={"malformed": self.malformed})
        return Observation("+" if guess < self.secret else "-")


def secrets():
    return [{"prompt": ">", "secret": letter} for letter in LETTERS]


def searches(rng):
    """Demonstrations of one turn each. A guess obeys all answers so far, or none."""
    secret, text = rng.choice(LETTERS), ">"
    low, high = 0, len(LETTERS)
    for _ in range(5):
        guess = rng.choice(LETTERS[low:high] if rng.random() < CAREFUL else LETTERS)
        yield text, guess
        if guess == secret:
            return
        higher = guess < secret
        text += f"{guess}{END}{'+' if higher else '-'}"
        place = LETTERS.index(guess)
        low, high = (max(low, place + 1), high) if higher else (low, min(high, place))


# ---------------------------------------------------------------- a tool


class Calculator:
    """`calc A*B` is answered with the product. Any other text is the final answer."""

    def reset(self, row):
        self.answer, self.calls, self.malformed = row["answer"], 0, 0

    def step(self, action):
        if not action.startswith("calc "):
            return Done(float(action.strip() == self.answer))
        left, times, right = action[5:].partition("*")
        if not (times and left.isdigit() and right.isdigit() and len(action) < 20):
            self.malformed += 1
            return Observation("error\n", metrics={"malformed": self.malformed})
        self.calls += 1
        return Observation(f"{int(left) * int(right)}\n", metrics={"calls": self.calls})


def products():
    rng = random.Random(0)
    pairs = [(rng.randrange(100, 1000), rng.randrange(100, 1000)) for _ in range(2000)]
    return [{"prompt": f"{a}*{b}=", "answer": str(a * b)} for a, b in pairs]


def products_demonstrated(rng):
    """One in five demonstrations uses the tool. The others guess the answer."""
    a, b = rng.randrange(100, 1000), rng.randrange(100, 1000)
    prompt, answer = f"{a}*{b}=", str(a * b)
    if rng.random() < 0.2:
        yield prompt, f"calc {a}*{b}"
    else:
        yield prompt, str(rng.randrange(10**4, 10**6))
    yield f"{prompt}calc {a}*{b}{END}{answer}\n", answer


# ---------------------------------------------------------------- the runs


class Task(NamedTuple):
    rows: str
    environment: str
    demonstrations: Callable
    turns: int
    max_tokens: int
    prompts: int
    steps: int
    lr: float
    warm_start_steps: int = 600


TASKS = {
    "search": Task("secrets", "Search", searches, turns=5, max_tokens=4, prompts=16, steps=200, lr=3e-4),
    "calculator": Task(
        "products",
        "Calculator",
        products_demonstrated,
        turns=3,
        max_tokens=16,
        prompts=8,
        steps=100,
        lr=2e-4,
        warm_start_steps=300,
    ),
}


def train(name, directory, args):
    """Write the start model into `directory`, and train the model there."""
    task, rng, pairs = TASKS[name], random.Random(args.seed), []
    while len(pairs) < NUM_DEMONSTRATIONS:
        pairs += task.demonstrations(rng)
    learn(
        pairs,
        directory / "base",
        directory / "start",
        Console(),
        alphabet=string.ascii_lowercase + string.digits + "<>+-?*= \n",
        steps=args.warm_start_steps or task.warm_start_steps,
        lr=4e-3,
        seed=args.seed,
    )
    return millrace.train(
        model={"path": str(directory / "start")},
        task={"kind": "function", "path": f"{__file__}:{task.rows}", "answer": None},
        reward={"kind": "environment", "path": f"{__file__}:{task.environment}", "turns": task.turns},
        run_dir=directory / "run",
        steps=args.steps or task.steps,
        seed=args.seed,
        batch={"prompts": task.prompts, "group_size": 8},
        sampling={"max_tokens": task.max_tokens},
        optimizer={"lr": args.lr or task.lr, "warmup_steps": 5},
        schedule={"kind": args.schedule},
        rollout={"max_sequence_tokens": 64, "slots": 64},
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, help="default: that of the task")
    parser.add_argument("--warm-start-steps", type=int, help="supervised steps; default: those of the task")
    parser.add_argument("--lr", type=float, help="default: that of the task")
    parser.add_argument("--schedule", default="millrace")
    parser.add_argument("--directory", type=Path, help="default: runs/turns-TASK")
    args = parser.parse_args()
    directory = args.directory or Path("runs") / f"turns-{args.task}"
    if directory.exists():
        sys.exit(f"{directory} exists already: remove it, or name another --directory")
    directory.mkdir(parents=True)
    run = train(args.task, directory, args)
    rewards = [step["reward/mean"] for step in run.metrics()]
    eighth = max(1, len(rewards) // 8)
    print(f"reward, first and last eighth: {mean(rewards[:eighth]):.2f} -> {mean(rewards[-eighth:]):.2f}")
    print(f"millrace show {run.path}; millrace ui {run.path}; millrace report {run.path}")


if __name__ == "__main__":
    main()
