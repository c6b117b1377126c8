"""Two tasks that a tiny model learns here in minutes: small Python functions, and answers to maths questions.

    python examples/tiny.py code    # tests of each function judge it, in a sandbox: code.toml
    python examples/tiny.py maths   # math-verify judges each answer by its meaning: maths.toml

First a model of 0.4 M parameters learns from demonstrations, most of which have a usual mistake. So it can
write an answer of the right form, and prefers a wrong one. Then reinforcement learning finds out what is
right, from the reward alone. Greedy answers to held-out questions are counted before and after.
Everything is in runs/tiny-code or runs/tiny-maths. The last line says how to look at it.
"""

import argparse
import json
import random
import sys
from itertools import product
from pathlib import Path
from statistics import mean

from rich.console import Console

import millrace
from millrace.quickstart.start_model import learn

HERE = Path(__file__).resolve().parent
RIGHT = {"code": 0.3, "maths": 0.4}  # shares of the demonstrations
NUM_HELD_OUT, NUM_DEMONSTRATIONS = 64, 20_000

NUMBERS = [
    *((f"add {k}", f"{{}} + {k}") for k in range(1, 10)),
    *((f"subtract {k}", f"{{}} - {k}") for k in range(1, 10)),
    *((f"times {k}", f"{{}} * {k}") for k in range(2, 10)),
    ("square", "{} ** 2"),
]
TEXTS = [
    *((f"the first {k}", f"{{}}[:{k}]") for k in range(1, 6)),
    *((f"the last {k}", f"{{}}[-{k}:]") for k in range(1, 6)),
    ("reverse", "{}[::-1]"),
    ("capital letters", "{}.upper()"),
]


def functions():
    """(row, right programs, mistakes) of each pair of operations whose order counts."""
    for name, operations, inputs in (("x", NUMBERS, (0, 1, 5, -3)), ("text", TEXTS, ("", "Millrace", "abc"))):
        for (one, first), (other, second) in product(operations, repeat=2):
            once, swapped = first.format(name), second.format(name)
            right = second.format(f"({once})" if name == "x" else once)
            mistakes = [once, first.format(f"({swapped})")]
            outputs, *others = ([eval(one, {name: value}) for value in inputs] for one in (right, *mistakes))
            if outputs in others:
                continue
            tests = {"fn_name": "f", "inputs": [[value] for value in inputs], "outputs": outputs}
            row = {
                "prompt": f"f({name}): {one}, then {other}",
                "answer": program(name, right),
                "tests": tests,
            }
            yield row, [row["answer"]], [program(name, each) for each in mistakes]


def program(name, expression):
    return f"def f({name}):\n    return {expression}"


def questions():
    """(row, right answers, mistakes) of five kinds of questions. An answer can have several forms."""
    for a, b in product(range(1, 10), repeat=2):
        yield question(f"Solve x + {a} = {a + b} for x.", [f"{b}"], [f"{a + a + b}"])
        yield question(f"Solve x - {a} = {b} for x.", [f"{a + b}"], [f"{b - a}"])
        yield question(
            f"Expand (x + {a})(x + {b}).",
            [f"x^2+{a + b}x+{a * b}", f"{a * b}+{a + b}x+x^2"],
            [f"x^2+{a * b}x+{a + b}", f"x^2+{a * b}"],
        )
        yield question(
            f"Add 1/{a} and 1/{b}.", [f"\\frac{{{a + b}}}{{{a * b}}}"], [f"\\frac{{2}}{{{a + b}}}"]
        )
        yield question(
            f"Simplify {a}y + {b}z + {b}y.", [f"{a + b}y+{b}z"], [f"{a}y+{2 * b}z", f"{a + 2 * b}yz"]
        )


def question(prompt, right, mistakes):
    boxed = [[f"\\boxed{{{answer}}}" for answer in answers] for answers in (right, mistakes)]
    return {"prompt": prompt, "answer": right[0]}, *boxed


def demonstrations(tasks, share, rng):
    for _ in range(NUM_DEMONSTRATIONS):
        row, right, mistakes = rng.choice(tasks)
        yield f"{row['prompt']}\n", rng.choice(right if rng.random() < share else mistakes)


def write_rows(path, tasks):
    path.write_text("".join(json.dumps(row) + "\n" for row, _, _ in tasks))
    return {"kind": "file", "path": str(path), "template": "{prompt}\n"}


def train(task, directory, args):
    """Write the rows and the start model into `directory`, and train the model there."""
    rng = random.Random(args.seed)
    tasks = list(functions() if task == "code" else questions())
    rng.shuffle(tasks)
    held_out = write_rows(directory / "held-out.jsonl", tasks[:NUM_HELD_OUT])
    practised = write_rows(directory / "train.jsonl", tasks[NUM_HELD_OUT:])
    pairs = list(demonstrations(tasks[NUM_HELD_OUT:], RIGHT[task], rng))
    texts = [row["prompt"] for row, _, _ in tasks] + ["".join(pair) for pair in pairs]
    learn(
        pairs,
        directory / "base",
        directory / "start",
        Console(),
        alphabet="".join(sorted(set("".join(texts)))),
        steps=args.warm_start_steps,
        lr=4e-3,
        seed=args.seed,
    )
    evaluation = {"name": "held-out", "task": held_out, "every": args.steps, "prompts": NUM_HELD_OUT}
    return millrace.train(
        HERE / f"{task}.toml",
        run_dir=directory / "run",
        model={"path": str(directory / "start")},
        task=practised,
        reward={"workers": 2},
        steps=args.steps,
        seed=args.seed,
        batch={"prompts": 8, "group_size": 8},
        sampling={"max_tokens": 48},
        optimizer={"lr": 2e-4, "warmup_steps": 5},
        schedule={"kind": "laminar", "staleness_max": 2},
        rollout={"max_sequence_tokens": 96, "slots": 64},
        evaluations=[evaluation | {"samples": 0, "share": 1.0}],
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("task", choices=("code", "maths"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--warm-start-steps", type=int, default=500)
    parser.add_argument("--directory", type=Path, help="default: runs/tiny-code or runs/tiny-maths")
    args = parser.parse_args()
    directory = args.directory or Path("runs") / f"tiny-{args.task}"
    if directory.exists():
        sys.exit(f"{directory} exists already: remove it, or name another --directory")
    directory.mkdir(parents=True)
    run = train(args.task, directory, args)
    rewards = [step["reward/mean"] for step in run.metrics()]
    eighth = max(1, len(rewards) // 8)
    print(f"reward, first and last eighth: {mean(rewards[:eighth]):.2f} -> {mean(rewards[-eighth:]):.2f}")
    held_out = [one["greedy"] for one in run.evaluations()]
    print(f"greedy, {NUM_HELD_OUT} held-out rows: {held_out[0]:.2f} -> {held_out[-1]:.2f}")
    print(f"millrace show {run.path}; millrace ui {run.path}; millrace report {run.path}")


if __name__ == "__main__":
    main()
