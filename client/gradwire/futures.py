"""Futures: the results of operations that were submitted when they were called."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import Awaitable, Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, Generic, TypeVar, cast, overload

from gradwire.errors import AbortedPredecessorError, GradwireError, ServiceClosedError, WouldDeadlockError

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")

logger = logging.getLogger("gradwire")


class Future(Generic[T]):
    """A result that is on its way.

    ``await future`` gives the result or raises the operation's error, as often as it is asked. Giving up waiting
    (a cancelled task, a timeout) does not cancel the operation; :meth:`cancel` does. :meth:`result` is for code
    without an event loop, or for another thread than the event loop's.
    """

    def __init__(
        self,
        label: str,
        loop: asyncio.AbstractEventLoop | None = None,
        *,
        on_raised: Callable[[], None] | None = None,
        on_cancel: Callable[[], None] | None = None,
    ) -> None:
        self._label = label
        self._loop = loop
        self._inner: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._traceback: TracebackType | None = None
        self._raised = False
        self._on_raised = on_raised
        self._on_cancel = on_cancel

    def __await__(self) -> Generator[Any, None, T]:
        yield from self._settled().__await__()
        return self._deliver()

    def result(self, timeout: float | None = None) -> T:
        """The result, waiting for it in this thread.

        Args:
            timeout: seconds to wait; None waits for as long as it takes.

        Raises:
            TimeoutError: when the result did not come in time. The operation goes on.
            WouldDeadlockError: on the thread of the event loop that has to receive the result. Use ``await`` there.
        """
        self._wait(timeout)
        return self._deliver()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error, or None for a result, waiting as :meth:`result` does."""
        self._wait(timeout)
        error = self._inner.exception()
        if error is not None:
            self._mark_raised()
        return error

    def done(self) -> bool:
        """Whether there is a result or an error."""
        return self._inner.done()

    def cancel(self) -> bool:
        """Asks the server to drop the operation if it has not started; False when it is over already.

        A dropped operation raises :class:`~gradwire.errors.OperationCancelledError`.
        """
        ask = self._on_cancel
        if ask is None:
            return False
        ask()
        return True

    def __repr__(self) -> str:
        if not self._inner.done():
            state = "pending"
        elif (error := self._inner.exception()) is not None:
            state = f"failed: {type(error).__name__}: {error}"
        else:
            state = "done"
        return f"<Future {self._label} {state}>"

    def __del__(self) -> None:
        if self._raised or not self._inner.done():
            return
        error = self._inner.exception()
        if error is not None and not isinstance(error, AbortedPredecessorError | ServiceClosedError):
            logger.warning(
                "%s failed and nobody asked for its result: %s: %s", self._label, type(error).__name__, error
            )

    async def _settled(self) -> None:
        """Waits for the outcome without raising it."""
        if self._inner.done():
            return
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def settle() -> None:
            if not waiter.done():
                waiter.set_result(None)

        def wake(_: concurrent.futures.Future[T]) -> None:
            if running_loop() is loop:
                settle()
            elif not loop.is_closed():
                loop.call_soon_threadsafe(settle)

        self._inner.add_done_callback(wake)
        await waiter

    def _then(self, label: str, work: Callable[[T], Coroutine[Any, Any, A]]) -> Future[A]:
        """A future of what ``work`` makes of the result, on the event loop that the result comes in on."""
        loop = self._loop
        if loop is None:  # failed before it began: so did what follows
            return cast("Future[A]", self)
        self._raised = True  # what follows is the one to ask

        async def follow() -> A:
            await self._settled()
            error = self._inner.exception()
            if error is not None:
                raise error
            return await work(self._inner.result())

        return start(label, loop, follow, on_raised=self._mark_raised)

    def _resolve(self, value: T) -> None:
        if not self._inner.done():
            self._on_cancel = None  # with what it refers to: nothing keeps a settled future alive
            self._inner.set_result(value)

    def _fail(self, error: BaseException) -> None:
        if not self._inner.done():
            self._on_cancel = None
            self._traceback = error.__traceback__
            self._inner.set_exception(error)

    def _wait(self, timeout: float | None) -> None:
        if self._inner.done():
            return
        here = running_loop()
        if here is not None and here is self._loop:
            raise WouldDeadlockError(
                f"{self._label}: .result() would block the event loop that has to receive the result; use `await`"
            )
        concurrent.futures.wait([self._inner], timeout)
        if not self._inner.done():
            raise TimeoutError(f"{self._label}: no result within {timeout} s; the operation goes on")

    def _deliver(self) -> T:
        error = self._inner.exception()
        if error is None:
            return self._inner.result()
        self._mark_raised()
        raise error.with_traceback(self._traceback)

    def _mark_raised(self) -> None:
        self._raised = True
        if self._on_raised is not None:
            self._on_raised()


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that this is called on, if it is."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def failed(label: str, error: BaseException, on_raised: Callable[[], None] | None = None) -> Future[Any]:
    """A future that failed before it began."""
    future: Future[Any] = Future(label, on_raised=on_raised)
    future._fail(error)
    return future


def start(
    label: str,
    loop: asyncio.AbstractEventLoop,
    work: Callable[[], Coroutine[Any, Any, T]],
    on_raised: Callable[[], None] | None = None,
) -> Future[T]:
    """Runs a coroutine on the loop, from any thread; its outcome is the future's."""
    future: Future[T] = Future(label, loop, on_raised=on_raised)
    tasks: set[asyncio.Task[None]] = set()

    async def run() -> None:
        try:
            future._resolve(await work())
        except asyncio.CancelledError:
            future._fail(ServiceClosedError(f"{label}: the service was closed before the result came"))
            raise
        except Exception as error:  # whatever it was belongs to whoever awaits the future
            future._fail(error)

    def launch() -> None:
        task = loop.create_task(run())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        future._on_cancel = lambda: cast(None, loop.call_soon_threadsafe(task.cancel))

    try:
        loop.call_soon_threadsafe(launch)
    except RuntimeError:
        future._fail(ServiceClosedError(f"{label}: the event loop of this service is closed"))
    return future


@overload
async def gather(a: Future[A], b: Future[B], /) -> tuple[A, B]: ...
@overload
async def gather(a: Future[A], b: Future[B], c: Future[C], /) -> tuple[A, B, C]: ...
@overload
async def gather(a: Future[A], b: Future[B], c: Future[C], d: Future[D], /) -> tuple[A, B, C, D]: ...
@overload
async def gather(*futures: Future[T]) -> tuple[T, ...]: ...
async def gather(*futures: Future[Any]) -> tuple[Any, ...]:
    """Waits for every future, and gives their results in order.

    When some failed, raises the first cause among them once all have settled; further independent failures are
    named in the exception's notes.
    """
    results, errors = [], []
    for future in futures:
        try:
            results.append(await cast("Awaitable[Any]", future))
        except Exception as error:  # collected, and the first cause raised below
            errors.append(error)
    if not errors:
        return tuple(results)
    roots = [error for error in errors if not isinstance(error, AbortedPredecessorError)]
    if not roots:
        raise next((error.__cause__ for error in errors if isinstance(error.__cause__, GradwireError)), errors[0])
    for other in roots[1:]:
        if other is not roots[0]:
            roots[0].add_note(f"also failed: {type(other).__name__}: {other}")
    raise roots[0]
