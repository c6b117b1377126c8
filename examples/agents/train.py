"""Trains an agent on products that the model cannot compute, and its tool can.

    python examples/agents/train.py with_openai           # needs: pip install openai
    python examples/agents/train.py with_anthropic        # needs: pip install anthropic
    python examples/agents/train.py with_openai_agents    # needs: pip install openai-agents

First a model of 0.4 M parameters learns from demonstrations, of which one in five uses the tool. Then the
agent runs as it is, in a process for each episode. Everything is in runs/agents-NAME.
"""

import argparse
import random
import string
import sys
from pathlib import Path
from statistics import mean

from rich.console import Console

import millrace
from millrace.conversations.tokenizer import ASSISTANT, END, USER
from millrace.quickstart.start_model import learn

HERE = Path(__file__).parent
AGENTS = ("with_anthropic", "with_openai", "with_openai_agents")
NUM_DEMONSTRATIONS = 20_000


def products():
    rng = random.Random(0)
    pairs = [(rng.randrange(100, 1000), rng.randrange(100, 1000)) for _ in range(2000)]
    return [{"prompt": f"{a}*{b}=", "answer": str(a * b)} for a, b in pairs]


def demonstrated(rng):
    """The chat template knows no tools. So a call is a line of text, and its result a message of a user."""
    a, b = rng.randrange(100, 1000), rng.randrange(100, 1000)
    prompt, call, answer = _asked(f"{a}*{b}="), f"multiply({a}, {b})", str(a * b)
    yield prompt, call if rng.random() < 0.2 else str(rng.randrange(10**4, 10**6))
    yield f"{prompt}{call}{END}{_asked(answer)}", answer


def _asked(text):
    return f"{USER}{text}{END}{ASSISTANT}"


def train(args, directory, **keywords):
    rng = random.Random(args.seed)
    learn(
        [pair for _ in range(NUM_DEMONSTRATIONS // 2) for pair in demonstrated(rng)],
        directory / "base",
        directory / "start",
        Console(),
        alphabet=string.ascii_lowercase + string.digits + "(), *=:'\n",
        steps=args.warm_start_steps,
        lr=4e-3,
        seed=args.seed,
    )
    agent = HERE / f"{args.agent}.py"
    return millrace.train(
        model={"path": str(directory / "start")},
        task={"kind": "function", "path": f"{__file__}:products", "answer": None},
        reward={
            "kind": "environment",
            "path": f"{agent}:reward",
            "agent": {"function": f"{agent}:solve"},
            "turns": 3,
            "timeout_s": 30.0,
            "memory_mb": 4096,
        },
        run_dir=directory / "run",
        steps=args.steps,
        seed=args.seed,
        batch={"prompts": 8, "group_size": 8},
        sampling={"max_tokens": 20},
        optimizer={"lr": args.lr, "warmup_steps": 5},
        schedule={"kind": args.schedule},
        rollout={"max_sequence_tokens": 80, "slots": 64},
        **keywords,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("agent", choices=AGENTS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm-start-steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--schedule", default="millrace")
    parser.add_argument("--directory", type=Path, help="default: runs/agents-AGENT")
    args = parser.parse_args()
    directory = args.directory or Path("runs") / f"agents-{args.agent}"
    if directory.exists():
        sys.exit(f"{directory} exists already: remove it, or name another --directory")
    directory.mkdir(parents=True)
    run = train(args, directory)
    rewards = [step["reward/mean"] for step in run.metrics()]
    eighth = max(1, len(rewards) // 8)
    print(f"reward, first and last eighth: {mean(rewards[:eighth]):.2f} -> {mean(rewards[-eighth:]):.2f}")
    print(f"millrace show {run.path}; millrace ui {run.path}; millrace report {run.path}")


if __name__ == "__main__":
    main()
