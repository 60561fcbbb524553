"""Run code written by a policy in a separate process that does not know the expected results.

The tests run in this process. The program's functions appear here as :class:`Remote` objects: a call sends the
arguments, and the result comes back as a value of builtin types (:mod:`.canonical`) or, for an object of the program's
own class, as another :class:`Remote`. Comparisons with values of this process happen in this process, and a remote
object never equals one.

One request, one reply, as frames of JSON:

    {"do": "load", "code": …}                            {"names": {name: …}}
    {"do": "operate", "name": …, "args": …, "kwargs": …} {"value": …, "changed": {argument: its new value}}
    {"do": "run", "code": …, "stdin": …}                 {"stdout": …}

Each may be answered by ``{"raised": [class, its bases, …], "message": …}``, and while one runs, the program may call a
function that it was given: ``{"callback": number, "args": …}``, answered by ``{"returned": …}`` or ``{"failed": …}``.
"""

from __future__ import annotations

import builtins
import os
import select
import shutil
import struct
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any, Self

from .canonical import decode, dumps, encode, loads
from .frames import write_frame
from .launching import ENVIRONMENT, Command, commands
from .remote import Remote

START_S = 20.0
REFUSED = (
    "not run: this machine refuses to isolate the policy's code; allow user namespaces, install bubblewrap, or set "
    'SandboxLimits(isolation="preferred") to run it anyway'
)


class ProgramError(RuntimeError):
    """The program ended, took too long, or raised an exception whose class does not exist here."""


class IsolationError(RuntimeError):
    """This machine cannot isolate a program although isolation is required."""


