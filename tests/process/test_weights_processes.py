"""The ring of weights across processes: who can still read, and what is left, when some are killed."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from millrace.core.digest import NamedBuffer, digest_buffers
from millrace.core.errors import WeightsError
from millrace.core.types import Endpoint
from millrace.weights.relay import RelayWorker
from millrace.weights.ring import open_reader, open_writer

SLOT_BYTES = 1 << 20

RELAY = """
    import asyncio, sys
    import msgspec
    from millrace.weights.relay import RelayWorker

    async def serve():
        relay = RelayWorker("relay", 3)
        print(msgspec.json.encode(await relay.open(int(sys.argv[1]))).decode(), flush=True)
        for line in sys.stdin:
            version, digest = line.split()
            print(msgspec.json.encode(await relay.stage(int(version), digest)).decode(), flush=True)

    asyncio.run(serve())
"""

READER = """
    import sys
    import msgspec, numpy as np
    from millrace.core.digest import NamedBuffer, digest_buffers
    from millrace.core.types import Endpoint
    from millrace.weights.ring import open_reader

    reader = open_reader(msgspec.json.decode(sys.argv[1], type=Endpoint))
    print("mapped", flush=True)
    for line in sys.stdin:
        into = [NamedBuffer("w", "bfloat16", (1000,), np.zeros(2000, np.uint8))]
        staged = reader.read(int(line), into)
        print(staged, digest_buffers(into), flush=True)
"""

WRITER = """
    import sys
    import msgspec, numpy as np
    from millrace.core.digest import NamedBuffer
    from millrace.core.types import Endpoint
    from millrace.weights.ring import open_writer

    writer = open_writer(msgspec.json.decode(sys.argv[1], type=Endpoint))
    tensors = [NamedBuffer("w", "bfloat16", (1000,), np.full(2000, i, np.uint8)) for i in (1, 2)]
    print("writing", flush=True)
    while True:
        for tensor in tensors:
            writer.write(2, [tensor])
"""


def weights(fill: int) -> list[NamedBuffer]:
    return [NamedBuffer("w", "bfloat16", (1000,), np.full(2000, fill, np.uint8))]


@contextmanager
def process(code: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", textwrap.dedent(code), *args]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def ask(child: subprocess.Popen[str], line: str) -> str:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(line + "\n")
    child.stdin.flush()
    return child.stdout.readline().strip()


def first_line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def holders(inode: int) -> list[str]:
    """Processes (that we may look at) with this memory open or mapped."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            maps = (directory / "maps").read_text().splitlines()
            opened = [fd.stat().st_ino for fd in (directory / "fd").iterdir() if "memfd:" in os.readlink(fd)]
        except OSError:
            continue
        if inode in opened or any("memfd:" in line and line.split()[4] == str(inode) for line in maps):
            found.append(directory.name)
    return found


def test_a_mapped_reader_reads_on_after_the_relay_was_killed_and_nothing_is_left_behind():
    named_before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    with process(RELAY, str(SLOT_BYTES)) as relay:
        line = first_line(relay)
        endpoint = msgspec.json.decode(line, type=Endpoint)
        writer = open_writer(endpoint)
        writer.write(1, weights(7))
        writer.close()
        digest = digest_buffers(weights(7))
        assert digest in ask(relay, f"1 {digest}")
        with process(READER, line) as reader:
            assert first_line(reader) == "mapped"
            inode = os.stat(endpoint.path).st_ino
            assert {str(relay.pid), str(reader.pid)} <= set(holders(inode))
            relay.send_signal(signal.SIGKILL)
            relay.wait()
            assert ask(reader, "1") == f"{digest} {digest}"
            with pytest.raises(WeightsError, match="is the relay alive"):
                open_reader(endpoint)
            reader.send_signal(signal.SIGKILL)
            reader.wait()
    assert holders(inode) == []
    named_after = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    assert not [name for name in named_after - named_before if "millrace" in name]


def test_a_writer_killed_at_any_moment_leaves_the_last_staged_version_readable():
    relay = RelayWorker("relay", 3)
    endpoint = asyncio.run(relay.open(SLOT_BYTES))
    writer = open_writer(endpoint)
    writer.write(1, weights(7))
    digest = digest_buffers(weights(7))
    asyncio.run(relay.stage(1, digest))
    reader = open_reader(endpoint)
    for _ in range(3):
        with process(WRITER, msgspec.json.encode(endpoint).decode()) as child:
            assert first_line(child) == "writing"
            child.send_signal(signal.SIGKILL)
            child.wait()
        assert reader.versions() == [1]
        assert reader.read(1, weights(0)) == digest
    writer.write(2, weights(9))
    assert asyncio.run(relay.stage(2, digest_buffers(weights(9)))).versions == [1, 2]
    os.close(int(endpoint.path.rsplit("/", 1)[1]))
