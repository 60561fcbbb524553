"""gradwire: the training loop on your laptop, the gradients on the GPU box.

``connect`` to a server, create a run, and train: see :class:`ServiceClient` and :class:`TrainingClient`. Scripts
without an event loop use :mod:`gradwire.sync`.
"""

import os as _os
from importlib.metadata import version as _version

_os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read at gRPC's import; what fails is raised or logged here

from gradwire import sync
from gradwire.connection import Connection, connect
from gradwire.descriptions import (
    EngineInfo,
    LossField,
    LossInfo,
    ModelInfo,
    RunChange,
    RunInfo,
    ServerInfo,
    TokenizerInfo,
)
from gradwire.errors import (
    AbandonedError,
    AbortedPredecessorError,
    AccessError,
    AlreadyExistsError,
    CheckpointCorruptError,
    ConnectionLostError,
    DeadlineExceededError,
    EngineUnavailableError,
    GradwireError,
    InternalServerError,
    InvalidArgumentError,
    InvalidBatchError,
    InvalidRequestError,
    LimitExceededError,
    NonFiniteError,
    NotFoundError,
    NothingToStepError,
    OperationCancelledError,
    OperationError,
    OutOfMemoryError,
    PayloadCorruptError,
    PermissionDeniedError,
    QuarantinedError,
    ResultReleasedError,
    RewoundError,
    RunBusyError,
    RunParkedError,
    SequenceGapError,
    SequenceReusedError,
    ServerError,
    ServerStartError,
    ServiceClosedError,
    ShuttingDownError,
    StaleEpochError,
    StorageFullError,
    UnauthenticatedError,
    UnknownCheckpointError,
    UnknownLossError,
    UnknownModelError,
    UnknownOperationError,
    UnknownRunError,
    UnsupportedError,
    WouldDeadlockError,
    WriterError,
)
from gradwire.futures import Future, gather
from gradwire.history import History
from gradwire.rendering import Rendered
from gradwire.results import Checkpoint, LossResult, OptimStepResult, Sample, SampledToken, SampleResult, Timings
from gradwire.sampling import SamplingClient, TokenStream
from gradwire.service import ServiceClient
from gradwire.training import TrainingClient
from gradwire.uploads import Upload

__all__ = [
    "AbandonedError",
    "AbortedPredecessorError",
    "AccessError",
    "AlreadyExistsError",
    "Checkpoint",
    "CheckpointCorruptError",
    "Connection",
    "ConnectionLostError",
    "DeadlineExceededError",
    "EngineInfo",
    "EngineUnavailableError",
    "Future",
    "GradwireError",
    "History",
    "InternalServerError",
    "InvalidArgumentError",
    "InvalidBatchError",
    "InvalidRequestError",
    "LimitExceededError",
    "LossField",
    "LossInfo",
    "LossResult",
    "ModelInfo",
    "NonFiniteError",
    "NotFoundError",
    "NothingToStepError",
    "OperationCancelledError",
    "OperationError",
    "OptimStepResult",
    "OutOfMemoryError",
    "PayloadCorruptError",
    "PermissionDeniedError",
    "QuarantinedError",
    "Rendered",
    "ResultReleasedError",
    "RewoundError",
    "RunBusyError",
    "RunChange",
    "RunInfo",
    "RunParkedError",
    "Sample",
    "SampleResult",
    "SampledToken",
    "SamplingClient",
    "SequenceGapError",
    "SequenceReusedError",
    "ServerError",
    "ServerInfo",
    "ServerStartError",
    "ServiceClient",
    "ServiceClosedError",
    "ShuttingDownError",
    "StaleEpochError",
    "StorageFullError",
    "Timings",
    "TokenStream",
    "TokenizerInfo",
    "TrainingClient",
    "UnauthenticatedError",
    "UnknownCheckpointError",
    "UnknownLossError",
    "UnknownModelError",
    "UnknownOperationError",
    "UnknownRunError",
    "UnsupportedError",
    "Upload",
    "WouldDeadlockError",
    "WriterError",
    "connect",
    "gather",
    "sync",
]

__version__ = _version("gradwire")
