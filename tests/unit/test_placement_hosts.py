"""Who is on which of several hosts."""

from __future__ import annotations

import pytest
from placement_needs import GB, ON_CPU, ON_GPU
from pydantic import ValidationError

from millrace.config.schema import Config
from millrace.core.errors import ConfigError
from millrace.core.placement import HERE, ROLES, Gpu, Host, Place
from millrace.placement.assign import assign
from millrace.placement.describe import table, tables, tight
from millrace.placement.hosts import Layout, added, lay_out, split


def host(name: str, gpus: int = 0, cores: int = 8, roles: tuple[str, ...] = ROLES) -> Host:
    listed = tuple(Gpu(i, "H100", 80 * GB, 80 * GB) for i in range(gpus))
    return Host(name, cores, 400 * GB, 400 * GB, listed, f"10.0.0.{ord(name[0])}", roles)


def config_for(replicas: int, **sections: object) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "task": {"kind": "gym", "name": "gcd"},
            "reward": {"kind": "gym", "workers": 3},
            "rollout": {"replicas": replicas},
            **sections,
        }
    )


def replicas_by_host(layout: Layout) -> dict[str, int]:
    hosts = [place.host for place in layout.replicas]
    return {name: hosts.count(name) for name in sorted(set(hosts))}


def relays(layout: Layout) -> list[str]:
    return [placed.relay.host for placed in layout.placements]


def test_one_host_is_placed_as_by_itself() -> None:
    for gpus, needs in ((0, ON_CPU), (1, ON_GPU), (4, ON_GPU)):
        alone = assign(config_for(2), host("a", gpus), needs)
        layout = lay_out(config_for(2), [host("a", gpus)], needs)
        assert layout.main == alone and layout.replicas == alone.replicas
        assert layout.reward_workers == (HERE,) * 3
        assert tables(layout) == table(alone)


def test_the_trainer_is_packed_and_replicas_are_spread_over_what_it_leaves() -> None:
    layout = lay_out(config_for(5, trainer={"shard": 2}), [host("a", 4), host("b", 4), host("c", 4)], ON_GPU)
    assert (layout.main.trainer.host, layout.main.trainer.devices) == ("a", (0, 1))
    assert replicas_by_host(layout) == {"a": 1, "b": 2, "c": 2}
    assert relays(layout) == ["a", "b", "c"]
    assert [place.host for place in layout.reward_workers] == ["localhost", "b", "c"]
    for name in "bc":
        assert [place.devices for place in layout.replicas if place.host == name] == [(0,), (1,)]


def test_the_trainer_goes_to_the_first_host_that_has_room_for_all_its_ranks() -> None:
    layout = lay_out(config_for(2, trainer={"shard": 4}), [host("a"), host("b", 2), host("c", 4)], ON_GPU)
    assert layout.main.trainer.host == "c"
    assert replicas_by_host(layout) == {"b": 2}
    assert relays(layout) == ["c", "b"], "a has neither"
    with pytest.raises(ConfigError, match=r"8 ranks.*\[2, 4\] GPUs"):
        lay_out(config_for(1, trainer={"shard": 8}), [host("a", 2), host("b", 4)], ON_GPU)


def test_ranks_are_divided_among_the_first_hosts_that_have_gpus_for_their_parts() -> None:
    config = config_for(3, trainer={"shard": 4, "hosts": 2})
    layout = lay_out(config, [host("a", 1), host("b", 2), host("c"), host("d", 3), host("e", 2)], ON_GPU)
    assert layout.trainer == Place(
        host="b", devices=(0, 1, 0, 1), ranks=4, hosts=("b", "d"), meet=f"10.0.0.{ord('b')}"
    )
    assert [placed.trains for placed in layout.placements] == [True, True, False, False]
    assert relays(layout) == ["b", "d", "a", "e"]
    assert replicas_by_host(layout) == {"a": 1, "d": 1, "e": 1}
    with pytest.raises(ConfigError, match=r"on 3 of the hosts, which have \[1, 2, 2\] GPUs"):
        lay_out(
            config_for(1, trainer={"shard": 6, "hosts": 3}),
            [host("a", 1), host("b", 2), host("c", 2)],
            ON_GPU,
        )


def test_without_gpus_the_first_hosts_train_and_each_keeps_its_part_of_the_trainer() -> None:
    config = config_for(3, trainer={"shard": 2, "hosts": 2})
    layout = lay_out(config, list(split(host("a"), 3, "127.0.0.1")), ON_CPU)
    assert (layout.trainer.hosts, layout.trainer.meet) == (("a", "host-1"), "127.0.0.1")
    kept = [placed.needs.trainer.host_bytes for placed in layout.placements]
    assert kept == [ON_CPU.trainer.host_bytes // 2] * 2 + [0]
    assert all(placed.relay_slots >= 3 for placed in layout.placements[:2])
    with pytest.raises(ConfigError, match=r"`trainer.hosts` \(2\) is more than the 1 hosts"):
        lay_out(config, [host("a")], ON_CPU)


def test_hosts_that_do_not_divide_the_ranks_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"`trainer.hosts` \(3\) must divide the trainer's 4 ranks"):
        config_for(1, trainer={"shard": 4, "hosts": 3})


def test_replicas_of_several_gpus_go_where_these_are_free() -> None:
    config = config_for(2, rollout={"replicas": 2, "engine": "vllm", "tensor": 2})
    layout = lay_out(config, [host("a", 2), host("b", 4)], ON_GPU)
    assert replicas_by_host(layout) == {"b": 2}
    assert [place.devices for place in layout.replicas] == [(0, 1), (2, 3)]


