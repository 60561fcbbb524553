"""The client for scripts without an event loop.

Coroutine methods of the async client return their results here; operations return the same futures, for
``future.result()``. The event loop runs in its own thread; each method calls the one of the same
name in :mod:`gradwire.service` or :mod:`gradwire.training`.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack

from gradwire import connection, files, jobs, service, sessions, training
from gradwire.connection import ConnectionOptions
from gradwire.errors import ServiceClosedError
from gradwire.history import RunUpdates
from gradwire.operations import Operations
from gradwire.results import Checkpoint
from gradwire.sampling import SamplingClient
from gradwire.wire.options import check_options
from gradwire.wire.processes import Connected, check_not_forked

P = ParamSpec("P")
R = TypeVar("R")


class LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gradwire", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine and return its result; an interrupt cancels it."""
        if self.closed:
            work.close()
            check_not_forked()
            raise ServiceClosedError("the service is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @property
    def closed(self) -> bool:
        """Whether the loop has ended, or belongs to the process that this one was forked from."""
        return self._loop.is_closed() or not self._thread.is_alive()

    def close(self) -> None:
        """End what still runs in the loop, then the loop."""
        self.run(_end_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _end_tasks() -> None:
    """Cancel the other tasks of this loop, and wait until they have ended."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Any, P], R]:
    """Wrap the method of the same name of ``self._client`` in a blocking call."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        loop: LoopThread = self._loop_thread
        return loop.run(method(self._client, *args, **kwargs))

    return call


def _opening(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, training.TrainingClient]],
) -> Callable[Concatenate[Any, P], TrainingClient]:
    """Like :func:`_blocking`, for a method that returns a training client."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> TrainingClient:
        loop: LoopThread = self._loop_thread
        return TrainingClient(loop.run(method(self._client, *args, **kwargs)), loop)

    return call


class RolloutSession:
    """A session of an agent: a blocking :class:`gradwire.RolloutSession`. ``with`` ends it."""

    def __init__(self, client: sessions.RolloutSession, loop_thread: LoopThread) -> None:
        self._client, self._loop_thread = client, loop_thread
        self.session_id, self.url, self.openai_url, self.key = (
            client.session_id, client.url, client.openai_url, client.key
        )  # fmt: skip

    @property
    def info(self) -> sessions.SessionInfo:
        """The session as it was when this client last heard of it."""
        return self._client.info

    def environment(self) -> dict[str, str]:
        """Environment variables with which agents on the libraries of OpenAI and Anthropic find the session."""
        return self._client.environment()

    refresh = _blocking(sessions.RolloutSession.refresh)
    rollout = _blocking(sessions.RolloutSession.rollout)
    end = _blocking(sessions.RolloutSession.end)
    delete = _blocking(sessions.RolloutSession.delete)

    def __enter__(self) -> RolloutSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loop_thread.run(self._client.__aexit__(kind, error, traceback))


def _opening_session(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, sessions.RolloutSession]],
) -> Callable[Concatenate[Any, P], RolloutSession]:
    """Like :func:`_blocking`, for a method that returns a session."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> RolloutSession:
        loop: LoopThread = self._loop_thread
        return RolloutSession(loop.run(method(self._client, *args, **kwargs)), loop)

    return call


class RolloutSessions:
    """The sessions of a server: a blocking :class:`gradwire.RolloutSessions`."""

    def __init__(self, client: sessions.RolloutSessions, loop_thread: LoopThread) -> None:
        self._client, self._loop_thread = client, loop_thread

    get = _opening_session(sessions.RolloutSessions.get)
    list = _blocking(sessions.RolloutSessions.list)


class TrainingClient(Operations):
    """One run: operations return futures; all other methods block."""

    def __init__(self, client: training.TrainingClient, loop_thread: LoopThread) -> None:
        super().__init__(client._transport, client._link, client._losses)
        self._client = client
        self._loop_thread = loop_thread

    earlier_operations = _blocking(training.TrainingClient.earlier_operations)
    info = _blocking(training.TrainingClient.info)
    model_info = _blocking(training.TrainingClient.model_info)
    history = _blocking(training.TrainingClient.history)
    activity = _blocking(training.TrainingClient.activity)
    list_recordings = _blocking(training.TrainingClient.list_recordings)
    recorded_batch = _blocking(training.TrainingClient.recorded_batch)
    recorded_rollouts = _blocking(training.TrainingClient.recorded_rollouts)
    record_rollouts = _blocking(training.TrainingClient.record_rollouts)
    list_checkpoints = _blocking(training.TrainingClient.list_checkpoints)
    cancel_operation = _blocking(training.TrainingClient.cancel_operation)
    discard_pending = _blocking(training.TrainingClient.discard_pending)
    accept_changes = _blocking(training.TrainingClient.accept_changes)
    share = _blocking(training.TrainingClient.share)
    unshare = _blocking(training.TrainingClient.unshare)
    delete_checkpoint = _blocking(training.TrainingClient.delete_checkpoint)
    download_checkpoint = _blocking(training.TrainingClient.download_checkpoint)
    download_record = _blocking(training.TrainingClient.download_record)
    push_to_hub = _blocking(training.TrainingClient.push_to_hub)
    rollout_session = _opening_session(training.TrainingClient.rollout_session)


