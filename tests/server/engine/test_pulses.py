"""The front's watch over ranks tells those that are stopped or out of step from those that are slow."""

from __future__ import annotations

from gradwire_proto.v1 import engine_pb2
from gradwire_server.engine_link.pulses import APART, PLACE_BITS, SILENCE_S, RankWatch


class Group:
    """Two ranks under a watch, of which each round sends pulses."""

    def __init__(self) -> None:
        self.watch = RankWatch()

    def round(self, *places: tuple[int, bool] | None) -> str:
        for rank, place in enumerate(places):
            if place is not None:
                number, waits = place
                self.watch.heard(engine_pb2.EnginePulse(rank=rank, collective=number << PLACE_BITS, waits=waits))
        self.watch.waited(0.25)
        return self.watch.trouble()


def test_a_rank_that_computes_for_long_is_no_trouble() -> None:
    group = Group()
    assert not any(group.round((7, True), (6, False)) for _ in range(4000))
    assert not any(group.round((7, True), (7, True)) for _ in range(100))  # such as idle ranks


def test_a_silent_rank_is_told_also_if_it_is_the_first() -> None:
    for silent in (0, 1):
        group = Group()
        assert not group.round((0, False), (0, False))
        rounds = [group.round(*(None if rank == silent else (0, False) for rank in (0, 1))) for _ in range(60)]
        told = rounds.index(f"rank {silent} has been silent for {SILENCE_S:.0f} s")
        assert (told + 1) * 0.25 >= SILENCE_S and not any(rounds[:told])


def test_ranks_that_wait_in_different_places_are_told() -> None:
    group = Group()
    assert not any(group.round((number, True), (number + 1, True)) for number in range(50))  # in passing
    rounds = [group.round((60, True), (61, True)) for _ in range(APART + 1)]
    assert not any(rounds[: APART - 1]) and "[60, 61]" in rounds[-1]


def test_time_that_the_front_was_stopped_does_not_count() -> None:
    group = Group()
    group.round((1, False), (1, False))
    for _ in range(5):
        group.watch.waited(3600.0)
    assert not group.watch.trouble()


def test_a_rank_that_is_starting_is_not_known() -> None:
    group = Group()
    assert not any(group.round((0, False), None) for _ in range(1000))
