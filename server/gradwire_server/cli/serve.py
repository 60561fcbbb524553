"""`gradwire serve`: holds models and serves training runs until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import os
import resource
import signal
import sqlite3
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from gradwire_http.child_processes import start_process
from gradwire_proto.v1 import training_pb2 as pb
from rich.table import Table
from typer.core import TyperCommand

from gradwire_server.cli.event_loop import loop_factory
from gradwire_server.cli.parent import outlived
from gradwire_server.cli.preflight import check
from gradwire_server.cli.saying import MISTAKE, NOT_NOW, console, fail, say
from gradwire_server.cli.settings import load, misspelled_variables, with_settings
from gradwire_server.cli.settings_file import SettingsError
from gradwire_server.config import ServerConfig
from gradwire_server.durable_files import is_full, replace_text
from gradwire_server.observability import logs

if TYPE_CHECKING:
    from gradwire_server.server import Server


HTTP = "127.0.0.1:8000"
"""Default of --http: the address at which a trained model is served to OpenAI's clients."""


@dataclass(frozen=True)
class Trained:
    """A training that had a server of its own.

    Attributes:
        state_dir: State folder of its server.
        checkpoint: ``RUN_ID/NAME`` of its newest checkpoint.
    """

    model: str
    state_dir: str
    checkpoint: str

    @staticmethod
    def read(folder: Path) -> Trained:
        """Read a training's folder.

        Raises:
            SettingsError: There is no finished training in it, or another server holds what it trained.
        """
        file = folder / "state.json"
        try:
            note = dict(json.loads(file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            note = {}
        except (OSError, ValueError, TypeError):
            raise SettingsError(f"{file} is not the state of a training") from None
        if not note.get("checkpoint") or "settings" not in note:
            raise SettingsError(f"{folder} holds no training that has saved a checkpoint")
        if not note.get("server"):
            raise SettingsError(f"the training in {folder} used the server at {note.get('address')}, which serves it")
        return Trained(note["settings"]["model"], note["server"], note["checkpoint"])

    def flags(self) -> dict[str, Any]:
        """The settings of a server for it."""
        return {"models": [self.model], "state_dir": self.state_dir, "http": HTTP}


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Parameters of mallopt(3)."""
SWITCH_S = 0.0005
"""Seconds for which a thread of the front may keep the interpreter while the event loop wants it. With Python's own
5 ms, a small call waits several times as long beside threads that write the journal and files for others."""
COLLECTED_AT = 5000
"""Containers that the front allocates between two collections of garbage. gRPC leaves some ten in cycles for each call.
With Python's 700 many of them outlived two collections, and the full ones held the event loop for up to 31 ms beside a
flood of calls; with this number the longest took 12 ms, and all of them a fifth of the time."""
ELSEWHERE = {
    "--port": "--address HOST:PORT",
    "--host": "--address HOST:PORT",
    "--tensor-parallel-size": "--ranks N",
    "--data-parallel-size": "--engines N",
    "--served-model-name": "--model NAME=FOLDER",
    "--api-key": "gradwire keys create NAME",
}
"""Other servers' options -> ours."""
SETTINGS_AT_FAULT = (pb.ERROR_CODE_INVALID_ARGUMENT, pb.ERROR_CODE_UNSUPPORTED, pb.ERROR_CODE_UNKNOWN_MODEL)


class Serve(TyperCommand):
    """The command, which knows other servers' options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for option in (word.partition("=")[0] for word in args):
            if option in ELSEWHERE:
                fail(f"there is no {option}: write {ELSEWHERE[option]}")
        return super().parse_args(ctx, args)


@app.command(cls=Serve)
@with_settings
def serve(
    flags: dict[str, Any],
    training: Annotated[
        Path | None,
        typer.Argument(
            help="Folder of a training that had a server of its own, to serve what it trained.", metavar="[FOLDER]"
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of settings.", metavar="FILE")] = None,
    ready_file: Annotated[
        Path | None, typer.Option(help="Gets the address once the server listens.", rich_help_panel="Process")
    ] = None,
    die_with_parent: Annotated[
        bool, typer.Option(help="Stop when the process that started this one ends.", rich_help_panel="Process")
    ] = False,
    key_on_stdin: Annotated[
        bool,
        typer.Option(help="Ask every caller for the key in the first line of stdin.", rich_help_panel="Process"),
    ] = False,
    parent_pid: Annotated[
        int | None, typer.Option(help="Stop when this is no longer the parent process.", rich_help_panel="Process")
    ] = None,
    console_page: Annotated[
        bool,
        typer.Option(
            "--console",
            help="Also start `gradwire console`, a page for browsers on this machine, as a process of its own.",
            rich_help_panel="Process",
        ),
    ] = False,
    feedback: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="With --console: the feedback service to which its playground hands answers.",
            rich_help_panel="Process",
        ),
    ] = "",
) -> None:
    """Holds models and serves training runs.

    Each setting is a flag (--state-dir), an environment variable (GRADWIRE_STATE_DIR) or a line of the YAML file that
    --config names (state_dir: FOLDER). Flags take precedence over the environment, the environment over the file, the
    file over the defaults.

    Flags that repeat are plural in the environment and the file: models, allow_models and losses, separated by commas
    in the environment, and limits (GRADWIRE_LIMITS__MAX_ROWS). What is under Process has a flag only.
    """
    for sentence in misspelled_variables():  # first: one of them may be why the settings are refused
        say(sentence)
    try:
        trained = Trained.read(training) if training is not None else None
        settings = load({**(trained.flags() if trained else {}), **flags}, config)
        check(settings)
    except SettingsError as error:
        fail(*error.sentences, status=NOT_NOW if error.may_pass else MISTAKE)
    if feedback and not console_page:
        fail("--feedback is the console's: give --console too")
    if console_page and settings.tls_cert is not None:
        fail("with --tls-cert, start the console itself: gradwire console --ca-cert FILE")
    os.umask(0o077)  # weights, batches and keys of a state folder are for the server's own user
    logs.configure(settings.log_level, settings.log_format, "front")
    sys.setswitchinterval(SWITCH_S)
    _give_memory_back()
    _open_many_files()
    parent = parent_pid or (os.getppid() if die_with_parent else None)
    own_key = sys.stdin.readline().strip() if key_on_stdin else ""
    if trained is not None:
        say(f"OpenAI's clients name what was trained {trained.checkpoint}")
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        raise typer.Exit(runner.run(_serve(settings, ready_file, parent, own_key, console_page, feedback)))


def _give_memory_back() -> None:
    """Have the C library give back what large bodies took: else it stays in the heaps, between what lives on.

    Blocks of 2 MiB, more than a chunk of tensors has, are mapped and go back as a whole, and threads share two heaps.
    """
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        library = ctypes.CDLL("libc.so.6")
        for parameter, value in ((M_MMAP_THRESHOLD, 2 << 20), (M_TRIM_THRESHOLD, 4 << 20), (M_ARENA_MAX, 2)):
            library.mallopt(parameter, value)


def _open_many_files() -> None:
    """Allow as many open files and connections as the system does; shells often allow 1,024, which anybody can open."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _serve(
    config: ServerConfig,
    ready_file: Path | None,
    parent: int | None,
    own_key: str,
    console_page: bool,
    feedback: str,
) -> int:
    from gradwire_server.errors import NotNow, ServiceError
    from gradwire_server.server import Server, start_failure

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if name is signal.SIGHUP and signal.getsignal(name) is signal.SIG_IGN:
            continue  # of nohup: it stays when its terminal goes
        loop.add_signal_handler(name, _be_told, stop, config.grace)
    watcher = loop.create_task(_watch_parent(parent, stop)) if parent else None
    server = Server(config, own_key=own_key)
    page: asyncio.subprocess.Process | None = None
    starting, stopped = loop.create_task(_start(server)), loop.create_task(stop.wait())
    try:
        await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            if refused := starting.result():
                console.print(str(refused.code), style="red", markup=False)
                return NOT_NOW if isinstance(refused, NotNow) else MISTAKE
            _announce(server, ready_file)
            if console_page:
                page = await _start_console(server.address, feedback)
            gc.freeze()  # what is loaded stays, so that no collection need walk it
            gc.set_threshold(COLLECTED_AT)
            await stopped
        else:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
    except ServiceError as error:
        console.print(start_failure(error), style="red", markup=False)
        return MISTAKE if error.code in SETTINGS_AT_FAULT else NOT_NOW
    finally:
        if page is not None and page.returncode is None:
            page.terminate()
        await server.stop()
        for task in (watcher, stopped):
            if task is not None:
                task.cancel()
    for run_id, count in server.core.left.items():
        console.print(
            f"gradwire: stopped; {count} acknowledged operations of {run_id} go on at the next start", markup=False
        )
    return 0


async def _start_console(address: str, feedback: str) -> asyncio.subprocess.Process:
    """Start the console in a process of its own, which ends with this one."""
    command = [sys.executable, "-m", "gradwire_console.cli", address, "--parent-pid", str(os.getpid())]
    command += ["--feedback", feedback] if feedback else []
    return await start_process(*command)


def _be_told(stop: asyncio.Event, grace_s: float) -> None:
    """Stop on a signal, and say at once what the operator will wait for."""
    if not stop.is_set():
        waits = f"waiting up to {grace_s:g} s for operations that are being executed"
        say(f"stopping; {waits}")
    stop.set()


async def _start(server: Server) -> SystemExit | None:
    """Start a server; returns the reason if it must not: a SystemExit may not leave a task."""
    from gradwire_server.journal.state_folder import unusable

    try:
        await server.start()
    except SystemExit as error:
        return error
    except (OSError, sqlite3.Error) as error:
        if isinstance(error, OSError) and not is_full(error):
            raise
        return unusable(error, server.config.state_dir)
    return None


async def _watch_parent(parent: int, stop: asyncio.Event) -> None:
    await outlived(parent)
    stop.set()


def _announce(server: Server, ready_file: Path | None) -> None:
    if server.core.engines.is_known:
        console.print(_models(server))
    else:
        front = f"{'https' if server.config.tls_cert else 'http'}://{server.address}"
        console.print(f"gradwire: no engine yet, waiting for `gradwire engine --front {front}`", markup=False)
    config, core = server.config, server.core
    console.print(
        f"{len(core.engines.hello.losses)} losses, {core.storage.records.count} runs in {config.state_dir}",
        markup=False,
    )
    for name, count in core.storage.records.by_model().items():
        if name not in config.all_models:
            absent = f"{name}, which this server does not have"
            say(f"{count} of these runs wait for {absent}: --model {name}=PATH")
    if server.core.keys.required and not config.loopback and config.tls_cert is None:
        console.print("API keys travel in the clear: give --tls-cert and --tls-key, or put a proxy with TLS before it")
    if not config.loopback:
        console.print(
            "where strangers reach it, put deploy/nginx.conf before it: it ends floods of HTTP/2 (SECURITY.md)"
        )
    if not server.core.keys.required:
        console.print("no API keys: " + ("loopback only" if config.loopback else "anyone who reaches it may use it"))
    if server.metrics_address:
        console.print(f"metrics: http://{server.metrics_address}/metrics", markup=False)
    if server.http is not None:
        print(f"gradwire: HTTP on {server.http.url}", flush=True)
    print(f"gradwire: listening on {server.address}", flush=True)
    if ready_file is not None:
        replace_text(ready_file, server.address + "\n")


def _models(server: Server) -> Table:
    table = Table(title=f"gradwire on {server.core.engines.hello.device}", title_justify="left")
    for column in ("model", "architecture", "parameters", "context", "dtype", "tokenizer"):
        table.add_column(column)
    for model in server.core.engines.hello.models:
        table.add_row(
            model.name, model.architecture, f"{model.num_parameters:,}", str(model.context_length), model.dtype,
            "yes" if model.has_tokenizer else "no",
        )  # fmt: skip
    return table
