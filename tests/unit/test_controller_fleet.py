"""Workers' specs say where they run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from millrace.config.schema import Config
from millrace.config.tables.operation import LocalHosts, RayCluster
from millrace.core.errors import WorkerError
from millrace.core.placement import Gpu, Host
from millrace.devices.device import torch_device
from millrace.placement.memory.engine_memory import CONTEXT_BYTES
from millrace.run import compose
from millrace.run_directory.run_directory import RunDirectory

GB = 1_000_000_000
MODEL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], Config]:
    """A configuration with this section `rollout`, on a host with two GPUs."""
    save_file({"a": np.zeros((10, 20), np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    gpus = tuple(Gpu(i, "H100", 80 * GB, 80 * GB) for i in range(2))
    monkeypatch.setattr(compose, "read_host", lambda: Host("played", 8, 100 * GB, 100 * GB, gpus))

    def configure(rollout: dict[str, Any]) -> Config:
        return Config.model_validate(
            {
                "model": {"path": str(tmp_path)},
                "task": {"kind": "gym", "name": "gcd"},
                "reward": {"kind": "gym"},
                "rollout": rollout,
            }
        )

    return configure


def test_roles_are_given_devices_shares_and_a_python(
    tmp_path: Path, configured: Callable[[dict[str, Any]], Config]
) -> None:
    config = configured({"engine": "vllm", "replicas": 2, "python": "/other/python"})
    fleet = compose.fleet(config, RunDirectory(tmp_path))
    assert (fleet.trainer.place.devices, fleet.trainer.kwargs["device_share"]) == ((0,), 1.0)
    assert fleet.trainer.place.python is None
    for replica in fleet.replicas:
        assert replica.place.devices == (1,)
        assert replica.place.python == "/other/python"
        assert replica.spawn_s_max > config.supervision.spawn_timeout_s > fleet.trainer.spawn_s_max
        options = replica.kwargs["options"]
        assert (options.device, options.device_share) == ("cuda", 0.5)
    assert fleet.relays[0].place.variables["CUDA_VISIBLE_DEVICES"] == ""
    assert fleet.relays[0].kwargs["slots"] == 7


@pytest.mark.parametrize(
    ("replicas", "heartbeat_timeout_s", "interval_s"), [(2, 10, 0.1), (512, 10, 2), (4096, 4, 2)]
)
def test_a_large_fleet_reports_rarely_and_never_looks_dead(
    configured: Callable[[dict[str, Any]], Config],
    replicas: int,
    heartbeat_timeout_s: float,
    interval_s: float,
) -> None:
    config = configured({"replicas": replicas})
    supervision = config.supervision.model_copy(update={"heartbeat_timeout_s": heartbeat_timeout_s})
    config = config.model_copy(update={"supervision": supervision})
    assert compose.report_interval_s(config) == interval_s
    assert compose.pace(config).look_s == (interval_s - 0.1) / 100


def test_each_server_has_a_replica_that_needs_no_device(
    tmp_path: Path, configured: Callable[[dict[str, Any]], Config]
) -> None:
    config = configured({"servers": ["http://a:1", "http://b:2"]})
    fleet = compose.fleet(config, RunDirectory(tmp_path))
    assert fleet.trainer.place.devices == (0,) and fleet.trainer.kwargs["device_share"] == 1.0
    assert [replica.place.devices for replica in fleet.replicas] == [(), ()]
    assert [replica.kwargs["engine"] for replica in fleet.replicas] == ["server"] * 2
    options = [replica.kwargs["options"] for replica in fleet.replicas]
    assert [each.server for each in options] == ["http://a:1", "http://b:2"]
    assert {each.shared_dir for each in options} == {str(tmp_path / "weights")}
    assert {each.server_wait_s for each in options} == {96.0}


def test_a_share_of_a_gpu_bounds_what_torch_hands_out(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = []

    class Properties:
        total_memory = 80 * GB

    class Tensor:
        device = torch.device("cuda", 0)

    monkeypatch.setattr(torch, "empty", lambda *_, device: Tensor())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties())
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda fraction, device: bounds.append(fraction)
    )
    assert torch_device("cuda", 0.25).type == "cuda"
    assert torch_device("cuda").type == "cuda"
    assert bounds == [0.25 - CONTEXT_BYTES / (80 * GB)]


def test_relays_of_several_hosts_get_an_address_and_one_secret_that_no_configuration_has(
    tmp_path: Path, configured: Callable[[dict[str, Any]], Config]
) -> None:
    alone = compose.fleet(configured({}), RunDirectory(tmp_path))
    assert [relay.name for relay in alone.relays] == ["relay"]
    assert alone.relays[0].kwargs.keys() == {"name", "slots", "versions"}
    config = configured({"replicas": 2}).model_copy(update={"runtime": LocalHosts(hosts=2)})
    fleets = [compose.fleet(config, RunDirectory(tmp_path)) for _ in range(2)]
    for fleet in fleets:
        assert [relay.name for relay in fleet.relays] == ["relay-played", "relay-host-1"]
        assert {relay.kwargs["address"] for relay in fleet.relays} == {"127.0.0.1"}
        assert set(fleet.hosts.values()) <= {"played", "host-1"}
    secrets = {relay.kwargs["secret"] for fleet in fleets for relay in fleet.relays}
    assert len(secrets) == 2, "each session has its own"
    assert not any(
        secret in repr(spec.kwargs["config"]) for secret in secrets for spec in fleet.reward_workers
    )


def test_a_runtime_that_is_not_there_is_refused_by_its_name(
    configured: Callable[[dict[str, Any]], Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    config = configured({}).model_copy(update={"runtime": RayCluster(address="10.0.0.1:6379")})
    with pytest.raises(WorkerError, match=r"runtime.kind.*needs Ray: install"):
        compose.place(config)
