"""Layers of a trainer in fp8: their numbers, what stays in bfloat16, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_device_waits import MIXTURES, TRAINED
from test_trainer_compiled import counter as counter
from test_trainer_compiled import installed, relative_error, step_gradient
from tests.device_watch import META, trained_as_on_gpu
from torch._subclasses.fake_tensor import FakeTensorMode
from trainer_doubles import make_batch, make_trainer, save_tiny_model, tiny_model

from millrace.core.errors import ConfigError, TrainingError
from millrace.trainer.kernels import fp8_matmul, on_cpu, products
from millrace.trainer.kernels.fp8_matmul import QUANTISE, fp8_weight, quantise_layers, quantised
from millrace.trainer.kernels.products import rounded_once
from millrace.trainer.kernels.row_threads import RowThreads
from millrace.trainer.model import install_kernels, load_model
from millrace.trainer.ranks.mesh import ALONE

Tensor = torch.Tensor
CPU = torch.device("cpu")
NO_KERNEL = "no such matmul"

# torch's compiler looks at the gradient of every tensor that it is given.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture(params=["kernel", "dequantised"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "dequantised":
        monkeypatch.setattr(fp8_matmul, "why_no_kernel", lambda device: NO_KERNEL)
    elif fp8_matmul.why_no_kernel(CPU):
        pytest.skip(fp8_matmul.why_no_kernel(CPU))
    return str(request.param)


def random(*shape: int, seed: int = 0) -> Tensor:
    """Rows of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.randint(-6, 5, (shape[0], 1), generator=generator)
    return torch.randn(shape, generator=generator) * sizes


def row_errors(found: Tensor, expected: Tensor) -> Tensor:
    return (found.double() - expected).norm(dim=1) / expected.norm(dim=1)


# ---------------------------------------------------------------- numbers


def relative(found_MN: Tensor, a_MK: Tensor, b_NK: Tensor) -> Tensor:
    """Errors of a b^T over the length of their summands."""
    a_MK, b_NK = a_MK.double(), b_NK.double()
    return (found_MN.double() - a_MK @ b_NK.t()) / (a_MK.square() @ b_NK.square().t()).sqrt()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_is_as_near_to_the_truth_as_its_own_scale_allows(way: str, dtype: torch.dtype) -> None:
    """e4m3 has 3 bits behind the point: a number is off by 2.6 % (root mean square), a product of two by
    3.7 %. One scale for a whole matrix would lose its small rows."""
    x_TI, grad_TO = random(40, 512).to(dtype), random(40, 96, seed=2).to(dtype)
    of_outputs = random(96, 512, seed=1).to(dtype)
    of_inputs = random(512, 96, seed=1).t().contiguous().to(dtype)
    output = fp8_weight(of_outputs, quantised).output(x_TI)
    gradient = fp8_weight(of_inputs, quantised).input_gradient(grad_TO)
    assert output.dtype == gradient.dtype == dtype
    for errors_MN in (relative(output, x_TI, of_outputs), relative(gradient, grad_TO, of_inputs.t())):
        for dim in (0, 1):
            errors = errors_MN.square().mean(dim).sqrt()
            assert errors.min() > 0.02 and errors.max() < 0.055
        assert 0.03 < errors_MN.square().mean().sqrt() < 0.042


def test_sums_of_the_rounded_numbers_are_exact(way: str) -> None:
    weight_OI = random(96, 512, seed=1)
    weight = fp8_weight(weight_OI, quantised)
    for a_MK, b_NK, compute in (
        (random(40, 512), weight_OI, weight.output),
        (random(40, 96, seed=2), weight_OI.t(), weight.input_gradient),
    ):
        (a, scale_M1), (b, scale_N1) = quantised(a_MK), quantised(b_NK)
        expected = (a.double() * scale_M1.double()) @ (b.double() * scale_N1.double()).t()
        assert row_errors(compute(a_MK), expected).max() < 1e-5


def test_the_largest_number_of_a_row_is_the_largest_of_the_format() -> None:
    numbers, scale = quantised(random(100, 64))
    assert (numbers.float().abs().amax(1) == fp8_matmul.FP8_MAX).all()
    assert scale.dtype == torch.float32 and scale.shape == (100, 1)
    turned = quantised(random(64, 100).t())[0]  # a GPU multiplies rows
    assert numbers.is_contiguous() and turned.is_contiguous()


