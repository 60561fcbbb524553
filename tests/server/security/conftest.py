"""A door with keys: ada owns runs, carl reads those she shares, bob has nothing of hers, root is an admin, eve's key
was revoked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.access.key_file import KeyFile, Quota
from support.front import Client, Door, Start, start
from support.keyed import Keyed, uploaded
from support.served import served

__all__ = ["served", "start"]


class KeyedDoor:
    """A door, the file of its keys, and clients that come with one."""

    def __init__(self, door: Door, file: KeyFile, secrets: dict[str, str]) -> None:
        self.door, self.file, self.secrets = door, file, secrets
        self.engine = door.engine

    async def client(self, name: str) -> Client:
        """Of a key's name, or, where there is none, with the name itself as the key."""
        client = await self.door.client()
        client.stub = Keyed(client.stub, self.secrets.get(name, name))
        return client

    async def shared_run(self) -> Client:
        """A run of ada's with an operation and the checkpoint "c", shared with carl."""
        ada = await (await self.client("ada")).begin(name="secret-name", tags={"project": "secret-tag"})
        await ada.fb(1, "secret-loss")
        await ada.submit(2, save_checkpoint=pb.SaveCheckpoint(name="c", note="secret-note"))
        assert await ada.statuses(2) == ["ok", "ok"]
        ada.upload_id = await uploaded(ada.stub)
        await ada.stub.ShareRun(pb.ShareRunRequest(run_id=ada.run_id, reader="carl"))
        return ada


@pytest.fixture
def keyed(start: Start, tmp_path: Path) -> Any:
    """`async with keyed(limits={...}, quotas={"bob": Quota(...)}) as door`."""

    @asynccontextmanager
    async def run(
        limits: dict[str, int] | None = None, quotas: dict[str, Quota] | None = None, **settings: Any
    ) -> AsyncIterator[KeyedDoor]:
        file, secrets = KeyFile(tmp_path), dict[str, str]()
        for name in ("ada", "bob", "carl", "root", "eve"):
            role = "admin" if name == "root" else "user"
            secrets[name] = file.create(name, role, (quotas or {}).get(name), replace=True)
        file.revoke("eve")
        async with start(limits=limits, **settings) as door:
            yield KeyedDoor(door, file, secrets)

    return run
