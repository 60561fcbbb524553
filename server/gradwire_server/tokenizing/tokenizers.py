"""The tokenizers of a process: serialized requests in, serialized responses out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from google.protobuf.message import DecodeError
from gradwire_proto.v1 import training_pb2 as pb
from tokenizers import Tokenizer

from gradwire_server.access.model_names import ModelNames
from gradwire_server.errors import ServiceError, check_length, invalid, limit_exceeded
from gradwire_server.tokenizing.chat_template import ChatTemplate
from gradwire_server.tokenizing.known_texts import KnownTexts
from gradwire_server.tokenizing.rendering import Renderer
from gradwire_server.tokenizing.settings import METHODS, TokenizerSettings

PIECE = 1 << 18
"""Characters or ids that are converted at a time: what the library keeps of a token takes a hundred times its size."""

T = TypeVar("T")


class Tokenizers:
    """The tokenizers of the models that have one."""

    def __init__(self, settings: TokenizerSettings) -> None:
        self._files, self._limits = settings.files, settings.limits
        self._names = ModelNames(settings.models, settings.named_first)
        self._loaded: dict[str, Tokenizer] = {}
        self._known: dict[str, KnownTexts] = {}
        self._renderers: dict[str, Renderer] = {}
        self._answers: dict[str, Callable[[str, bytes], bytes]] = {
            "Encode": lambda owner, raw: self.encode(owner, pb.EncodeRequest.FromString(raw)).SerializeToString(),
            "Decode": lambda owner, raw: self.decode(pb.DecodeRequest.FromString(raw)).SerializeToString(),
            "Render": lambda owner, raw: self.render(owner, pb.RenderRequest.FromString(raw)).SerializeToString(),
            "GetTokenizerInfo": lambda owner, raw: self.info(
                pb.GetTokenizerInfoRequest.FromString(raw)
            ).SerializeToString(),
        }
        assert set(self._answers) == set(METHODS)

    def answer(self, method: str, owner: str, raw: bytes) -> bytes:
        """Answer a serialized request with a serialized response.

        Raises:
            ServiceError: LIMIT_EXCEEDED, UNKNOWN_MODEL, INVALID_ARGUMENT; UNSUPPORTED for a model without a tokenizer.
        """
        try:
            return self._answers[method](owner, raw)
        except DecodeError as error:
            message = "the message cannot be parsed; client and server may be of different versions"
            raise ServiceError(pb.ERROR_CODE_INVALID_ARGUMENT, message) from error

    def encode(self, owner: str, request: pb.EncodeRequest) -> pb.EncodeResponse:
        """Encode texts into token ids; of a single text, as a prompt is, only the parts that are new to its owner."""
        limits, response = self._limits, pb.EncodeResponse()
        if len(request.texts) > limits.max_encode_texts:
            raise limit_exceeded(f"{len(request.texts)} texts", "max_encode_texts", limits.max_encode_texts, "texts")
        for text in request.texts:
            check_length(text, "max_text_chars", limits.max_text_chars, "texts")
        model = self._names.find(request.model, "model")
        tokenizer = self._load(model)
        if len(request.texts) == 1 and not (request.add_special_tokens and tokenizer.num_special_tokens_to_add(False)):
            response.sequences.add().ids.extend(self._known[model].ids(owner, request.texts[0]))
            return response
        for piece in _pieces(request.texts):
            for found in tokenizer.encode_batch(piece, add_special_tokens=request.add_special_tokens):
                response.sequences.add().ids.extend(found.ids)
        return response

    def decode(self, request: pb.DecodeRequest) -> pb.DecodeResponse:
        """Decode sequences of token ids into texts."""
        limit, response = self._limits.max_encode_texts, pb.DecodeResponse()
        if len(request.sequences) > limit:
            raise limit_exceeded(f"{len(request.sequences)} sequences", "max_encode_texts", limit, "sequences")
        tokenizer = self._load(self._names.find(request.model, "model"))
        if request.pieces:
            if any(len(sequence.ids) != 1 for sequence in request.sequences):
                raise invalid("pieces are those of single ids: send a sequence of one id for each", "sequences")
            response.texts.extend(tokenizer.id_to_token(sequence.ids[0]) or "" for sequence in request.sequences)
            return response
        for piece in _pieces([sequence.ids for sequence in request.sequences]):
            response.texts.extend(
                tokenizer.decode_batch(list(map(list, piece)), skip_special_tokens=request.skip_special_tokens)
            )
        return response

    def render(self, owner: str, request: pb.RenderRequest) -> pb.RenderResponse:
        """Render conversations; see :meth:`.Renderer.render`."""
        limit = self._limits.max_encode_texts
        if len(request.conversations) > limit:
            count = f"{len(request.conversations)} conversations"
            raise limit_exceeded(count, "max_encode_texts", limit, "messages")
        return self._renderer(self._names.find_or_only(request.model, "model")).render(owner, request)

    def info(self, request: pb.GetTokenizerInfoRequest) -> pb.TokenizerInfo:
        """Describe a tokenizer."""
        return self._renderer(self._names.find_or_only(request.model, "model")).info()

    def _load(self, model: str) -> Tokenizer:
        if model not in self._files:
            raise ServiceError(
                pb.ERROR_CODE_UNSUPPORTED,
                f"the model {model!r} has no tokenizer.json on the server; put it into its folder, or send token ids",
                field="model",
            )
        if model not in self._loaded:
            try:
                tokenizer = Tokenizer.from_file(self._files[model])
            except Exception as error:  # the library raises no other class for a damaged file
                raise ServiceError(
                    pb.ERROR_CODE_UNSUPPORTED,
                    f"the tokenizer of the model {model!r}, {self._files[model]}, cannot be read: {error}",
                    field="model",
                ) from error
            tokenizer.no_padding()
            tokenizer.no_truncation()
            self._loaded[model], self._known[model] = tokenizer, KnownTexts(tokenizer)
        return self._loaded[model]

    def _renderer(self, model: str) -> Renderer:
        if model not in self._renderers:
            tokenizer = self._load(model)
            try:
                template = ChatTemplate(Path(self._files[model]).parent)
            except (OSError, ValueError, KeyError, TypeError) as error:
                message = f"the tokenizer's settings of {model!r} cannot be read: {type(error).__name__}"
                raise ServiceError(pb.ERROR_CODE_UNSUPPORTED, message, field="model") from error
            num_ids = _num_ids(Path(self._files[model]).with_name("config.json"))
            self._renderers[model] = Renderer(model, tokenizer, template, self._limits, self._known[model], num_ids)
        return self._renderers[model]


def _num_ids(config: Path) -> int:
    """Size of a model's vocabulary by its configuration; 0 if that does not say."""
    try:
        found = json.loads(config.read_bytes())
        size = found.get("text_config", found).get("vocab_size", found.get("vocab_size", 0))
        return size if isinstance(size, int) else 0
    except (OSError, ValueError, AttributeError):
        return 0


def _pieces(items: Sequence[Sequence[T]]) -> Iterator[list[Sequence[T]]]:
    """Consecutive items of at most ``PIECE`` entries in total, or one item of more."""
    piece: list[Sequence[T]] = []
    size = 0
    for item in items:
        if piece and size + len(item) > PIECE:
            yield piece
            piece, size = [], 0
        piece.append(item)
        size += len(item)
    if piece:
        yield piece
