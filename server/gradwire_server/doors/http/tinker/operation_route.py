"""Routes of a model's operations, whose numbers are used up also by requests that are not valid.

The SDK numbers an operation before it sends it, and goes on with the next number whatever the answer is. An operation
that was refused without using up its number would let all later ones of its model wait for it for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from gradwire_proto.v1 import training_pb2 as pb
from pydantic import ValidationError

from gradwire_server.doors.http.errors import invalid_body
from gradwire_server.doors.http.tinker.models import Models
from gradwire_server.doors.http.tinker.training_requests import OperationRequest

OPERATIONS = {
    "/optim_step": ("step", pb.Operation(optim_step=pb.OptimStep())),
    "/save_weights": ("save", pb.Operation(save_checkpoint=pb.SaveCheckpoint())),
    "/save_weights_for_sampler": ("save_sampler", pb.Operation(save_checkpoint=pb.SaveCheckpoint(weights_only=True))),
    "/save_weights_external": ("save_external", pb.Operation(export=pb.ExportModel())),
    "/load_weights": ("load", pb.Operation(load_checkpoint=pb.LoadCheckpoint())),
}
"""For each route, the kind of its result, and an operation to fail in place of one that cannot be parsed."""


def operation_route(models: Models) -> type[APIRoute]:
    """The class of routes over these models."""

    class OperationRoute(APIRoute):
        """A route that answers a body with a wrong field with a promise, which fails."""

        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            """Wrap FastAPI's handler."""
            handle, known = super().get_route_handler(), OPERATIONS.get(self.path)

            async def handled(request: Request) -> Response:
                try:
                    return await handle(request)
                except RequestValidationError as error:
                    if known is None:
                        raise
                    try:
                        asked = OperationRequest.model_validate(error.body)
                    except ValidationError:
                        raise error from None
                    kind, operation = known
                    caller = request.scope["gradwire.caller"]
                    promise = await models.submit(
                        caller, asked.model_id, asked.seq_id, kind, operation, refusal=invalid_body(error)
                    )
                    return JSONResponse({"request_id": promise, "model_id": asked.model_id})

            return handled

    return OperationRoute