def test_rows_of_zeros_and_none_give_zeros_and_none(way: str) -> None:
    weight = fp8_weight(torch.zeros(16, 32), quantised)
    for rows in (0, 3):
        assert torch.equal(weight.output(torch.randn(rows, 32)), torch.zeros(rows, 16))
    weight = fp8_weight(random(16, 32), quantised)
    assert torch.equal(weight.input_gradient(torch.zeros(3, 16)), torch.zeros(3, 32))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_stays_so_and_others_do_not_change(way: str, value: float) -> None:
    weight, grad_TO = fp8_weight(random(16, 32), quantised), random(3, 16, seed=1)
    expected = weight.input_gradient(grad_TO)
    grad_TO[1, 5] = value
    found = weight.input_gradient(grad_TO)
    assert found[1].isnan().all()
    assert torch.equal(found[::2], expected[::2])


def test_gradients_that_are_very_small_are_as_exact_as_others(way: str) -> None:
    weight, grad_TO = fp8_weight(torch.randn(32, 48), quantised), torch.randn(5, 32)
    small = weight.input_gradient(grad_TO * 2.0**-100)
    assert torch.equal(small, weight.input_gradient(grad_TO) * 2.0**-100)


# ---------------------------------------------------------------- a layer


def layer_gradients(install: Any, fp8: bool, *, sums: bool = True) -> list[Tensor]:
    """The output of a layer with a bias in bfloat16, and the gradients of input, weight and bias."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 48)
    model = SimpleNamespace(base_model=SimpleNamespace(layers=torch.nn.ModuleList([layer])))
    if fp8:
        quantise_layers(model, CPU)  # type: ignore[arg-type]
    whole: Any = torch.nn.Sequential(layer)
    install(whole)
    if sums:
        for parameter in layer.parameters():
            parameter.grad = torch.zeros_like(parameter)
    x = random(1, 30, 64).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16), rounded_once(whole, torch.bfloat16):
        out = whole(x)
        (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
    return [out, *(t.grad for t in (x, layer.weight, layer.bias) if t.grad is not None)]


@pytest.mark.parametrize("install", [on_cpu.install_linear, products.install_linear], ids=["cpu", "gpu"])
@pytest.mark.parametrize("sums", [True, False])
def test_gradients_of_weight_and_bias_are_those_of_bfloat16(install: Any, sums: bool) -> None:
    (out, of_x, *ours), (out_bf16, of_x_bf16, *theirs) = (
        layer_gradients(install, fp8, sums=sums) for fp8 in (True, False)
    )
    assert len(ours) == 2
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
    for one, other in ((out, out_bf16), (of_x, of_x_bf16)):
        assert one.dtype == other.dtype
        assert 0.01 < relative_error([one], [other]) < 0.045


# ---------------------------------------------------------------- a model


def fp8_model(family: str = "qwen3") -> Any:
    model = tiny_model(family)
    install_kernels(model, CPU, ALONE, quantised=True)
    return model


def test_layers_of_the_decoder_are_in_fp8_and_nothing_else() -> None:
    named = {name for name, module in fp8_model().named_modules() if hasattr(module, QUANTISE)}
    parts = [*(f"self_attn.{x}_proj" for x in "qkvo"), *(f"mlp.{x}_proj" for x in ("gate", "up", "down"))]
    assert named == {f"model.layers.{layer}.{part}" for layer in range(2) for part in parts}


def test_weights_are_quantised_once_for_all_rows_and_both_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    made, made_of = list[Tensor](), fp8_matmul.fp8_weight
    monkeypatch.setattr(products, "fp8_weight", lambda weight, of: made.append(weight) or made_of(weight, of))
    trainer = make_trainer(model=fp8_model(), dtype=torch.bfloat16, published=torch.bfloat16, token_budget=64)
    trainer._rows = RowThreads(64)
    summary = trainer.accumulate(make_batch())
    layers = [module for module in trainer.model.modules() if hasattr(module, QUANTISE)]
    assert summary.num_rows > 1 and len(made) == len(layers) == 14
    for weight, layer in zip(made, layers, strict=True):
        assert torch.equal(weight, layer.weight.bfloat16())
    assert not any(hasattr(layer, products.JOINED) for layer in layers)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "gemma3", "phi3"])
def test_a_gradient_is_as_near_to_float32_as_fp8_allows(family: str) -> None:
    true = step_gradient(tiny_model(family), torch.float32)
    bfloat16 = step_gradient(tiny_model(family), torch.bfloat16)
    found = step_gradient(fp8_model(family), torch.bfloat16)
    assert 2 * relative_error(bfloat16, true) < relative_error(found, true) < 0.25


def test_a_cpu_that_computes_in_float32_has_fp8_all_the_same() -> None:
    """`dtype` is then float32, and the rounding to bfloat16 is that of the weights alone."""
    true = step_gradient(tiny_model(), torch.float32)
    found = step_gradient(fp8_model(), torch.float32)
    assert 0.01 < relative_error(found, true) < 0.25


def test_layers_that_are_joined_and_compiled_compute_the_same(
    counter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    true, alone = step_gradient(tiny_model(), torch.float32), step_gradient(fp8_model(), torch.bfloat16)
    model, seen = tiny_model(), set[int]()
    quantise_layers(model, CPU)
    model, multiplied = installed(model, counter, monkeypatch), products._multiplied
    monkeypatch.setattr(
        products, "_multiplied", lambda joined, x: seen.add(len(joined.layers)) or multiplied(joined, x)
    )
    assert model.base_model.layers[0].mlp.up_proj.quantise is not quantised
    found = step_gradient(model, torch.bfloat16)
    assert seen == {1, 2, 3}
    assert relative_error(found, true) < 1.2 * relative_error(alone, true)


def test_the_matmuls_of_a_gpu_are_as_torch_asks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors of a GPU meet torch's checks: sizes, rows of the first factor, shapes of scales."""
    monkeypatch.setattr(fp8_matmul, "why_no_kernel", lambda device: "")
    with FakeTensorMode():

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device="cuda")

        weight = fp8_weight(empty(48, 64), quantised)
        for x_TI in (empty(7, 64), empty(1, 64), empty(64, 7).t(), empty(1, 64).expand(9, 64)):
            assert weight.output(x_TI).shape == (len(x_TI), 48)
        for grad_TO in (empty(7, 48), empty(48, 7).t()):
            assert weight.input_gradient(grad_TO).dtype == torch.bfloat16


