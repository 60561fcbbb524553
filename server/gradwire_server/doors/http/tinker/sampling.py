"""Routes of sampling."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter
from gradwire_http.models import BoundedModel
from gradwire_proto.v1 import tinker_pb2
from gradwire_proto.v1 import training_pb2 as pb
from pydantic import Base64Bytes, Field

from gradwire_server.access.calls import CallKind
from gradwire_server.core.core import Core
from gradwire_server.doors.http.protocol import CallerOf
from gradwire_server.doors.http.tinker.images import ChunkImages
from gradwire_server.doors.http.tinker.names import TinkerPath, sampler_id_of
from gradwire_server.doors.http.tinker.prompt_scores import WantedScores, add_prompt_scores
from gradwire_server.doors.http.tinker.results import add_samples
from gradwire_server.doors.http.tinker.samplers import Samplers
from gradwire_server.doors.http.tinker.saved_weights import SavedWeights
from gradwire_server.doors.http.tinker.sessions import session_of
from gradwire_server.doors.http.tinker.store import Name, SamplerRecord, TinkerStore
from gradwire_server.doors.http.tinker.usage import sampling_label
from gradwire_server.errors import ServiceError, invalid, limit_exceeded

MAX_NUMBER = 2**31
MAX_SAMPLE_NUMBER = 2**63
StopId = Annotated[int, Field(ge=0, lt=MAX_NUMBER)]


class CreateSamplerRequest(BoundedModel):
    """A new sampler of a base model or a checkpoint."""

    session_id: Name
    sampling_session_seq_id: int = Field(ge=0, lt=MAX_NUMBER)
    base_model: Name | None = None
    model_path: Name | None = None


class PromptChunk(BoundedModel):
    """A part of a prompt: text, or an image whose file is in base64."""

    type: str = "encoded_text"
    tokens: list[int] | None = None
    data: Base64Bytes | None = None
    expected_tokens: int | None = Field(default=None, lt=MAX_NUMBER)


class PromptTokens(BoundedModel):
    """A prompt as token ids and images."""

    chunks: list[PromptChunk]

    def ids(self, images: ChunkImages) -> list[int]:
        """The ids of all parts. An image has one if any of the prompt's does not say how many it is: then the engine
        puts in the others.

        Args:
            images: Takes the prompt's.
        """
        prompt_ids: list[int] = []
        shown = [chunk for chunk in self.chunks if chunk.type == "image"]
        counted = all(chunk.expected_tokens is not None for chunk in shown)
        images.begin_row()
        for chunk in self.chunks:
            if chunk.type == "image" and chunk.data is not None:
                count = chunk.expected_tokens if counted and chunk.expected_tokens is not None else 1
                prompt_ids += images.add(chunk.data, count, "the prompt", "prompt").tolist()
                continue
            if chunk.tokens is None:
                message = f"the prompt has a chunk of type {chunk.type[:50]!r}; this server reads text and images"
                raise invalid(message, "prompt")
            prompt_ids += chunk.tokens
        if prompt_ids and not 0 <= min(prompt_ids) <= max(prompt_ids) < 2**32:
            raise invalid("the prompt has a token id that no model has", "prompt")
        return prompt_ids


class SampleSettings(BoundedModel):
    """How tokens are drawn."""

    max_tokens: int | None = Field(default=None, ge=0, lt=MAX_NUMBER)
    seed: int | None = None
    stop: str | list[str] | list[StopId] | None = None
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_k: int = Field(default=-1, ge=-1, lt=MAX_NUMBER)
    top_p: float = Field(default=1.0, ge=0, le=1, allow_inf_nan=False)


class AsampleRequest(WantedScores):
    """A prompt to sample from."""

    sampling_session_id: Name | None = None
    seq_id: int | None = Field(default=None, ge=0, lt=MAX_SAMPLE_NUMBER)
    num_samples: int = Field(default=1, ge=1)
    prompt: PromptTokens
    sampling_params: SampleSettings = SampleSettings()
    record_stability_info: bool | None = None


def routes(core: Core, store: TinkerStore, saved: SavedWeights, samplers: Samplers) -> APIRouter:
    """The routes over the door's state."""
    router = APIRouter()

    @router.post("/create_sampling_session")
    async def create_sampling_session(caller: CallerOf, request: CreateSamplerRequest) -> dict[str, str]:
        """Make a sampler of a base model or of a checkpoint."""
        session_of(store, caller.name, request.session_id)
        base_model, source = request.base_model or "", ""
        if request.model_path:
            source = saved.checkpoint(caller, request.model_path)
            base_model = store.models[TinkerPath.read(request.model_path).model_id].base_model
        elif base_model:
            source = base_model = core.model_name(base_model)
        else:
            raise invalid("give a base_model or a model_path", "base_model")
        asked = SamplerRecord(
            owner=caller.name,
            sampler_id=sampler_id_of(request.session_id, request.sampling_session_seq_id),
            session_id=request.session_id,
            base_model=base_model,
            model_path=request.model_path or "",
            source=source,
        )
        made = await samplers.create(caller, request.session_id, request.sampling_session_seq_id, asked)
        return {"type": "create_sampling_session", "sampling_session_id": made.sampler_id}

    @router.get("/samplers/{sampler_id}")
    async def get_sampler(caller: CallerOf, sampler_id: str) -> dict[str, Any]:
        """Return a sampler's model and checkpoint."""
        sampler = samplers.get(caller, sampler_id)
        path = {"model_path": sampler.model_path} if sampler.model_path else {}
        return {"sampler_id": sampler.sampler_id, "base_model": sampler.base_model, **path}

    @router.post("/asample")
    async def asample(caller: CallerOf, request: AsampleRequest) -> dict[str, Any]:
        """Begin to sample."""
        if request.sampling_session_id is None or request.seq_id is None:
            raise invalid("give sampling_session_id and seq_id", "sampling_session_id")
        sampler = samplers.get(caller, request.sampling_session_id)
        most = core.config.limits.max_samples
        if request.num_samples > most:
            raise limit_exceeded(f"num_samples is {request.num_samples}", "max_samples", most, "num_samples")
        if request.record_stability_info:
            message = (
                "record_stability_info goes with the loss stable_reinforce, whose formula is not public: train with "
                "loss_fn=importance_sampling, which needs none"
            )
            raise ServiceError(pb.ERROR_CODE_UNSUPPORTED, message, field="record_stability_info")
        model = core.model_info(sampler.base_model)
        images = ChunkImages(model, core.config.limits)
        prompt = request.prompt.ids(images)
        request.check(len(prompt), core.config.limits)
        room = max(1, min(model.context_length - len(prompt), core.config.limits.max_sample_tokens))
        asked = pb.SampleRequest(
            model=samplers.source(sampler), call=_call(request, room), prompt_ids=[pb.TokenIds(ids=prompt)],
        )  # fmt: skip
        if request.wants_scores and len(prompt) == model.context_length and asked.call.max_tokens == 1:
            asked.call.max_tokens, asked.call.prompt_logprobs = 0, True  # the SDK's compute_logprobs wants no token
        if images.contents:
            asked.images.extend(images.contents)
            asked.prompt_images.add(images=images.rows[0])

        async def work() -> bytes:
            async with core.calls.turn(caller.name, CallKind.SAMPLE):
                answer = tinker_pb2.SampleResponse()
                if request.wants_scores:
                    await add_prompt_scores(answer, core, caller, asked, prompt, request)
                stored = await core.sample(caller, asked, sampling_label(sampler.session_id))
                add_samples(answer, stored)
                return answer.SerializeToString(deterministic=True)

        seq = request.seq_id
        content = request.model_dump_json()
        promise = samplers.ask(caller, sampler, seq, content.encode(), work)
        await asyncio.sleep(0)  # it begins, and is refused at once if too many wait
        if (refused := samplers.refused(sampler, seq)) is not None:
            raise refused
        numbers = [f"{sampler.sampler_id}:{seq}:{number}" for number in range(request.num_samples)]
        return {"request_id": promise, "sample_sequence_ids": numbers}

    return router


def _call(request: AsampleRequest, room: int) -> pb.SampleCall:
    """The core's call. A ``stop`` of the client's replaces the model's end tokens, also an empty one."""
    params = request.sampling_params
    call = pb.SampleCall(
        n=request.num_samples, max_tokens=room if params.max_tokens is None else params.max_tokens,
        temperature=params.temperature, top_k=max(params.top_k, 0), top_p=params.top_p,
        top_logprobs=request.topk_sample_logprobs,
    )  # fmt: skip
    if params.seed is not None:
        call.seed = params.seed % 2**64
    if params.stop is None:
        return call
    call.ignore_eos = True
    for stop in [params.stop] if isinstance(params.stop, str) else params.stop:
        if isinstance(stop, str):
            call.stop.append(stop)
        else:
            call.stop_token_ids.append(stop)
    return call
