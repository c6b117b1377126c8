"""The devices that a trainer in JAX takes, its memory, and the flags that it sets. Needs no JAX."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from trainer_doubles import role_config

from millrace.devices.inventory import computes_on_tpu
from millrace_jax import role
from millrace_jax.role import (
    FRACTIONS,
    GPU_FLAGS,
    GPU_VARIABLE,
    PREALLOCATE,
    PRECISION,
    TPU_FLAGS,
    TPU_VARIABLE,
    add_flags,
    limit_memory,
)

V5E, NETWORK_CARD, GPU = ("0x1ae0", "0x0063"), ("0x1ae0", "0x0042"), ("0x10de", "0x2330")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (TPU_VARIABLE, GPU_VARIABLE, "JAX_PLATFORMS", PREALLOCATE, PRECISION, *FRACTIONS):
        monkeypatch.setenv(name, "")  # so that what a test sets is taken back
        monkeypatch.delenv(name)


def host(path: Path, *devices: tuple[str, str]) -> Path:
    for number, identity in enumerate(devices):
        (path / str(number)).mkdir()
        for name, value in zip(("vendor", "device"), identity, strict=True):
            (path / str(number) / name).write_text(f"{value}\n")
    return path


def test_a_tpu_is_known_from_a_network_card_of_the_same_vendor(tmp_path: Path) -> None:
    assert not computes_on_tpu("auto", host(tmp_path, NETWORK_CARD, GPU))
    (tmp_path / "half").mkdir()
    assert not computes_on_tpu("auto", tmp_path)
    (tmp_path / "more").mkdir()
    assert computes_on_tpu("auto", host(tmp_path / "more", NETWORK_CARD, V5E))


@pytest.mark.parametrize(
    ("asked", "platforms", "taken"),
    [("auto", "", True), ("auto", "tpu,cpu", True), ("auto", "cpu", False), ("cpu", "", False)],
)
def test_what_the_user_asks_for_wins_over_a_tpu(
    asked: str, platforms: str, taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    assert computes_on_tpu(asked, host(tmp_path, V5E)) == taken


def test_every_flag_is_set_once_with_its_value() -> None:
    add_flags(TPU_VARIABLE, TPU_FLAGS)
    add_flags(TPU_VARIABLE, TPU_FLAGS)
    assert os.environ[TPU_VARIABLE].split() == [f"--{flag.name}={flag.value}" for flag in TPU_FLAGS]


def test_a_flag_of_the_user_keeps_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ["--xla_enable_async_all_gather=false", "--xla_own=1"]
    monkeypatch.setenv(TPU_VARIABLE, " ".join(own))
    add_flags(TPU_VARIABLE, TPU_FLAGS)
    words = os.environ[TPU_VARIABLE].split()
    assert words[:2] == own and len(words) == 1 + len(TPU_FLAGS)
    assert sum("xla_enable_async_all_gather" in word for word in words) == 1


def test_an_empty_variable_of_the_user_means_no_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TPU_VARIABLE, "")
    add_flags(TPU_VARIABLE, TPU_FLAGS)
    assert os.environ[TPU_VARIABLE] == ""


@pytest.mark.parametrize("tpu", [True, False])
def test_a_trainer_placed_on_a_cpu_takes_the_tpus_and_simulates_devices_only_without_them(
    tpu: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config: dict[str, Any] = role_config("model", trainer={"backend": "jax"})
    config["model"]["device"] = "auto"
    monkeypatch.setattr(role, "computes_on_tpu", lambda asked: tpu and asked == "auto")
    role.JaxTrainer(config, str(tmp_path), "trainer_doubles:open_memory_writer", device="cpu")
    assert (TPU_VARIABLE in os.environ) == tpu
    assert os.environ.get("JAX_PLATFORMS") == (None if tpu else "cpu")
    assert GPU_VARIABLE not in os.environ or tpu is False, "no flag of a GPU on a TPU"
    assert not any(name in os.environ for name in (PREALLOCATE, PRECISION, *FRACTIONS))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trainer_on_a_gpu_has_its_flags_and_its_share_of_the_memory(dtype: str, tmp_path: Path) -> None:
    config: dict[str, Any] = role_config("model", trainer={"backend": "jax"})
    config["model"]["dtype"] = dtype
    writer = "trainer_doubles:open_memory_writer"
    role.JaxTrainer(config, str(tmp_path), writer, device="cuda", device_share=0.8)
    assert os.environ[GPU_VARIABLE].split() == [f"--{flag.name}={flag.value}" for flag in GPU_FLAGS]
    assert os.environ[FRACTIONS[0]] == "0.760" and os.environ[PREALLOCATE] == "false"
    assert (os.environ.get(PRECISION) == "highest") == (dtype == "float32")


def test_a_trainer_that_is_alone_on_a_gpu_takes_the_memory_at_once() -> None:
    limit_memory(1.0)
    assert os.environ[FRACTIONS[0]] == "0.900" and PREALLOCATE not in os.environ


@pytest.mark.parametrize("name", FRACTIONS)
def test_memory_that_the_user_has_set_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "0.5")
    monkeypatch.setenv(PREALLOCATE, "true")
    limit_memory(0.5)
    assert [os.environ.get(each) for each in FRACTIONS].count(None) == 1 and os.environ[name] == "0.5"
    assert os.environ[PREALLOCATE] == "true"
