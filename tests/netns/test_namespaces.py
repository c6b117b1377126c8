"""The hosts that tests are given: who reaches whom, how fast, and what is left of them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.namespaces import Host, hosts

CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 9), timeout=2)"


def connects(host: Host, address: str) -> str:
    """What a connection to a port where nobody listens ends with: refused if the host is reached."""
    command = [*host.prefix, "python3", "-c", CONNECT, address]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return done.stderr.strip().splitlines()[-1].partition(":")[0]


def test_hosts_reach_each_other_until_a_cable_is_out_and_nothing_is_left_of_them() -> None:
    with hosts(2) as (first, second):
        assert connects(first, second.address) == "ConnectionRefusedError"
        second.link(up=False)
        assert connects(first, second.address) == "TimeoutError"
        second.link(up=True)
        assert connects(first, second.address) == "ConnectionRefusedError"
        names = {first.name, second.name, first.switch}
        assert names <= {path.name for path in Path("/run/netns").iterdir()}
    assert not names & {path.name for path in Path("/run/netns").iterdir()}


def test_what_a_killed_test_left_is_removed_by_the_next() -> None:
    abandoned = "millrace-4194305-0"  # of a process id that no kernel gives
    subprocess.run(["ip", "netns", "add", abandoned], check=True)
    with hosts(1):
        assert not Path("/run/netns", abandoned).exists()


def test_a_failure_to_make_hosts_names_the_command() -> None:
    with pytest.raises(RuntimeError, match="tc qdisc add"), hosts(1, rate="fast"):
        pass