def test_one_gpu_in_all_is_shared_where_it_is() -> None:
    layout = lay_out(config_for(2), [host("a"), host("b", 1)], ON_GPU)
    assert layout.main.trainer.host == "b" and replicas_by_host(layout) == {"b": 2}
    assert 0 < layout.main.trainer.share < 1


def test_without_gpus_the_second_of_two_replicas_is_on_the_other_host() -> None:
    layout = lay_out(config_for(2), list(split(host("a", cores=2), 2, "127.0.0.1")), ON_CPU)
    assert layout.main.trainer.host == "a"
    assert replicas_by_host(layout) == {"a": 1, "host-1": 1}
    assert {place.host for place in layout.reward_workers} == {"localhost", "host-1"}


def test_logical_hosts_divide_what_the_machine_has() -> None:
    machine = host("a", 5, cores=9)
    parts = split(machine, 2, "127.0.0.1")
    assert [part.name for part in parts] == ["a", "host-1"]
    assert [[gpu.index for gpu in part.gpus] for part in parts] == [[0, 1], [2, 3, 4]]
    assert {part.memory_bytes for part in parts} == {200 * GB}
    assert split(machine, 1, "127.0.0.1") == (machine,)


def test_a_host_without_the_trainer_needs_no_memory_for_it() -> None:
    small = Host("b", 8, 10 * GB, 10 * GB, address="10.0.0.2")
    layout = lay_out(config_for(2), [host("a"), small], ON_CPU)
    assert replicas_by_host(layout) == {"a": 1, "b": 1}


def test_what_is_told_names_the_host() -> None:
    layout = lay_out(config_for(2, weights={"slots": 5}), [host("a"), host("b")], ON_CPU)
    rows = tables(layout)
    assert rows["a"] == "the trainer, a relay, 1 replica" and rows["b"] == "a relay, 1 replica"
    assert "b: a replica, host memory" in rows and "b: the trainer, host memory" not in rows
    full = [host("a"), Host("b", 8, 20 * GB, 8 * GB, address="x")]
    assert any(
        warning.startswith("b: ") for warning in tight(lay_out(config_for(2), full, ON_CPU), config_for(2))
    )


def test_hosts_without_a_relay_are_spare_and_replicas_may_join_on_them() -> None:
    layout = lay_out(config_for(1), [host("a", 4), host("b"), host("c", 2)], ON_GPU)
    assert [host.name for host in layout.spare] == ["b", "c"]
    assert added(config_for(1), layout.spare[0], layout.main) is None, "replicas compute on GPUs"
    there = added(config_for(1), layout.spare[1], layout.main)
    assert there is not None and there.replicas == () and not there.trains
    assert there.relay.host == "c" and there.relay_slots >= 2
    small = Host("d", 8, GB, GB, address="10.0.0.4")
    with pytest.raises(ConfigError, match=r"the host has 1\.0 GB of memory"):
        added(
            config_for(1, model={"path": "m", "device": "cpu"}),
            small,
            lay_out(config_for(1), [host("a")], ON_CPU).main,
        )


# ---------------------------------------------------------------- roles, and packed replicas


def test_every_host_takes_what_its_roles_allow() -> None:
    hosts = [
        host("a", roles=("none",)),
        host("b", roles=("trainer",)),
        host("c", roles=("rollout",)),
        host("d", roles=("rollout", "reward")),
    ]
    layout = lay_out(config_for(4), hosts, ON_CPU)
    assert layout.main.trainer.host == "b" and relays(layout) == ["b", "c", "d"]
    assert replicas_by_host(layout) == {"c": 2, "d": 2}
    assert {place.host for place in layout.reward_workers} == {"d"}
    assert [host.name for host in layout.spare] == ["a"]
    assert added(config_for(4), layout.spare[0], layout.main) is None


def test_the_controllers_host_can_be_left_to_the_controller() -> None:
    layout = lay_out(config_for(2), [host("a", 2, roles=("none",)), host("b", 2)], ON_GPU)
    assert relays(layout) == ["b"] and {place.host for place in layout.reward_workers} == {"b"}
    assert layout.main.trainer.devices == (0,)


@pytest.mark.parametrize("role", ROLES)
def test_a_role_that_no_host_may_take_is_named(role: str) -> None:
    others = tuple(other for other in ROLES if other != role)
    with pytest.raises(ConfigError, match=rf"the role `{role}` has no host: the labels of a, b do not"):
        lay_out(config_for(2), [host("a", roles=others), host("b", roles=others)], ON_CPU)


def test_replicas_without_a_gpu_that_they_may_use_are_refused() -> None:
    with pytest.raises(ConfigError, match="no GPU is left for replicas"):
        lay_out(config_for(1), [host("a", 1, roles=("trainer", "reward")), host("b")], ON_GPU)


def test_packed_replicas_fill_one_host_after_the_other() -> None:
    packed = {"replicas": 4, "packed": True}
    hosts = [host("a", 4), host("b", 4), host("c", 4)]
    assert replicas_by_host(lay_out(config_for(4, rollout=packed), hosts, ON_GPU)) == {"a": 3, "b": 1}
    assert replicas_by_host(lay_out(config_for(4), hosts, ON_GPU)) == {"a": 1, "b": 2, "c": 1}
    many = lay_out(config_for(13, rollout=packed | {"replicas": 13}), hosts, ON_GPU)
    assert replicas_by_host(many) == {"a": 3, "b": 5, "c": 5}, "beyond the room as if they were spread"
