"""Futures: results of operations, which are submitted at the call."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from inspect import isawaitable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, cast, overload

from gradwire.errors import (
    AbortedPredecessorError,
    GradwireError,
    InvalidArgumentError,
    ServiceClosedError,
    WouldDeadlockError,
    type_of,
)
from gradwire.wire.processes import Connected, check_not_forked

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")

logger = logging.getLogger("gradwire")


class Future(Connected, Generic[T]):
    """The pending result of an operation.

    ``await future`` returns the result or raises the operation's error; it can be awaited any number of times. A
    cancelled task or a timeout stops the waiting, not the operation; :meth:`cancel` stops the operation. :meth:`result`
    is for code without an event loop, and for threads other than the event loop's.
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
        """Block this thread until the result is available, and return it.

        Args:
            timeout: Seconds to wait; None waits without limit.

        Raises:
            TimeoutError: The result did not arrive in time. The operation goes on.
            WouldDeadlockError: Called on the thread of the event loop that must receive the result. Use ``await``
                there.
        """
        self._wait(timeout)
        return self._deliver()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the operation's error, or None if it succeeded; waits like :meth:`result`."""
        self._wait(timeout)
        error = self._inner.exception()
        if error is not None:
            self._mark_raised()
        return error

    def done(self) -> bool:
        """Return whether the operation has a result or an error."""
        return self._inner.done()

    def cancel(self) -> bool:
        """Ask the server to cancel the operation; return False if the operation has already ended.

        A cancelled operation raises :class:`~gradwire.errors.OperationCancelledError`. An operation that is being
        executed is stopped between two micro-batches or tokens, and the run is as it was before it; an optimizer step
        or a save that has begun continues.
        """
        ask = self._on_cancel
        if ask is None:
            return False
        ask()
        return True

    if not TYPE_CHECKING:  # for a type checker a future has no other attributes

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"a future of {self.__dict__.get('_label', 'an operation')} has no {name!r}; its result may: await it"
                " first, or call its .result()",
                name=name,
                obj=self,
            )

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
                "%s failed and its result was never retrieved: %s: %s", self._label, type(error).__name__, error
            )

    async def _settled(self) -> None:
        """Wait for the outcome without raising it."""
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
        """Chain a future that applies ``work`` to the result, on the event loop that receives the result."""
        loop = self._loop
        if loop is None:  # failed before it started, and so did this future
            return cast("Future[A]", self)
        self._raised = True  # the error is reported through the derived future

        async def follow() -> A:
            await self._settled()
            error = self._inner.exception()
            if error is not None:
                raise error
            return await work(self._inner.result())

        return start(label, loop, follow, on_raised=self._mark_raised)

    def _resolve(self, value: T) -> None:
        if not self._inner.done():
            # drop the callback and what it references, so that a settled future keeps nothing alive
            self._on_cancel = None
            self._inner.set_result(value)

    def _fail(self, error: BaseException) -> None:
        if not self._inner.done():
            self._on_cancel = None
            self._traceback = error.__traceback__
            self._inner.set_exception(error)

    def _wait(self, timeout: float | None) -> None:
        if self._inner.done():
            return
        check_not_forked()
        here = running_loop()
        if here is not None and here is self._loop:
            raise WouldDeadlockError(
                f"{self._label}: .result() would block the event loop that must receive the result; use `await`"
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
    """Return the running event loop, or None."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def failed(label: str, error: BaseException, on_raised: Callable[[], None] | None = None) -> Future[Any]:
    """Return a future that has already failed."""
    future: Future[Any] = Future(label, on_raised=on_raised)
    future._fail(error)
    return future


def start(
    label: str,
    loop: asyncio.AbstractEventLoop,
    work: Callable[[], Coroutine[Any, Any, T]],
    on_raised: Callable[[], None] | None = None,
) -> Future[T]:
    """Run a coroutine on the loop, from any thread; its outcome settles the future."""
    future: Future[T] = Future(label, loop, on_raised=on_raised)
    tasks: set[asyncio.Task[None]] = set()

    async def run() -> None:
        try:
            future._resolve(await work())
        except asyncio.CancelledError:
            future._fail(ServiceClosedError(f"{label}: the service was closed before the result came"))
            raise
        except Exception as error:  # any error is raised where the future is awaited
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
    """Wait for all futures and return their results in order.

    If some failed, raise the first cause among them once all have settled; further independent failures are
    counted in the exception's notes, each text once.

    Raises:
        InvalidArgumentError: An argument is no future.
    """
    for place, future in enumerate(futures):
        if not isawaitable(future):
            several = "; give the futures of a list as gather(*futures)" if isinstance(future, Iterable) else ""
            raise InvalidArgumentError(
                f"gather takes futures, and argument {place} is {type_of(future)}{several}", field="futures"
            )
    results, errors = [], []
    for future in futures:
        try:
            results.append(await cast("Awaitable[Any]", future))
        except Exception as error:  # collected here; the first cause is raised below
            errors.append(error)
    if not errors:
        return tuple(results)
    roots = [error for error in errors if not isinstance(error, AbortedPredecessorError)]
    if not roots:
        raise next((error.__cause__ for error in errors if isinstance(error.__cause__, GradwireError)), errors[0])
    others = Counter(f"{type(other).__name__}: {other}" for other in roots[1:] if other is not roots[0])
    for text, count in others.items():
        roots[0].add_note(f"also failed{f' ({count} times)' if count > 1 else ''}: {text}")
    raise roots[0]
