"""How fast the links between nodes are. Each node has a worker: one worker listens, another worker sends."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from millrace.core import clock

CONNECT_S = 5.0
SEND_S = 15.0
CHUNK_BYTES = 1 << 20


class LinkProbe:
    """One end of a link. It listens at `address`, for as long as it lives."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._server: asyncio.Server | None = None

    async def listen(self) -> int:
        """Listen. Returns the port that the system chose."""
        if self._server is None:
            self._server = await asyncio.start_server(_swallow, self._address, 0, limit=CHUNK_BYTES)
        return int(self._server.sockets[0].getsockname()[1])

    async def send(self, address: str, port: int, num_bytes: int) -> tuple[float, float] | str:
        """Seconds until the connection stood, and bytes a second from then until all had arrived. Or the
        error."""
        try:
            async with asyncio.timeout(CONNECT_S):
                began_s = clock.now()
                reader, writer = await asyncio.open_connection(address, port)
                connected_s = clock.now()
            try:
                async with asyncio.timeout(SEND_S):
                    for _ in range(num_bytes // CHUNK_BYTES):
                        writer.write(bytes(CHUNK_BYTES))
                        await writer.drain()
                    writer.write_eof()
                    await reader.read()
                return connected_s - began_s, num_bytes / max(1e-9, clock.now() - connected_s)
            finally:
                writer.close()
        except TimeoutError:
            return "no answer"
        except OSError as error:
            return error.strerror or str(error)


async def _swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while await reader.read(CHUNK_BYTES):
            pass
    writer.close()
