"""Records which files a Python process executes while the file ``on`` exists in the folder ``GRADWIRE_WALK``.

Python imports this module at its start when its folder is on ``PYTHONPATH``, before any thread of the process begins.
The process writes ``started-PID`` when it begins to record, and ``files-PID`` with one file a line when ``on`` is gone.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any


def record(folder: Path) -> None:
    files: set[str] = set()
    recording = False

    def called(frame: FrameType, event: str, arg: Any) -> None:
        # The heartbeat's thread reports beside the walk, and only sometimes during it.
        if recording and event == "call" and threading.current_thread().name != "heartbeat":
            files.add(frame.f_code.co_filename)

    def watch() -> None:
        nonlocal recording
        while True:
            wanted = (folder / "on").exists()
            if wanted and not recording:
                recording = True
                (folder / f"started-{os.getpid()}").touch()
            if recording and not wanted:
                recording = False
                part = folder / f"part-{os.getpid()}"
                part.write_text("\n".join(sorted(files)))
                part.rename(folder / f"files-{os.getpid()}")
            time.sleep(0.01)

    threading.Thread(target=watch, daemon=True).start()
    threading.setprofile(called)
    sys.setprofile(called)


if "GRADWIRE_WALK" in os.environ:
    record(Path(os.environ["GRADWIRE_WALK"]))
