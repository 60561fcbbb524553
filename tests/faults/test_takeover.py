"""A run that is taken over while its older writer is still at work: each of the two learns the truth about its own
operations, and neither loses a result to the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

import gradwire
import pytest
from gradwire.wire.streams import SubmitStream
from gradwire_proto.v1 import training_pb2 as pb
from support.scripted import until
from support.server import Server

pytestmark = pytest.mark.long

BATCH = {"input_ids": [[4, 5, 6, 7]]}
LONGER = {"input_ids": [[4, 5, 6, 7, 8, 9]]}


@pytest.fixture
async def services(server: Server) -> AsyncIterator[list[gradwire.ServiceClient]]:
    """Two, as of two programs."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(gradwire.connect(server.address)) for _ in range(2)]


class SlowNetwork:
    """What a client sends, asks for and acknowledges waits here while its event is cleared.

    Attributes:
        operations, results, acknowledgements: the events.
        cuts_acknowledgements: whether the stream of operations breaks, and stays so, at the next acknowledgement.
        lost: whether that has happened.
        waiting: set once an acknowledgement has come here.
        answered: set once one has been answered.
    """

    def __init__(self, service: gradwire.ServiceClient, monkeypatch: pytest.MonkeyPatch) -> None:
        self.operations, self.results, self.acknowledgements = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.cuts_acknowledgements = self.lost = False
        for event in (self.operations, self.results, self.acknowledgements):
            event.set()
        self.waiting, self.answered = asyncio.Event(), asyncio.Event()
        self._transport = transport = service._transport
        self._unary, self._submit, self.results_of = transport.unary, transport.submit, transport.results
        monkeypatch.setattr(transport, "unary", self._held_unary)
        monkeypatch.setattr(transport, "submit", self._held_submit)
        monkeypatch.setattr(transport, "results", self._held_results)

    async def _held_unary(self, method: Any, request: Any, **settings: Any) -> Any:
        if not isinstance(request, pb.AckResultsRequest):
            return await self._unary(method, request, **settings)
        self.waiting.set()
        await self.acknowledgements.wait()
        try:
            return await self._unary(method, request, **settings)
        finally:
            self.answered.set()

    def _held_submit(self) -> SubmitStream:
        stream = self._submit()
        send = stream.send

        async def held(operations: Sequence[Any]) -> None:
            await self.operations.wait()
            await send(operations)

        stream.send = held  # type: ignore[method-assign]
        if not self.operations.is_set():
            return stream
        acknowledgements = stream.acknowledgements

        async def cut() -> AsyncIterator[pb.SubmitAck]:
            async for ack in acknowledgements():
                if self.cuts_acknowledgements:
                    self.cuts_acknowledgements, self.lost = False, True
                    self.operations.clear()
                    stream.cancel()
                    raise gradwire.ConnectionLostError("the connection broke before the acknowledgement came")
                yield ack

        stream.acknowledgements = cut  # type: ignore[method-assign]
        return stream

    async def _held_results(self, run_id: str, from_seq: int) -> AsyncIterator[Any]:
        await self.results.wait()
        async with aclosing(self.results_of(run_id, from_seq)) as results:
            async for each in results:
                yield each


async def known(service: gradwire.ServiceClient, run_id: str) -> pb.Run:
    return await service._transport.unary(lambda stub: stub.GetRun, pb.GetRunRequest(run_id=run_id))


async def reached(service: gradwire.ServiceClient, run_id: str, **numbers: int) -> None:
    """Waits until the server says so of the run."""
    async with asyncio.timeout(60):
        while True:
            run = await known(service, run_id)
            if all(getattr(run, name) >= seq for name, seq in numbers.items()):
                return
            await asyncio.sleep(0.01)


def steps(run: gradwire.TrainingClient, count: int) -> list[gradwire.Future[Any]]:
    """A ``forward_backward`` and an ``optim_step`` each."""
    return [
        operation
        for _ in range(count)
        for operation in (run.forward_backward(BATCH, "causal_lm"), run.optim_step(learning_rate=1e-2))
    ]


