"""A process that lists a key's runs again and again: ``python steady_caller.py ADDRESS SECRET FILE``.

It appends when each call began and how long it took, in seconds of the monotonic clock. A process of its own is held up
by nobody who sends large bodies.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import grpc
from gradwire_proto.v1.training_pb2 import ListRunsRequest
from gradwire_proto.v1.training_pb2_grpc import TrainingServiceStub

PAUSE_S = 0.005


def call(address: str, secret: str, file: Path) -> None:
    metadata = (("authorization", f"Bearer {secret}"),)
    with grpc.insecure_channel(address) as channel, file.open("ab", buffering=0) as times:
        stub = TrainingServiceStub(channel)
        while True:
            began = time.monotonic()
            stub.ListRuns(ListRunsRequest(), metadata=metadata)
            times.write(f"{began} {time.monotonic() - began}\n".encode())  # whole lines only
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    call(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
