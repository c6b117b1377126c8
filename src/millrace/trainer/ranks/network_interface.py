"""The network interface over which this host reaches another host. gloo and NCCL need its name."""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress

from millrace.core.errors import WorkerError

SIOCGIFADDR = 0x8915  # of Linux: an interface's IPv4 address
NAME_BYTES_MAX = 15


def interface_to(address: str) -> str:
    """The name of the interface over which this host reaches `address`, which may be its own. Nothing is
    sent.

    Raises: WorkerError: there is none.
    """
    source = ""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 1))
        source = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            if _address(probe, name) == source:
                return name
    raise WorkerError(
        f"no network interface here has {source or 'an address'} that reaches {address}, where the ranks of "
        "the trainer meet\n  Set GLOO_SOCKET_IFNAME, and with GPUs NCCL_SOCKET_IFNAME, on every host"
    )


def _address(probe: socket.socket, name: str) -> str:
    request = struct.pack("256s", name.encode()[:NAME_BYTES_MAX])
    with suppress(OSError):  # the interface has no IPv4 address
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24])
    return ""
