"""Scores (one, a JSON list, or JSON lines), and items to rate on the page."""

from __future__ import annotations

import json
from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import APIRouter, Header, Request
from fastapi.responses import JSONResponse
from gradwire_http.request_headers import headers_of, media_type
from pydantic import TypeAdapter, ValidationError
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from gradwire_feedback.api.access import Rater, Reader, TheContext, Trainer
from gradwire_feedback.api.bodies import ROW_FIELDS, ROWS, CountedRoute, check
from gradwire_feedback.api.errors import PROBLEMS, SHOWN_ERRORS, fields_of, problem, sentence
from gradwire_feedback.api.schemas import (
    AgentId,
    AgreementOut,
    ErrorField,
    FeedbackIn,
    FeedbackOut,
    ItemIn,
    ItemOut,
)
from gradwire_feedback.context import Context
from gradwire_feedback.database.tables import Item, new_id
from gradwire_feedback.settings import LIMITS
from gradwire_feedback.statistics.agreement import agreement
from gradwire_feedback.store import feedback, rating
from gradwire_feedback.store.problems import ProblemError, TooLargeError, UnprocessableError

router = APIRouter(prefix="/api/policies", tags=["feedback"], responses=PROBLEMS, route_class=CountedRoute)

JSON_LINES = ("application/x-ndjson", "application/jsonl", "application/ndjson", "text/plain")
REF = "#/components/schemas/FeedbackIn"
BODY: dict[str, Any] = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {
                "anyOf": [
                    {"$ref": REF},
                    {"type": "array", "items": {"$ref": REF}, "minItems": 1, "maxItems": LIMITS.batch_rows},
                ]
            }
        },
        "application/x-ndjson": {"schema": {"type": "string", "description": "One FeedbackIn per line."}},
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file"],
                "properties": {
                    "file": {"type": "string", "format": "binary", "description": "JSON lines, one FeedbackIn each."}
                },
            }
        },
    },
}
_one: TypeAdapter[FeedbackIn] = TypeAdapter(FeedbackIn)


class InvalidRowsError(Exception):
    """Rows of a request are not valid feedback."""

    def __init__(self, errors: list[ErrorField]) -> None:
        super().__init__(sentence(errors))
        self.errors = errors


class UnsupportedTypeError(ProblemError):
    status = 415


@router.post(
    "/feedback/{agent_id}",
    status_code=201,
    response_model=FeedbackOut | list[FeedbackOut],
    openapi_extra={"requestBody": BODY},
)
async def submit_feedback(
    agent_id: AgentId,
    request: Request,
    context: TheContext,
    caller: Rater,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=200, pattern=r"^[!-~]+$")] = None,
) -> JSONResponse:
    """Stores one score or many; if one is invalid, none is stored.

    A JSON object is one score; a JSON list or JSON lines (a body or a file upload) are many. A request that is
    repeated with the same `Idempotency-Key` within seven days is stored once, and gets the first answer again.
    """
    try:
        rows, single = await _read_rows(request)
    except InvalidRowsError as error:
        return problem(422, str(error), error.errors)
    answer = await run_in_threadpool(_store, context, agent_id, rows, single, caller.name, idempotency_key)
    return JSONResponse(answer, status_code=201)


async def _read_rows(request: Request) -> tuple[list[FeedbackIn], bool]:
    kind = media_type(headers_of(request.headers.raw).get("content-type", ""))
    if kind in ("application/json", ""):
        body = await request.body()
        await check(body, ROWS)
        return await run_in_threadpool(_json, body)
    if kind in JSON_LINES:
        return await _counted_lines(await request.body())
    if kind == "multipart/form-data":
        async with request.form(max_files=1, max_fields=1) as form:
            file = form.get("file")
            if file is None or isinstance(file, str):
                raise UnprocessableError("file: upload the JSON lines as the file of the field 'file'")
            return await _counted_lines(await file.read())
    raise UnsupportedTypeError(
        f"{kind[:100]} is not supported: send application/json, application/x-ndjson or multipart/form-data"
    )


def _json(body: bytes) -> tuple[list[FeedbackIn], bool]:
    content = _parse(body, "the body")
    single = isinstance(content, dict)
    return _rows([content] if single else content, "" if single else "row"), single


async def _counted_lines(body: bytes) -> tuple[list[FeedbackIn], bool]:
    await check(body, ROWS)
    return await run_in_threadpool(_lines, body), False


