"""The engine with its C code, against its general way, as compiled for several processors."""

from __future__ import annotations

import _bisect
import ctypes
import os
import platform
import pwd
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_models import CONFIGS, make_engine, make_model, make_work, prompt_of, run
from tests.long import few
from transformers import Gemma3TextConfig, Qwen3Config

from millrace.core.types import Sampling
from millrace.engines.own import torch_engine as engines
from millrace.engines.own.accelerated import native

GEMMA = CONFIGS["gemma3"].to_dict() | {"hidden_activation": "gelu_pytorch_tanh"}
WINDOWS = CONFIGS["qwen3 tied"].to_dict() | {
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 40,
}
MORE = {"gemma3, tanh": Gemma3TextConfig(**GEMMA), "qwen3, windows": Qwen3Config(**WINDOWS)}
SERVED = ("llama biases, llama3 rope", "qwen3 tied", "qwen3 untied, no grouping", "phi3", *MORE)
PROCESSORS = ("native", *(("x86-64", "x86-64-v3") if platform.machine() == "x86_64" else ()))

pytestmark = pytest.mark.skipif(native.library()[0] is None, reason="there is no C compiler")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def compile_for(tmp_path, monkeypatch):
    """Sets the processor that the C code is compiled for."""

    def set_processor(name: str) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        flags = tuple(flag for flag in native.FLAGS if not flag.startswith("-march"))
        monkeypatch.setattr(native, "FLAGS", (*flags, f"-march={name}"))
        native.library.cache_clear()
        assert native.library()[0] is not None

    yield set_processor
    monkeypatch.undo()
    native.library.cache_clear()


def works():
    """More than slots, of several lengths, two of them one group; they end at different times."""
    settings = [Sampling(max_tokens=5 + 7 * i, logprobs=2 * (i % 2), ignore_eos=True) for i in range(9)]
    lengths = (1, 2, 17, 64, 90, 3, 30, 30, 5)
    return [make_work(i, prompt_of(i, n), s) for i, (n, s) in enumerate(zip(lengths, settings, strict=True))]


def same_as_the_general_way(name: str, monkeypatch) -> None:
    model = make_model(name, scale=1.5)
    fast = make_engine(model, slots=5, prefill_chunk=24)
    monkeypatch.setattr(engines, "native_pass", lambda *_, **__: (None, ""))
    general = make_engine(model, slots=5, prefill_chunk=24)
    assert ("in C" in fast.computes, "in C" in general.computes) == (True, False)
    found, expected = run(fast, works()), run(general, works())
    for trajectory_id, (tokens, logprobs, _) in expected.items():
        assert found[trajectory_id][0] == tokens
        assert (torch.tensor(found[trajectory_id][1]) - torch.tensor(logprobs)).abs().max() < 2e-5


@pytest.mark.parametrize("name", SERVED)
def test_it_generates_what_the_general_way_generates(name, monkeypatch):
    monkeypatch.setattr("engine_models.CONFIGS", CONFIGS | MORE)
    same_as_the_general_way(name, monkeypatch)


@pytest.mark.parametrize("processor", few(PROCESSORS[::-1]))
def test_so_it_does_when_compiled_for_another_processor(processor, compile_for, monkeypatch):
    compile_for(processor)
    same_as_the_general_way("llama biases, llama3 rope", monkeypatch)


