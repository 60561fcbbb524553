"""A reward model: a run with a scalar head on a server, as a function of numpy arrays."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from gradwire import sync
from gradwire.errors import InvalidArgumentError, NotFoundError, WouldDeadlockError
from gradwire.futures import running_loop
from gradwire.rl.generation import ServiceCodec, TextCodec, TokenizerCodec
from gradwire.rlhf.origins import export_run, served_models, served_name
from gradwire.rlhf.results import RewardModelReport
from gradwire.service import ServiceClient
from gradwire.training import TrainingClient

Scores = npt.NDArray[np.float32]
T = TypeVar("T")

ENCODED_AT_ONCE = 256
DETAILS_FILE = "gradwire_reward_model.json"


@dataclass(frozen=True)
class RewardModelDetails:
    """The contents of a reward model's folder besides its weights.

    Attributes:
        base_model: The model that it was trained from.
        mean, std: Mean and standard deviation of the training scores: a score is the head's output times ``std`` plus
            ``mean``.
        max_tokens: Maximum row length; a longer row loses its beginning.
        checkpoint: ``"RUN_ID/NAME"`` on the server that trained it.
        report: Quality on held-out ratings.
    """

    base_model: str
    mean: float
    std: float
    max_tokens: int
    checkpoint: str = ""
    report: RewardModelReport | None = None

    def write(self, folder: Path) -> None:
        text = json.dumps(asdict(self), indent=1)
        (folder / DETAILS_FILE).write_text(text + "\n", encoding="utf-8")

    @staticmethod
    def read(folder: Path) -> RewardModelDetails:
        """Read the details of a folder; raises InvalidArgumentError if it is not a reward model's folder."""
        try:
            values = json.loads((folder / DETAILS_FILE).read_text(encoding="utf-8"))
            report = values.pop("report")
            return RewardModelDetails(**values, report=None if report is None else RewardModelReport.from_json(report))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InvalidArgumentError(
                f"{folder} is not a reward model: {error}; pass a folder written by save_pretrained",
                field="reward_model_path",
                rule=f"a folder with {DETAILS_FILE}",
            ) from error


