"""Access control: the key of a request is checked before anything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from gradwire_feedback.context import Context
from gradwire_feedback.store.keys import Caller, Role, caller_of, digest_of
from gradwire_feedback.store.problems import ForbiddenError

_bearer = HTTPBearer(auto_error=False, description="A key made by `gradwire feedback keys create`.")


def context_of(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


def _require(role: Role) -> Callable[..., Caller]:
    def check(
        context: Annotated[Context, Depends(context_of)],
        credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
    ) -> Caller:
        with context.database.read() as session:
            caller = caller_of(session, digest_of(credentials.credentials) if credentials else None)
        if not caller.may(role):
            raise ForbiddenError(
                f"the key {caller.name} has the role {caller.role}; this request needs the role {role}"
            )
        return caller

    return check


TheContext = Annotated[Context, Depends(context_of)]
Rater = Annotated[Caller, Depends(_require("rate"))]
Reader = Annotated[Caller, Depends(_require("read"))]
Trainer = Annotated[Caller, Depends(_require("train"))]