def test_a_row_is_attended_alike_alone_and_among_others():
    code, generator = native.library()[0], torch.Generator().manual_seed(0)
    rows, heads, kv_heads, width, positions = 7, 4, 2, 32, 96
    slots, places = torch.randperm(rows, generator=generator), torch.tensor([0, 1, 31, 32, 33, 70, 95])
    shape = native._Shape(heads, kv_heads, width, positions, 1, 1e-6, 0.0, 0.2)

    def numbers(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    tables, qkv = numbers(2, positions, width), numbers(rows, heads + 2 * kv_heads, width)
    keys, values = (numbers(rows, kv_heads, width * positions) for _ in range(2))
    scores = torch.zeros(positions)

    def attended(which: list[int]) -> torch.Tensor:
        cache = [keys.clone(), values.clone(), *tables]
        layer = native._Attention(*(each.data_ptr() for each in cache), None, None, width, 40)
        given = [slots[which], places[which], qkv[which], torch.zeros(len(which), heads, width), scores]
        addresses = (each.data_ptr() for each in given)
        code.attend(ctypes.byref(shape), ctypes.byref(layer), len(which), *addresses)
        return given[3]

    alone = torch.cat([attended([row]) for row in range(rows)])
    assert alone.isfinite().all() and torch.equal(attended(list(range(rows))), alone)


@pytest.mark.parametrize("compiler", ["/nowhere/cc", "false"])
def test_without_a_compiler_that_works_the_engine_goes_its_general_way(compiler, tmp_path, monkeypatch):
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.library.__wrapped__()[0] is None
    monkeypatch.setattr(native, "library", native.library.__wrapped__)
    engine = make_engine(make_model("qwen3 tied"))
    assert "attention in torch: " in engine.computes
    assert len(run(engine, [make_work(0, [5, 6], Sampling(max_tokens=4, ignore_eos=True))])[0][0]) == 4


@pytest.mark.parametrize("name", ["llama tied", "qwen3_moe", "gemma2", "gemma3"])
def test_a_model_that_the_c_code_does_not_know_goes_the_general_way(name):
    assert "in C" not in make_engine(make_model(name)).computes


def test_threads_that_divide_the_rows_change_no_bit():
    """Several tokens of a slot are among the rows, as in a prefill."""
    code, generator = native.library()[0], torch.Generator().manual_seed(0)
    rows, heads, kv_heads, width, positions = 240, 4, 2, 32, 96

    def numbers(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    tables, cache = numbers(2, positions, width), numbers(2, 5, kv_heads, width * positions)
    qkv, gates, weight = numbers(rows, 256), numbers(rows, 512), numbers(256)
    slots, places = torch.arange(rows) // 48, torch.arange(rows) % 48

    def outputs(threads: int) -> list[torch.Tensor]:
        shape = ctypes.byref(native._Shape(heads, kv_heads, width, positions, threads, 1e-6, 0.0, 0.2))
        kept, own, scores = cache.clone(), qkv.clone(), torch.zeros(threads, positions)
        layer = native._Attention(*(each.data_ptr() for each in (*kept, *tables)), None, None, width, 40)
        normed, gated, attended = torch.zeros(rows, 256), torch.zeros(rows, 256), torch.zeros(rows, 128)
        code.norm(shape, rows, own.data_ptr(), weight.data_ptr(), normed.data_ptr(), 256)
        code.gate(shape, rows, gates.data_ptr(), gated.data_ptr(), 256, 1.0, 0.0)
        where = (each.data_ptr() for each in (slots, places, own, attended, scores))
        code.attend(shape, ctypes.byref(layer), rows, *where)
        return [normed, gated, attended, kept]

    for one, several in zip(outputs(1), outputs(3), strict=True):
        assert one.isfinite().all() and torch.equal(one, several)


def test_with_several_threads_the_engine_keeps_its_c_code(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert make_engine(make_model("qwen3 tied")).computes.endswith("2 threads; attention in C")


def test_the_code_is_compiled_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.library.__wrapped__()[0] is not None
    monkeypatch.setattr(native, "_compile", None)  # any call raises
    assert native.library.__wrapped__()[0] is not None
    assert [path.suffix for path in (tmp_path / "millrace").iterdir()] == [".so"]


@pytest.fixture
def compiled(tmp_path, monkeypatch) -> Path:
    """What is compiled, in a cache of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.library.__wrapped__()[0] is not None
    (file,) = (tmp_path / "millrace").iterdir()
    return file


def test_nobody_else_can_write_what_is_compiled(compiled):
    assert [path.stat().st_mode & 0o777 for path in (compiled, compiled.parent)] == [0o700, 0o700]


@pytest.mark.parametrize("damage", few(["cut", "another library", "others may write", "a pipe", "empty"], 4))
def test_a_compiled_file_that_is_not_what_was_compiled_is_made_anew(compiled, damage, caplog):
    whole = compiled.read_bytes()
    if damage == "others may write":
        compiled.chmod(0o722)
    else:
        compiled.unlink()  # this process has it mapped
    match damage:
        case "cut":
            compiled.write_bytes(whole[: len(whole) // 2])
        case "empty":
            compiled.touch()
        case "another library":
            compiled.write_bytes(Path(_bisect.__file__).read_bytes())
        case "a pipe":
            os.mkfifo(compiled)
    assert native.library.__wrapped__()[0] is not None
    assert str(compiled) in caplog.text
    (file,) = compiled.parent.iterdir()
    assert file.stat().st_mode & 0o777 == 0o700


def test_a_cache_of_somebody_else_is_not_loaded_from(compiled, monkeypatch, caplog):
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    code, why = native.library.__wrapped__()
    assert code is None
    assert "belongs to another user" in why
    assert why in caplog.text


def test_without_a_home_the_engine_goes_its_general_way(monkeypatch, caplog):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    code, why = native.library.__wrapped__()
    assert code is None
    assert "home" in why
    assert why in caplog.text
