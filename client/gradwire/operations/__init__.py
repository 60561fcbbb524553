"""The operations of a run: one module for those that train it, one for those that read it, one for what they save."""

from gradwire.operations.checkpoints import CheckpointOperations
from gradwire.operations.scoring import ScoringOperations
from gradwire.operations.training import TrainingOperations

__all__ = ["Operations"]


class Operations(TrainingOperations, ScoringOperations, CheckpointOperations):
    """The operations of one run. Every method submits at once, in program order, and returns a future.

    A failed operation leaves the run unchanged. Operations that were submitted behind it before its error was raised,
    up to and including the next ``optim_step`` or ``train_step``, fail with an
    :class:`~gradwire.errors.AbortedPredecessorError` that names the first cause.
    """
