"""TLS and mutual TLS with certificates made on the spot, spoken by the server and the SDK."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import gradwire
import httpx
import pytest
import trustme
from cryptography import x509
from gradwire_server.access.key_file import KeyFile
from gradwire_server.cli.app import app
from gradwire_server.config import ServerConfig
from gradwire_server.doors.certificates import Certificates
from gradwire_server.doors.http import door
from gradwire_server.server import Server
from pydantic import ValidationError
from support.fake_engine import FakeEngine
from typer.testing import CliRunner


@dataclass(frozen=True)
class Papers:
    """PEM files of an authority, and of a certificate that it signed."""

    ca: Path
    cert: Path
    key: Path


def issue(folder: Path, *names: str) -> Papers:
    folder.mkdir()
    authority = trustme.CA()
    issued = authority.issue_cert(*names)
    papers = Papers(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")
    authority.cert_pem.write_to_path(papers.ca)
    issued.private_key_pem.write_to_path(papers.key)
    for index, part in enumerate(issued.cert_chain_pems):
        part.write_to_path(papers.cert, append=index > 0)
    return papers


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Papers]]:
    folder = tmp_path_factory.mktemp("papers")
    yield {
        "server": issue(folder / "server", "localhost", "127.0.0.1"),
        "client": issue(folder / "client", "ada@example.org"),
        "stranger": issue(folder / "stranger", "localhost", "127.0.0.1"),
    }


def config(folder: Path, papers: dict[str, Papers], *, mutual: bool = False) -> ServerConfig:
    return ServerConfig(
        address="127.0.0.1:0", state_dir=folder, models={"tiny": "x"}, grace=1, tls_cert=papers["server"].cert,
        tls_key=papers["server"].key, tls_client_ca=papers["client"].ca if mutual else None,
    )  # fmt: skip


async def connect(address: str, patience_s: float = 60.0, **settings: object) -> str:
    async with gradwire.connect(address, connect_timeout=patience_s, **settings) as service:  # type: ignore[arg-type]
        return (await service.server_info()).device


async def shut_out(address: str, **settings: object) -> None:
    with pytest.raises((gradwire.ConnectionLostError, gradwire.InvalidArgumentError)):
        await connect(address, 1.0, **settings)


async def test_a_client_that_knows_the_authority_gets_in_and_no_other(
    tmp_path: Path, papers: dict[str, Papers]
) -> None:
    secret = KeyFile(tmp_path).create("ada")
    async with Server(config(tmp_path, papers), [FakeEngine(tmp_path)]) as server:
        ca = papers["server"].ca
        assert await connect(server.address, ca_cert=ca, api_key=secret) == "fake"
        with pytest.raises(gradwire.UnauthenticatedError):
            await connect(server.address, ca_cert=ca)
        for settings in ({}, {"ca_cert": papers["stranger"].ca}):
            await shut_out(server.address, api_key=secret, **settings)
        await shut_out(f"https://{server.address}", api_key=secret)  # the system's own roots do not know the authority


async def test_mutual_tls_lets_in_only_clients_with_a_certificate_of_the_authority(
    tmp_path: Path, papers: dict[str, Papers]
) -> None:
    async with Server(config(tmp_path, papers, mutual=True), [FakeEngine(tmp_path)]) as server:
        ca, own, other = papers["server"].ca, papers["client"], papers["stranger"]
        assert await connect(server.address, ca_cert=ca, client_cert=own.cert, client_key=own.key) == "fake"
        await shut_out(server.address, ca_cert=ca)
        await shut_out(server.address, ca_cert=ca, client_cert=other.cert, client_key=other.key)


async def test_an_expired_certificate_is_renewed_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "RENEW_S", 0.05)
    authority, yesterday = trustme.CA(), datetime.now(UTC) - timedelta(days=1)
    given = Papers(tmp_path / "ca.pem", tmp_path / "cert.pem", tmp_path / "key.pem")
    authority.cert_pem.write_to_path(given.ca)

    def write(not_after: datetime | None) -> None:
        issued = authority.issue_cert("localhost", "127.0.0.1", not_after=not_after)
        issued.private_key_pem.write_to_path(given.key)
        issued.cert_chain_pems[0].write_to_path(given.cert)

    async def read(url: str) -> int:
        async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=given.ca)) as client:
            return (await client.get(f"{url}/health")).status_code

    write(yesterday)
    settings = config(tmp_path, {"server": given}).model_copy(update={"http": "127.0.0.1:0"})
    async with Server(settings, [FakeEngine(tmp_path)]) as server:
        await shut_out(server.address, ca_cert=given.ca)
        with pytest.raises(httpx.ConnectError, match="expired"):
            await read(server.http.url)
        given.cert.write_text("half a certificate")  # as of a renewal that goes on
        await shut_out(server.address, ca_cert=given.ca)
        write(None)
        assert await connect(server.address, ca_cert=given.ca) == "fake"
        while True:
            try:
                assert await read(server.http.url) == 200
                break
            except httpx.ConnectError:
                await asyncio.sleep(0.05)


@pytest.mark.long
async def test_certificates_are_renewed_under_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty times, the key before its certificate; once they change again just after they were looked at."""
    monkeypatch.setattr(door, "RENEW_S", 0.02)
    authority = trustme.CA()
    given = Papers(tmp_path / "ca.pem", tmp_path / "cert.pem", tmp_path / "key.pem")
    authority.cert_pem.write_to_path(given.ca)
    look, raced = Certificates.changed, list[bool]()

    def racing(files: Certificates) -> bool:
        found = look(files)
        if found and not raced:
            raced.append(found)
            given.cert.write_text("half a certificate")
        return found

    def write() -> int:
        issued = authority.issue_cert("localhost", "127.0.0.1")
        issued.private_key_pem.write_to_path(given.key)
        issued.cert_chain_pems[0].write_to_path(given.cert)
        return x509.load_pem_x509_certificate(issued.cert_chain_pems[0].bytes()).serial_number

    async def serial(address: str) -> int:
        host, _, port = address.rpartition(":")
        context = ssl.create_default_context(cafile=given.ca)
        _, writer = await asyncio.open_connection(host, int(port), ssl=context)
        found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return x509.load_der_x509_certificate(found).serial_number

    write()
    settings = config(tmp_path, {"server": given}).model_copy(update={"http": "127.0.0.1:0"})
    async with Server(settings, [FakeEngine(tmp_path)]) as server:
        calls, over = [0, 0], asyncio.Event()

        async def over_http() -> None:
            while not over.is_set():
                async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=given.ca)) as client:
                    assert (await client.get(f"{server.http.url}/health")).status_code == 200
                calls[0] += 1

        async def over_grpc() -> None:
            while not over.is_set():
                assert await connect(server.address, ca_cert=given.ca) == "fake"
                calls[1] += 1

        monkeypatch.setattr(Certificates, "changed", racing)
        load = [asyncio.create_task(each()) for each in (over_http, over_http, over_grpc)]
        for _ in range(30):
            newest = await asyncio.to_thread(write)
            await asyncio.sleep(0.05)
        for address in (server.http.address, server.address):
            while await serial(address) != newest:  # noqa: ASYNC110  a server's, no event
                await asyncio.sleep(0.02)
        over.set()
        await asyncio.gather(*load)
        assert raced and min(calls) > 5, calls


def test_half_a_pair_is_no_tls(tmp_path: Path, papers: dict[str, Papers]) -> None:
    half = {"address": "127.0.0.1:0", "state_dir": tmp_path, "models": {"tiny": "x"}}
    for settings in ({"tls_cert": papers["server"].cert}, {"tls_client_ca": papers["client"].ca}):
        with pytest.raises(ValidationError, match="--tls-cert"):
            ServerConfig.model_validate(half | settings)
    words = ["serve", "--model", "x", "--state-dir", str(tmp_path), "--tls-key", str(papers["server"].key)]
    assert CliRunner().invoke(app, words).exit_code == 2


async def test_a_certificate_that_cannot_be_read_ends_the_start(tmp_path: Path, papers: dict[str, Papers]) -> None:
    broken = config(tmp_path, papers).model_copy(update={"tls_key": tmp_path / "nothing.pem"})
    with pytest.raises(SystemExit, match="cannot be read"):
        async with Server(broken, [FakeEngine(tmp_path)]):
            pass
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("no key")
    with pytest.raises(SystemExit, match="cannot listen"):
        async with Server(config(tmp_path, papers).model_copy(update={"tls_key": garbage}), [FakeEngine(tmp_path)]):
            pass
