"""Errors: every code has an exception, the drawn tree is the real one, and nothing of gRPC leaves the client."""

from __future__ import annotations

import inspect
import re
from typing import Any

import gradwire
import pytest
from gradwire import errors
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.doors.grpc.interceptors import GRPC_STATUS
from support.scripted import Script, ScriptedService, scripted_run, scripted_server

CODES = pb.ErrorCode.values()


def test_every_code_has_an_exception_and_a_status() -> None:
    assert set(errors.EXCEPTIONS) == set(CODES) == set(GRPC_STATUS)
    mapped = [kind for code, kind in errors.EXCEPTIONS.items() if code != pb.ERROR_CODE_UNSPECIFIED]
    assert len(mapped) == len(set(mapped)), "one class a code"


def test_the_drawn_tree_is_the_real_one() -> None:
    drawn: dict[str, str] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^    ([│├└─ ]*)(\w+Error)\b", line)
        if match:
            depth = len(match[1]) // 4
            above[depth:] = [match[2]]
            drawn[match[2]] = above[depth - 1] if depth else "Exception"
    real = {
        name: kind.__base__.__name__
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.GradwireError) and kind.__base__ is not None
    }
    assert drawn == real
    for name in real:
        assert getattr(gradwire, name) is getattr(errors, name)


@pytest.mark.parametrize("code", CODES, ids=pb.ErrorCode.Name)
def test_from_wire(code: pb.ErrorCode.ValueType) -> None:
    message = pb.Error(code=code, message="what", field="rewards", row=0, rule="finite", cause_seq=7, request_id="r-1")
    error = errors.from_wire(message)
    assert type(error) is errors.EXCEPTIONS[code]
    assert (str(error), error.field, error.row, error.rule, error.request_id) == ("what", "rewards", 0, "finite", "r-1")
    if isinstance(error, errors.AbortedPredecessorError):
        assert error.cause_seq == 7
    assert errors.from_wire(pb.Error(code=code, message="what")).row is None


def test_a_code_of_a_newer_server() -> None:
    assert type(errors.from_wire(pb.Error(code=9999, message="new"))) is errors.InternalServerError  # type: ignore[arg-type]


async def test_details_make_the_exception() -> None:
    async with scripted_run(Script()) as (_, service):
        with pytest.raises(gradwire.UnknownModelError, match="no such model") as caught:
            await service.create_run("gpt-9")
        assert caught.value.field == "base_model"
        assert caught.value.__cause__ is None
        with pytest.raises(gradwire.UnsupportedError, match="UNIMPLEMENTED"):
            await service.delete_run("run-a")


async def test_nobody_there() -> None:
    async with scripted_server(Script()) as (address, _):
        pass
    with pytest.raises(gradwire.ConnectionLostError, match=address):
        await gradwire.connect(address, connect_timeout=0.3)


async def test_unknown_is_never_tried_again() -> None:
    calls = []

    class Broken(ScriptedService):
        async def GetServerInfo(self, request: Any, context: Any) -> pb.ServerInfo:
            calls.append(1)
            raise RuntimeError("a fault")

    async with scripted_server(Script(), service=Broken) as (address, _):
        with pytest.raises(gradwire.InternalServerError, match="UNKNOWN"):
            await gradwire.connect(address)
    assert calls == [1]


async def test_the_key_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script()
    async with scripted_server(script) as (address, _):
        async with gradwire.connect(address, api_key="secret"):
            assert ("authorization", "Bearer secret") in script.metadata
        monkeypatch.setenv("GRADWIRE_API_KEY", "other")
        async with gradwire.connect(address):
            assert ("authorization", "Bearer other") in script.metadata


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({}, "models"),
        ({"address": "127.0.0.1:1", "models": ["tiny"]}, "address"),
        ({"address": "127.0.0.1:1", "client_cert": "c.pem"}, "client_key"),
    ],
)
async def test_settings_that_contradict_each_other(settings: dict[str, object], field: str) -> None:
    with pytest.raises(gradwire.InvalidArgumentError) as caught:
        await gradwire.connect(**settings)  # type: ignore[arg-type]
    assert caught.value.field == field
