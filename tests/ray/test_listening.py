"""On which interfaces a Ray of this machine alone listens."""

from __future__ import annotations

import json
import subprocess
import sys

LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}

STARTED = """
import json, os
from pathlib import Path
from millrace.runtime.process import children
from millrace_ray.cluster import LOCAL, connect

connect(LOCAL)
import ray
ray.get(ray.remote(lambda: 1).remote())
pids = [os.getpid()]
for pid in pids:
    pids += children(pid)
links = set()
for pid in pids:
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.add(os.readlink(fd))
        except OSError:
            pass
tables = [Path("/proc/net", name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
lines = [line.split() for table in tables for line in table]
print(json.dumps([f[1] for f in lines if f[3] == "0A" and f"socket:[{f[9]}]" in links]))
ray.shutdown()
"""


def test_a_ray_of_this_machine_alone_listens_to_no_network() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARTED], capture_output=True, text=True, timeout=120, check=False
    )
    assert not done.returncode, done.stderr
    places = json.loads(done.stdout.splitlines()[-1])
    assert len(places) >= 4
    assert {place.partition(":")[0] for place in places} <= LOOPBACK, places
