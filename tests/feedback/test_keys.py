"""Keys: hashed, with roles, on a running service; and what the command line says of mistakes."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from gradwire_console.feedback import Feedback
from gradwire_feedback.cli import app
from support.feedback import FeedbackService, run_keys, scores
from support.server import Server
from typer.testing import CliRunner

MAY = {
    "rate": {("POST", "/feedback/bot"): 201, ("GET", "/bot"): 403, ("PUT", "/bot/deployment"): 403},
    "read": {("POST", "/feedback/bot"): 403, ("GET", "/bot"): 200, ("PUT", "/bot/deployment"): 403},
    "train": {("POST", "/feedback/bot"): 201, ("GET", "/bot"): 200, ("PUT", "/bot/deployment"): 200},
}


@pytest.mark.long
def test_roles_and_revocation(server: Server, tmp_path: Path) -> None:
    with FeedbackService(tmp_path, "tiny", "--service", server.address) as service:
        with service.client() as open_door:
            assert open_door.get("/bot").status_code == 200, "without a key everybody on loopback may"
        keys = {role: run_keys(service, "create", f"{role}.key", "--role", role) for role in MAY}
        for role, allowed in MAY.items():
            with service.client(headers={"Authorization": f"Bearer {keys[role]}"}) as api:
                for (method, path), status in allowed.items():
                    body = scores(1)[0] if "feedback" in path else {"base": 1.0}
                    answer = api.request(method, path, json=None if method == "GET" else body)
                    assert answer.status_code == status, (role, path, answer.text)
        with service.client() as anybody:
            answer = anybody.get("/bot")
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
        with pytest.raises(OSError, match=r"refuses: .*GRADWIRE_FEEDBACK_KEY"):
            asyncio.run(Feedback(service.url).ratings())
        found = asyncio.run(Feedback(service.url, keys["read"]).ratings())
        assert [(each.agent, each.source, each.scores) for each in found] == [("bot", "", 2)]
        run_keys(service, "revoke", "read.key")
        with service.client(headers={"Authorization": f"Bearer {keys['read']}"}) as revoked:
            assert revoked.get("/bot").status_code == 401
        listed = run_keys(service, "list")
        assert "revoked" in listed and not any(key in listed for key in keys.values())
        stored = "\n".join(sqlite3.connect(tmp_path / "feedback.db").iterdump())
        assert not any(key in stored for key in keys.values())


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["serve", "--base-model", "x", "--address", "0.0.0.0:0"], "there is no key"),
        (["serve", "--base-model", "x", "--address", "nowhere"], "not HOST:PORT"),
        (["serve", "--base-model", "x", "--database", "mysql://x/y"], "sqlite and postgresql"),
        (["serve", "--base-model", "x", "--database", "nonsense"], "not a database URL"),
        (["keys", "create", "a b", "--role", "rate"], "not a name"),
        (["keys", "create", "ann", "--role", "king"], "not a role: rate, train, read"),
        (["keys", "revoke", "nobody"], "has no key"),
    ],
)
def test_mistakes_are_explained(
    arguments: list[str], word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = CliRunner().invoke(app, arguments)
    assert ended.exit_code == 2, ended.output
    assert word in " ".join(ended.stderr.split()) and "Traceback" not in ended.stderr


IMPATIENT = """
import functools
import gradwire
from gradwire_feedback.cli import main

gradwire.connect = functools.partial(gradwire.connect, connect_timeout=1.0)
main()
"""


@pytest.mark.long
def test_a_training_server_that_is_not_there_is_explained(tmp_path: Path) -> None:
    arguments = ["serve", "--base-model", "x", "--address", "127.0.0.1:0", "--service", "127.0.0.1:1"]
    command = [sys.executable, "-c", IMPATIENT, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert ended.returncode == 2
    assert "127.0.0.1:1" in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.slow
def test_pages_that_no_browser_opens_do_not_stay(server: Server, tmp_path: Path) -> None:
    with FeedbackService(tmp_path, "tiny", "--service", server.address) as service:
        run_keys(service, "create", "ann", "--role", "rate")
        sizes = []
        for _ in range(3):
            for _ in range(600):
                assert httpx.get(f"{service.url}/login").status_code == 200
            sizes.append(service.memory("VmRSS"))
        assert sizes[2] - sizes[0] < 30 << 20, sizes  # 1,200 pages would take 130 MiB
