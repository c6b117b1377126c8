"""What torch compiles of a model: whole graphs, one for rows of every length, and the same numbers."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from test_trainer_adapter import DORA, LORA, with_adapter
from test_trainer_routing import gradient, perturb, sampled
from tests.long import covering, few, long
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from trainer_doubles import make_batch, make_trainer, tiny_model

from millrace.trainer import model as trainer_model
from millrace.trainer.kernels import on_gpu, products
from millrace.trainer.kernels.row_threads import RowThreads
from millrace.trainer.model import install_kernels
from millrace.trainer.ranks.mesh import ALONE

# torch's compiler looks at the gradient of every tensor that it is given.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture
def counter(monkeypatch):
    """Compiles without a C++ compiler, and counts. Rows keep their lengths."""
    monkeypatch.setattr(trainer_model, "by_onednn", lambda: False)
    torch._dynamo.reset()
    counters.clear()
    on_gpu.compiled.cache_clear()
    yield CompileCounterWithBackend("aot_eager")
    on_gpu.compiled.cache_clear()
    torch._dynamo.reset()


def compiled_model(family, counter, monkeypatch, **changes):
    model = tiny_model(family, **changes)
    module = sys.modules[type(model).__module__]
    monkeypatch.setattr(module, on_gpu.ROTATE, getattr(module, on_gpu.ROTATE))  # undone afterwards
    on_gpu.install_compiled(model, counter)
    return model


@long
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_twenty_lengths_of_rows_compile_once_without_a_break(family, recompute, counter, monkeypatch):
    model = compiled_model(family, counter, monkeypatch)
    if recompute:
        trainer_model.recompute_layers(model)
    trainer, lengths = make_trainer(model=model), set()
    for seed in range(40):
        lengths.add(trainer.accumulate(make_batch(seed=seed, groups=1 + seed % 4)).forwarded_tokens)
        # a layer's first norm, its heads, a sum and the second norm, the gate, and the model's last norm
        assert counter.frame_count == 5
    assert len(lengths) >= 20 and not counters["graph_break"]


@pytest.mark.parametrize("family", few(["qwen3", "qwen3_moe, a dense layer", "gemma3", "phi3", "llama"], 2))
def test_a_compiled_model_gives_the_same_gradient(family, counter, monkeypatch):
    gradients = []
    for model in (tiny_model(family), compiled_model(family, counter, monkeypatch)):
        loss = make_trainer(model=model).accumulate(make_batch()).loss
        gradients.append([torch.tensor(loss), *(p.grad for p in model.parameters())])
    assert counter.frame_count >= 2
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def relative_error(one, other):
    one, other = (torch.cat([x.flatten() for x in each]).double() for each in (one, other))
    return ((one - other).norm() / other.norm()).item()


def installed(model, counter, monkeypatch):
    """As on a GPU, and no parameter has two gradients."""
    products.install_linear(model)
    module = sys.modules[type(model).__module__]
    monkeypatch.setattr(module, on_gpu.ROTATE, getattr(module, on_gpu.ROTATE))
    on_gpu.install_compiled(model, counter)
    return model


def step_gradient(model, dtype):
    """The loss and all gradients of a batch, one row after another."""
    trainer = make_trainer(model=model, dtype=dtype, published=torch.bfloat16, token_budget=64)
    trainer._rows = RowThreads(64)
    summary = trainer.accumulate(make_batch())
    assert summary.num_rows > 1
    return [torch.tensor([summary.loss]), *(p.grad for p in trainer.trained)]


NARROW = ["qwen3", "qwen2", "llama", "mistral", "smollm3", "qwen3_moe, a dense layer", "gemma3", "phi3"]


@pytest.mark.parametrize(
    ("family", "adapter", "recompute"), covering(NARROW, ["none", "lora", "dora"], [False, True])
)
def test_in_bfloat16_a_gradient_is_as_near_to_float32_as_with_autocast(
    family, adapter, recompute, counter, monkeypatch
):
    def model():
        made = tiny_model(family)
        if adapter != "none" and "moe" not in family:  # experts get no adapters
            with_adapter(made, LORA if adapter == "lora" else DORA, published=torch.bfloat16)
        return made

    true, theirs = (step_gradient(model(), dtype) for dtype in (torch.float32, torch.bfloat16))
    ours = installed(model(), counter, monkeypatch)
    if recompute:
        trainer_model.recompute_layers(ours)
    found = step_gradient(ours, torch.bfloat16)
    assert relative_error(found, true) <= 1.2 * relative_error(theirs, true)
    assert not counters["graph_break"]


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_a_compiled_mixture_trains_the_experts_that_were_sampled(recompute, counter, monkeypatch):
    model, batch = tiny_model("qwen3_moe"), sampled(tiny_model("qwen3_moe"))
    perturb(model)
    ours = installed(copy.deepcopy(model), counter, monkeypatch)
    for each in (model, ours):
        trainer_model.install_replay(each)
    if recompute:
        trainer_model.recompute_layers(ours)
    assert relative_error(gradient(ours, batch).values(), gradient(model, batch).values()) < 1e-5


@pytest.mark.parametrize(("family", "adapted"), [("qwen3", False), ("qwen2", False), ("qwen2", True)])
def test_queries_keys_and_values_are_one_matmul(family, adapted, counter, monkeypatch):
    model, seen = tiny_model(family), list[int]()
    if adapted:
        with_adapter(model, published=torch.bfloat16)
    installed(model, counter, monkeypatch)
    multiplied = products._multiplied
    monkeypatch.setattr(
        products, "_multiplied", lambda joined, x: seen.append(len(joined.layers)) or multiplied(joined, x)
    )
    step_gradient(model, torch.bfloat16)
    assert seen[:4] == [3, 1, 2, 1] and set(seen) == {1, 2, 3}
    assert not any(hasattr(module, products.JOINED) for module in model.modules())


def test_a_model_that_was_taken_apart_computes_in_its_modules(counter, monkeypatch):
    model, names = installed(tiny_model("qwen3"), counter, monkeypatch), set[str]()
    on_gpu.take_apart(model)
    for name, module in model.base_model.named_modules():
        module.register_forward_hook(lambda module, args, out, name=name: names.add(name))
    found = step_gradient(model, torch.bfloat16)
    assert {name for name, module in model.base_model.named_modules() if name} - {"layers"} <= names
    assert relative_error(found, step_gradient(tiny_model("qwen3"), torch.bfloat16)) < 0.02


def test_where_torch_cannot_compile_the_model_stays_and_the_log_says_so(monkeypatch, caplog):
    def refuse(*_, **__):
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(torch, "compile", refuse)
    on_gpu.compiled.cache_clear()
    model = tiny_model()
    on_gpu.install_where_it_runs(model, torch.device("cpu"))
    assert "no C compiler" in caplog.text
    assert not any("forward" in vars(module) for module in model.modules())


def test_on_a_cpu_rotary_embeddings_stay_as_they_are(monkeypatch, counter):
    model = compiled_model("qwen3", on_gpu.INDUCTOR, monkeypatch)
    rotate = getattr(sys.modules[type(model).__module__], on_gpu.ROTATE)
    q, k, (cos, sin) = torch.randn(1, 4, 9, 16), torch.randn(1, 2, 9, 16), torch.rand(2, 1, 9, 16)
    for one, other in zip(rotate(q, k, cos, sin), rotate.args[0](q, k, cos, sin), strict=True):
        assert torch.equal(one, other)


def test_a_model_on_a_cpu_gets_nothing_that_is_compiled(monkeypatch):
    monkeypatch.setattr(on_gpu, "compiled", lambda *_: pytest.fail("it compiles"))
    install_kernels(tiny_model(), torch.device("cpu"), ALONE)
