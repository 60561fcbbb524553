"""Of whose runs a stream of changes tells."""

from __future__ import annotations

from typing import Any

from gradwire_proto.v1 import training_pb2 as pb
from support.watch import watching


async def test_a_key_sees_the_changes_of_its_runs_alone(keyed: Any) -> None:
    async with keyed() as door:
        ada, carl = await (await door.client("ada")).begin(), await door.client("carl")
        async with watching(carl) as watch:
            await watch.until(lambda: watch.wholes)
            assert not watch.runs
            await ada.fb(1)
            await ada.results(1)
            share = pb.ShareRunRequest(run_id=ada.run_id, reader="carl")
            await ada.stub.ShareRun(share)
            await watch.until(lambda: ada.run_id in watch.runs)
            assert watch.points == []
            share.revoke = True
            await ada.stub.ShareRun(share)
            await watch.until(lambda: watch.gone == [ada.run_id])
            other = await (await door.client("ada")).begin()
            await other.stub.DeleteRun(pb.DeleteRunRequest(run_id=other.run_id))
            mine = await (await door.client("carl")).begin()
            await watch.until(lambda: mine.run_id in watch.runs)
            assert other.run_id not in watch.gone and other.run_id not in watch.runs
