"""Blocking code of the user's beside the event loop."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def run_in_daemon(function: Callable[[], T]) -> T:
    """Runs it in a daemon thread of its own, which can be abandoned: one that hangs holds up nobody, not even exit.

    (A pool's threads are joined at exit, and a hung one takes a place in the pool.)
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(value)  # type: ignore[arg-type]  # there is a value where there is no error
        else:
            future.set_exception(error)

    def work() -> None:
        value, caught = None, None
        try:
            value = function()
        except BaseException as error:  # belongs to whoever awaits
            plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            # The others would end the loop: exit() in the user's code is a failure of that code alone.
            caught = error if plain else RuntimeError(f"{type(error).__name__} in the user's code")
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, caught)

    threading.Thread(target=work, name="gradwire user code", daemon=True).start()
    return await future


async def called(function: Callable[..., Any], *args: Any, blocking: bool = True) -> Any:
    """What a user's function gives, be it ``async`` or plain; a plain one may block."""
    if blocking and not inspect.iscoroutinefunction(function):
        result = await run_in_daemon(lambda: function(*args))
    else:
        result = function(*args)
    return await result if inspect.isawaitable(result) else result
