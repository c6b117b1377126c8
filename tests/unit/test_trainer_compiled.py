"""What torch compiles of a model: whole graphs, one for rows of every length, and the same numbers."""

from __future__ import annotations

import sys

import pytest
import torch
from tests.long import few, long
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from trainer_doubles import make_batch, make_trainer, tiny_model

from millrace.trainer import model as trainer_model
from millrace.trainer.kernels import on_gpu
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
@pytest.mark.parametrize(("family", "graphs"), [("qwen3", 4), ("llama", 3)])
def test_twenty_lengths_of_rows_compile_once_without_a_break(family, graphs, recompute, counter, monkeypatch):
    model = compiled_model(family, counter, monkeypatch)
    if recompute:
        trainer_model.recompute_layers(model)
    trainer, lengths = make_trainer(model=model), set()
    for seed in range(40):
        lengths.add(trainer.accumulate(make_batch(seed=seed, groups=1 + seed % 4)).forwarded_tokens)
        assert counter.frame_count == graphs  # norms of two sizes or of one, the gate, the rotary embedding
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
