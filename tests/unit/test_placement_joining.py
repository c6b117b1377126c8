"""Where replicas go that join a running run."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from test_placement_assign import GB, ON_CPU, ON_GPU, config_for
from test_placement_assign import host as one_host
from test_placement_hosts import host as named_host

from millrace.core.errors import ConfigError
from millrace.placement.hosts import joining_places, lay_out

MUCH = 1_000 * GB


def join(layout, config, count, *, there=None, free_bytes=MUCH):
    present = list(layout.replicas if there is None else there)
    return joining_places(config, layout, present, count, free_bytes=free_bytes)


def test_on_cpus_as_many_join_as_the_memory_holds():
    config = config_for(2)
    layout = lay_out(config, [one_host(0)], ON_CPU)
    assert [place.devices for place in join(layout, config, 9)] == [()] * 9
    with pytest.raises(ConfigError, match=r"more replicas: \d+ would fit. On played: \d+ replicas"):
        join(layout, config, 12)


def test_what_is_free_now_counts_too():
    config = config_for(1)
    layout = lay_out(config, [one_host(0)], ON_CPU)
    assert len(join(layout, config, 2, free_bytes=15 * GB)) == 2
    with pytest.raises(ConfigError, match=r"a replica takes 7\.1 GB, and .* are free"):
        join(layout, config, 3, free_bytes=15 * GB)


def test_a_replica_that_joins_gets_a_gpu_that_nobody_has():
    config = config_for(2)
    layout = lay_out(config, [one_host(4)], ON_GPU)
    (place,) = join(layout, config, 1)
    assert (place.devices, place.share) == ((3,), 1.0)
    with pytest.raises(ConfigError, match=r"no room for 2 more replicas: 1 would fit.*left of its GPUs"):
        join(layout, config, 2)


def test_the_gpu_of_one_that_left_is_given_again():
    config = config_for(3)
    layout = lay_out(config, [one_host(4)], ON_GPU)
    (place,) = join(layout, config, 1, there=[layout.replicas[0], layout.replicas[2]])
    assert (place.devices, place.share) == ((2,), 1.0)


def test_of_a_gpu_that_others_share_it_takes_what_it_needs():
    config = config_for(4)
    layout = lay_out(config, [one_host(2)], ON_GPU)  # a quarter of GPU 1 each
    (place,) = join(layout, config, 1, there=layout.replicas[:3])
    assert place.devices == (1,) and place.share < 0.25


def test_replicas_on_several_gpus_take_free_ones():
    config = config_for(1, rollout={"replicas": 1, "tensor": 2, "engine": "vllm"})
    layout = lay_out(config, [one_host(6)], ON_GPU)
    assert [place.devices for place in join(layout, config, 1)] == [(3, 4)]
    with pytest.raises(ConfigError, match="no room"):
        join(layout, config, 2)


def test_of_several_hosts_the_one_with_the_fewest_is_filled_first():
    config = config_for(3, device="cpu")
    layout = lay_out(config, [named_host("a"), named_host("b")], ON_CPU)
    there = [place for place in layout.replicas if place.host == "a"]
    hosts = [place.host for place in join(layout, config, 3, there=there)]
    assert hosts.count("b") > hosts.count("a")
    assert join(layout, config, 1)[0].python is None


def test_what_a_place_lacks_is_said_of_each_host():
    config = config_for(2, device="cpu")
    small = replace(named_host("b"), memory_bytes=10 * GB)
    layout = lay_out(config, [named_host("a"), small], ON_CPU)
    with pytest.raises(ConfigError, match=r"On .*: .*; .*: .*"):
        join(layout, config, 1, free_bytes=GB)


def test_packed_replicas_join_where_the_most_are():
    config = config_for(3, device="cpu", rollout={"replicas": 3, "packed": True})
    layout = lay_out(config, [named_host("a", cores=3), named_host("b")], ON_CPU)
    assert [place.host for place in layout.replicas] == ["a", "a", "b"]
    assert [place.host for place in join(layout, config, 2)] == ["a", "a"]