@pytest.mark.parametrize("family", [name for name in TRAINED if name not in MIXTURES])
def test_on_a_gpu_every_matrix_of_every_family_is_used_in_fp8_and_nothing_waits(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8_matmul, "why_no_kernel", lambda device: "")
    made, used = list[Tensor](), list[Tensor]()
    inner, product = fp8_matmul.fp8_weight, fp8_matmul._matmul
    monkeypatch.setattr(products, "fp8_weight", lambda weight, of: made.append(weight) or inner(weight, of))
    monkeypatch.setattr(fp8_matmul, "_matmul", lambda *args: used.append(args[2]) or product(*args))
    model = tiny_model(family)
    quantise_layers(model, META)
    with trained_as_on_gpu(model.to(META)) as watch:
        trainer = make_trainer(model=model, dtype=torch.bfloat16, published=torch.bfloat16)
        prepared = trainer._prepared(make_batch(), 1)
        with watch, trainer._serving():
            trainer._backward(prepared.rows[0][0], prepared.flat, 0.0, first=True)
    assert watch.waits == []
    assert sum(weight.numel() for weight in made) == sum(
        layer.weight.numel() for layer in model.modules() if hasattr(layer, QUANTISE)
    )
    assert len(used) == len({id(rows) for rows in used}) == 2 * len(made)  # once forward, once back


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_ends_the_step(value: float, tmp_path: Any) -> None:
    model = fp8_model()

    def poison(module: Any, args: Any, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda grad: grad.index_fill(1, torch.tensor([0]), value))

    model.base_model.layers[1].mlp.down_proj.register_forward_hook(poison)
    trainer = make_trainer(model=model, dtype=torch.bfloat16, published=torch.bfloat16)
    with pytest.raises(TrainingError, match="the gradient norm is nan"):
        trainer.step(make_batch(), rejected_dir=tmp_path)


# ---------------------------------------------------------------- what is refused


def test_a_gpu_without_the_matmul_is_refused_and_a_cpu_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(fp8_matmul, "why_no_kernel", lambda device: NO_KERNEL)
    with pytest.raises(ConfigError, match=r"(?s)`trainer.quantization`.*no such matmul.*8\.9.*Leave the key"):
        quantise_layers(tiny_model(), torch.device("cuda:1"))
    load_model(save_tiny_model(tmp_path), CPU, quantised=True)


def test_sizes_that_a_gpu_cannot_multiply_are_refused_with_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_matmul, "why_no_kernel", lambda device: "")
    quantise_layers(tiny_model(), torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"0\.mlp\.gate_proj is 40 x 32, and both must be multiples of 16"):
        quantise_layers(tiny_model(intermediate_size=40), torch.device("cuda"))


def test_why_torch_has_no_matmul_is_one_line() -> None:
    fp8_matmul.why_no_kernel.cache_clear()
    assert "\n" not in fp8_matmul.why_no_kernel(CPU)
