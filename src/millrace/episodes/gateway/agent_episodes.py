"""The episodes of agents in one worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from millrace.config.objects import load_function
from millrace.config.tables.generation import SamplingConfig
from millrace.config.tables.task import EnvironmentRewardSection, Task
from millrace.core.errors import ConfigError, RewardError
from millrace.core.turns.end_ids import end_ids
from millrace.episodes.agents.agent_process import DIRECTORY
from millrace.episodes.bridge import PlainBridge
from millrace.episodes.budgets import Budgets
from millrace.episodes.environment import Environment
from millrace.episodes.episodes import Episodes
from millrace.episodes.gateway.agent_environment import AgentEnvironment, AgentParts, EpisodeEnd, Reward
from millrace.episodes.gateway.local_agents import LocalAgents, WorkersDirectory
from millrace.episodes.gateway.rendering import make_rendering
from millrace.episodes.gateway.replies import Replies
from millrace.episodes.harmony import turn_reader
from millrace.episodes.own_form import EpisodeLoop
from millrace.episodes.snapshots import Snapshots
from millrace.rewards.function import accepted
from millrace.tasks.rows import Row
from millrace.tasks.tasks import Task as Rows
from millrace.tasks.tasks import first_usable

MARGIN = 0.05
"""Share of the deadline of an answer that is left for what is not waiting."""


class _Agents:
    """Makes environments."""

    wants_ids = True

    def __init__(self, parts: AgentParts, recovery: str) -> None:
        self._parts, self.recovery = parts, recovery

    def __call__(self) -> Environment:
        return cast(Environment, AgentEnvironment(self._parts))  # which is never restored from a snapshot


class AgentReward:
    """`def reward(end, replies, tests, **columns)`, plain or async, with the arguments that it names."""

    def __init__(self, path: str, rows: Rows) -> None:
        try:
            self._function, self.file = load_function("reward.path", path)
        except ConfigError as error:
            raise RewardError(str(error)) from error
        self._accepted = accepted(
            path, self._function, {**first_usable(rows), **dict.fromkeys(EpisodeEnd._fields)}
        )

    def __call__(self, end: EpisodeEnd, row: Row) -> Reward:
        arguments = {**row, **end._asdict()}
        if self._accepted is not None:
            arguments = {name: arguments[name] for name in self._accepted if name in arguments}
        loop = EpisodeLoop()
        try:
            return loop.result(self._function(**arguments))
        finally:
            loop.close(None)


def make_agent_episodes(
    config: EnvironmentRewardSection,
    task: Task,
    rows: Rows,
    tokenizer: Any,
    sampling: SamplingConfig,
    run_dir: Path | None,
    model_path: str,
) -> Episodes:
    """Raises: RewardError: the reward or the agent's function cannot be loaded."""
    agent = config.agent
    assert agent is not None
    reward = AgentReward(config.path, rows)
    model_ends = end_ids(model_path, tokenizer)
    rendering = make_rendering(tokenizer, task.chat_arguments, model_ends)
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else model_ends)}
    parts = AgentParts(
        LocalAgents(agent, rendering, None if run_dir is None else WorkersDirectory(run_dir / DIRECTORY)),
        rendering,
        Replies(tokenizer, rendering.style, end_ids=ends, stop=sampling.stop),
        reward,
        timeout_s=config.timeout_s * (1 - MARGIN) - agent.end_s,
        end_s=agent.end_s,
        max_tokens=sampling.max_tokens,
        stop=sampling.stop,
        num_tokens=len(tokenizer),
    )
    return Episodes(
        _Agents(parts, agent.recovery),
        name=" ".join(agent.command) or str(agent.function),
        file=reward.file,
        bridge=PlainBridge(tokenizer),
        decode=turn_reader(tokenizer),
        budgets=Budgets.of(config),
        snapshots=Snapshots(run_dir, config.snapshot_bytes),
        timeout_s=config.timeout_s,
        trial=run_dir is None,
    )
