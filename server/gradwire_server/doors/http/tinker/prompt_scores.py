"""Log-probabilities of a prompt: of its tokens, of the most probable ones, of ids that the client names, of drawn ones.

Legend: ``T`` tokens of the prompt, ``K`` ids in each place. The first token has no log-probability; places of ids begin
with the second token. Log-probabilities are at temperature 1.
"""

from __future__ import annotations

import itertools
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from gradwire_http.models import BoundedModel
from gradwire_proto import codec
from gradwire_proto.v1 import tinker_pb2
from gradwire_proto.v1 import training_pb2 as pb
from pydantic import Field

from gradwire_server.access.keys import Caller
from gradwire_server.core.core import Core
from gradwire_server.errors import ServiceError, invalid, limit_exceeded
from gradwire_server.limits import Limits

NO_ID, NO_LOGPROB = 0, -99_999.0
"""Values of empty cells in the protocol's tables of most probable tokens."""
ABSENT = -1
"""A target that is not wanted."""
MAX_ID = 2**32
MAX_TARGETS = 1 << 22
"""Cells of the targets of one prompt, those included that a sparse tensor leaves out."""
Ids = npt.NDArray[np.int64]
Count = Annotated[int, Field(ge=0)]


class Targets(BoundedModel):
    """``[T - 1, K]`` ids to score, dense or as compressed sparse rows; -1 for none."""

    data: list[int]
    dtype: Literal["int64"]
    shape: tuple[Count, Count]
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None

    def dense(self, length: int) -> Ids:
        """The ids for a prompt of ``length`` tokens."""
        places, width = self.shape
        if places != max(length - 1, 0):
            raise _invalid(f"target_prompt_logprobs is {list(self.shape)}; it is [{max(length - 1, 0)}, K] here")
        if places * width > MAX_TARGETS:
            message = f"target_prompt_logprobs is {list(self.shape)}; {MAX_TARGETS} cells at most in one request"
            raise _invalid(message)
        if self.data and not ABSENT <= min(self.data) <= max(self.data) < MAX_ID:
            raise _invalid("target_prompt_logprobs has an id that no model has")
        values = np.array(self.data, np.int64)
        if (cells := self.cells()) is None:
            if len(values) != places * width:
                raise _invalid(f"target_prompt_logprobs is {list(self.shape)} and has {len(values)} values")
            return values.reshape(places, width)
        found = np.full((places, width), ABSENT, np.int64)
        found[cells] = values
        return found

    def cells(self) -> tuple[Ids, Ids] | None:
        """Rows and columns of sparse values; None if they are dense."""
        if self.sparse_crow_indices is None and self.sparse_col_indices is None:
            return None
        starts, columns = self.sparse_crow_indices or [], self.sparse_col_indices or []
        whole = len(starts) == self.shape[0] + 1 and starts[0] == 0 and starts[-1] == len(columns) == len(self.data)
        if (
            not whole
            or any(one > other for one, other in itertools.pairwise(starts))
            or not all(0 <= column < self.shape[1] for column in columns)
        ):
            raise _invalid(f"target_prompt_logprobs is no sparse tensor of shape {list(self.shape)}")
        rows = np.repeat(np.arange(self.shape[0]), np.array([b - a for a, b in itertools.pairwise(starts)], np.int64))
        return rows, np.array(columns, np.int64)

    def answer(self, dense: npt.NDArray[np.float32]) -> tinker_pb2.InputTensor:
        """Log-probabilities ``[T - 1, K]`` in the layout of these ids."""
        tensor = tinker_pb2.InputTensor(dtype=tinker_pb2.TINKER_DTYPE_FLOAT32, shape=self.shape)
        if (cells := self.cells()) is None:
            tensor.dense = dense.astype("<f4").tobytes()
            return tensor
        tensor.sparse.values = dense[cells].astype("<f4").tobytes()
        tensor.sparse.row_starts = np.array(self.sparse_crow_indices, "<i8").tobytes()
        tensor.sparse.columns = np.array(self.sparse_col_indices, "<i8").tobytes()
        return tensor


class WantedScores(BoundedModel):
    """The scores that a request wants beside its samples."""

    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = Field(default=0, ge=0)
    target_prompt_logprobs: Targets | None = None
    topk_sample_logprobs: int = Field(default=0, ge=0)
    prompt_alt_tokens_k: int = Field(default=0, ge=0)

    @property
    def wants_scores(self) -> bool:
        """Whether the prompt is to be scored."""
        return bool(
            self.prompt_logprobs or self.topk_prompt_logprobs or self.target_prompt_logprobs or self.prompt_alt_tokens_k
        )

    def check(self, length: int, limits: Limits) -> None:
        """Check the request against the length of its prompt."""
        last = self.prompt_logprobs_last_n
        if last is not None and not (self.prompt_logprobs and 1 <= last < max(length, 2)):
            raise _invalid(
                f"prompt_logprobs_last_n is {last}; it goes with prompt_logprobs, and is 1 to the prompt's tokens - 1",
                "prompt_logprobs_last_n",
            )
        most = limits.max_top_logprobs
        for field in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
            if (wanted := getattr(self, field)) > most:
                raise limit_exceeded(f"{field} is {wanted}", "max_top_logprobs", most, field)
        if self.target_prompt_logprobs is not None:
            self.target_prompt_logprobs.dense(length)


