"""How far the trainer's log-probs are from the log-probs that the engine sampled with."""

from __future__ import annotations

import gc
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

from millrace.config.schema import Config
from millrace.core.completion.columns import TokenColumns, token_array
from millrace.core.types import Batch, Sampling, TrainGroup, TrainSequence, Work
from millrace.devices.device import torch_device
from millrace.engines.own.load_engine import load_engine
from millrace.trainer.ranks.mesh import ALONE
from millrace.trainer.role import load_reference, reference_logprobs
from node_parts.setting import Figures, Note, Setting

GROUP = 4


def gap_part(setting: Setting, note: Note) -> None:
    """The engine samples groups. Then the trainer's forward pass computes the same tokens, at the same
    weights: rounded, packed, in the same number format. |trainer - engine| of each token, in nats."""
    model = setting.large()
    config = Config.model_validate(setting.configuration(model))
    batch = sampled(setting, model, config)
    gc.collect()
    if setting.device == "cuda":
        torch.cuda.empty_cache()
    note({"gap_tokens": sum(len(s.columns) for group in batch.groups for s in group.sequences)})
    trained_C = reference_logprobs(
        load_reference(config, torch_device(setting.device), ALONE), batch, config
    ).astype(float)
    sampled_C = np.concatenate([s.columns.logprobs for group in batch.groups for s in group.sequences])
    note(statistics(trained_C - sampled_C))


def statistics(difference_C: np.ndarray) -> Figures:
    gap_C = np.abs(difference_C)
    return {
        "gap_mean": float(gap_C.mean()),
        "gap_p999": float(np.quantile(gap_C, 0.999)),
        "gap_max": float(gap_C.max()),
        "difference_mean": float(difference_C.mean()),
    }


def sampled(setting: Setting, model: Path, config: Config) -> Batch:
    """Groups of completions by the own engine, with the log-probs of their tokens."""
    prompts, max_tokens = setting.prompts(model, setting.sized(32, 4)), config.sampling.max_tokens
    engine = load_engine(
        str(model),
        device=setting.device,
        dtype=setting.dtype,
        slots=config.rollout.slots,
        max_sequence_tokens=config.rollout.max_sequence_tokens,
    )
    sampling, works = Sampling(max_tokens=max_tokens), []
    for number in range(len(prompts) * GROUP):
        prompt = token_array(prompts[number // GROUP])
        works.append(Work(number, number // GROUP, 0, prompt, token_array(), sampling, seed=1))
    engine.submit(works)
    columns: dict[int, list[TokenColumns]] = defaultdict(list)
    while engine.has_work or engine.has_finished:
        engine.step()
        for progress in engine.take_progress():
            columns[progress.trajectory_id].append(progress.columns)
    engine.close()
    return Batch(0, [group_of(index, prompt, columns) for index, prompt in enumerate(prompts)])


def group_of(index: int, prompt: list[int], columns: dict[int, list[TokenColumns]]) -> TrainGroup:
    def sequence(number: int) -> TrainSequence:
        tokens = [token for part in columns[number] for token in part.tokens]
        logprobs = [logprob for part in columns[number] for logprob in part.logprobs]
        return TrainSequence(number, TokenColumns.of(tokens, logprobs, 0), float(number % 2), truncated=False)

    numbers = range(index * GROUP, (index + 1) * GROUP)
    return TrainGroup(index, token_array(prompt), [sequence(number) for number in numbers])
