"""vLLM's drafts: tokens come from the distribution that their log-probs name, under any version."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from bench import MODELS, TOLERANCE, Bench, OpenBench, prompt_of
from msgspec.structs import replace
from safetensors.torch import save_file
from test_settings import nearest
from test_top_logprobs import check
from transformers import LlamaForCausalLM

from millrace.core.types import Sampling
from millrace.engines.vllm.vllm_versions import refuse_missing_package

pytestmark = pytest.mark.computed

FEW = (5, 6, 7, 8)  # of so few tokens, most have followed the same ones before
DRAWN = Sampling(max_tokens=60, temperature=0.7, top_k=3, allowed_token_ids=FEW, ignore_eos=True)
GREEDY = Sampling(max_tokens=60, temperature=0.0, ignore_eos=True)


@pytest.fixture(params=["ngram", "suffix"])
def drafting(request: pytest.FixtureRequest, kind: str, tensor: int, bench_of: OpenBench) -> Bench:
    if kind != "vllm" or tensor > 1:
        pytest.skip("of vLLM, on one device")
    try:
        refuse_missing_package(request.param)
    except ImportError as missing:
        pytest.skip(str(missing))
    return bench_of(drafts=request.param, seeded=False)


def test_tokens_are_drawn_from_the_distribution_of_their_logprobs(drafting: Bench) -> None:
    """How surprising they are is what that distribution expects."""
    version, before = drafting.serve(1), drafting.engine.load()
    played = drafting.play(drafting.work(prompt_of(i, 6), DRAWN) for i in range(16))
    surprise = variance = 0.0
    for one in played:
        logprobs, gaps = nearest(drafting.logits(version, one), one)
        assert gaps.max() < TOLERANCE
        probs, finite = logprobs.exp(), logprobs.masked_fill(logprobs.isinf(), 0)
        entropy = -(probs * finite).sum(1)
        surprise += float(-sum(one.columns.logprobs) - entropy.sum())
        variance += float(((probs * finite**2).sum(1) - entropy**2).sum())
    assert abs(surprise) < 4 * math.sqrt(variance)
    load = drafting.engine.load()
    drafted, accepted = (
        load.drafted_tokens - before.drafted_tokens,
        load.accepted_tokens - before.accepted_tokens,
    )
    assert 0 < accepted < drafted


def test_a_penalty_and_top_logprobs_are_of_each_position_that_was_verified(drafting: Bench) -> None:
    version, before = drafting.serve(1), drafting.engine.load().accepted_tokens
    sampling = replace(DRAWN, repetition_penalty=1.3, logprobs=3)
    played = drafting.play(drafting.work(prompt_of(i, 6), sampling) for i in range(8))
    for one in played:
        assert nearest(drafting.logits(version, one), one)[1].max() < TOLERANCE
        check(drafting, one)
    assert drafting.engine.load().accepted_tokens > before


def test_greedy_tokens_are_the_most_likely_ones(drafting: Bench) -> None:
    version = drafting.serve(1)
    played = drafting.play(drafting.work(prompt_of(i, 5) * 4, GREEDY) for i in range(3))
    for one in played:
        logits = drafting.logits(version, one)
        best = logits.gather(1, torch.tensor(one.tokens)[:, None])[:, 0]
        assert (logits.amax(1) - best).max() < TOLERANCE
    drafting.check(played)
    assert drafting.engine.load().accepted_tokens > 0


def test_a_version_that_comes_between_drafts_has_its_own_logprobs(drafting: Bench) -> None:
    """Of so many trajectories some are in the middle, however long the version takes to come."""
    drafting.serve(1)
    sampling = [Sampling(max_tokens=100 + 2 * i, temperature=0.0, ignore_eos=True) for i in range(32)]
    drafting.submit(drafting.work(prompt_of(i, 5) * 4, one) for i, one in enumerate(sampling))
    drafting.sample(10)
    drafting.serve(2)
    played = drafting.drain().values()
    assert all(len(one.columns.runs) <= 2 for one in played)
    assert any(len(one.columns.runs) == 2 for one in played)
    drafting.check(played)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random EAGLE head of one layer."""
    path, config = tmp_path_factory.mktemp("head"), MODELS["llama untied"].to_dict()
    torch.manual_seed(0)
    model = LlamaForCausalLM(type(MODELS["llama untied"])(**config | {"num_hidden_layers": 1}))
    model.config.architectures = ["EagleLlamaForCausalLM"]
    model.config.save_pretrained(path)
    left_out = "lm_head.weight", "model.norm.weight", "model.layers.0.input_layernorm.weight"
    tensors = {n.removeprefix("model."): t for n, t in model.state_dict().items() if n not in left_out}
    fc = torch.randn(model.config.hidden_size, 2 * model.config.hidden_size) / 16
    save_file(tensors | {"fc.weight": fc}, path / "model.safetensors")
    return path


def test_a_penalty_counts_the_draft_tokens_before_a_position(
    kind: str, tensor: int, fresh_bench: OpenBench, head: Path
) -> None:
    """A head drafts tokens that the trajectory does not have yet."""
    if kind != "vllm" or tensor > 1:
        pytest.skip("of vLLM, on one device")
    drafting = fresh_bench("llama untied", drafts="eagle", draft_model=str(head), seeded=False)
    version = drafting.serve(1)
    sampling = Sampling(max_tokens=16, temperature=2.0, repetition_penalty=2.0, ignore_eos=True, logprobs=3)
    played = drafting.play(drafting.work(prompt_of(i, 4), sampling) for i in range(96))
    for one in played:
        assert nearest(drafting.logits(version, one), one)[1].max() < TOLERANCE
        check(drafting, one)
    assert drafting.engine.load().accepted_tokens > 0