class Files:
    """The files of your key on a server: a blocking :class:`gradwire.Files`."""

    def __init__(self, client: files.Files, loop_thread: LoopThread) -> None:
        self._client, self._loop_thread = client, loop_thread

    upload = _blocking(files.Files.upload)
    get = _blocking(files.Files.get)
    list = _blocking(files.Files.list)
    delete = _blocking(files.Files.delete)
    download = _blocking(files.Files.download)


class Jobs:
    """The jobs of your key on a server: a blocking :class:`gradwire.Jobs`."""

    def __init__(self, client: jobs.Jobs, loop_thread: LoopThread) -> None:
        self._client, self._loop_thread = client, loop_thread

    submit = _blocking(jobs.Jobs.submit)
    get = _blocking(jobs.Jobs.get)
    list = _blocking(jobs.Jobs.list)
    cancel = _blocking(jobs.Jobs.cancel)
    pause = _blocking(jobs.Jobs.pause)
    resume = _blocking(jobs.Jobs.resume)
    delete = _blocking(jobs.Jobs.delete)
    wait = _blocking(jobs.Jobs.wait)
    events = _blocking(jobs.Jobs.events)
    log = _blocking(jobs.Jobs.log)
    report = _blocking(jobs.Jobs.report)


class ServiceClient(Connected):
    """A connection to a server: a blocking :class:`gradwire.ServiceClient`."""

    def __init__(self, client: service.ServiceClient, loop_thread: LoopThread) -> None:
        self._client = client
        self._loop_thread = loop_thread

    @property
    def address(self) -> str:
        """``HOST:PORT`` of the server."""
        return self._client.address

    @property
    def api_key(self) -> str:
        """The key that this connection sends, for other connections to an embedded server; empty if there is none."""
        return self._client.api_key

    @property
    def jobs(self) -> Jobs:
        """Trainings that the server runs by itself."""
        return Jobs(self._client.jobs, self._loop_thread)

    @property
    def files(self) -> Files:
        """The files that jobs train on."""
        return Files(self._client.files, self._loop_thread)

    @property
    def sessions(self) -> RolloutSessions:
        """The rollout sessions of agents."""
        return RolloutSessions(self._client.sessions, self._loop_thread)

    server_info = _blocking(service.ServiceClient.server_info)
    list_models = _blocking(service.ServiceClient.list_models)
    list_losses = _blocking(service.ServiceClient.list_losses)
    list_keys = _blocking(service.ServiceClient.list_keys)
    list_queues = _blocking(service.ServiceClient.list_queues)
    usage = _blocking(service.ServiceClient.usage)
    list_runs = _blocking(service.ServiceClient.list_runs)
    delete_run = _blocking(service.ServiceClient.delete_run)
    move_run = _blocking(service.ServiceClient.move_run)
    drain_engine = _blocking(service.ServiceClient.drain_engine)
    encode = _blocking(service.ServiceClient.encode)
    decode = _blocking(service.ServiceClient.decode)
    tokenizer_info = _blocking(service.ServiceClient.tokenizer_info)
    upload_adapter = _blocking(service.ServiceClient.upload_adapter)
    list_uploads = _blocking(service.ServiceClient.list_uploads)
    delete_upload = _blocking(service.ServiceClient.delete_upload)
    render: Any = _blocking(service.ServiceClient.render)
    render_turns: Any = _blocking(service.ServiceClient.render_turns)
    rollout_session = _opening_session(service.ServiceClient.rollout_session)
    create_run = _opening(service.ServiceClient.create_run)
    fork_run = _opening(service.ServiceClient.fork_run)

    def get_training_client(self, run_id: str, takeover: bool = True) -> TrainingClient:
        """Return a client of an existing run: see :meth:`gradwire.ServiceClient.get_training_client`."""
        return TrainingClient(self._client.get_training_client(run_id, takeover), self._loop_thread)

    def watch(self, cursor: str = "", with_points: bool = False) -> Iterator[RunUpdates]:
        """Follow the runs, blocking until something changes: see :meth:`gradwire.ServiceClient.watch`."""
        updates = self._client.watch(cursor, with_points)

        async def following() -> RunUpdates:
            return await anext(updates)

        try:
            while True:
                yield self._loop_thread.run(following())
        finally:
            self._loop_thread.run(updates.aclose())

    def sampling_client(self, model: str | Checkpoint) -> SamplingClient:
        """Return a client that samples: see :meth:`gradwire.ServiceClient.sampling_client`."""
        return self._client.sampling_client(model)

    def close(self) -> None:
        """Close the connection: see :meth:`gradwire.ServiceClient.close`. Ends the thread as well."""
        atexit.unregister(self.close)
        if self._loop_thread.closed:
            return
        try:
            self._loop_thread.run(self._client.close())
        finally:
            self._loop_thread.close()

    def __enter__(self) -> ServiceClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def connect(address: str | None = None, **options: Unpack[ConnectionOptions]) -> ServiceClient:
    """Connect like :func:`gradwire.connect`.

    Use ``with``, or call :meth:`ServiceClient.close`; otherwise the end of the program does, so that operations that
    were submitted reach the server.
    """
    check_options(ConnectionOptions, options, connect)
    loop_thread = LoopThread()
    try:
        client = ServiceClient(loop_thread.run(connection.open_service(address, options)), loop_thread)
    except BaseException:
        loop_thread.close()
        raise
    atexit.register(client.close)
    return client
