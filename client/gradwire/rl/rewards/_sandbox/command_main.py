"""Run a command that can write to one folder alone and sees its own processes alone, which end with it.

Arguments: the setup as JSON, and the folder of this package. The network stays: an agent has to reach its model.
"""

from __future__ import annotations

import json
import os
import sys

from .isolation import (
    CLONE_NEWIPC,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    die_with_parent,
    drop_capabilities,
    enclose,
    forbid_new_privileges,
    map_user,
    unshare,
)

REFUSED = 126
"""Exit status if the machine cannot isolate the command, as shells have it for what cannot be executed."""


def main() -> None:
    setup = json.loads(sys.argv[1])
    die_with_parent()
    user, group = os.geteuid(), os.getegid()
    if sys.platform != "linux" or not unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC):
        _refuse("namespaces of its own")
    map_user(user, group)
    first = os.fork()
    if first:
        _end_as(os.waitpid(first, 0)[1])
    die_with_parent()
    if missing := enclose(setup["folder"]):
        _refuse(", ".join(missing))
    child = os.fork()
    if not child:
        drop_capabilities()
        forbid_new_privileges()
        os.chdir(setup["work"])
        try:
            os.execvp(setup["command"][0], setup["command"])
        except OSError as error:
            print(f"{setup['command'][0]}: {error.strerror}", file=sys.stderr, flush=True)
            os._exit(127)
    while True:  # the first process of a namespace adopts what others leave behind
        number, status = os.wait()
        if number == child:
            _end_as(status)


def _refuse(what: str) -> None:
    print(f"not run: this machine refuses {what}; allow user namespaces", file=sys.stderr, flush=True)
    os._exit(REFUSED)


def _end_as(status: int) -> None:
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)
