"""How many threads a worker computes with on a CPU, and the rows that the trainer's threads share. Pure.

A step of the trainer takes 6 operations for each parameter and token, and sampling takes 2. So with a large
model the trainer is the slower side. Its batch is then cut into rows of about `ROW_OPERATIONS`, and each
thread takes the next row when it is free. No thread waits for another one at a barrier, so the trainer may
have as many threads as the host has cores: its threads use what the replicas leave. A model for which even a
full micro-batch is no more than one such row stays on one thread. There sampling is the slower side, because
calls cost more than products, and a second thread of the trainer would take a replica's core.

The threads of a replica divide each product, and wait for one another. So a replica gets a second thread only
where the cores suffice for it. `REPLICA_SHARE` is a prior: 2 of 8 operations, which take twice their time,
because a product of a decode step has few rows. With `rollout.colocated` replicas share all cores in their
turn.
"""

from __future__ import annotations

from millrace.config.schema import Config
from millrace.core.placement import Host

ROW_OPERATIONS = 2e11
"""Two seconds of one core with AVX-512, and at 1 M parameters more than a micro-batch of the default size."""
ROW_TOKENS_MIN, ROW_FULL_MIN = 512, 256
"""A tree of the first number of tokens is not cut, because each part repeats the prompt. Several trees share
a row of the second: more rows divide better among threads, and a row's activations are less memory."""
OPERATIONS = 6
REPLICA_SHARE = 0.4
ROW_THREADS_MAX = 8
"""Beyond these, several threads work at one row: a batch has a limited number of rows."""


def row_tokens(parameters: int, token_budget: int) -> int:
    """The most tokens of a row of the trainer on a CPU. The number of threads does not change it, so neither
    does it change a gradient."""
    return row_full(parameters, token_budget, narrow=True)


def row_full(parameters: int, token_budget: int, *, narrow: bool) -> int:
    """The most tokens of a row of several trees, at most `row_tokens`. `narrow`: matmuls are in 16 bits, so
    activations are small, and adding to the gradients takes as long as a product of few tokens."""
    least = ROW_TOKENS_MIN if narrow else ROW_FULL_MIN
    return min(token_budget, max(least, int(ROW_OPERATIONS / (OPERATIONS * max(1, parameters)))))


def trainer_threads(config: Config, host: Host, parameters: int) -> int:
    """Of a trainer of one rank. A rank among several has one thread."""
    if host.threads:
        return host.threads
    budget = config.batch.token_budget
    rows_at_once = budget // row_tokens(parameters, budget)  # all of them have room in one micro-batch
    return min(host.cores, rows_at_once) if config.trainer.ranks == 1 else 1


def tokens_at_once(config: Config, threads: int, parameters: int) -> int:
    """How many tokens a trainer of one rank computes at the same time on a CPU, at most."""
    budget, longest = config.batch.token_budget, config.rollout.max_sequence_tokens
    narrow = config.model.dtype == "bfloat16"
    tree = longest + (config.batch.group_size - 1) * config.completion_tokens_max
    row = min(row_tokens(parameters, budget), max(row_full(parameters, budget, narrow=narrow), tree))
    return max(row, longest) * min(threads, ROW_THREADS_MAX)


def replica_threads(config: Config, host: Host, parameters: int) -> int:
    """Of each replica of `host`."""
    if host.threads:
        return host.threads
    budget, replicas = config.batch.token_budget, max(1, config.rollout.replicas)
    small = row_tokens(parameters, budget) == budget
    share = 1.0 if config.rollout.colocated else REPLICA_SHARE  # a trainer that sleeps needs no core
    return 1 if small else max(1, round(host.cores * share / replicas))


def divided(threads: int, *, cut: bool) -> tuple[int, int]:
    """Of a trainer's threads: how many rows it computes at once, and the threads of each row."""
    rows = min(threads, ROW_THREADS_MAX) if cut else 1
    return rows, max(1, threads // rows)
