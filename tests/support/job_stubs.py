"""Raw stubs of jobs and files, and what most tests ask of them. No worker runs: ``job_workers`` is 0."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from gradwire_proto.v1 import jobs_pb2 as jobs
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_proto.v1.jobs_pb2_grpc import JobServiceStub

from support.front import Door
from support.keyed import Keyed, error_of

ROW = b'{"prompt": "1 and 1?", "completion": "2"}\n'
NO_WORKERS: dict[str, Any] = {"job_workers": 0}


async def stub_of(door: Door, secret: str = "") -> Any:
    return Keyed(JobServiceStub((await door.client()).channel), secret)


async def upload(stub: Any, content: bytes = ROW * 3, key: str = "", **file: Any) -> jobs.File:
    described = jobs.File(**{"filename": "data.jsonl", "purpose": "fine-tune"} | file)

    async def frames() -> AsyncIterator[jobs.UploadFileFrame]:
        yield jobs.UploadFileFrame(file=described, idempotency_key=key)
        yield jobs.UploadFileFrame(chunk=content)

    made: jobs.File = await stub.UploadFile(frames())
    return made


async def create(stub: Any, key: str = "", recipe: str = "sft", **settings: Any) -> jobs.Job:
    if "data" not in settings:
        settings["data"] = (await upload(stub)).file_id
    spec = jobs.JobSpec(recipe=recipe, settings=json.dumps({"model": "tiny"} | settings))
    made: jobs.Job = await stub.CreateJob(jobs.CreateJobRequest(spec=spec, idempotency_key=key))
    return made


async def refused(call: Any) -> pb.Error:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return error_of(caught.value)
