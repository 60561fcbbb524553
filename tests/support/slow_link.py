"""A TCP relay on loopback that delivers every byte a fixed time later, in each direction."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    loop = asyncio.get_running_loop()
    due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def deliver() -> None:
        while True:
            when, data = await due.get()
            await asyncio.sleep(when - loop.time())
            if not data:
                break
            writer.write(data)
            await writer.drain()
        with contextlib.suppress(ConnectionError, OSError):
            writer.close()
            await writer.wait_closed()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(deliver())
        data = b"."
        while data:
            with contextlib.suppress(ConnectionError):
                data = await reader.read(1 << 16)
                due.put_nowait((loop.time() + delay_s, data))
                continue
            due.put_nowait((loop.time() + delay_s, b""))
            break


@contextlib.asynccontextmanager
async def slow_link(address: str, round_trip_s: float) -> AsyncIterator[str]:
    """Relay to ``address`` over a link with this added round trip."""
    host, port = address.rsplit(":", 1)
    open_links: set[asyncio.Task[None]] = set()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        open_links.add(task)
        upstream_reader, upstream_writer = await asyncio.open_connection(host, int(port))
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_relay(reader, upstream_writer, round_trip_s / 2))
                tasks.create_task(_relay(upstream_reader, writer, round_trip_s / 2))
        for side in (writer, upstream_writer):
            side.close()

    relay = await asyncio.start_server(connect, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{relay.sockets[0].getsockname()[1]}"
    finally:
        relay.close()
        for link in open_links:
            link.cancel()
        await asyncio.gather(*open_links, return_exceptions=True)
