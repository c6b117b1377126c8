"""The kernel that draws tokens gives those of the CPU. Triton's interpreter runs it without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: the fused kernel cannot run")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton compiles for a GPU here: tests/gpu runs the kernel", allow_module_level=True)

from millrace.core.types import Sampling
from millrace.engines.own import sampler
from millrace.engines.own.accelerated import draw_tiles, drawn
from millrace.engines.own.sampler import DIRECT_VOCAB_MAX, TokenSampler
from millrace.engines.own.sampling_options import Edits

CPU = torch.device("cpu")
SETTINGS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 1.7, "token_masks": False, "top_k": 5},
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 10_000},
    {"top_p": 0.05},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 0.999},
    {"min_p": 0.001},
    {"min_p": 0.3},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.9},
    {"top_k": 3, "top_p": 0.999, "temperature": 0.8},
    {"min_p": 0.02, "top_k": 30, "top_p": 0.81, "temperature": 0.6},
    {"min_p": 0.2, "top_p": 0.9},
    {"min_p": 0.2, "top_k": 4000},
]
SAMPLINGS = [Sampling(max_tokens=1, **setting) for setting in SETTINGS]


@pytest.fixture
def kernel(monkeypatch):
    """Samplers that are made from here on have the kernel."""
    monkeypatch.setattr(sampler, "has_kernel", lambda *_: True)
    monkeypatch.setattr(sampler, "OPERATORS", draw_tiles)


@pytest.fixture(params=[64, 1024])
def tile(request, monkeypatch):
    monkeypatch.setattr(draw_tiles, "TILE", request.param)


def both(samplings, logits, uniforms, monkeypatch, edits=lambda: None):
    expected = TokenSampler(samplings, CPU, edits())(logits.clone(), uniforms)
    with monkeypatch.context() as patch:
        patch.setattr(sampler, "has_kernel", lambda *_: True)
        patch.setattr(sampler, "OPERATORS", draw_tiles)
        found = TokenSampler(samplings, CPU, edits())(logits.clone(), uniforms)
    return found, expected


def same(found, expected):
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert (found.logprobs - expected.logprobs).abs().max() < 1e-5
    assert (found.allowed_RV is None) == (expected.allowed_RV is None)
    if expected.allowed_RV is not None:
        assert torch.equal(found.allowed_RV, expected.allowed_RV)


def noise(rows, seed):
    return torch.rand(rows, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("vocab", "scale"), [(1, 1.0), (31, 3.0), (257, 0.1), (600, 4.0), (600, 40.0)])
def test_tokens_masks_and_logprobs_are_those_of_the_cpu(vocab, scale, seed, tile, monkeypatch):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn((len(SAMPLINGS), vocab), generator=generator)
    same(*both(SAMPLINGS, logits, noise(len(SAMPLINGS), seed), monkeypatch))


@pytest.mark.parametrize("seed", range(2))
def test_of_equal_logits_the_smaller_ids_come_first(seed, tile, monkeypatch):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-3, 3, (len(SAMPLINGS), 300), generator=generator).float()
    same(*both(SAMPLINGS, logits, noise(len(SAMPLINGS), seed), monkeypatch))


@pytest.mark.parametrize("vocab", [DIRECT_VOCAB_MAX + 77, 40_000])
def test_a_large_vocabulary_is_drawn_from_as_on_the_cpu(vocab, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn((len(SAMPLINGS), vocab), generator=generator)
    same(*both(SAMPLINGS, logits, noise(len(SAMPLINGS), 1), monkeypatch))


def test_many_draws_of_one_row_are_the_same(monkeypatch):
    monkeypatch.setattr(draw_tiles, "TILE", 512)
    logits = (2 * torch.randn(500, generator=torch.Generator().manual_seed(3))).repeat(200, 1)
    for setting in ({}, {"top_k": 40, "top_p": 0.97}):
        samplings = [Sampling(max_tokens=1, token_masks=False, **setting)] * 200
        found, expected = both(samplings, logits, noise(200, 4), monkeypatch)
        assert found.allowed_RV is None and len(set(found.tokens.tolist())) > 20
        same(found, expected)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-52])
def test_the_first_and_the_last_token_are_reached_at_the_ends_of_the_noise(uniform, tile, monkeypatch):
    logits = torch.randn((len(SAMPLINGS), 300), generator=torch.Generator().manual_seed(5))
    uniforms = torch.full((len(SAMPLINGS),), uniform, dtype=torch.float64)
    same(*both(SAMPLINGS, logits, uniforms, monkeypatch))


def test_what_edits_ban_is_not_drawn_and_counts_for_nothing(tile, monkeypatch):
    options = {"banned_token_ids": tuple(range(0, 200, 3)), "frequency_penalty": 0.7}
    samplings = [Sampling(max_tokens=1, **{**setting, **options}) for setting in SETTINGS]
    samplings.append(Sampling(max_tokens=1, allowed_token_ids=(7, 130), top_k=20))
    logits = torch.randn((len(samplings), 200), generator=torch.Generator().manual_seed(6))

    def edits():
        return Edits(samplings, [([0], [1, 1, 2])] * len(samplings), vocab=200, device=CPU)

    same(*both(samplings, logits, noise(len(samplings), 7), monkeypatch, edits))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_without_a_number_ends_and_does_not_disturb_the_others(bad, tile, monkeypatch):
    """The engine refuses the row."""
    samplings = [Sampling(max_tokens=1, top_k=5, top_p=0.9, token_masks=False)] * 3
    logits = torch.randn((3, 100), generator=torch.Generator().manual_seed(8))
    logits[1, 40] = bad
    with np.errstate(invalid="ignore"):
        found, expected = both(samplings, logits, noise(3, 9), monkeypatch)
    assert found.tokens[::2].tolist() == expected.tokens[::2].tolist() and 0 <= found.tokens[1] < 100


def test_rows_with_likely_tokens_take_the_other_way(kernel):
    samplings = [Sampling(max_tokens=1), Sampling(max_tokens=1, logprobs=3)]
    sampled = TokenSampler(samplings, CPU)(torch.randn((2, 20)), noise(2, 0))
    assert sampled.top is not None and sampled.top[0].shape == (2, 3)


def test_the_kernel_is_taken_if_it_agrees_with_the_cpu(monkeypatch):
    monkeypatch.setattr(drawn, "OPERATORS", draw_tiles)
    assert drawn.disagreement(CPU, TokenSampler) < drawn.TOLERANCE


@pytest.mark.parametrize("broken", ["tokens", "logprobs"])
def test_a_kernel_that_is_wrong_is_left_and_the_log_says_so(broken, monkeypatch, caplog):
    class Wrong:
        @staticmethod
        def drawn(*arguments):
            tokens, logprobs, allowed = draw_tiles.drawn(*arguments)
            return (
                (tokens + 1, logprobs, allowed) if broken == "tokens" else (tokens, logprobs + 0.1, allowed)
            )

    monkeypatch.setattr(drawn, "OPERATORS", Wrong)
    real = drawn.disagreement
    monkeypatch.setattr(drawn, "disagreement", lambda *_: real(CPU, TokenSampler))
    drawn.has_kernel.cache_clear()
    assert (
        not drawn.has_kernel(torch.device("cuda"), TokenSampler)
        and "drawn without a fused kernel" in caplog.text
    )
    drawn.has_kernel.cache_clear()


PROGRAM = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from millrace.engines.own.accelerated.draw_tiles import TILE, _drawn

TYPES = {"uniforms": "*fp64", "settings": "*fp64", "tokens": "*i64", "allowed": "*u8", "TILE": "constexpr"}
TYPES |= {"vocabulary": "i32", "num_tiles": "i32"}
signature = {name: TYPES.get(name, "*fp32") for name in _drawn.arg_names}
source = ASTSource(_drawn, signature=signature, constexprs={(_drawn.arg_names.index("TILE"),): TILE})
for capability in (80, 90, 100):
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
    print(capability, len(made.asm["cubin"]) > 0, made.metadata.shared)
"""


def test_the_kernel_compiles_for_three_generations_of_gpus(tmp_path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.stdout.count("True") == 3, done.stderr
