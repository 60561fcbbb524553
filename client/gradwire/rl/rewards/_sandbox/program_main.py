"""The process that runs the policy's code, started for one program; it does not know the tests.

Argument: the setup as JSON. Frames on stdin and stdout, see :mod:`program`. No answer can be trusted: the program
controls its content, and so does code that takes over this module.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import operator
import os
import sys
import tempfile
import types
from collections.abc import Callable
from typing import Any

from .canonical import decode, dumps, encode, loads
from .frames import read_frame, write_frame
from .isolation import die_with_parent, drop_capabilities, forbid_new_privileges, restrict
from .sealing import NAMESPACES, begin, finish, hide

OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, *args, **kwargs: function(*args, **kwargs),
    "getattr": getattr, "iter": iter, "next": next, "len": len, "bool": bool, "str": str,
    "repr": repr, "hash": hash, "int": int, "float": float, "isinstance": isinstance,
    "enter": lambda manager: manager.__enter__(), "exit": lambda manager: manager.__exit__(None, None, None),
    **{name: getattr(operator, name) for name in (
        "getitem", "setitem", "delitem", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg",
        "and_", "or_", "xor", "eq", "ne", "lt", "le", "gt", "ge",
    )},
}  # fmt: skip


def main() -> None:
    setup = json.loads(sys.argv[1])
    limits = setup["limits"]
    requests, replies = os.dup(0), os.dup(1)
    die_with_parent()
    wall = NAMESPACES if setup["isolated"] else ""
    if setup["isolate"]:
        wall = begin(limits["network"], rules=False)
        die_with_parent()
        if wall:
            child = os.fork()
            if child:
                os.close(requests)
                os.close(replies)
                os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
            die_with_parent()
            root = tempfile.mkdtemp(dir=".")
            wall = wall if hide({"shown": setup["folders"]}, os.path.abspath(root), limits["file_bytes"]) else ""
    restrict(limits, 1, False)
    if wall:
        isolated = finish(wall, {}, network=limits["network"])
    else:
        isolated = False
        drop_capabilities()
        forbid_new_privileges()
    with contextlib.suppress(OSError):
        os.chdir("/tmp")
    sys.path[:] = setup["sys_path"]
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # as the module site does, which is not loaded
    quiet = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(quiet, fd)
    write_frame(replies, dumps({"isolated": isolated}))
    session = Session(requests, replies)
    while True:
        try:
            request = loads(read_frame(requests))
        except EOFError:
            return
        session.answer(request)


class Session:
    """One program: its global names, and the objects that the other process refers to by number."""

    def __init__(self, requests: int, replies: int) -> None:
        self._requests, self._replies = requests, replies
        self._objects: list[Any] = []
        self._scope: dict[str, Any] = {"__name__": "candidate"}

    def answer(self, request: dict[str, Any]) -> None:
        try:
            reply = getattr(self, f"do_{request['do']}")(request)
        except BaseException as error:  # the policy's code may raise anything, including SystemExit
            kinds = [kind.__name__ for kind in type(error).__mro__]
            reply = {"raised": kinds, "message": _text_of(error)}
        self._write(reply)

    def do_load(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run the code; return its global names, with the class names of exceptions and the names of modules."""
        exec(compile(request["code"], "candidate", "exec"), self._scope)
        names: dict[str, Any] = {}
        for name, value in self._scope.items():
            if isinstance(value, types.ModuleType):
                names[name] = {"module": value.__name__}
            elif isinstance(value, type) and issubclass(value, BaseException):
                names[name] = {"raises": [kind.__name__ for kind in value.__mro__], **self._reference(value)}
            elif not name.startswith("__"):
                names[name] = self._reference(value)
        return {"names": names}

    def do_operate(self, request: dict[str, Any]) -> dict[str, Any]:
        args = [decode(each, self._referent) for each in request["args"]]
        kwargs = {name: decode(each, self._referent) for name, each in request["kwargs"].items()}
        value = OPERATIONS[request["name"]](*args, **kwargs)
        after = [encode(each, self._reference) for each in args]
        changed = {i: new for i, (new, old) in enumerate(zip(after, request["args"])) if new != old}
        return {"value": encode(value, self._reference), "changed": changed}

    def do_run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run the code as a program with this standard input; return its output."""
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as printed:
            stdin.write(request["stdin"].encode())
            stdin.flush()
            os.lseek(stdin.fileno(), 0, os.SEEK_SET)
            os.dup2(stdin.fileno(), 0)
            os.dup2(printed.fileno(), 1)
            sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
            ended: dict[str, Any] = {}
            try:
                exec(compile(request["code"], "candidate", "exec"), {"__name__": "__main__"})
            except SystemExit:
                pass
            except BaseException as error:  # printing may fail as well
                ended = {"raised": [kind.__name__ for kind in type(error).__mro__], "message": _text_of(error)}
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            size = os.fstat(printed.fileno()).st_size
            return {"stdout": os.pread(printed.fileno(), size, 0).decode(errors="replace"), **ended}

    def _write(self, reply: dict[str, Any]) -> None:
        write_frame(self._replies, dumps(reply))

    def _reference(self, value: Any) -> dict[str, Any]:
        self._objects.append(value)
        return {"object": len(self._objects) - 1, "class": type(value).__name__}

    def _referent(self, content: dict[str, Any]) -> Any:
        return self._objects[content["object"]] if "object" in content else self._callback(content["callback"])

    def _callback(self, number: int) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self._write({"callback": number, "args": [encode(each, self._reference) for each in args]})
            while True:
                request = loads(read_frame(self._requests))
                if "returned" in request:
                    return decode(request["returned"], self._referent)
                if "failed" in request:
                    raise RuntimeError(request["failed"])
                self.answer(request)

        return call


def _text_of(error: BaseException) -> str:
    with contextlib.suppress(BaseException):
        return str(error)[:500]
    return ""
