"""What a host has, from what the kernel and `nvidia-smi` tell."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from millrace.core.errors import ConfigError
from millrace.core.placement import Gpu
from millrace.devices.inventory import MIB, _group_limits, read_host, visible

LISTED = """\
0, GPU-aa11, NVIDIA H100 80GB HBM3, 81559, 81000
1, GPU-bb22, NVIDIA H100 80GB HBM3, 81559, 40
"""
FIRST = Gpu(0, "NVIDIA H100 80GB HBM3", 81559 * MIB, 81000 * MIB)
SECOND = Gpu(1, "NVIDIA H100 80GB HBM3", 81559 * MIB, 40 * MIB)


@pytest.mark.parametrize(
    ("names", "gpus"),
    [
        (None, (FIRST, SECOND)),
        ("", ()),
        ("-1", ()),
        ("1", (SECOND,)),
        ("1, 0", (SECOND, FIRST)),
        ("GPU-bb22", (SECOND,)),
        ("GPU-a", (FIRST,)),
    ],
)
def test_gpus_are_those_that_the_environment_allows(names: str | None, gpus: tuple[Gpu, ...]) -> None:
    assert visible(LISTED, names) == gpus


@pytest.mark.parametrize("name", ["7", "MIG-cc33"])
def test_a_gpu_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"names '{name}', and this host has GPUs \[0, 1\]"):
        visible(LISTED, name)


def test_a_gpu_without_memory_of_its_own_is_left_out() -> None:
    assert visible("0, GPU-aa, NVIDIA GB10, [N/A], [N/A]\n", None) == ()
    assert visible("", "0") == ()


def test_this_host_is_read() -> None:
    host = read_host()
    assert host.cores == len(os.sched_getaffinity(0))
    assert 0 < host.free_bytes <= host.memory_bytes


def test_the_limit_of_the_control_group_counts(tmp_path: Path) -> None:
    for name, text in {"max": "1000", "current": "700", "stat": "anon 1\ninactive_file 100"}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert (1000, 600) in list(_group_limits(tmp_path))


def test_a_control_group_without_a_limit_does_not_count(tmp_path: Path) -> None:
    for name, text in {"max": "max", "current": "700", "stat": "inactive_file 100"}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert list(_group_limits(tmp_path)) == []