class RewardModel:
    """Predicts the score that raters would give. Created by :func:`train_reward_model` or :meth:`from_pretrained`.

    Its input is the tokens of a prompt and a response, without an end token. To change the
    reward, override :meth:`forward` and pass the class to the trainer.

    ``with`` or :meth:`close` closes the connection, and stops the server if the model started one.

    Args:
        service: An open service.
        run: A run with a reward head.
        details: See :class:`RewardModelDetails`.
        codec: Converts text to the run's token ids; by default through the server.
        owner: The object that :meth:`close` closes.
    """

    def __init__(
        self,
        service: ServiceClient,
        run: TrainingClient,
        details: RewardModelDetails,
        *,
        codec: TextCodec | None = None,
        model: str = "",
        owner: sync.ServiceClient | None = None,
    ) -> None:
        self.details = details
        self.run = run
        self._service = service
        self._codec = codec or ServiceCodec(service, model or details.base_model)
        self._owner = owner
        self._scoring_only = False

    @property
    def report(self) -> RewardModelReport | None:
        """Quality of its predictions on held-out ratings; None if none were held out."""
        return self.details.report

    def forward(self, input_ids: npt.ArrayLike, attention_mask: npt.ArrayLike | None = None) -> Scores:
        """Predict scores.

        Args:
            input_ids: ``[rows, tokens]``, token ids of prompt and response, padded.
            attention_mask: ``[rows, tokens]``, 1 for tokens, 0 for padding; all 1 by default.

        Returns:
            ``[rows]``, float32, in units of the ratings (0 to 1 for a well-trained model).
        """
        batch: dict[str, Any] = {"input_ids": np.asarray(input_ids)}
        if attention_mask is not None:
            batch["attention_mask"] = np.asarray(attention_mask)
        outputs = np.asarray(self.run.compute_rewards(batch).result(), np.float32)
        return outputs * np.float32(self.details.std) + np.float32(self.details.mean)

    def __call__(self, input_ids: npt.ArrayLike, attention_mask: npt.ArrayLike | None = None) -> Scores:
        return self.forward(input_ids, attention_mask)

    def score(self, prompts: Sequence[str], responses: Sequence[str]) -> Scores:
        """Predict the scores of texts, ``[pairs]``: :meth:`forward` on their tokens."""
        if len(prompts) != len(responses):
            raise InvalidArgumentError(
                f"{len(prompts)} prompts but {len(responses)} responses", field="responses", rule="one a prompt"
            )
        if not prompts:
            return np.zeros(0, np.float32)
        rows = self._wait(encode_pairs(self._codec, prompts, responses))
        return np.asarray(self.forward(*padded([row[-self.details.max_tokens :] for row in rows])), np.float32)

    async def score_async(self, prompts: Sequence[str], responses: Sequence[str]) -> Scores:
        """Like :meth:`score`, on an event loop."""
        return await asyncio.to_thread(self.score, prompts, responses)

    def save_pretrained(self, path: str | Path) -> Path:
        """Write a Hugging Face folder: the model with the adapter merged, tokenizer, head; the adapter in ``adapter``.

        Returns:
            The folder, which :meth:`from_pretrained` reads.
        """
        return self._wait(self.save_pretrained_async(path))

    async def save_pretrained_async(self, path: str | Path) -> Path:
        """Like :meth:`save_pretrained`, on an event loop."""
        folder = Path(path)
        await export_run(self.run, folder)
        checkpoint = await self.run.save_checkpoint("reward-model", overwrite=True)
        self.details = replace(self.details, checkpoint=checkpoint.path)
        self.details.write(folder)
        return folder

    @classmethod
    def from_pretrained(cls, path: str | Path, *, address: str | None = None, api_key: str | None = None) -> Self:
        """Open a folder written by :meth:`save_pretrained`.

        Args:
            path: The folder.
            address: Address of a running server, which must hold the checkpoint that the folder was made from, or the
                folder itself as a model; None starts a server, which stops with :meth:`close`.
            api_key: API key of that server.

        Raises:
            InvalidArgumentError: The folder is not a reward model, or the server cannot open it.
        """
        folder = Path(path).resolve()
        RewardModelDetails.read(folder)
        own = sync.connect(address, api_key=api_key, models=() if address else served_models([str(folder)]))
        try:
            model = own._loop_thread.run(cls.from_pretrained_async(folder, own._client))
        except BaseException:
            own.close()
            raise
        model._owner = own
        return model

    @classmethod
    async def from_pretrained_async(cls, path: str | Path, service: ServiceClient) -> Self:
        """Like :meth:`from_pretrained`, on an open service, which the caller closes."""
        folder = Path(path).resolve()  # noqa: ASYNC240 - does not read a file
        details = RewardModelDetails.read(folder)
        name = served_name(str(folder))
        if name in {model.name for model in await service.list_models()}:
            run = await service.create_run(name, lora=1, head="reward", name=f"reward model {folder.name}")
            return cls._scorer(service, run, details, name)
        try:
            run = await service.fork_run(details.checkpoint, name=f"reward model {folder.name}")
        except (NotFoundError, InvalidArgumentError):
            raise InvalidArgumentError(
                f"the server at {service.address} knows neither the checkpoint {details.checkpoint!r} that {folder} "
                f"was made from, nor the folder as a model: start it with --model {folder}, or pass no address",
                field="reward_model_path",
                rule="known to the server",
            ) from None
        return cls._scorer(service, run, details, details.base_model)

    @classmethod
    def _scorer(cls, service: ServiceClient, run: TrainingClient, details: RewardModelDetails, model: str) -> Self:
        scorer = cls(service, run, details, model=model)
        scorer._scoring_only = True
        return scorer

    def close(self) -> None:
        """Close the connection, and stop the server if the model started one."""
        owner, self._owner = self._owner, None
        if owner is None:
            return
        try:
            self._wait(self.close_async())
        finally:
            owner.close()

    async def close_async(self) -> None:
        """Delete the run that :meth:`from_pretrained` created; a run that was trained stays on its server."""
        if self._scoring_only:
            self._scoring_only = False
            await self._service.delete_run(self.run.run_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        loop = self._service._loop
        if running_loop() is loop:
            work.close()
            raise WouldDeadlockError(
                "this call would block the event loop that it needs; await the method named ..._async"
            )
        return asyncio.run_coroutine_threadsafe(work, loop).result()


async def encode_pairs(
    codec: TextCodec, prompts: Sequence[str], responses: Sequence[str]
) -> list[npt.NDArray[np.int64]]:
    """Encode each prompt followed by its response as token ids."""
    before = await encoded(codec, prompts)
    after = await encoded(codec, responses, add_special_tokens=False)
    return [np.concatenate([first, second]) for first, second in zip(before, after)]


async def encoded(
    codec: TextCodec, texts: Sequence[str], *, add_special_tokens: bool = True
) -> list[npt.NDArray[np.int64]]:
    """Encode texts as token ids, in requests of a size that the server accepts."""
    rows: list[npt.NDArray[np.int64]] = []
    for start in range(0, len(texts), ENCODED_AT_ONCE):
        rows += await codec.encode(texts[start : start + ENCODED_AT_ONCE], add_special_tokens=add_special_tokens)
    return rows


def padded(rows: Sequence[npt.NDArray[np.int64]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Pad rows to ``input_ids`` and ``attention_mask``, both ``[rows, tokens]``."""
    width = max(len(row) for row in rows)
    ids, mask = np.zeros((len(rows), width), np.int64), np.zeros((len(rows), width), np.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row)], mask[index, : len(row)] = row, 1
    return ids, mask


def text_codec(service: ServiceClient, model: str, tokenizer: Any) -> TextCodec:
    """Return the codec of the user's tokenizer, or of the server for None."""
    return ServiceCodec(service, model) if tokenizer is None else TokenizerCodec(tokenizer)
