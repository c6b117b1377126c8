"""The kernels in Triton give what the general way gives. Triton's interpreter runs them without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: the fused kernel cannot run")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton compiles for a GPU here: tests/gpu runs the kernels", allow_module_level=True)

from millrace.trainer import row_logprobs
from millrace.trainer.kernels import trainer_tiles
from millrace.trainer.kernels.softmax import Upstream
from millrace.trainer.row_logprobs import GENERAL, Softmax, token_logprobs

TILES = Softmax(trainer_tiles.statistics, trainer_tiles.slopes)
CPU = torch.device("cpu")


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


def problem(rows=7, vocabulary=300, scale=4.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn((rows, vocabulary), generator=generator)
    return logits, torch.randint(vocabulary, (rows,), generator=generator)


@pytest.fixture(params=[16, 128, 4096])
def tile(request, monkeypatch):
    monkeypatch.setattr(trainer_tiles, "TILE", request.param)


@pytest.mark.parametrize("vocabulary", [1, 127, 128, 300])
@pytest.mark.parametrize("scale", [0.0, 1.0, 60.0])
def test_one_pass_gives_the_target_the_entropy_and_the_normalizer(vocabulary, scale, tile):
    logits, targets = problem(vocabulary=vocabulary, scale=scale)
    for found, expected in zip(
        TILES.statistics(logits.clone(), targets), GENERAL.statistics(logits.clone(), targets), strict=True
    ):
        close(found, expected)


def test_a_cut_token_counts_for_nothing(tile):
    logits, targets = problem()
    logits[:, 10:] = logprobs_cut = -1e30
    targets %= 10
    found = TILES.statistics(logits.clone(), targets)
    for one, other in zip(found, GENERAL.statistics(logits[:, :10].clone(), targets), strict=True):
        close(one, other)
    assert logprobs_cut < trainer_tiles.LOWEST.value or all(x.isfinite().all() for x in found)


def test_a_logit_that_is_not_a_number_shows(tile):
    logits, targets = problem()
    logits[2, 100] = torch.nan
    assert TILES.statistics(logits, targets)[2].isnan().tolist() == [i == 2 for i in range(7)]


@pytest.mark.parametrize("bends", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_is_that_of_the_general_way(bends, temperature, dtype, tile):
    logits, targets = problem()
    _, entropy, normalizer = GENERAL.statistics(logits.clone(), targets)
    gradient = torch.linspace(-2, 1, 7)
    given = Upstream(
        targets, targets % 2 == 0, normalizer, entropy, gradient, gradient.flip(0) if bends else None
    )
    found, expected = (
        each.slopes(logits.clone(), given, temperature=temperature, curve=1.0, dtype=dtype)
        for each in (TILES, GENERAL)
    )
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5 if dtype == torch.float32 else 0.01)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_and_their_gradients_are_those_without_the_kernel(temperature, monkeypatch):
    monkeypatch.setattr(row_logprobs, "CHUNK_LOGITS", 31 * 4)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(13, 8, generator=generator).requires_grad_()
    weight = torch.randn(31, 8, generator=generator).requires_grad_()
    targets = torch.randint(0, 31, (13,), generator=generator)
    results = []
    for each in (GENERAL, TILES):
        monkeypatch.setattr(row_logprobs, "softmax_on", lambda device, dtype, softcap, each=each: each)
        values, entropy = token_logprobs(hidden, weight, targets, temperature=temperature)
        loss = (values * torch.linspace(-1, 1, 13) + entropy * torch.linspace(2, -1, 13)).sum()
        results.append([values, entropy, *torch.autograd.grad(loss, [hidden, weight])])
    for found, expected in zip(results[1], results[0], strict=True):
        close(found, expected)


def test_a_kernel_is_taken_if_it_agrees_with_the_general_way():
    assert row_logprobs.disagreement(TILES, CPU) < row_logprobs.TOLERANCE
    row_logprobs.fused.cache_clear()
    assert row_logprobs.fused(CPU) == TILES
    row_logprobs.fused.cache_clear()


@pytest.mark.parametrize("broken", ["statistics", "slopes"])
def test_a_kernel_that_is_wrong_is_left_and_the_log_says_so(broken, monkeypatch, caplog):
    right = getattr(trainer_tiles, broken)

    def wrong(*arguments, **options):
        found = right(*arguments, **options)
        return tuple(x + 0.1 for x in found) if broken == "statistics" else found + 0.1

    monkeypatch.setattr(trainer_tiles, broken, wrong)
    row_logprobs.fused.cache_clear()
    assert row_logprobs.fused(CPU) is None and "off by 0.1" in caplog.text
    row_logprobs.fused.cache_clear()


PROGRAM = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from millrace.trainer.kernels import trainer_tiles

NUMBERS = dict.fromkeys(("normalizer", "entropy", "chosen", "own", "of_logprobs", "of_entropy"), "*fp32")
TYPES = NUMBERS | {"logits": "*fp32", "slope": "*bf16", "targets": "*i64"}
TYPES |= {"vocabulary": "i32", "temperature": "fp32"}
for kernel in (trainer_tiles._statistics, trainer_tiles._slopes):
    constants = {name: value for name, value in (("BENDS", True), ("TILE", 4096)) if name in kernel.arg_names}
    signature = {name: TYPES.get(name, "constexpr") for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature=signature, constexprs=places)
    for capability in (80, 90, 100):
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        print(kernel.__name__, capability, len(made.asm["cubin"]) > 0)
"""


def test_the_kernels_compile_for_three_generations_of_gpus(tmp_path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.stdout.count("True") == 6, done.stderr
