"""The engine's kernels in Triton give what plain operations give. The interpreter runs them without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from functools import partial
from types import SimpleNamespace

import flash_double
import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: the fused kernels cannot run")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton compiles for a GPU here: tests/gpu runs the kernels", allow_module_level=True)

import triton.language as tl
from engine_models import make_engine, make_model, make_work, prompt_of, run
from triton.runtime import interpreter

from millrace.core.types import Sampling
from millrace.engines.own import mixture
from millrace.engines.own.accelerated import attention_tiles, flash, fused, layer_tiles

KERNELS = (
    "rotated",
    "attended",
    "gated_linear",
    "added",
    "chosen",
    "by_expert",
    "gated_rows",
    "added_experts",
)
CLOSE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 0.03}
"""Relative to the largest number. The interpreter cuts bfloat16 off, where a GPU rounds to the nearest."""
SAME = {torch.float32: 0.0, torch.float16: 0.97, torch.bfloat16: 0.0}
"""So many numbers are the same: roundings are in the same places."""


@pytest.fixture
def dots(monkeypatch):
    """The interpreter multiplies bit patterns of bfloat16. Here it multiplies the numbers."""
    real = interpreter.InterpreterBuilder.create_dot

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self, a, b, *more):
        return real(self, widened(a), widened(b), *more)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def random(*size, dtype=torch.float32, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found, expected):
    assert found.dtype == expected.dtype and found.shape == expected.shape
    gap = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert gap <= CLOSE[found.dtype], gap
    assert (found == expected).float().mean() >= SAME[found.dtype]


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "width"), [(4, 2, 32, 32), (3, 3, 16, 8), (8, 1, 24, 24), (2, 1, 40, 16)]
)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("from_one", "neighbours"), [(False, False), (False, True), (True, False)])
def test_queries_are_turned_and_keys_and_values_are_in_the_cache(
    heads, kv_heads, dim, width, normed, from_one, neighbours, dtype
):
    rows, tokens = 5, 12
    qkv = random(rows + 3, (heads + 2 * kv_heads) * dim, dtype=dtype)  # three rows are padding
    norms = [1 + 0.3 * random(dim, dtype=dtype, seed=i) if normed else None for i in (1, 2)]
    turns = [random(rows + 3, 1, width, dtype=dtype, seed=i) for i in (3, 4)]
    places = torch.tensor([7, 0, 11, 3, 8])
    results = []
    for rotate in (fused.rotated, layer_tiles.rotated):
        keys, values = (random(tokens, kv_heads, dim, dtype=dtype, seed=i) for i in (5, 6))
        q = rotate(qkv.clone(), *norms, *turns, places, keys, values, 1e-3, from_one, neighbours)
        results.append((q, keys, values))
    for found, expected in zip(results[1], results[0], strict=True):
        close(found, expected)
    assert torch.equal(results[0][2], results[1][2])
    others = [i for i in range(tokens) if i not in places]
    assert torch.equal(results[1][1][others], random(tokens, kv_heads, dim, dtype=dtype, seed=5)[others])


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 128, 48), (8, 72, 37), (33, 200, 64), (70, 65, 9)]
)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_and_its_gate_are_one_kernel(rows, inputs, outputs, activation, biased, dtype, dots):
    x, weight = random(rows, inputs, dtype=dtype), random(2 * outputs, inputs, dtype=dtype, seed=1)
    weight /= inputs**0.5
    bias = random(2 * outputs, dtype=dtype, seed=2) if biased else None
    found = layer_tiles.gated_linear(x, weight, bias, activation)
    close(found, fused.gated_linear(x, weight, bias, activation))


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 72), (9, 1152)])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("from_one", "scale"), [(False, 1.0), (False, 0.25), (True, 1.0)])
def test_what_is_added_to_the_stream_and_the_norms_around_it_are_one_kernel(
    rows, width, normed, from_one, scale, dtype
):
    x, stream = random(rows, width, dtype=dtype), random(rows, width, dtype=dtype, seed=1)
    first, second = (1 - from_one + 0.3 * random(width, dtype=dtype, seed=i) for i in (2, 3))
    results = []
    for add in (fused.added, layer_tiles.added):
        to = stream.clone()
        out = add(to, x.clone(), first if normed else None, second, scale, 1e-3, from_one)
        results.append((to, out))
    for found, expected in zip(results[1], results[0], strict=True):
        close(found, expected)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (8, 1, 24), (3, 3, 64)])
@pytest.mark.parametrize(
    ("window", "cap", "has_sinks"),
    [(None, None, False), (40, 2.0, False), (9, 2.0, True), (None, None, True)],
)
@pytest.mark.parametrize("rows", [None, [1, 9, 20, 8]])
def test_queries_of_steps_and_of_prompts_attend_to_what_they_see(
    heads, kv_heads, dim, window, cap, has_sinks, rows, dtype, dots
):
    """`rows` of the slots 3, 2, 1 and 0; None: a decode step."""
    slots, positions, starts = 4, 700, [690, 0, 130, 264]
    used, tiles = [start + 1 for start in starts], None
    if rows is not None:
        used = [
            starts[slot] + i + 1 for slot, count in zip((3, 2, 1, 0), rows, strict=True) for i in range(count)
        ]
        tiles = torch.tensor(flash.tiles_of(zip((3, 2, 1, 0), rows, strict=True)))
    q, sinks = (
        random(len(used), heads, dim, dtype=dtype),
        random(heads, dtype=dtype, seed=1) + 2 if has_sinks else None,
    )
    keys, values = (random(slots, positions, kv_heads, dim, dtype=dtype, seed=i) for i in (2, 3))
    counts = torch.zeros((len(used) if tiles is None else len(tiles)) * kv_heads, dtype=torch.int32)
    inputs = (q, keys, values, sinks, torch.tensor(used, dtype=torch.int32), counts, tiles, 0.3, cap, window)
    found = attention_tiles.attended(*inputs)
    assert not counts.any()
    expected = fused.attended(*inputs)
    assert (found - expected).abs().max() <= 2 * CLOSE[dtype] * expected.abs().max()


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(
    ("activation", "clamp"), [("silu", None), ("gelu_pytorch_tanh", None), ("", (1.7, 1.0))]
)
@pytest.mark.parametrize("biased", [False, True])
def test_biases_of_experts_and_their_gate_are_one_kernel(activation, clamp, biased, dtype):
    x = random(7, 2 * 1030, dtype=dtype)
    biases = random(5, 2 * 1030, dtype=dtype, seed=1) if biased else None
    inputs = (x, biases, torch.tensor([0, 0, 1, 3, 3, 3, 4]), activation, clamp)
    close(layer_tiles.gated_rows(*inputs), mixture.gated_rows(*inputs))


def test_a_cut_gate_of_no_number_is_no_number():
    x = torch.tensor([[torch.nan, 1.0, 1.0, torch.nan, torch.inf, -torch.inf, 1.0, 1.0]])
    inputs = (x, None, torch.tensor([0]), "", (1.7, 2.0))
    torch.testing.assert_close(layer_tiles.gated_rows(*inputs), mixture.gated_rows(*inputs), equal_nan=True)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(("rows", "width", "routed"), [(1, 64, 1), (5, 72, 2), (3, 600, 4)])
@pytest.mark.parametrize(
    ("biased", "normed", "from_one"), [(False, False, False), (True, False, False), (True, True, True)]
)
def test_the_weighted_sum_of_experts_joins_the_stream_in_one_kernel(
    rows, width, routed, biased, normed, from_one, dtype
):
    experts = torch.stack([torch.randperm(6)[:routed] for _ in range(rows)])
    places = mixture.by_expert(experts, 6)[2]
    outputs, biases = (
        random(rows * routed, width, dtype=dtype),
        random(6, width, dtype=dtype, seed=1) if biased else None,
    )
    shares = random(rows, routed, seed=2).softmax(-1)
    first, second = (random(width, dtype=dtype, seed=i) if normed or i == 4 else None for i in (3, 4))
    results = []
    for add in (fused.added_experts, layer_tiles.added_experts):
        to = random(rows, width, dtype=dtype, seed=5)
        results.append(
            (to, add(to, outputs, biases, places, experts, shares, first, second, 0.5, 1e-3, from_one))
        )
    for found, expected in zip(results[1], results[0], strict=True):
        close(found, expected)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(("rows", "num_experts", "routed"), [(1, 6, 2), (7, 128, 8), (40, 40, 3)])
@pytest.mark.parametrize("sum_1", [False, True])
def test_a_row_gets_the_experts_with_the_highest_logits(rows, num_experts, routed, sum_1, dtype):
    logits = torch.stack([torch.randperm(num_experts) for _ in range(rows)]).to(dtype) / 16
    (found, experts), (expected, others) = (
        choose(logits, routed, sum_1) for choose in (layer_tiles.chosen, mixture.chosen)
    )
    close(found, expected)
    assert torch.equal(experts, others)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_of_equal_experts_each_is_taken_once_and_what_is_no_number_stays_so():
    logits = torch.tensor([[1.0, 1.0, 1.0, 0.0, 1.0], [torch.nan] * 5, [0.0, torch.inf, 0.0, torch.nan, 1.0]])
    shares, experts = layer_tiles.chosen(logits, 3, True)
    assert experts[0].tolist() == [0, 1, 2] and torch.equal(shares[0], torch.full((3,), 1 / 3))
    assert experts.min() >= 0 and experts.max() < 5 and shares[1:].isnan().all()


@pytest.mark.parametrize(("rows", "num_experts", "routed"), [(1, 6, 2), (33, 5, 3), (20, 200, 8)])
def test_rows_are_sorted_by_expert_as_torch_sorts(rows, num_experts, routed):
    experts = torch.randint(num_experts, (rows, routed), generator=torch.Generator().manual_seed(rows))
    results = [sort(experts, num_experts) for sort in (layer_tiles.by_expert, mixture.by_expert)]
    for found, expected in zip(*results, strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected)


def test_few_rows_split_their_keys_and_many_rows_only_long_ones():
    assert attention_tiles.shares(64, 4096, 64) == (4, 128)
    assert attention_tiles.shares(8, 4096, 64) == (32, 128)
    assert attention_tiles.shares(8, 256, 64) == (2, 128)
    assert attention_tiles.shares(2048, 4096, 64) == (1, attention_tiles.LONG)
    assert attention_tiles.shares(2048, 40_000, 64) == (4, attention_tiles.LONG)


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 256])
@pytest.mark.parametrize("outputs", [37, 3072, 18_944])
def test_a_tile_fits_into_the_fast_memory_of_every_gpu_that_is_served(rows, outputs):
    """99 KiB on GPUs of compute capability 8.6 and 8.9, for four steps in 16 bits."""
    m, o, i = layer_tiles.tiles(rows, outputs)
    assert min(m, o, i) >= 16 and 4 * 2 * i * (m + 2 * o) <= 99 * 1024


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # exp(x) of a large x, below a fraction line
@pytest.mark.parametrize(
    "name",
    [
        *("qwen3 tied", "phi3", "llama biases, llama3 rope", "glm4", "granite"),
        *("gemma2", "gemma3", "qwen3_moe", "gpt_oss"),
    ],
)
def test_an_engine_generates_with_the_kernels_what_it_generates_without(name, monkeypatch):
    flash_double.install(monkeypatch)
    model = make_model(name, scale=1.5)
    sent = [make_work(i, prompt_of(i, 3 + 20 * i), Sampling(max_tokens=6, ignore_eos=True)) for i in range(3)]
    expected = run(make_engine(model, slots=2), sent)
    calls = Counter()

    def counted(name, *arguments):
        calls[name] += 1
        return getattr(attention_tiles if name == "attended" else layer_tiles, name)(*arguments)

    kernels = SimpleNamespace(**{name: partial(counted, name) for name in KERNELS})
    for module in (flash, fused):
        monkeypatch.setattr(module, "OPERATORS", kernels)
    engine = make_engine(model, slots=2)
    routed = name in ("qwen3_moe", "gpt_oss")
    engine._forward.mixture.grouped = routed
    calls.clear()
    found = run(engine, sent)
    used = {"chosen", "by_expert", "gated_rows", "added_experts"} if routed else {"gated_linear"}
    assert set(calls) - {"added"} == {"rotated", "attended"} | used and min(calls.values()) > 20
    assert {i: one[0] for i, one in found.items()} == {i: one[0] for i, one in expected.items()}
    for one, other in zip(found.values(), expected.values(), strict=True):
        assert (torch.tensor(one[1]) - torch.tensor(other[1])).abs().max() < 2e-5


PROGRAM = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from millrace.engines.own.accelerated import attention_tiles, layer_tiles

NUMBERS = {"rows": "i32", "inputs": "i32", "outputs": "i32", "eps": "fp32", "places": "*i64"}
SHAPE = {"HEADS": 16, "KV_HEADS": 8, "DIM": 128, "WIDTH": 128, "NORMED": True, "FROM_ONE": False, "TILE": 128}
SHAPE |= {"NEIGHBOURS": False, "BIASED": True, "ACTIVATION": "silu"}
SHAPE |= dict(zip(("TILE_M", "TILE_O", "TILE_I"), layer_tiles.tiles(256, 3072)))
NUMBERS |= dict.fromkeys(("positions", "share_min", "window"), "i32")
NUMBERS |= {"scale": "fp32", "used": "*i32", "counts": "*i32", "parts": "*fp32", "sums": "*fp32"}
SHAPE |= {"GROUP": 2, "SPLITS": 4, "TILE_G": 16, "TILE_D": 128, "TILE_P": 64}
SHAPE |= {"ROUTED": 8, "SUM_1": True, "TILE_R": 8}
NUMBERS |= {"count": "i32", "pairs": "i32", "shares": "*fp32", "ends": "*i32"}
NUMBERS |= dict.fromkeys(("experts", "sorted_experts", "tiles"), "*i64")
NUMBERS |= dict.fromkeys(("alpha", "limit"), "fp32")
SHAPE |= {"CLAMPED": True, "ROWS": 8, "CAP": 50.0, "SINKS": True}
OTHERS = SHAPE | {"CLAMPED": False, "ROWS": 1, "CAP": 0.0, "SINKS": False, "ROUTED": 0, "BIASED": False}
NAMES = "rotated", "added", "gated_linear", "gated_rows", "chosen", "by_expert"
KERNELS = [attention_tiles._attended, *(getattr(layer_tiles, "_" + name) for name in NAMES)]
VARIANTS = [(kernel, SHAPE) for kernel in KERNELS]
VARIANTS += [(kernel, OTHERS) for kernel in (KERNELS[0], layer_tiles._added, layer_tiles._gated_rows)]
for kernel, SHAPE in VARIANTS:
    numbers = NUMBERS | ({"rows": "*i64"} if kernel is layer_tiles._by_expert else {})
    constants = {name: value for name, value in SHAPE.items() if name in kernel.arg_names}
    signature = {
        name: "constexpr" if name in SHAPE else numbers.get(name, "*bf16") for name in kernel.arg_names
    }
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature=signature, constexprs=places)
    for capability in (80, 90, 100):
        stages = 4 if kernel is layer_tiles._gated_linear else 2
        target = GPUTarget("cuda", capability, 32)
        made = triton.compile(source, target=target, options={"num_stages": stages})
        print(kernel.__name__, capability, len(made.asm["cubin"]) > 0, made.metadata.shared)
"""


def test_the_kernels_compile_for_three_generations_of_gpus(tmp_path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.stdout.count("True") == 30, done.stderr
