"""Conversion of texts and conversations into token ids and back, for callers that a door has authenticated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.keys import Caller
from gradwire_server.access.model_names import ModelNames
from gradwire_server.bounded.pool import ProcessPool
from gradwire_server.config import ServerConfig
from gradwire_server.errors import ServiceError
from gradwire_server.tokenizing.settings import METHODS, TokenizerSettings

GROUP_CHARS = 1 << 18
"""Characters of prompts that are encoded at a time, unless one has more: the first that is too long ends it."""
PIECES = 2048
"""Tokens whose pieces are looked up at a time."""


class Texts:
    """The conversions, in processes of their own; every key has its turn.

    Every method raises ServiceError: LIMIT_EXCEEDED, UNKNOWN_MODEL; INVALID_ARGUMENT for what is no conversation or
    what a template refuses; UNSUPPORTED for a model without a tokenizer or a template.

    Args:
        files: Returns the path of each model's ``tokenizer.json``, by model name.
    """

    def __init__(self, files: Callable[[], Mapping[str, str]], models: ModelNames, config: ServerConfig) -> None:
        def settings() -> TokenizerSettings:
            return TokenizerSettings(
                files=dict(files()),
                models=dict(models.paths),
                named_first=tuple(models.named_first),
                limits=config.limits,
                memory_bytes=int(config.tokenizer_memory_gib * (1 << 30)),
            )

        self._pool = ProcessPool("gradwire_server.tokenizing.process", METHODS, settings)

    async def convert(self, caller: Caller, method: str, request: bytes) -> bytes:
        """Answer a serialized request with a serialized response, for a door that holds such messages.

        Args:
            method: ``"Encode"``, ``"Decode"``, ``"Render"`` or ``"GetTokenizerInfo"``.
        """
        return await self._pool.ask(method, caller.name, request)

    async def encode_prompts(
        self, caller: Caller, model: str, texts: Sequence[str], context_length: int
    ) -> list[pb.TokenIds]:
        """Encode prompts into token ids with the model's tokenizer.

        Raises:
            ServiceError: INVALID_BATCH for a prompt that leaves no room in the context, before its ids go further.
        """
        sequences: list[pb.TokenIds] = []
        while len(sequences) < len(texts):
            group, chars = list[str](), 0
            for text in texts[len(sequences) :]:
                chars += len(text)
                if group and chars > GROUP_CHARS:
                    break
                group.append(text)
            for sequence in await self.encode(caller, model, group):
                if len(sequence.ids) >= context_length:
                    raise ServiceError(
                        pb.ERROR_CODE_INVALID_BATCH,
                        f"prompt {len(sequences)} has {len(sequence.ids)} tokens, which leaves no room after it:"
                        f" this model's maximum context length is {context_length} tokens",
                        field="prompt",
                        row=len(sequences),
                        rule=f"tokens < {context_length}",
                    )
                sequences.append(sequence)
        return sequences

    async def encode(
        self, caller: Caller, model: str, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[pb.TokenIds]:
        """Encode texts into token ids with the model's tokenizer."""
        request = pb.EncodeRequest(model=model, texts=texts, add_special_tokens=add_special_tokens)
        response = await self.convert(caller, "Encode", request.SerializeToString())
        return list(pb.EncodeResponse.FromString(response).sequences)

    async def decode(
        self, caller: Caller, model: str, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool = True
    ) -> list[str]:
        """Decode sequences of token ids into texts with the model's tokenizer."""
        ids = [pb.TokenIds(ids=sequence) for sequence in sequences]
        request = pb.DecodeRequest(model=model, sequences=ids, skip_special_tokens=skip_special_tokens)
        response = await self.convert(caller, "Decode", request.SerializeToString())
        return list(pb.DecodeResponse.FromString(response).texts)

    async def pieces(self, caller: Caller, model: str, ids: Sequence[int]) -> list[str]:
        """Each token as the model's vocabulary writes it; empty for an id that it does not have."""
        texts: list[str] = []
        for start in range(0, len(ids), PIECES):
            sequences = [pb.TokenIds(ids=[token]) for token in ids[start : start + PIECES]]
            request = pb.DecodeRequest(model=model, sequences=sequences, pieces=True)
            response = await self.convert(caller, "Decode", request.SerializeToString())
            texts += pb.DecodeResponse.FromString(response).texts
        return texts

    async def render(self, caller: Caller, request: pb.RenderRequest) -> pb.RenderResponse:
        """Render conversations into token ids and loss masks with the model's own chat template."""
        response = await self.convert(caller, "Render", request.SerializeToString())
        return pb.RenderResponse.FromString(response)

    async def tokenizer_info(self, caller: Caller, model: str) -> pb.TokenizerInfo:
        """Describe a model's tokenizer: vocabulary size, special tokens, chat template."""
        request = pb.GetTokenizerInfoRequest(model=model)
        response = await self.convert(caller, "GetTokenizerInfo", request.SerializeToString())
        return pb.TokenizerInfo.FromString(response)

    async def close(self) -> None:
        """End the processes."""
        await self._pool.close()
