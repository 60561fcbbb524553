"""Conversion of exceptions into the error that a person reads."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from gradwire_losses.batch import BatchError
from gradwire_losses.registry import LossConfig, LossSpec
from gradwire_proto.codec import CodecError
from gradwire_proto.v1 import training_pb2
from pydantic import ValidationError

from gradwire_server.engine.errors import DamagedFile, GroupBroken, OperationError
from gradwire_server.stores.store import StoreError, StoreFull

T = TypeVar("T")
logger = logging.getLogger(__name__)

_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def to_error(error: Exception, what: str) -> training_pb2.Error:
    """Convert an exception into an error of the wire.

    An unexpected exception is logged with its traceback; the client gets only its type and a request id.

    Args:
        what: Description of the work that failed, for the log.
    """
    if isinstance(error, OperationError):
        return error.to_proto()
    if isinstance(error, BatchError):
        return OperationError.from_batch_error(error).to_proto()
    if isinstance(error, CodecError):
        return training_pb2.Error(
            code=training_pb2.ERROR_CODE_INVALID_BATCH, message=str(error), field=error.field, rule=error.rule
        )
    if isinstance(error, StoreError):
        full = isinstance(error, StoreFull)
        code = training_pb2.ERROR_CODE_STORAGE_FULL if full else training_pb2.ERROR_CODE_INTERNAL
        return training_pb2.Error(code=code, message=str(error))
    if is_out_of_memory(error):
        logger.warning("out of memory in %s: %s", what, error)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return training_pb2.Error(
            code=training_pb2.ERROR_CODE_OUT_OF_MEMORY,
            message="the server ran out of memory; the run is as it was. Shorter rows or a smaller group help, as do "
            "gradient_checkpointing at create_run, and the server's --microbatch-tokens and --activation-budget-gib",
        )
    request_id = secrets.token_hex(6)
    logger.error("%s failed; request id %s", what, request_id, exc_info=error, extra={"request_id": request_id})
    return training_pb2.Error(
        code=training_pb2.ERROR_CODE_INTERNAL,
        message=f"a fault of the server ({type(error).__name__}); its log has the details under {request_id}",
        request_id=request_id,
    )


def is_fatal(error: Exception) -> bool:
    """Whether the device is unusable from now on, a run's tensors are lost, or the group of ranks is broken.

    Only a new process helps then.
    """
    if isinstance(error, (DamagedFile, GroupBroken)):
        return True
    kind = getattr(torch, "AcceleratorError", None)
    return kind is not None and isinstance(error, kind) and not is_out_of_memory(error)


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, on the device or the host; a smaller attempt may succeed."""
    on_cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return on_cpu or isinstance(error, (MemoryError, torch.OutOfMemoryError))


def read_config(loss: LossSpec, kwargs: Mapping[str, Any]) -> LossConfig:
    """Validate a loss's arguments.

    Raises:
        OperationError: INVALID_ARGUMENT, naming the argument and its allowed values.
    """
    try:
        return loss.config.model_validate(dict(kwargs))
    except ValidationError as error:
        problems = error.errors()
    argument = problems[0]["loc"][:1]
    # Of an argument with several forms, what is wrong within the form that was meant.
    meant = (each for each in problems if each["loc"][:1] == argument)
    first = max(meant, key=lambda each: (len(each["loc"]), each["type"] != "string_type"))
    name = str(first["loc"][0]) if first["loc"] else ""
    entry = str(first["loc"][-1]) if first["loc"] else ""
    schema = loss.config.model_json_schema()
    properties = schema.get("properties", {})
    said = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
        rule = f"one of {', '.join(properties)}" if properties else "no arguments"
        message = f"{loss.name} has no argument {name!r}; it has: {', '.join(properties) or 'none'}"
    elif not name:
        rule, message = said, f"the arguments of {loss.name} do not go together: {said}"
    elif first["type"] == "extra_forbidden":
        form = str(first["loc"][-2])  # with the name of a check after it, if there is one
        known = ", ".join(
            key for title, each in schema["$defs"].items() if title in form for key in each.get("properties", ())
        )
        rule, message = f"one of {known}", f"{loss.name}: {name} has no entry {entry!r}; it has: {known}"
    elif first["type"] == "missing":
        rule, message = f"{entry} is given", f"{loss.name}: {name} is {first['input']!r}, without the entry {entry!r}"
    elif first["type"] == "model_type":
        rule = "one of the forms of the argument"
        message = f"{loss.name}: {name} is {first['input']!r}; it takes {properties[name].get('description', rule)}"
    else:
        span = _range(name, properties.get(name, {}))
        rule = span or said
        of_type = first["type"].endswith(("_type", "_parsing"))
        must = (f": {said}" if of_type or not span else "") + (f"; the rule is {span}" if span else "")
        within = len(first["loc"]) > 2 and not isinstance(first["loc"][-1], int)
        message = f"{loss.name}: {f'the {entry!r} of {name}' if within else name} is {first['input']!r}{must}"
    raise OperationError(training_pb2.ERROR_CODE_INVALID_ARGUMENT, message, field=name, rule=rule)


def _range(name: str, schema: Mapping[str, Any]) -> str:
    """The rule in a property's JSON schema, such as ``"0 <= x"`` or ``"x in {'a', 'b'}"``; empty if it has none."""
    choices = [schema, *schema.get("anyOf", ())]
    for choice in choices:
        if "enum" in choice:
            return f"{name} in {{{', '.join(map(repr, choice['enum']))}}}"
        bounds = [f"{name} {sign} {choice[key]:g}" for key, sign in _BOUNDS.items() if key in choice]
        if bounds:
            return " and ".join(bounds)
    return ""


def tried(work: Callable[[], T], *, alone: bool) -> T | None:
    """Do the work of one run; in company None if it raises, because repeating it alone raises the same."""
    try:
        return work()
    except Exception as error:  # whatever it is, the other runs go on
        if alone or is_fatal(error):
            raise
        return None
