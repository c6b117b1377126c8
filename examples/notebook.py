"""Training from a notebook: open this file in an editor that runs `# %%` cells, or run it as a script.

It needs a model directory. `make quickstart` makes runs/quickstart/start, a small model that spells words
backwards badly. All of it takes about half a minute on two cores.
"""

# %% The task: rows with a prompt and an answer, and a reward that gives credit for part of it

import millrace

WORDS = "stone river maple cloud tiger ocean bread night piano green horse light paper smoke field grape"
rows = [{"prompt": f"{word}>", "answer": word[::-1]} for word in WORDS.split()]
credit = {"whole": 0.5, "part": 0.5}


def right_letters(completion, answer):
    return sum(a == b for a, b in zip(completion, answer, strict=False)) / max(len(completion), len(answer))


def reward(completion, answer):
    part = right_letters(completion, answer)
    whole = float(completion == answer)
    return {"reward": credit["part"] * part + credit["whole"] * whole, "letters": part}


# %% The run, in the background: this cell returns at once

run = millrace.train(
    {"model.path": "runs/quickstart/start"},
    reward=reward,
    rows=rows,
    schedule={"kind": "laminar", "staleness_max": 2},
    steps=40,
    optimizer={"lr": 3e-4},
    sampling={"max_tokens": 16},
    rollout={"max_sequence_tokens": 64},
    wait=False,
)

# %% Curves that grow while the run trains, in a notebook. Interrupting this cell leaves the run alone

run.curves("reward/mean", "reward_metrics/letters", "staleness/mean")

# %% How it goes: each step as soon as it is done. Interrupting this cell leaves the run alone

for step in run.steps():
    if step["version"] % 10 == 0:
        print(f"step {step['version']:3}  reward {step['reward/mean']:.3f}")

# %% Frames, here or in another notebook: millrace.Run("runs/run-...") opens the run, while it trains or later

metrics = run.metrics().frame()
print(metrics[["version", "reward/mean", "staleness/mean", "trainer/loss"]].tail(3))

trajectories = run.trajectories().frame()
print(trajectories.groupby("trained_version")["reward/letters"].mean().iloc[[0, -1]])
print(trajectories.tail(3)[["prompt", "completion", "reward"]])

# %% Is it better at words that it was not trained on?

new_words = ("water", "table", "lemon", "sugar", "winter")
held_out = [{"prompt": f"{word}>", "answer": word[::-1]} for word in new_words]
before = millrace.evaluate(run, model="runs/quickstart/start", reward=reward, rows=held_out)
after = millrace.evaluate(run, reward=reward, rows=held_out)
print(f"mean reward of words not trained on: {before.reward_mean:.2f} -> {after.reward_mean:.2f}")

# %% Go on, with the same functions and rows: the run has kept them

run.resume(steps=50, show=False)
print(run)
