"""The console behind a proxy with a path prefix, through a tunnel with another port, and through OpenSSH's."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gradwire
import pytest
from gradwire import sync
from playwright.sync_api import Browser, expect
from support.console import Console, page_of
from support.server import Server, free_port

pytestmark = [pytest.mark.browser, pytest.mark.slow]

ROWS = {"input_ids": [[5, 6, 7, 8, 9, 10]] * 2}


@contextmanager
def forwarded(url: str, prefix: str = "") -> Iterator[str]:
    """Forward a port of its own to the console: as a tunnel, or as a proxy that takes a prefix off the path."""
    host, port = url.removeprefix("http://").split(":")
    loop, ready = asyncio.new_event_loop(), threading.Event()
    found: list[int] = []

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if prefix:  # a request a connection, so that each one's path is seen
            assert head.split(b" ", 2)[1].startswith(prefix.encode()), head
            head = head.replace(f" {prefix}".encode(), b" ", 1)
            if b"upgrade: websocket" not in head.lower():
                head = b"\r\n".join(
                    line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")
                ).replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
        to_reader, to_writer = await asyncio.open_connection(host, int(port))
        to_writer.write(head)
        await asyncio.gather(pipe(reader, to_writer), pipe(to_reader, writer), return_exceptions=True)

    async def listen() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        found.append(server.sockets[0].getsockname()[1])
        ready.set()

    def run() -> None:
        loop.run_until_complete(listen())
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    ready.wait(30)
    yield f"http://127.0.0.1:{found[0]}{prefix}"
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)


def answers(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until something listens on a port."""
    while process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError(f"{process.args} ended with {process.returncode}")


@contextmanager
def ssh_tunnel(url: str, folder: Path) -> Iterator[str]:
    """Forward a port by ``ssh -L`` through an sshd of this machine, with a key of its own."""
    sshd, port, here = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin"), free_port(), free_port()
    if sshd is None or shutil.which("ssh") is None:
        pytest.skip("OpenSSH is missing: apt-get install openssh-server openssh-client")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    allowed = folder / "allowed"
    allowed.write_bytes((folder / "user.pub").read_bytes())
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where an sshd of root confines itself
    options = {"HostKey": folder / "host", "AuthorizedKeysFile": allowed, "ListenAddress": f"127.0.0.1:{port}",
               "PidFile": "none", "UsePAM": "no", "StrictModes": "no", "PasswordAuthentication": "no"}  # fmt: skip
    given = [f"-o{name}={value}" for name, value in options.items()]
    with subprocess.Popen([sshd, "-D", "-e", "-f", "/dev/null", *given]) as server:
        try:
            answers(port, server)
            command = ["ssh", "-N", "-F", "none", "-i", str(folder / "user"), "-p", str(port),
                       "-oStrictHostKeyChecking=no", f"-oUserKnownHostsFile={folder / 'known'}", "-oBatchMode=yes",
                       "-oExitOnForwardFailure=yes", "-L", f"{here}:{url.removeprefix('http://')}",
                       "127.0.0.1"]  # fmt: skip
            with subprocess.Popen(command) as client:
                try:
                    answers(here, client)
                    yield f"http://127.0.0.1:{here}"
                finally:
                    client.terminate()
        finally:
            server.terminate()


@pytest.fixture(scope="module")
def run(server: Server) -> Iterator[sync.TrainingClient]:
    with gradwire.sync.connect(server.address) as service:
        run = service.create_run("tiny", lora={"rank": 2}, name="from afar", record_batches=1.0)
        run.forward_backward(ROWS, "causal_lm").result(60)
        run.optim_step().result(60)
        yield run


def test_signing_in_behind_a_proxy_keeps_its_path(server: Server, run: sync.TrainingClient, browser: Browser) -> None:
    with (
        Console(server.address, "--sign-in", "--root-path", "/console") as console,
        forwarded(console.url, "/console") as url,
        page_of(browser) as page,
    ):
        page.goto(f"{url}/run/{run.run_id}")
        page.wait_for_url(f"{url}/login?next=*")
        page.get_by_label("Key of the server").fill("any, as the server has no keys")
        page.keyboard.press("Enter")
        page.wait_for_url(f"{url}/run/{run.run_id}")
        expect(page.get_by_role("heading", level=1)).to_have_text("from afar")


@pytest.mark.parametrize("way", ["proxy", "tunnel", "ssh"])
def test_it_is_used_through_a_proxy_and_a_tunnel(
    server: Server, run: sync.TrainingClient, browser: Browser, way: str, tmp_path: Path
) -> None:
    prefix = "/console" if way == "proxy" else ""
    with (
        Console(server.address, *(["--root-path", prefix] if prefix else [])) as console,
        ssh_tunnel(console.url, tmp_path) if way == "ssh" else forwarded(console.url, prefix) as url,
        page_of(browser) as page,
    ):
        page.goto(f"{url}/")
        page.get_by_role("link", name="from afar").click()
        page.wait_for_url(f"{url}/run/{run.run_id}")
        expect(page.locator(".gw-plot canvas").first).to_be_visible()
        expect(page.locator(".gw-state.connected")).to_be_visible()
        page.get_by_role("link", name="Batches").click()
        page.get_by_role("link", name="forward_backward 1").click()
        expect(page.locator(".gw-tokens span").first).to_be_visible()
        page.get_by_role("link", name="Timeline").click()
        with page.expect_download() as download:
            page.get_by_role("button", name="Download a trace").click()
        assert download.value.suggested_filename == "gradwire-trace.json"
        step = run.info().step
        page.goto(f"{url}/run/{run.run_id}")
        run.forward_backward(ROWS, "causal_lm").result(60)
        run.optim_step().result(60)
        expect(page.locator(".gw-facts").first).to_contain_text(str(step + 1))
