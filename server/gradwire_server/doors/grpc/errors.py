"""How the core's errors look to gRPC: one map from codes to statuses, and the metadata that carries the whole error."""

from __future__ import annotations

import grpc
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.errors import Code

GRPC_STATUS: dict[Code, grpc.StatusCode] = {
    pb.ERROR_CODE_UNSPECIFIED: grpc.StatusCode.INTERNAL,
    pb.ERROR_CODE_INTERNAL: grpc.StatusCode.INTERNAL,
    pb.ERROR_CODE_INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    pb.ERROR_CODE_INVALID_BATCH: grpc.StatusCode.INVALID_ARGUMENT,
    pb.ERROR_CODE_UNKNOWN_LOSS: grpc.StatusCode.INVALID_ARGUMENT,
    pb.ERROR_CODE_UNKNOWN_MODEL: grpc.StatusCode.NOT_FOUND,
    pb.ERROR_CODE_UNKNOWN_RUN: grpc.StatusCode.NOT_FOUND,
    pb.ERROR_CODE_UNKNOWN_CHECKPOINT: grpc.StatusCode.NOT_FOUND,
    pb.ERROR_CODE_UNKNOWN_OPERATION: grpc.StatusCode.NOT_FOUND,
    pb.ERROR_CODE_ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    pb.ERROR_CODE_SEQ_REUSED: grpc.StatusCode.ALREADY_EXISTS,
    pb.ERROR_CODE_SEQ_GAP: grpc.StatusCode.OUT_OF_RANGE,
    pb.ERROR_CODE_STALE_EPOCH: grpc.StatusCode.FAILED_PRECONDITION,
    pb.ERROR_CODE_RUN_BUSY: grpc.StatusCode.FAILED_PRECONDITION,
    pb.ERROR_CODE_ABORTED_PREDECESSOR: grpc.StatusCode.ABORTED,
    pb.ERROR_CODE_CANCELLED: grpc.StatusCode.CANCELLED,
    pb.ERROR_CODE_ABANDONED: grpc.StatusCode.ABORTED,
    pb.ERROR_CODE_LIMIT_EXCEEDED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    pb.ERROR_CODE_UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    pb.ERROR_CODE_PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
    pb.ERROR_CODE_NON_FINITE: grpc.StatusCode.FAILED_PRECONDITION,
    pb.ERROR_CODE_OUT_OF_MEMORY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    pb.ERROR_CODE_ENGINE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    pb.ERROR_CODE_QUARANTINED: grpc.StatusCode.ABORTED,
    pb.ERROR_CODE_STORAGE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    pb.ERROR_CODE_CHECKPOINT_CORRUPT: grpc.StatusCode.DATA_LOSS,
    pb.ERROR_CODE_PAYLOAD_CORRUPT: grpc.StatusCode.DATA_LOSS,
    pb.ERROR_CODE_RESULT_RELEASED: grpc.StatusCode.OUT_OF_RANGE,
    pb.ERROR_CODE_REWOUND: grpc.StatusCode.FAILED_PRECONDITION,
    pb.ERROR_CODE_NOTHING_TO_STEP: grpc.StatusCode.FAILED_PRECONDITION,
    pb.ERROR_CODE_UNSUPPORTED: grpc.StatusCode.FAILED_PRECONDITION,
    pb.ERROR_CODE_SHUTTING_DOWN: grpc.StatusCode.UNAVAILABLE,
}