def _parse(text: bytes | str, place: str) -> Any:
    try:
        return json.loads(text)
    except UnicodeDecodeError as error:
        raise UnprocessableError(f"{place} is not UTF-8: {error.reason} at byte {error.start}") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise UnprocessableError(f"{place} is not JSON: {error}") from None
    except ValueError:  # Python reads no more digits
        raise UnprocessableError(f"{place} holds a whole number of more than 4,300 digits") from None


def _lines(body: bytes) -> list[FeedbackIn]:
    try:
        lines = body.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UnprocessableError(f"the lines are not UTF-8: {error.reason} at byte {error.start}") from None
    return _rows([(n, _parse(line, f"line {n}")) for n, line in enumerate(lines, 1) if line.strip()], "line")


def _rows(content: Any, word: str) -> list[FeedbackIn]:
    """Validate each row; errors name it: `row 0` of a list, `line 1` of JSON lines."""
    if not isinstance(content, list):
        raise UnprocessableError("the body is neither a JSON object nor a list of them")
    if not content:
        raise UnprocessableError("there is no feedback in the body")
    if len(content) > LIMITS.batch_rows:
        raise TooLargeError(f"{len(content)} rows; a request may have at most {LIMITS.batch_rows}: send them in parts")
    rows: list[FeedbackIn] = []
    errors: list[ErrorField] = []
    for number, row in content if word == "line" else enumerate(content):
        if len(errors) >= SHOWN_ERRORS:
            break
        if not isinstance(row, dict):
            errors.append(ErrorField(field=f"{word} {number}", message="this is not a JSON object"))
            continue
        if len(row) > ROW_FIELDS:
            message = f"this has {len(row)} fields; a row has at most {ROW_FIELDS}"
            errors.append(ErrorField(field=f"{word} {number}" if word else "body", message=message))
            continue
        try:
            rows.append(_one.validate_python(row))
        except ValidationError as error:
            errors += fields_of(error.errors(), f"{word} {number}" if word else "")
    if errors:
        raise InvalidRowsError(errors[:SHOWN_ERRORS])
    return rows


def _store(context: Context, agent_id: str, rows: list[FeedbackIn], single: bool, caller: str, key: str | None) -> Any:
    digest = feedback.request_digest([row.model_dump() for row in rows]) if key else ""
    for last in (False, True):
        try:
            with context.database.write() as session:
                if key and (earlier := feedback.earlier_answer(session, caller, agent_id, key, digest)) is not None:
                    return earlier
                scores = [feedback.Score(**row.model_dump()) for row in rows]
                stored = [
                    FeedbackOut(id=row.id, agent_id=agent_id, score=row.score, created_at=row.created_at).model_dump(
                        mode="json", by_alias=True
                    )
                    for row in feedback.add_feedback(session, agent_id, scores)
                ]
                answer = stored[0] if single else stored
                if key:
                    feedback.keep_answer(session, caller, agent_id, key, digest, answer)
                return answer
        except sa.exc.IntegrityError:  # a concurrent request with the same key finished first: return its answer
            if last or not key:
                raise
    raise AssertionError("unreachable")


@router.post("/items/{agent_id}", status_code=201)
def add_item(agent_id: AgentId, item: ItemIn, context: TheContext, caller: Trainer) -> ItemOut:
    """Adds an answer that was made elsewhere, or several side by side, to the queue of the rating page."""
    with context.database.write() as session:
        stored = store_item(session, agent_id, item)
        return ItemOut(
            id=stored.id, agent_id=agent_id, run_ids=[answer.run_id for answer in stored.answers],
            raters=stored.raters, created_at=stored.created_at,
        )  # fmt: skip


def store_item(session: Session, agent_id: str, item: ItemIn) -> Item:
    """Put an item in the queue of the rating page.

    Raises:
        ConflictError: A run id is already in use.
    """
    answers = [rating.NewAnswer(item.run_id or new_id(), item.response)]
    answers += [rating.NewAnswer(other.run_id or new_id(), other.response) for other in item.others]
    return rating.add_item(session, agent_id, item.prompt, answers, item.raters, ask=item.ask)


@router.get("/{agent_id}/agreement")
def get_agreement(agent_id: AgentId, context: TheContext, caller: Reader) -> AgreementOut:
    """Returns the agreement of raters on the answers that several of them scored on the page."""
    with context.database.read() as session:
        table = rating.score_table(session, agent_id)
    return AgreementOut(raters=table.shape[0], answers=table.shape[1], krippendorff_alpha=agreement(table))
