"""Mistakes that people make, and what they are told: a sentence that names the thing and says what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gradwire
import pytest
import trustme
from gradwire import connection, data
from gradwire.data import DataError
from gradwire.errors import ConnectionLostError, InvalidArgumentError, ServerStartError
from support.server import Server, free_port
from support.web import Quiet, serving

ROW = [{"input_ids": [1, 2, 3]}]
CHAT = [{"role": "user", "content": "hi"}]
MISTAKES: dict[str, tuple[Callable[[Any, Any], Any], type[Exception], str]] = {
    "a metric": (lambda service, run: run.forward(ROW, "causal_lm").result()["perplexty"], KeyError,
                 "there is no metric 'perplexty' .did you mean 'perplexity'"),
    "a target module": (
        lambda service, run: service.create_run("tiny", lora={"rank": 2, "target_modules": ["query"]}),
        InvalidArgumentError, "the model has no layer 'query'; its linear layers are down_proj, gate_proj, k_proj"),
    "peft's names": (lambda service, run: service.create_run("tiny", lora={"r": 2}), InvalidArgumentError,
                     "no setting 'r' .did you mean 'rank'"),
    "peft's alpha": (lambda service, run: service.create_run("tiny", lora={"rank": 2, "lora_alpha": 4}),
                     InvalidArgumentError, "no setting 'lora_alpha' .did you mean 'alpha'"),
    "chat to sample": (lambda service, run: run.sample(CHAT).result(), InvalidArgumentError,
                       "these are chat messages: give the ids that .* returns"),
    "chats to sample": (lambda service, run: run.sample([CHAT]).result(), InvalidArgumentError, "chat messages"),
    "an optimizer": (lambda service, run: run.optim_step(optimizer="adam").result(), InvalidArgumentError,
                     "optimizer is 'adam'; the rule is one of adamw, adamw8bit, sgd, muon"),
    "a rate": (lambda service, run: run.optim_step(-1.0).result(), InvalidArgumentError,
               "learning_rate is -1.0; the rule is learning_rate >= 0"),
    "a choice": (lambda service, run: run.forward(ROW, "causal_lm", {"reduction": "mean"}).result(),
                 InvalidArgumentError, "reduction is 'mean'; the rule is reduction in {'token_mean'"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_with_its_remedy(mistake: str, server: Server) -> None:
    call, kind, words = MISTAKES[mistake]
    with gradwire.sync.connect(server.address) as service:
        run = service.create_run("tiny", lora=2)
        try:
            with pytest.raises(kind, match=words):
                call(service, run)
        finally:
            service.delete_run(run.run_id)


@pytest.fixture(scope="module")
def with_tls(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Address of a server with TLS, and a certificate that has nothing to do with it."""
    folder = tmp_path_factory.mktemp("tls")
    certificate = trustme.CA().issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(folder / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    trustme.CA().cert_pem.write_to_path(folder / "other.pem")
    flags = ("--tls-cert", str(folder / "cert.pem"), "--tls-key", str(folder / "key.pem"))
    running = Server(tiny_model_path, folder / "state", *flags).start()
    yield running.address, folder / "other.pem"
    running.end()


@pytest.mark.long
async def test_an_address_of_another_protocol_is_told_at_once(server: Server, with_tls: tuple[str, Path]) -> None:
    address, other = with_tls
    cases: list[tuple[str, dict[str, Any], type[Exception], str]] = [
        (f"http://{server.address}", {}, InvalidArgumentError, f"begins with http://.*: write {server.address}"),
        (f"{server.address}/v1", {}, InvalidArgumentError, "write HOST:PORT"),
        (f"https://{server.address}", {}, InvalidArgumentError, "does not speak TLS: leave out https://"),
        (address, {"ca_cert": other}, InvalidArgumentError, "is not trusted .*: give the PEM file of who signed it"),
        (address, {"connect_timeout": 0.1}, ConnectionLostError, "a server with TLS has https:// in its address"),
    ]
    for given, options, kind, words in cases:
        with pytest.raises(kind, match=words) as caught:
            await gradwire.connect(given, **options)
        assert "TSI_PROTOCOL" not in str(caught.value) and "UNAVAILABLE" not in str(caught.value)


async def test_an_address_where_no_server_of_ours_is_is_told_in_words() -> None:
    class Web(Quiet):
        protocol_version = "HTTP/1.1"

    with serving(Web) as web, pytest.raises((InvalidArgumentError, ConnectionLostError), match="does not speak gRPC"):
        await gradwire.connect(web, connect_timeout=0.5)
    nowhere = f"127.0.0.1:{free_port()}"
    with pytest.raises(
        ConnectionLostError, match=f"^no answer from {nowhere}: nothing listens there; start the server"
    ):
        await gradwire.connect(nowhere, connect_timeout=0.5)


async def test_a_light_client_without_an_address_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ServerStartError, match=r"torch is not installed: pip install 'gradwire\[server\]', or give"):
        await gradwire.connect(models=["tiny"])


def test_rows_that_people_have_are_read_or_refused_with_the_reason(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "two "}, {"type": "text", "text": "and two"}]
    asked = {"role": "user", "content": parts}
    (row,) = data.conversations([{"messages": [asked, {"role": "assistant", "content": "four"}]}])
    assert row.messages[0]["content"] == "two and two"
    (tmp_path / "sheet.xlsx").write_bytes(b"PK")
    picture = {"type": "image_url", "image_url": "x"}
    cases: list[tuple[Any, str]] = [
        (
            [{"messages": [{**asked, "content": [*parts, picture]}]}],
            "has an image 'x'; nothing is fetched",
        ),
        ([{"question": "a", "answer": None}], "answer is null; it holds the completion: write it there"),
        (tmp_path / "sheet.xlsx", r"\.xlsx files are not read; save the sheet as \.csv"),
    ]
    for source, words in cases:
        with pytest.raises(DataError, match=words):
            data.conversations(source)
    same = data.conversations([{"prompt": "a", "completion": "b"}] * 3)
    with pytest.raises(ValueError, match=r"3 rows with 1 different prompts .*set held_out: 0"):
        same.split(0.1)
