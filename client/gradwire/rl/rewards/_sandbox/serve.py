"""The process that holds the function and forks a guard for each request."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import sys
import tempfile

from .frames import read_frame, write_frame
from .guard import evaluate
from .isolation import die_with_parent
from .rebuild import rebuild


def serve() -> None:
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setup = pickle.loads(read_frame(requests))
    sys.path[:] = setup["sys_path"]
    try:
        function = rebuild(setup["function"])
    except BaseException as error:  # reported to the caller
        write_frame(replies, json.dumps({"error": f"could not be set up: {type(error).__name__}: {error}"}).encode())
        return
    write_frame(replies, b"{}")
    while True:
        try:
            request = read_frame(requests)
        except EOFError:
            return
        folder = tempfile.mkdtemp(prefix="gradwire-reward-")
        guard = os.fork()
        if guard == 0:
            code = 1
            try:
                die_with_parent()
                os.setpgid(0, 0)
                os.close(requests)
                write_frame(
                    replies, json.dumps(evaluate(function, pickle.loads(request), setup["limits"], folder)).encode()
                )
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(guard, 0)
        shutil.rmtree(folder, ignore_errors=True)
        if status:
            write_frame(replies, json.dumps({"error": f"the sandbox itself failed (status {status})"}).encode())
