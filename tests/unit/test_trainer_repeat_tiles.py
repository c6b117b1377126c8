"""The sums of repeated rows in Triton are those of plain operations. Triton's interpreter runs them here."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: the fused kernel cannot run")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton compiles for a GPU here: tests/gpu runs the kernels", allow_module_level=True)

from test_trainer_attention import make_trees

from millrace.trainer.batch.packing import pack
from millrace.trainer.kernels import fused_attention, trainer_tiles

CPU = torch.device("cpu")


@pytest.mark.parametrize("columns", [1, 16, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sums_are_those_of_plain_operations(columns, dtype):
    for row in pack(make_trees(alphabet=2), 64):
        ragged = fused_attention.arrange(row.segments, CPU)
        assert ragged.keys_K is not None and ragged.repeats is not None
        rows = torch.randn((len(ragged.keys_K), columns), generator=torch.Generator().manual_seed(0)).to(
            dtype
        )
        found = trainer_tiles.repeat_sums(rows, *ragged.repeats)
        expected = torch.zeros((len(row.tokens_T), columns)).index_add_(0, ragged.keys_K, rows.float())
        close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.01}
        torch.testing.assert_close(found.float(), expected, **close)
        plain = fused_attention.repeat_sums(rows, *ragged.repeats)
        torch.testing.assert_close(found, plain, **close)


def test_the_example_tells_right_kernels_from_wrong_ones(caplog):
    assert fused_attention.sums_right(trainer_tiles.repeat_sums, CPU) and not caplog.text
    assert not fused_attention.sums_right(lambda *given: trainer_tiles.repeat_sums(*given) * 1.1, CPU)
    assert "summed without a fused kernel: it is off by 0.1" in caplog.text
    assert not fused_attention.sums_right(lambda *given: np.zeros(3), CPU)


PROGRAM = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from millrace.trainer.kernels import trainer_tiles

kernel = trainer_tiles._sums
signature = {"rows": "*bf16", "order": "*i32", "begins": "*i32", "sums": "*bf16", "num_columns": "i32"}
signature["TILE"] = "constexpr"
source = ASTSource(kernel, signature=signature, constexprs={(5,): trainer_tiles.COLUMNS})
for capability in (80, 90, 100):
    print(len(triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]) > 0)
"""


def test_the_kernel_compiles_for_three_generations_of_gpus(tmp_path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.stdout.count("True") == 3, done.stderr