async def add_prompt_scores(
    answer: tinker_pb2.SampleResponse,
    core: Core,
    caller: Caller,
    sampled: pb.SampleRequest,
    prompt: list[int],
    wanted: WantedScores,
) -> None:
    """Score a prompt and add what is wanted to an answer.

    Args:
        sampled: The samples that go with it: their model, the images, and the seed and temperature of drawn tokens.

    Raises:
        ServiceError: As for :meth:`.core.Core.sample`.
    """
    length, top, draws = len(prompt), wanted.topk_prompt_logprobs, wanted.prompt_alt_tokens_k
    logprobs = np.full(length, np.nan, np.float32)
    top_ids = np.full((length, top), NO_ID, np.int32)
    top_logprobs = np.full((length, top), NO_LOGPROB, np.float32)
    drawn_ids, drawn_logprobs = np.zeros((max(length - 1, 0), draws), np.int64), np.zeros((max(length - 1, 0), draws))
    targets = wanted.target_prompt_logprobs
    ids = None if targets is None else targets.dense(length)
    of_targets = None if ids is None else np.zeros(ids.shape, np.float32)
    if length > 1:
        call = pb.SampleCall(
            max_tokens=0, temperature=1.0, top_p=1.0, prompt_logprobs=True, top_prompt_logprobs=top
        )  # fmt: skip
        if sampled.call.HasField("seed"):
            call.seed = sampled.call.seed
        scoring = pb.SampleRequest(
            model=sampled.model, call=call, prompt_ids=[pb.TokenIds(ids=prompt)], images=sampled.images,
            prompt_images=sampled.prompt_images, prompt_draws=draws, prompt_draw_temperature=sampled.call.temperature,
        )  # fmt: skip
        if ids is not None and ids.size:
            scoring.prompt_candidates.add(ids=np.maximum(ids, 0).ravel().tolist())
        scored = await core.sample(caller, scoring)
        columns = codec.decode(list(scored.header.tensors), scored.payload)
        logprobs[1:] = columns["prompt_logprobs"].values
        if top:
            top_ids[1:] = columns["prompt_top_token_ids"].values
            top_logprobs[1:] = columns["prompt_top_logprobs"].values
        if draws:
            drawn_ids, drawn_logprobs = (columns[f"prompt_drawn_{name}"].values for name in ("token_ids", "logprobs"))
        if ids is not None and ids.size:
            of_targets = np.where(ids == ABSENT, 0.0, columns["prompt_candidate_logprobs"].values)
    if wanted.prompt_logprobs_last_n is not None:
        before = length - wanted.prompt_logprobs_last_n
        logprobs[:before], top_ids[:before], top_logprobs[:before] = np.nan, NO_ID, NO_LOGPROB
    if wanted.prompt_logprobs:
        answer.prompt_logprobs = logprobs.astype("<f4").tobytes()
    if top:
        answer.top_prompt_logprobs.CopyFrom(top_message(top_ids, top_logprobs))
    if draws:
        answer.prompt_draws.tokens.CopyFrom(_tensor(drawn_ids, "<i8", tinker_pb2.TINKER_DTYPE_INT64))
        answer.prompt_draws.logprobs.CopyFrom(_tensor(drawn_logprobs, "<f4", tinker_pb2.TINKER_DTYPE_FLOAT32))
    if targets is not None and of_targets is not None:
        answer.target_prompt_logprobs.CopyFrom(targets.answer(of_targets))


def top_message(ids: npt.NDArray[Any], logprobs: npt.NDArray[Any]) -> tinker_pb2.TopLogprobs:
    """The most probable tokens ``[length, k]`` as the protocol has them."""
    return tinker_pb2.TopLogprobs(
        token_ids=ids.astype("<i4").tobytes(),
        logprobs=logprobs.astype("<f4").tobytes(),
        length=ids.shape[0],
        k=ids.shape[1],
    )


def _tensor(values: npt.NDArray[Any], layout: str, dtype: tinker_pb2.TinkerDType.ValueType) -> tinker_pb2.InputTensor:
    return tinker_pb2.InputTensor(dense=values.astype(layout).tobytes(), dtype=dtype, shape=values.shape)


def _invalid(message: str, field: str = "target_prompt_logprobs") -> ServiceError:
    return invalid(message, field)
