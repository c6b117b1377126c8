"""Who runs where, on hosts with no, one, two and eight GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from placement_needs import GB, ON_CPU, ON_GPU

from millrace.config.schema import Config
from millrace.core.errors import ConfigError
from millrace.core.placement import Gpu, Host
from millrace.placement.assign import LARGE_BYTES, Placement, assign, devices_of
from millrace.placement.describe import table, warnings
from millrace.placement.memory.engine_memory import CONTEXT_BYTES, LIBRARIES_BYTES
from millrace.placement.memory.needs import MemoryNeed


def host(gpus: int, *, gpu_gb: int = 80, gb: int = 100, free_gb: int | None = None) -> Host:
    free = gb if free_gb is None else free_gb
    listed = tuple(Gpu(i, "H100", gpu_gb * GB, gpu_gb * GB) for i in range(gpus))
    return Host("played", 16, gb * GB, free * GB, listed)


def config_for(replicas: int, *, device: str = "auto", bound: int = 4, **sections: object) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "m", "device": device},
            "task": {"kind": "gym", "name": "gcd"},
            "reward": {"kind": "gym"},
            "rollout": {"replicas": replicas},
            "schedule": {"kind": "areal", "eta": bound},
            **sections,
        }
    )


def devices(placement: Placement) -> list[tuple[int, ...] | None]:
    return [place.devices for place in (placement.trainer, *placement.replicas)]


def test_without_a_gpu_everything_computes_on_the_cpu() -> None:
    placement = assign(config_for(2), host(0), ON_CPU)
    assert placement.device == "cpu"
    assert devices(placement) == [(), (), ()]


def test_a_cpu_that_is_asked_for_is_taken_beside_gpus_which_stay_hidden() -> None:
    placement = assign(config_for(2, device="cpu"), host(8), ON_CPU)
    assert placement.device == "cpu"
    assert placement.trainer.variables["CUDA_VISIBLE_DEVICES"] == ""


def test_a_gpu_that_is_asked_for_and_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.device.*nvidia-smi lists no GPU"):
        assign(config_for(2, device="cuda"), host(0), ON_CPU)


def test_on_eight_gpus_each_worker_has_its_own() -> None:
    placement = assign(config_for(7), host(8), ON_GPU)
    assert devices(placement) == [(i,) for i in range(8)]
    assert {place.share for place in (placement.trainer, *placement.replicas)} == {1.0}
    assert list(warnings(placement, config_for(1))) == []


def test_on_two_gpus_the_trainer_keeps_one_and_replicas_share_the_other() -> None:
    placement = assign(config_for(2), host(2), ON_GPU)
    assert devices(placement) == [(0,), (1,), (1,)]
    assert [place.share for place in placement.replicas] == [0.5, 0.5]
    assert placement.trainer.share == 1.0


def test_on_one_gpu_replicas_get_what_they_keep_and_a_tenth_and_the_trainer_the_rest() -> None:
    placement = assign(config_for(2), host(1), ON_GPU)
    each = (5 * GB * 1.1 + LIBRARIES_BYTES + CONTEXT_BYTES) / (80 * GB)
    assert [place.share for place in placement.replicas] == pytest.approx([each, each])
    assert placement.trainer.share == pytest.approx(1 - 2 * each)
    assert (
        "the trainer 84% (8.0 GB), replica-0 8% (5.0 GB), replica-1 8% (5.0 GB)" in table(placement)["GPU 0"]
    )


def test_a_tiny_model_too_leaves_room_for_the_workspaces_of_libraries() -> None:
    tiny = replace(ON_GPU, replica=MemoryNeed(2_000_000, 1_000_000), trainer=MemoryNeed(8_000_000, 1_000_000))
    replica = assign(config_for(2), host(1), tiny).replicas[0]
    assert replica.share * 80 * GB - CONTEXT_BYTES - 2_000_000 >= 400_000_000


@pytest.mark.parametrize("gpus", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("replicas", [1, 2, 3, 7, 20])
def test_shares_of_a_gpu_are_at_most_the_whole_and_every_replica_has_one(gpus: int, replicas: int) -> None:
    placement = assign(config_for(replicas), host(gpus, gpu_gb=800, gb=1000), ON_GPU)
    for gpu in range(gpus):
        workers = [p for p in (placement.trainer, *placement.replicas) if p.devices == (gpu,)]
        assert sum(place.share for place in workers) <= 1 + 1e-9
        assert all(place.share > 0 for place in workers)
    assert all(0 <= device < gpus for used in devices_of(replicas, gpus) for device in used)


@pytest.mark.parametrize(
    ("replicas", "tensor", "gpus", "expected"),
    [
        (2, 2, 5, [(0,), (1, 2), (3, 4)]),
        (3, 2, 6, [(0,), (1, 2), (3, 4), (1, 2)]),
        (1, 4, 8, [(0,), (1, 2, 3, 4)]),
        (1, 2, 3, [(0,), (1, 2)]),
    ],
)
def test_a_replica_of_several_devices_has_neighbours_that_the_trainer_does_not_use(
    replicas: int, tensor: int, gpus: int, expected: list[tuple[int, ...]]
) -> None:
    config = config_for(1, rollout={"replicas": replicas, "tensor": tensor})
    placement = assign(config, host(gpus), ON_GPU)
    assert devices(placement) == expected
    sharing = expected.count(expected[1])
    assert placement.replicas[0].share == 1 / sharing
    assert placement.replicas[0].variables["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, expected[1]))
    assert "replica-0" in table(placement)["GPU 1"] and "replica-0" in table(placement)["GPU 2"]


@pytest.mark.parametrize(
    ("ranks", "replicas", "gpus", "expected"),
    [
        ({"shard": 2}, 2, 4, [(0, 1), (2,), (3,)]),
        ({"shard": 2}, 2, 3, [(0, 1), (2,), (2,)]),
        ({"shard": 2, "tensor": 2, "sequence": 2}, 1, 9, [tuple(range(8)), (8,)]),
    ],
)
def test_each_rank_of_the_trainer_has_a_gpu_that_no_replica_uses(
    ranks: dict[str, int], replicas: int, gpus: int, expected: list[tuple[int, ...]]
) -> None:
    config = config_for(replicas, trainer=ranks)
    placement = assign(config, host(gpus), ON_GPU)
    assert devices(placement) == expected
    assert (placement.trainer.ranks, placement.trainer.share) == (config.trainer.ranks, 1.0)
    assert "the trainer" in table(placement)[f"GPU {config.trainer.ranks - 1}"]


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_more_ranks_of_the_trainer_than_gpus_are_refused(gpus: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"(?s)is 4\. .* this host has {gpus}\..* at most {max(1, gpus - 1)} "
    ):
        assign(config_for(1, trainer={"shard": 2, "tensor": 2}), host(gpus), ON_GPU)


def test_ranks_on_the_cpu_are_told_with_the_memory_of_them_all() -> None:
    placement = assign(config_for(2, trainer={"shard": 2}), host(0), ON_CPU)
    assert (placement.trainer.ranks, placement.relay.ranks, placement.replicas[0].ranks) == (2, 1, 1)
    assert table(placement)["the trainer, host memory"] == "9.0 GB in 2 ranks"


@pytest.mark.parametrize(("gpus", "most"), [(1, 1), (2, 1), (4, 3)])
def test_more_devices_for_a_replica_than_there_are_are_refused(gpus: int, most: int) -> None:
    config = config_for(1, rollout={"replicas": 1, "tensor": 4})
    with pytest.raises(ConfigError, match=rf"(?s)`rollout.tensor` \(4\).* at most {most}$"):
        assign(config, host(gpus), ON_GPU)


def test_a_gpu_that_is_too_small_for_a_part_tells_how_many_slots_fit() -> None:
    config = config_for(1, rollout={"replicas": 2, "tensor": 2})
    with pytest.raises(ConfigError, match=r"(?s)replica-0 keeps 5\.0 GB on GPU 1 .* 1139 slots would fit"):
        assign(config, host(3, gpu_gb=10), ON_GPU)


def test_gpus_keep_the_numbers_that_the_host_gives_them() -> None:
    listed = tuple(Gpu(i, "H100", 80 * GB, 80 * GB) for i in (2, 5))
    placement = assign(config_for(1), replace_gpus(host(0), listed), ON_GPU)
    assert devices(placement) == [(2,), (5,)]


def replace_gpus(there: Host, gpus: tuple[Gpu, ...]) -> Host:
    return Host(there.name, there.cores, there.memory_bytes, there.free_bytes, gpus)


def test_a_gpu_that_is_too_small_is_refused_with_the_numbers_and_what_to_set() -> None:
    with pytest.raises(ConfigError, match=r"(?s)the trainer keeps 8\.0 GB on GPU 0 .*rollout\.replicas"):
        assign(config_for(2), host(1, gpu_gb=16), ON_GPU)
    with pytest.raises(ConfigError, match=r"(?s)replica-0 keeps 5\.0 GB on GPU 1 .* 461 slots would fit"):
        assign(config_for(3), host(2, gpu_gb=16), ON_GPU)


def test_a_gpu_in_use_by_others_and_one_without_work_are_told() -> None:
    busy = tuple(Gpu(i, "H100", 80 * GB, (80 if i else 2) * GB) for i in range(3))
    placement = assign(config_for(1), replace_gpus(host(0), busy), ON_GPU)
    text = " ".join(warnings(placement, config_for(1)))
    assert "GPU 0 has 2.0 GB free, and the run keeps 8.5 GB there" in text
    assert "nobody computes on GPU 2" in text


# ---------------------------------------------------------------- versions in the relay


SMALL = replace(ON_CPU, weights_bytes=LARGE_BYTES)


def test_the_relay_holds_small_versions_whole_as_many_as_the_staleness_bound_can_use() -> None:
    for bound, slots in ((4, 7), (0, 3), (20, 8)):
        assert assign(config_for(2, bound=bound), host(0), SMALL).relay_slots == slots


@pytest.mark.parametrize("bound", [0, 4, 20])
def test_large_versions_take_two_and_a_half_whatever_the_bound(bound: int) -> None:
    placement = assign(config_for(2, bound=bound), host(0), ON_CPU)
    assert (placement.relay_slots, placement.relay_versions) == (2, bound + 3)
    assert placement.relay_bytes == 2.5 * ON_CPU.weights_bytes


def test_a_relay_that_sends_or_stores_large_versions_has_them_whole() -> None:
    assert assign(config_for(2), host(0), ON_CPU, alone=False).relay_slots == 7
    assert assign(config_for(2), host(0), ON_CPU, alone=False, trains=False).relay_slots == 2
    stored = config_for(2, weights={"directory": "memory://run"})
    assert assign(stored, host(0), ON_CPU).relay_slots == 7


@pytest.mark.parametrize(("free_gb", "slots"), [(100, 7), (33, 5), (29, 3), (27, 2), (1, 2)])
def test_the_relay_takes_half_of_what_the_processes_leave_free_and_two_at_least(
    free_gb: int, slots: int
) -> None:
    config = config_for(2, weights={"slots": 7})
    placement = assign(config, host(0, free_gb=free_gb), ON_CPU)  # 23 GB for the processes
    assert placement.relay_slots == slots
    is_warned = any("the relay has room for" in line for line in warnings(placement, config_for(1)))
    assert is_warned == (slots < 7 and not placement.relay_keeps_deltas)
    assert placement.relay_bytes <= max(2 * ON_CPU.weights_bytes, (free_gb - 23) * GB / 2)


def test_the_number_of_versions_can_be_capped() -> None:
    assert assign(config_for(2, weights={"slots": 2}), host(0), ON_CPU).relay_slots == 2
    assert assign(config_for(2, weights={"slots": 20}), host(0, free_gb=33), ON_CPU).relay_slots == 5


def test_a_host_without_room_for_two_versions_is_refused_with_the_numbers() -> None:
    assert assign(config_for(2), host(0, gb=25), ON_CPU).relay_slots == 2
    with pytest.raises(ConfigError, match=r"the host has 24\.0 GB.* 9\.0 GB .* 7\.0 GB each.*: 25\.0 GB"):
        assign(config_for(2), host(0, gb=24), ON_CPU)


def test_host_and_shared_memory_are_told_apart() -> None:
    rows = table(assign(config_for(2), host(0), ON_CPU))
    assert rows["the relay, shared memory"] == (
        "2 versions of 1.0 GB and older ones as deltas in half of one = 2.5 GB"
    )
    assert rows["the host"] == "23.0 GB + 2.5 GB shared, of 100.0 GB, 100.0 GB free"


def test_host_memory_that_is_tight_is_told() -> None:
    message = next(warnings(assign(config_for(2, bound=0), host(0, free_gb=26), ON_CPU), config_for(2)))
    assert "the run keeps 23.0 GB of host memory and, shared, 2.0 GB; 26.0 GB of 100.0 GB are free" in message


def test_what_a_replica_rebuilds_an_older_version_in_is_told_and_counts() -> None:
    placement = assign(config_for(4), host(0, free_gb=43), ON_CPU)
    assert table(placement)["a replica that reads an older version"] == "1.0 GB more, in host memory"
    messages = list(warnings(placement, config_for(4)))
    assert len(messages) == 1 and "What it needs for a moment may not fit" in messages[0]
    whole = assign(config_for(4, bound=0, weights={"slots": 3}), host(0, free_gb=43), ON_CPU)
    assert "a replica that reads an older version" not in table(whole) and not whole.older_bytes
