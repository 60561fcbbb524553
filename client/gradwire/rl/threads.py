"""Run the user's blocking code outside the event loop."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def run_in_daemon(function: Callable[[], T]) -> T:
    """Run a function in its own daemon thread. A hung thread can be abandoned: it blocks neither a pool nor the exit.

    (A pool's threads are joined at exit, and a hung thread occupies a place in the pool.)
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(value)  # type: ignore[arg-type]  # the value is set if there is no error
        else:
            future.set_exception(error)

    def work() -> None:
        value, caught = None, None
        try:
            value = function()
        except BaseException as error:  # the awaiting caller gets the error
            plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            # Other BaseExceptions would end the loop: exit() in the user's code must fail only that code.
            caught = error if plain else RuntimeError(f"{type(error).__name__} in the user's code")
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, caught)

    threading.Thread(target=work, name="gradwire user code", daemon=True).start()
    return await future


async def called(function: Callable[..., Any], *args: Any, blocking: bool = True) -> Any:
    """Call a user's function, ``async`` or plain; a plain one may block."""
    if blocking and not inspect.iscoroutinefunction(function):
        result = await run_in_daemon(lambda: function(*args))
    else:
        result = function(*args)
    return await result if inspect.isawaitable(result) else result


def is_cancelled() -> bool:
    """Whether the running task is being cancelled; if not, a ``CancelledError`` came out of the user's code."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
