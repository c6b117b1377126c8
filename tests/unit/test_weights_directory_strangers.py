"""A directory of versions into which others write too: links, what is no file, versions of another run."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from test_weights_directory import DIGESTS, Host, asked, filled

from millrace.core.errors import ConfigError, UnknownVersionError, WeightsError
from millrace.weights.store.directory import Directory
from millrace.weights.store.restoring import restore

PLANTS: dict[str, Callable[[Path], object]] = {
    "link": lambda path: path.symlink_to(path.parents[1] / "precious"),
    "directory": lambda path: path.mkdir(),
    "FIFO": lambda path: os.mkfifo(path),
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "precious").write_bytes(b"not of this run")
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.mark.parametrize("suffix", ["json", "safetensors", "json.part", "safetensors.part"])
@pytest.mark.parametrize("kind", PLANTS)
def test_what_has_the_name_of_a_file_is_told_and_never_written_through(place, kind, suffix):
    planted = place / f"v00000000.{suffix}"
    PLANTS[kind](planted)
    directory, host = Directory(f"file://{place}"), Host()
    host.publish(0)
    if suffix.endswith("part"):  # names of files that are being made are not known before
        host.store(directory, 0)
        assert restore(directory, Host().memory, 0, DIGESTS[0])
    else:
        with pytest.raises(WeightsError, match=rf"{planted.name} is a {kind}.*remove it"):
            host.store(directory, 0)
        assert not list(place.glob("*.part"))
    assert (place.parent / "precious").read_bytes() == b"not of this run"
    assert planted.is_dir() == (kind == "directory")


@pytest.mark.parametrize("kind", PLANTS)
@pytest.mark.parametrize("name", ["v00000003.json", "v00000003.delta", "v00000004.safetensors"])
def test_what_has_the_name_of_a_file_is_passed_by_another_way_and_never_read(place, kind, name):
    directory = Directory(f"file://{place}")
    filled(directory, 6, anchor_every=4, keep=9)
    (place / name).unlink()
    PLANTS[kind](place / name)
    cold = Host()
    restore(directory, cold.memory, 5, DIGESTS[5])
    assert cold.holds_exactly(5)


@pytest.mark.parametrize("kind", PLANTS)
def test_what_has_the_name_of_the_only_file_is_named(place, kind):
    directory = Directory(f"file://{place}")
    filled(directory, 0)
    (place / "v00000000.safetensors").unlink()
    PLANTS[kind](place / "v00000000.safetensors")
    with pytest.raises(UnknownVersionError, match=rf"v00000000.safetensors is a {kind}.*remove it"):
        restore(directory, Host().memory, 0, DIGESTS[0])


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_the_second_run_in_a_directory_is_told_whose_it_is(tmp_path, scheme):
    url = f"{scheme}://{tmp_path}/run"
    first, second = Host(directory=url, owner="first-1"), Host(directory=url, owner="second-2")
    for host in (first, second):
        host.publish(0)
        host.publish(1)
    assert not asked(first.relay, 0).reason
    reason = asked(second.relay, 1).reason
    assert "belongs to the run `first-1`, and this is `second-2`" in reason and "owner" in reason
    assert list(Directory(url).entries()) == [0]
    Directory(url, "first-1").refuse_other()
    with pytest.raises(ConfigError, match=r"Name another directory"):
        Directory(url, "second-2").refuse_other()
    assert not asked(first.relay, 1).reason


def test_a_mark_that_a_killed_run_left_empty_is_nobodys(tmp_path):
    (tmp_path / "owner").touch()
    host = Host(directory=f"file://{tmp_path}", owner="first-1")
    host.publish(0)
    assert not asked(host.relay, 0).reason
    assert (tmp_path / "owner").read_text() == "first-1"


def test_a_run_with_a_long_name_has_its_own_directory(tmp_path):
    owner = "sweep-" * 60
    host = Host(directory=f"file://{tmp_path}", owner=owner)
    host.publish(0)
    assert not asked(host.relay, 0).reason
    Directory(f"file://{tmp_path}", owner).refuse_other()


@pytest.mark.parametrize("kind", PLANTS)
def test_what_has_the_name_of_the_mark_is_told(place, kind):
    PLANTS[kind](place / "owner")
    with pytest.raises(WeightsError, match=rf"owner is a {kind}"):
        Directory(f"file://{place}", "first-1").refuse_other()
    host = Host(directory=f"file://{place}", owner="first-1")
    host.publish(0)
    assert f"owner is a {kind}" in asked(host.relay, 0).reason
    with pytest.raises(UnknownVersionError):
        asyncio.run(Host().relay.fetch(0, DIGESTS[0], [f"file://{place}"]))
