"""The base of all operations: the run's queue, its link to the server, and the losses that the server has."""

from __future__ import annotations

from gradwire_proto.v1 import training_pb2 as pb

from gradwire.losses import LossCatalogue
from gradwire.results import Columns
from gradwire.wire.link import RunLink
from gradwire.wire.processes import Connected
from gradwire.wire.transport import Transport


class Submitter(Connected):
    """One run, to which operations are submitted."""

    elsewhere = "pass its run_id on, and call get_training_client(run_id) of a connection there"

    def __init__(self, transport: Transport, link: RunLink, losses: LossCatalogue) -> None:
        self._transport = transport
        self._link, self._queue = link, link.queue
        self._losses = losses

    @property
    def run_id(self) -> str:
        """The run's id, accepted by ``get_training_client`` from this or any other process."""
        return self._queue.run_id

    def __repr__(self) -> str:
        return f"<TrainingClient {self.run_id}>"


def no_result(result: pb.OperationResult, columns: Columns) -> None:
    """Decode the result of an operation that returns nothing."""
