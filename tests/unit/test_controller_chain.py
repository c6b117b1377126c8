"""The chain: which relay asks which others for a version."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.controller.state.chain import Fetch, next_fetch
from millrace.controller.state.relays import RelayRecord, Relays
from millrace.core.types import Endpoint


def relay(host: str, *versions: int, root: bool = False, up: bool = True) -> RelayRecord:
    endpoint = Endpoint("memfd", f"/{host}", 3, 8, address=f"{host}:1") if up else None
    return RelayRecord(host, root, endpoint, versions if up else ())


def fetch_of(relays: Relays, host: str, wanted: Sequence[int]) -> Fetch | None:
    chain = relays.values()
    return next_fetch(chain, host, wanted, directory=relays.directory, stored=relays.stored_versions)


def asked(chain: list[RelayRecord], host: str, *wanted: int) -> tuple[int, list[str]] | None:
    fetch = next_fetch(chain, host, wanted)
    return None if fetch is None else (fetch.version, [address.split(":")[0] for address in fetch.sources])


def test_each_relay_asks_the_one_before_it_and_falls_back_on_the_earlier_ones() -> None:
    chain = [relay("a", 3, 4, root=True), relay("b", 3), relay("c", 3), relay("d", 3)]
    assert asked(chain, "a") is None
    assert asked(chain, "b") == (4, ["a"])
    assert asked(chain, "c") == (4, ["b", "a"]), "b is told at the same time, and forwards while it receives"
    assert asked(chain, "d") == (4, ["c", "b", "a"])


def test_the_chain_closes_around_a_dead_relay() -> None:
    chain = [relay("a", 4, root=True), relay("b", up=False), relay("c", 3)]
    assert asked(chain, "b") is None
    assert asked(chain, "c") == (4, ["a"])


def test_a_relay_gets_what_a_dead_or_new_head_has_not_from_those_after_it() -> None:
    dead, new = relay("a", root=True, up=False), relay("a", root=True)
    for head in (dead, new):
        chain = [head, relay("b"), relay("c", 4), relay("d", 3, 4)]
        assert asked(chain, "b") == (4, ["c", "d"])
        assert asked(chain, "c") is None


def test_a_head_asks_nobody_since_the_trainer_writes_into_it() -> None:
    assert asked([relay("a", root=True), relay("b", 4)], "a", 3) is None


def test_what_lost_trajectories_need_is_asked_for_after_the_newest_and_of_those_that_hold_it() -> None:
    chain = [relay("a", 2, 4, root=True), relay("b", 4), relay("c", 3, 4), relay("d")]
    assert asked(chain, "d", 2, 3) == (4, ["c", "b", "a"])
    chain[3].versions = (4,)
    assert asked(chain, "d", 2, 3) == (3, ["c"])
    chain[3].versions = (3, 4)
    assert asked(chain, "d", 2, 3) == (2, ["a"])
    chain[3].versions = (2, 3, 4)
    assert asked(chain, "d", 2, 3) is None
    assert asked(chain, "b", 1) is None, "nobody has it"


def test_of_many_sources_few_are_asked_at_a_time_and_all_of_them_in_turn() -> None:
    assert (
        Fetch(4, ("c", "b", "a")).sources_after(0)
        == Fetch(4, ("c", "b", "a")).sources_after(1)
        == ("c", "b", "a")
    )
    many = Fetch(4, tuple("gfedcba"))
    assert many.sources_after(0) == ("g", "f", "e"), "the nearest"
    assert {source for misses in range(3) for source in many.sources_after(misses)} == set("gfedcba")


def test_nothing_is_asked_for_before_there_is_a_version() -> None:
    assert asked([relay("a", root=True), relay("b")], "b") is None


@given(st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 4))), min_size=2, max_size=6))
def test_every_relay_that_is_up_gets_to_the_newest_version(relays: list[tuple[bool, set[int]]]) -> None:
    chain = [
        relay(f"h{i}", *sorted(versions), root=i == 0, up=up or i == 0)
        for i, (up, versions) in enumerate(relays)
    ]
    newest = max(one.newest for one in chain)
    for one in chain:
        fetch = next_fetch(chain, one.host)
        if one.root or one.endpoint is None or newest < 0 or newest in one.versions:
            assert fetch is None
        else:
            own = one.endpoint.address
            assert fetch is not None and fetch.version == newest
            assert own not in fetch.sources and len(set(fetch.sources)) == len(fetch.sources)
            assert any(newest in other.versions for other in chain if _address(other) in fetch.sources)


def _address(record: RelayRecord) -> str:
    return record.endpoint.address if record.endpoint else ""


@pytest.fixture
def parts() -> Relays:
    """Of a trainer on the hosts a and b, which has just written version 5."""
    relays = Relays(["a", "b", "c", "d"], roots=["a", "b"])
    for host in relays:
        relays.up(host, Endpoint("memfd", host, 3, 8, address=host))
        relays.set_versions(host, [4])
    relays.wrote(5, "first")
    return relays


def test_heads_that_have_a_part_each_and_all_after_them_make_a_ring(parts: Relays) -> None:
    found = {host: fetch_of(parts, host, ()) for host in parts}
    assert found == {
        "a": Fetch(5, ("d", "c", "b")),
        "b": Fetch(5, ("a", "d", "c")),
        "c": Fetch(5, ("b", "a")),
        "d": Fetch(5, ("c", "b", "a")),
    }


def test_nothing_is_asked_for_while_a_head_is_away_with_its_part(parts: Relays) -> None:
    parts.down("b")
    parts.up("b", Endpoint("memfd", "b", 3, 8, address="new"))
    assert [fetch_of(parts, host, ()) for host in "abcd"] == [None] * 4
    assert parts.rewritten == 0
    parts.wrote(5, "first")
    assert parts.rewritten == 1
    assert fetch_of(parts, "c", ()) == Fetch(5, ("new", "a"))


def test_a_version_written_again_with_other_weights_is_got_again_by_all(parts: Relays) -> None:
    for host in parts:
        parts.set_versions(host, [4, 5])
    parts.wrote(5, "first")
    assert fetch_of(parts, "c", ()) is None and fetch_of(parts, "a", ()) is not None
    parts.wrote(5, "rounded otherwise")
    assert all(fetch_of(parts, host, ()) is not None for host in "abcd")


@pytest.fixture
def relays() -> Relays:
    relays = Relays(["b", "a", "c"], roots=["a"])
    for host in "abc":
        relays.up(host, Endpoint("memfd", host, 3, 8, address=f"{host}:1"))
    return relays


def test_the_heads_are_first_in_the_chain(relays: Relays) -> None:
    assert list(relays) == ["a", "b", "c"]


def test_a_version_that_was_put_somewhere_is_due_there_until_it_arrives_or_will_not_come(
    relays: Relays,
) -> None:
    relays.put("a", 5)
    relays.arrived("a", 4)
    assert [relays[host].staging_version for host in "abc"] == [5, -1, -1]
    relays.arrived("a", 5)
    assert relays["a"].staging_version == -1
    relays.put("a", 6)
    relays.down("a")
    assert relays["a"].staging_version == -1


def test_a_version_is_coming_to_a_host_that_has_it_not_yet_unless_its_relay_fails(relays: Relays) -> None:
    relays.set_versions("a", [5])
    assert [relays.fetching_version(host) for host in "abc"] == [-1, 5, 5]
    relays["b"].failing = True
    relays.down("c")
    assert [relays.fetching_version(host) for host in "abc"] == [-1, -1, -1]


def test_what_replicas_can_get_is_what_their_hosts_hold_or_can_fetch(relays: Relays) -> None:
    relays.set_versions("a", [4, 5])
    relays.set_versions("b", [3, 5])
    assert relays.pullable({"a"}) == (4, 5), "a head fetches nothing"
    assert relays.pullable({"b"}) == (3, 4, 5)
    relays.down("b")
    assert relays.pullable({"a", "b"}) == (4, 5) and relays.newest == 5


def test_a_version_that_a_relay_keeps_as_a_delta_is_for_replicas_of_its_own_host(relays: Relays) -> None:
    relays.set_versions("a", [3, 4, 5], older_versions=[3])
    relays.set_versions("b", [5])
    assert relays.pullable({"a"}) == (3, 4, 5)
    assert relays.pullable({"b"}) == (4, 5)
    assert fetch_of(relays, "b", [3]) is None
    assert fetch_of(relays, "b", [3, 4]) is not None


def test_a_version_that_is_staged_with_other_weights_goes_down_the_chain_again(relays: Relays) -> None:
    for host in "ab":
        relays.set_versions(host, [5])
    relays.staged(5, "first")
    relays.staged(5, "first")
    assert relays["b"].versions == (5,)
    relays.staged(5, "rounded otherwise")
    assert fetch_of(relays, "b", ()) == Fetch(5, ("a:1",))


def test_the_directory_is_asked_behind_every_relay_and_when_none_has_it() -> None:
    def from_directory(chain: list[RelayRecord], host: str, *wanted: int) -> Fetch | None:
        return next_fetch(chain, host, wanted, directory="s3://run", stored=(2, 4))

    chain = [relay("a", 4, root=True), relay("b"), relay("c", up=False)]
    assert from_directory(chain, "b") == Fetch(4, ("a:1", "s3://run"))
    chain[0] = relay("a", root=True, up=False)
    assert from_directory(chain, "b") == Fetch(4, ("s3://run",))
    chain[1].versions = (4,)
    assert from_directory(chain, "b", 2, 3) == Fetch(2, ("s3://run",))
    assert from_directory(chain, "a") is None


def test_steps_that_were_undone_are_not_looked_for_in_the_directory() -> None:
    relays = Relays(["b", "a"], roots=["a"], directory="s3://run")
    for host in ("a", "b"):
        relays.up(host, Endpoint("memfd", f"/{host}", 3, 8, address=f"{host}:1"))
    for version in (4, 5):
        relays.staged(version, f"d{version}")
        relays.note_stored(version)
    relays.staged(4, "other")
    relays.set_versions("a", [4])
    assert fetch_of(relays, "b", ()) == Fetch(4, ("a:1",))
    relays.note_stored(4)
    assert fetch_of(relays, "b", ()) == Fetch(4, ("a:1", "s3://run"))


def test_a_host_that_joins_is_the_last_of_the_chain_and_asks_the_nearest_first(relays: Relays) -> None:
    relays.join("aa")
    assert list(relays) == ["a", "b", "c", "aa"] and fetch_of(relays, "aa", ()) is None
    for host in "abc":
        relays.set_versions(host, [4, 5])
    relays.up("aa", Endpoint("memfd", "aa", 3, 8, address="aa:1"))
    assert fetch_of(relays, "aa", ()) == Fetch(5, ("c:1", "b:1", "a:1"))
    relays.set_versions("aa", [6])
    relays.down("aa")
    relays.gone("aa")
    assert list(relays) == ["a", "b", "c"] and relays.newest == 5


def test_what_a_lone_host_holds_is_seen_host_by_host_once_another_has_joined() -> None:
    relays = Relays(["a"], roots=["a"])
    relays.up("a", Endpoint("memfd", "a", 3, 8, address="a:1"))
    relays.set_versions("a", [5])
    relays.join("b")
    assert relays.pullable({"b"}) == () and relays.fetching_version("b") == -1
    relays.up("b", Endpoint("memfd", "b", 3, 8, address="b:1"))
    assert relays.pullable({"b"}) == (5,) and relays.fetching_version("b") == 5
