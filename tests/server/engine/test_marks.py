"""What front and engine tell each other through shared memory: begun or taken back, never both."""

from __future__ import annotations

import os
import threading

from gradwire_server.engine_link.crash_marks import SLOTS, CrashMarks


def test_a_request_is_begun_or_taken_back() -> None:
    front = CrashMarks()
    engine = CrashMarks(os.dup(front.fd))
    assert engine.begin([1]) == [True] and not front.withdraw(1) and front.begun == {1}
    assert front.withdraw(2) and engine.begin([2]) == [False] and front.begun == {1}
    front.answered(1)
    front.answered(2)
    assert front.begun == set()
    engine.close()
    front.close()


def test_the_engine_waits_for_a_front_that_does_not_read() -> None:
    """A request that was not begun for want of a slot would be missed by those of its run behind it."""
    front = CrashMarks()
    engine = CrashMarks(os.dup(front.fd))
    assert all(engine.begin([request_id]) == [True] for request_id in range(1, SLOTS + 1))
    begun: list[bool] = []
    waiting = threading.Thread(target=lambda: begun.extend(engine.begin([SLOTS + 1])))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    front.answered(7)
    waiting.join(30)
    assert begun == [True] and SLOTS + 1 in front.begun and 7 not in front.begun
    engine.close()
    front.close()