class PolicyProgram:
    """One program of the policy; a context manager, which ends it.

    Args:
        code: Python source.
        time_s: Total running time of all calls, in seconds.
        memory_bytes, file_bytes, open_files: As in :class:`~gradwire.rl.rewards.SandboxLimits`.
        result_bytes: Maximum size of one answer.
        network: Whether it may use the network.
        isolation: ``"required"``: raise if it cannot be isolated; ``"preferred"``: run it anyway.

    The program may start threads but no processes. It sees Python, the installed packages and an empty ``/tmp``.
    """

    def __init__(
        self,
        code: str,
        *,
        time_s: float = 5.0,
        memory_bytes: int = 1 << 30,
        file_bytes: int = 16 << 20,
        open_files: int = 64,
        result_bytes: int = 1 << 20,
        network: bool = False,
        isolation: str = "required",
    ) -> None:
        self._code = code
        self._limits = {
            "time_s": time_s, "memory_bytes": memory_bytes, "file_bytes": file_bytes, "open_files": open_files,
            "result_bytes": result_bytes, "network": network,
        }  # fmt: skip
        self._required = isolation == "required"
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = ""
        self._deadline = 0.0
        self._callbacks: list[Callable[..., Any]] = []
        self._exceptions: dict[str, type[Exception]] = {}
        self.isolated = False

    def __enter__(self) -> Self:
        self._folder = tempfile.mkdtemp(prefix="gradwire-program-")
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        self._deadline = time.monotonic() + float(self._limits["time_s"])
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def load(self) -> dict[str, Any]:
        """Run the code and return its global names: functions and other objects as :class:`Remote`, modules as text."""
        names = self._ask({"do": "load", "code": self._code}).get("names")
        if not isinstance(names, dict):
            raise ProgramError("its answer could not be read")
        return {str(name): self._named(value) for name, value in names.items()}

    def run(self, stdin: str = "") -> str:
        """Run the code as a program and return its output.

        Raises:
            Exception: The program's exception, raised after its output.
        """
        return str(self._ask({"do": "run", "code": self._code, "stdin": stdin}).get("stdout", ""))

    def operate(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Perform one of the operations of ``program_main`` on values and remote objects."""
        request = {
            "do": "operate",
            "name": name,
            "args": [encode(each, self._reference) for each in args],
            "kwargs": {key: encode(each, self._reference) for key, each in kwargs.items()},
        }
        reply = self._ask(request)
        changed = reply.get("changed")
        for index, value in changed.items() if isinstance(changed, dict) else ():
            if str(index).isdecimal() and int(index) < len(args):
                _replace(args[int(index)], self._decoded(value))
        return self._decoded(reply.get("value"))

    def _named(self, value: Any) -> Any:
        if isinstance(value, dict) and set(value) == {"module"}:
            return str(value["module"])
        if isinstance(value, dict) and isinstance(value.get("raises"), list):
            return self._exception(value["raises"])
        return self._decoded(value)

    def _decoded(self, content: Any) -> Any:
        try:
            return decode(content, self._referent)
        except (ValueError, TypeError, ArithmeticError, RecursionError, KeyError, AttributeError):
            raise ProgramError("its answer could not be read") from None

    def _reference(self, value: Any) -> dict[str, Any]:
        if isinstance(value, Remote):
            return {"object": value._number}
        if callable(value):
            self._callbacks.append(value)
            return {"callback": len(self._callbacks) - 1}
        raise TypeError(f"an object of the class {type(value).__name__} cannot be given to the policy's code")

    def _referent(self, content: dict[str, Any]) -> Remote:
        return Remote(self.operate, int(content["object"]), str(content.get("class", "object")))

    def _exception(self, names: list[Any]) -> type[Exception]:
        """Find the local class for a program's exception: the builtin of that name, or a derived class."""
        known = [getattr(builtins, str(name), None) for name in names]
        base = next((each for each in known if isinstance(each, type) and issubclass(each, Exception)), ProgramError)
        name = str(names[0]) if names else ""
        if base.__name__ == name or not name.isidentifier():
            return base
        if name not in self._exceptions:
            self._exceptions[name] = type(name, (base,), {})
        return self._exceptions[name]

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self._send(request)
        while True:
            reply = self._receive(self._deadline)
            if isinstance(reply.get("callback"), int):
                self._send(self._called(reply))
                continue
            if isinstance(reply.get("raised"), list):
                kind = self._exception(reply["raised"])
                # its own __init__ may need more arguments
                raise kind.__new__(kind, str(reply.get("message", ""))[:500])
            return reply

    def _called(self, reply: dict[str, Any]) -> dict[str, Any]:
        try:
            function = self._callbacks[reply["callback"]]
            value = function(*(self._decoded(each) for each in reply.get("args", ())))
            return {"returned": encode(value, self._reference)}
        except Exception as error:  # an exception of the test's own function is raised to its caller
            return {"failed": f"{type(error).__name__}: {error}"[:500]}

    def _start(self) -> None:
        for way in commands(self._limits):
            if self._required and not way.isolated:
                break
            self._launch(way)
            try:
                ready = self._receive(time.monotonic() + START_S)
            except ProgramError:
                ready = {}
            self.isolated = ready.get("isolated") is True
            if self.isolated:
                return
            if ready and not self._required:
                warnings.warn("the policy's code runs without isolation on this machine", RuntimeWarning, stacklevel=3)
                return
            self._end()
        raise IsolationError(REFUSED) if self._required else ProgramError("its process could not be started")

    def _launch(self, way: Command) -> None:
        self._process = subprocess.Popen(
            way.words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
            cwd=self._folder, env=ENVIRONMENT, preexec_fn=way.before,
        )  # fmt: skip

    def _send(self, message: dict[str, Any]) -> None:
        if self._process is None or self._process.stdin is None:
            raise ProgramError("the program ended")
        try:
            write_frame(self._process.stdin.fileno(), dumps(message))
        except BrokenPipeError:
            raise ProgramError("the program ended") from None

    def _receive(self, deadline: float) -> dict[str, Any]:
        size = struct.unpack("<I", self._read(4, deadline))[0]
        if size > self._limits["result_bytes"]:
            self._end()
            raise ProgramError(f"answered with {size} bytes; at most {self._limits['result_bytes']} are allowed")
        try:
            reply = loads(self._read(size, deadline))
        except (ValueError, RecursionError):
            raise ProgramError("its answer could not be read") from None
        return reply if isinstance(reply, dict) else {}

    def _read(self, size: int, deadline: float) -> bytes:
        if self._process is None or self._process.stdout is None:
            raise ProgramError("the program ended")
        fd, parts = self._process.stdout.fileno(), []
        while size:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                self._end()
                raise ProgramError(f"took more than {self._limits['time_s']:g} s and was killed")
            part = os.read(fd, size)
            if not part:
                self._end()
                raise ProgramError("the program ended")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _end(self) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _replace(argument: Any, value: Any) -> None:
    """Apply the program's changes of a passed list, dict, set or bytearray to the local object."""
    if type(argument) is not type(value):
        return
    if isinstance(argument, list | bytearray):
        argument[:] = value
    elif isinstance(argument, dict | set):
        argument.clear()
        argument.update(value)
