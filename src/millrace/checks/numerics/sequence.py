"""The sequence that every side computes: of a run's record, or random tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from millrace.config.schema import Config
from millrace.core.errors import DataError
from millrace.core.types import Sampling
from millrace.ledger.reading.reader import LedgerReader
from millrace.placement.model_directory import read_model_config


@dataclass(frozen=True, eq=False)
class ProbedSequence:
    """`recorded`: log-probs that the engine of the run reported for the last tokens; None: nothing to compare
    with. `why`: the reason."""

    tokens: list[int]
    recorded: NDArray[np.float64] | None = None
    why: str = "the ledger has none of this version"


def random_sequence(config: Config, model: Path, num_tokens: int) -> ProbedSequence:
    """Uniformly random tokens, the same for the same seed of the run."""
    vocab = read_model_config(model).get("vocab_size")
    if not isinstance(vocab, int):
        raise DataError(f"{model / 'config.json'} has no `vocab_size`: give the directory of a decoder")
    return ProbedSequence(np.random.default_rng(config.seed).integers(0, vocab, num_tokens).tolist())


def recorded_sequence(config: Config, ledger: Path, version: int, num_tokens: int) -> ProbedSequence | None:
    """The first trajectory that `version` began, as far as it sampled it, and at most `num_tokens`.
    None: there is none."""
    with LedgerReader(ledger) as reader:
        for group in reader.groups():
            for member in group.members:
                tokens, logprobs = list(member.columns.tokens), member.columns.logprobs
                first, count = member.columns.runs[0] if tokens else (-1, 0)
                if first != version:
                    continue
                whole = [*group.prompt, *tokens[:count]][:num_tokens]
                if why := _incomparable(config, len(group.prompt), len(whole)):
                    return ProbedSequence(whole, None, why)
                num_sampled = len(whole) - len(group.prompt)
                return ProbedSequence(whole, np.asarray(logprobs[:num_sampled], np.float64))
    return None


def _incomparable(config: Config, prompt: int, tokens: int) -> str:
    sampling = Sampling(**dict(config.sampling))
    if sampling.cuts or sampling.edits:
        return "`sampling` changes the distribution by more than its temperature"
    if config.rollout.quantization is not None:
        return f"replicas compute with `rollout.quantization` ({config.rollout.quantization})"
    return "" if prompt < tokens else f"its prompt has {prompt} tokens: raise --tokens"
