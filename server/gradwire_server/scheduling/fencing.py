"""Who may write to a run: the writer with its present epoch, and a new operation only under a new number."""

from __future__ import annotations

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.errors import ServiceError
from gradwire_server.journal.run_row import RunRecord


class Fencing:
    """The check that keeps older writers of a run out.

    Attributes:
        record: The run's row.
    """

    record: RunRecord

    def check_epoch(self, epoch: int) -> None:
        """Check that an epoch is the current writer's.

        Raises:
            ServiceError: STALE_EPOCH; REWOUND if the epoch is from before the run's last rewind.
        """
        record = self.record
        if epoch == record.epoch:
            return
        if 0 < epoch <= record.rewound_epoch:
            raise self.rewound()
        raise ServiceError(
            pb.ERROR_CODE_STALE_EPOCH,
            f"another writer ({record.writer or 'unknown'}) has taken over the run {record.run_id}: this one writes"
            f" with epoch {epoch}, the run is at {record.epoch}; open the run again to take it back",
        )

    def rewound(self) -> ServiceError:
        """The error for readers and writers from before the run's last rewind."""
        return ServiceError(
            pb.ERROR_CODE_REWOUND,
            f"the run {self.record.run_id} went back to operation {self.record.rewound_to_seq} (durability=checkpoint"
            " and the engine was restarted): later operations are void; open the run again and go on from there",
        )


def reused(seq: int) -> ServiceError:
    """SEQ_REUSED for a number that another operation has."""
    return ServiceError(
        pb.ERROR_CODE_SEQ_REUSED,
        f"number {seq} was used for another operation; a new operation takes a new number",
        field="seq",
    )