async def test_an_older_writer_acknowledges_nothing_that_the_newer_one_has_yet_to_fetch(
    services: list[gradwire.ServiceClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    network = SlowNetwork(services[0], monkeypatch)
    network.acknowledgements.clear()
    old = await services[0].create_run("tiny", lora=2)
    seen = await gradwire.gather(*steps(old, 3))
    await network.waiting.wait()
    new = await services[1].get_training_client(old.run_id)
    network.acknowledgements.set()  # it arrives when the run is taken over, and nothing fetched yet
    await network.answered.wait()
    earlier = await new.earlier_operations()
    again = await asyncio.gather(*earlier.values())
    assert list(earlier) == [1, 2, 3, 4, 5, 6]
    assert [each.loss for each in again[::2]] == [each.loss for each in seen[::2]]
    assert [each.grad_norm for each in again[1::2]] == [each.grad_norm for each in seen[1::2]]
    assert (await new.save_checkpoint("after")).step == 3
    assert (await gradwire.gather(*steps(new, 1)))[1].step == 4


async def test_the_older_writer_gets_what_was_accepted_from_it_and_is_told_of_what_was_not(
    services: list[gradwire.ServiceClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    network = SlowNetwork(services[0], monkeypatch)
    network.results.clear()
    old = await services[0].create_run("tiny", lora=2)
    accepted = steps(old, 2)
    await until(lambda: old._queue.first_unacknowledged is None)
    new = await services[1].get_training_client(old.run_id)
    with pytest.raises(gradwire.StaleEpochError, match="another"):
        await old.optim_step()
    assert not any(each.done() for each in accepted)
    network.results.set()
    assert [(await each).step for each in accepted[1::2]] == [1, 2]
    with pytest.raises(gradwire.StaleEpochError, match="another"):
        await old.save_checkpoint()
    assert (await new.save_checkpoint("after")).step == 2


async def test_a_result_that_was_released_is_told_on_its_own_future_only(
    services: list[gradwire.ServiceClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    network = SlowNetwork(services[0], monkeypatch)
    network.results.clear()
    old = await services[0].create_run("tiny", lora=2)
    submitted = steps(old, 3)
    await until(lambda: old._queue.first_unacknowledged is None)
    new = await services[1].get_training_client(old.run_id)
    await reached(services[1], new.run_id, applied_seq=6)
    # As the server does by itself with results that have waited for as long as it keeps them.
    request = pb.AckResultsRequest(run_id=new.run_id, up_to_seq=4, epoch=new._link._lease.epoch)
    await services[1]._transport.unary(lambda stub: stub.AckResults, request)
    earlier = await new.earlier_operations()
    for seq in (1, 2, 3, 4):
        with pytest.raises(gradwire.ResultReleasedError, match=f"operation {seq} .*was executed") as caught:
            await earlier[seq]
        assert caught.value.seq == seq
    assert (await earlier[5]).num_loss_tokens == 3 and (await earlier[6]).step == 3
    assert (await new.save_checkpoint("after")).step == 3
    await reached(services[1], new.run_id, released_seq=7)
    network.results.set()
    for future in submitted:
        with pytest.raises(gradwire.ResultReleasedError, match="fetched by an earlier client"):
            await future


async def test_a_number_that_both_writers_used_is_answered_to_the_newer_one(
    services: list[gradwire.ServiceClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    network = SlowNetwork(services[0], monkeypatch)
    network.acknowledgements.clear()
    old = await services[0].create_run("tiny", lora=2)
    await old.forward_backward(BATCH, "causal_lm")
    network.operations.clear()
    new = await services[1].get_training_client(old.run_id)
    ours = old.forward_backward(BATCH, "causal_lm")  # its number is 2, and it has not arrived
    assert (await new.forward_backward(LONGER, "causal_lm")).num_loss_tokens == 5
    await until(lambda: old._link.results_of.next_index == 3)  # the result of number 2 has come to both
    assert not ours.done()
    network.operations.set()
    with pytest.raises(gradwire.StaleEpochError, match="another"):
        await ours
    assert (await new.optim_step()).step == 1


async def test_an_operation_whose_acknowledgement_was_lost_before_a_takeover_is_known_to_be_accepted(
    services: list[gradwire.ServiceClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    network = SlowNetwork(services[0], monkeypatch)
    network.results.clear()
    network.acknowledgements.clear()
    old = await services[0].create_run("tiny", lora=2)
    network.cuts_acknowledgements = True
    accepted = old.forward_backward(BATCH, "causal_lm")
    await until(lambda: network.lost)
    behind = old.optim_step()
    new = await services[1].get_training_client(old.run_id)
    network.operations.set()
    network.results.set()
    with pytest.raises(gradwire.StaleEpochError, match="another"):
        await behind
    assert (await accepted).num_loss_tokens == 3
    again = await new.earlier_operations()
    assert (await again[1]).loss == (await accepted).loss
    assert (await new.optim_step()).step == 1
