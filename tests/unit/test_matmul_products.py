"""Products by oneDNN: the same numbers, wherever this CPU would use it by itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from millrace.devices import matmul
from millrace.engines.own.accelerated import row_matmul
from millrace.engines.own.accelerated.row_matmul import RowMatmul
from millrace.trainer.batch.packing import Branch, Tree, pack, padded
from millrace.trainer.kernels import on_cpu

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"),
    reason="torch has no oneDNN here",
)


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (matmul, on_cpu, row_matmul):
        monkeypatch.setattr(module, "by_onednn", lambda: True)
    monkeypatch.setattr(row_matmul, "packing_pays", lambda weight: True)


def test_only_a_processor_of_amd_with_avx_512_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere a run's bytes stay what they are."""
    monkeypatch.setattr(matmul, "cpu_vendor", lambda: "GenuineIntel")
    assert not matmul.by_onednn.__wrapped__()
    monkeypatch.setattr(matmul, "cpu_vendor", lambda: "AuthenticAMD")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert not matmul.by_onednn.__wrapped__()


SMALL, LARGE = torch.empty(128, 512, device="meta"), torch.empty(3072, 576, device="meta")


@pytest.mark.parametrize(
    ("capability", "vendor", "pays"),
    [
        ("AVX512", "AuthenticAMD", [True, True]),
        ("AVX512", "GenuineIntel", [False, True]),
        ("AVX2", "GenuineIntel", [False, False]),
        ("DEFAULT", "GenuineIntel", [False, False]),
    ],
)
def test_large_matrices_are_packed_with_avx_512_and_small_ones_on_amd(
    monkeypatch: pytest.MonkeyPatch, capability: str, vendor: str, pays: list[bool]
) -> None:
    monkeypatch.setattr(matmul, "packs", lambda dtype: True)
    monkeypatch.setattr(matmul, "by_onednn", lambda: vendor == "AuthenticAMD")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert [matmul.packing_pays(weight) for weight in (SMALL, LARGE)] == pays


@needs_onednn
@pytest.mark.parametrize("rows", [1, 31, 32, 100])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_has_the_outputs_and_gradients_of_torch(onednn: None, rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    expected, layer = torch.nn.Linear(48, 80, bias=bias), torch.nn.Linear(48, 80, bias=bias)
    layer.load_state_dict(expected.state_dict())
    on_cpu.install_linear(layer)
    x, slope = torch.randn(2, rows, 48), torch.randn(2, rows, 80)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [each(own) for each, own in zip((expected, layer), inputs, strict=True)]
    for output in outputs:
        output.backward(slope)
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-5, atol=1e-5)
    for own, of_torch in zip(layer.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(own.grad, of_torch.grad, rtol=1e-5, atol=1e-4)


@needs_onednn
def test_other_formats_are_computed_as_before(onednn: None) -> None:
    layer, x = torch.nn.Linear(8, 8).double(), torch.randn(64, 8, dtype=torch.float64)
    on_cpu.install_linear(layer)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
    layer = layer.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x.float()).dtype == torch.bfloat16


def test_padding_stands_behind_a_row_and_is_seen_by_nobody() -> None:
    branch = Branch([5, 6, 7], np.ones(3, dtype=bool), first_index=0)
    (row,) = pack([Tree([1, 2, 3], [branch])], 100)
    longer = padded(row, 8)
    assert len(longer.tokens_T) == len(longer.positions_T) == 8 and longer.segments[:-1] == row.segments
    assert (longer.segments[-1].start, longer.segments[-1].length) == (len(row.tokens_T), 3)
    assert longer.sources_N is row.sources_N and padded(longer, 8) is longer


def test_a_cpu_tells_its_maker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from millrace.placement import number_format

    (tmp_path / "cpuinfo").write_text("processor\t: 0\nvendor_id\t: AuthenticAMD\n")
    monkeypatch.setattr(number_format, "CPUS", tmp_path / "cpuinfo")
    assert number_format.cpu_vendor() == "AuthenticAMD"


@needs_onednn
@pytest.mark.parametrize("rows", [1, 7, 8, 31, 64])
@pytest.mark.parametrize("width", [128, 256])
def test_a_packed_matrix_gives_the_results_of_the_plain_one(onednn: None, rows: int, width: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, width), torch.randn(80, width), torch.randn(80)
    products = RowMatmul()
    expected = torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(products.linear(x, weight, bias), expected, rtol=1e-5, atol=1e-4)
    total = torch.ones(rows, 80)
    products.add_linear(total, x, weight, bias)
    torch.testing.assert_close(total, expected + 1, rtol=1e-5, atol=1e-4)


@needs_onednn
def test_a_matrix_that_has_changed_is_packed_again(onednn: None) -> None:
    x, weight, products = torch.randn(16, 256), torch.randn(80, 256), RowMatmul()
    before = products.linear(x, weight, None)
    weight.mul_(2.0)
    products.forget()
    torch.testing.assert_close(products.linear(x, weight, None), 2 * before)
