"""Ranks that come to different places in their work: each learns it, or the front's watch does."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from gradwire_proto.v1 import engine_pb2
from gradwire_server.engine.errors import GroupBroken
from gradwire_server.engine.group_agreement import GroupAgreement, GroupMessages
from gradwire_server.engine.process.activity import Activity
from gradwire_server.engine.process.pulse import Pulse
from gradwire_server.engine_link.pulses import RankWatch

Work = Callable[[GroupAgreement], object]
REQUEST = engine_pb2.EngineRequest()
PLACES: dict[str, Work] = {
    "check": lambda agreement: agreement.check(REQUEST),
    "confirm": lambda agreement: agreement.confirm(engine_pb2.EngineReply()),
    "gather": lambda agreement: agreement.gathered(b"x" * 100),
    "attempt": lambda agreement: agreement.attempt(lambda: None),
}


class Group:
    """Two ranks, each in a thread."""

    def __init__(self) -> None:
        self.sockets = socket.socketpair()
        self.ranks = [GroupAgreement(rank, 2) for rank in range(2)]
        for rank, agreement in enumerate(self.ranks):
            agreement._messages = GroupMessages(rank, self.sockets[rank : rank + 1])
        self.broken: list[GroupBroken] = []

    def work(self, *works: Work) -> list[threading.Thread]:
        threads = [threading.Thread(target=self._work, args=each) for each in zip(self.ranks, works, strict=True)]
        for thread in threads:
            thread.start()
        return threads

    def _work(self, agreement: GroupAgreement, work: Work) -> None:
        try:
            work(agreement)
            agreement.greatest(0)  # where rank 0 comes to, if it waited for nobody
        except GroupBroken as error:
            self.broken.append(error)

    def end(self) -> None:
        for each in self.sockets:
            each.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def group() -> Iterator[Group]:
    group = Group()
    yield group
    for each in group.sockets:
        each.close()


@pytest.mark.parametrize("first", PLACES)
@pytest.mark.parametrize("second", PLACES)
def test_ranks_in_different_places_are_told_of(group: Group, first: str, second: str) -> None:
    threads = group.work(PLACES[first], PLACES[second])
    watch, pulses = RankWatch(), [Pulse(agreement, Activity()) for agreement in group.ranks]
    while any(thread.is_alive() for thread in threads) and not group.broken and not watch.trouble():
        for pulse in pulses:
            watch.heard(pulse.present())
        time.sleep(0.01)
    told = bool(group.broken) or "in different places" in watch.trouble()
    group.end()
    for thread in threads:
        thread.join()
    assert told == (first != second)
