"""Images of a batch's rows and of prompts: read, checked, and put in the places of their tokens.

A row has the token of an image once in the place of each of its images, as chat templates write it, or all tokens that
the model's processor makes of it. What belongs to the row's other tokens stays as the caller sent it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from gradwire_losses.batch import Batch, BatchError, segment_ids
from gradwire_losses.images import ImageTokens, Picture
from gradwire_proto.codec import IMAGE_BYTES, IMAGES, Column
from gradwire_proto.v1 import training_pb2
from torch import Tensor

from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.interruption import between_micro_batches
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.model.vision.decoders import ImageRefused
from gradwire_server.engine.model.vision.image_tokens import Expanded, Vision
from gradwire_server.engine.model.vision.processing import ProcessedImage

MAX_TOKENS = 1 << 26
"""Maximum tokens of a batch with those of its images."""
MAX_BYTES = 8 << 30
"""Maximum bytes of a batch's images as their model takes them."""
UNSCORED = (
    "the tokens of images are not scored, because a model is not asked to predict them: leave them out of the loss mask"
)


@dataclass(frozen=True)
class RowImages:
    """The images of some rows.

    Attributes:
        vision: The vision part that they were read for.
        images: The distinct images.
        rows: Each row's images, as indices.
        model: Path of the model.
        context_length: Maximum tokens of a sequence.
    """

    vision: Vision
    images: Sequence[ProcessedImage]
    rows: Sequence[Sequence[int]]
    model: str
    context_length: int


def images_of_rows(policy: Policy, columns: Mapping[str, Column]) -> RowImages:
    """Read the images of a batch's columns.

    Raises:
        BatchError: The columns contradict each other, or an image cannot be read; names the row.
        OperationError: UNSUPPORTED if the model takes no images, or the server cannot read them.
    """
    numbers, contents = columns.get(IMAGES), columns.get(IMAGE_BYTES)
    if numbers is None or contents is None:
        raise BatchError(f"{IMAGES} and {IMAGE_BYTES} come together", field=IMAGES, rule="both or none")
    if len(numbers.levels) != 1 or numbers.values.ndim != 1 or numbers.values.dtype.kind not in "iu":
        raise BatchError(f"{IMAGES} is one row of numbers of images a row", field=IMAGES, rule="int [rows, images]")
    if len(contents.levels) != 1 or contents.values.ndim != 1 or contents.values.dtype != np.uint8:
        raise BatchError(f"{IMAGE_BYTES} is one row of bytes an image", field=IMAGE_BYTES, rule="uint8 [images, bytes]")
    return read_images(policy, [row.tolist() for row in numbers.rows()], [each.tobytes() for each in contents.rows()])


def read_images(policy: Policy, rows: Sequence[Sequence[int]], contents: Sequence[bytes]) -> RowImages:
    """Read images, given each row's as indices into the contents; errors as of :func:`images_of_rows`."""
    vision, facts = policy.split_model.vision, policy.facts
    if vision is None:
        raise OperationError(
            training_pb2.ERROR_CODE_UNSUPPORTED,
            f"model {facts.name!r} ({facts.architecture}) takes no images here; the models that do are Qwen2-VL,"
            " Qwen2.5-VL, Qwen3-VL, Idefics3, SmolVLM, LLaVA and Gemma 3",
            field=IMAGES,
        )
    for row, numbers in enumerate(rows):
        for number in numbers:
            if not 0 <= number < len(contents):
                raise BatchError(
                    f"{IMAGES}, row {row}: there is no image {number}, there are {len(contents)}",
                    field=IMAGES,
                    row=row,
                    rule=f"0 <= number < {len(contents)}",
                )
    images: list[ProcessedImage] = []
    size = 0
    for number, content in enumerate(contents):
        between_micro_batches()  # many images take seconds
        try:
            images.append(vision.processor.read(content))
            size += images[-1].nbytes
            if size > MAX_BYTES:
                raise ImageRefused(
                    f"the batch's images up to this one take {size:,} bytes as the model takes them, and a batch has"
                    f" {MAX_BYTES:,} at most; send fewer images at a time, or smaller ones"
                )
        except ImageRefused as error:
            shown = next((row for row, numbers in enumerate(rows) if number in numbers), None)
            which = "" if shown is None else f", row {shown}, image {list(rows[shown]).index(number)}"
            raise BatchError(f"{IMAGES}{which}: {error}", field=IMAGES, row=shown, rule="a readable image") from error
    return RowImages(vision, images, rows, facts.path, facts.context_length)


def check_without_images(policy: Policy, rows: Sequence[Tensor]) -> None:
    """Refuse rows that have image tokens and no images.

    Raises:
        BatchError: Names the row.
    """
    vision = policy.split_model.vision
    if vision is None:
        return
    for row, ids in enumerate(rows):
        if vision.marked(ids).any():
            raise BatchError(
                f"{IMAGES}, row {row}: it has image tokens (id {vision.mark}), and no images were sent with it",
                field=IMAGES,
                row=row,
                rule="one image token for each image",
            )


def with_images(batch: Batch, row_images: RowImages) -> Batch:
    """Put the tokens of its images into a batch, whose examples are the rows; all sequences of one have its images.

    Raises:
        BatchError: A row has another number of image tokens, or is too long with them.
    """
    if len(row_images.rows) != batch.num_examples:
        raise BatchError(
            f"{IMAGES} has {len(row_images.rows)} rows, and the batch has {batch.num_examples}",
            field=IMAGES,
            rule="equal row counts",
        )
    vision = row_images.vision
    sequences = zip(
        segment_ids(batch.group_sizes).tolist(),
        batch.input_ids.split(batch.lengths.tolist()),
        batch.scored.split(batch.lengths.tolist()),
        strict=True,
    )
    ids, scored, tokens, total = [], [], _ImageTokenCollector(row_images), 0
    for row, own, own_scored in sequences:
        expanded = tokens.add(row, own)
        total += len(expanded.ids)
        if total > MAX_TOKENS:
            raise BatchError(
                f"{IMAGES}, row {row}: the batch has more than {MAX_TOKENS:,} tokens with those of its images; send"
                " fewer rows at a time",
                field=IMAGES,
                row=row,
                rule=f"tokens <= {MAX_TOKENS}",
            )
        if batch.target_tokens is None:
            own_scored = own_scored & ~vision.marked(own)
        ids.append(expanded.ids)
        scored.append((expanded.sources >= 0) & own_scored[expanded.sources])
    fields, warnings = batch.fields, batch.warnings
    stays = ~vision.marked(batch.input_ids[batch.scored])
    if batch.target_tokens is None and not stays.all():
        fields = {name: each[stays] if batch.levels[name] == "token" else each for name, each in fields.items()}
        warnings = (*warnings, UNSCORED)
    return replace(
        batch,
        input_ids=torch.cat(ids),
        lengths=torch.tensor([len(each) for each in ids]),
        scored=torch.cat(scored),
        fields=fields,
        warnings=warnings,
        images=tokens.joined(),
    )


def prompts_with_images(prompts: Sequence[Sequence[int]], row_images: RowImages) -> list[ImagePrompt]:
    """Put the tokens of their images into prompts; errors as of :func:`with_images`."""
    if len(row_images.rows) != len(prompts):
        raise BatchError(
            f"{IMAGES} has {len(row_images.rows)} rows, and there are {len(prompts)} prompts",
            field=IMAGES,
            rule="one row a prompt",
        )
    made = []
    for row, prompt in enumerate(prompts):
        tokens = _ImageTokenCollector(
            replace(row_images, images=[row_images.images[number] for number in row_images.rows[row]])
        )
        expanded = tokens.add(row, torch.tensor(prompt, dtype=torch.int64), range(len(row_images.rows[row])))
        made.append(ImagePrompt(expanded.ids.tolist(), tokens.joined(), expanded.sources >= 0))
    return made


class _ImageTokenCollector:
    """The image tokens of sequences that are added one after the other."""

    def __init__(self, given: RowImages) -> None:
        self._given = given
        counts = [image.count for image in given.images]
        self._own = [torch.arange(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True)]
        self._places: list[Tensor] = []
        self._positions: list[Tensor] = []

    def add(self, row: int, ids: Tensor, numbers: Sequence[int] | None = None) -> Expanded:
        """Add a sequence of a row.

        Args:
            numbers: The row's images, if they are not those of the given rows.
        """
        images = self._given
        numbers = images.rows[row] if numbers is None else numbers
        try:
            expanded = images.vision.expand(ids, [images.images[number] for number in numbers])
        except ImageRefused as error:
            rule = "one image token for each image"
            raise BatchError(f"{IMAGES}, row {row}: {error}", field=IMAGES, row=row, rule=rule) from error
        if len(expanded.ids) > images.context_length:
            raise BatchError(
                f"{IMAGES}, row {row}: it has {len(expanded.ids)} tokens with those of its images, and the model's"
                f" context has {images.context_length}; make the images smaller",
                field=IMAGES,
                row=row,
                rule=f"tokens <= {images.context_length}",
            )
        table = torch.cat([torch.zeros(0, dtype=torch.int64), *(self._own[number] for number in numbers)])
        seen = expanded.places >= 0
        places = expanded.places.clone()
        places[seen] = table[places[seen]]
        self._places.append(places)
        if expanded.positions is not None:
            self._positions.append(expanded.positions)
        return expanded

    def joined(self) -> ImageTokens:
        """The image tokens of all sequences."""
        positions = torch.cat(self._positions) if self._positions else None
        return ImageTokens(torch.cat(self._places), positions, self._given.images, self._given.model)


class ImagePrompt(tuple[int, ...]):
    """Token ids of a prompt with all tokens of its images; equal to another one only if the images are the same.

    Attributes:
        images: The image tokens among them.
        sent: ``[L]`` bool, whether the caller sent the token; one that he sent for an image is the image's last.
        shift: Number added to a later token's index to get its position for rotary embeddings.
    """

    images: ImageTokens
    sent: Tensor
    shift: int

    def __new__(cls, ids: Iterable[int], images: ImageTokens, sent: Tensor) -> ImagePrompt:
        prompt = super().__new__(cls, ids)
        prompt.images, prompt.sent = images, sent
        prompt.shift = 0 if images.positions is None else int(images.positions.max()) + 1 - len(prompt)
        return prompt

    def followed_by(self, ids: Sequence[int]) -> ImagePrompt:
        """The prompt with these tokens of text behind it."""
        images, count = self.images, len(ids)
        places = torch.cat([images.places, torch.full((count,), -1)])
        positions = images.positions
        if positions is not None:
            more = torch.arange(len(self), len(self) + count) + self.shift
            positions = torch.cat([positions, more[:, None].expand(-1, 3)])
        sent = torch.cat([self.sent, torch.ones(count, dtype=torch.bool)])
        return ImagePrompt((*self, *ids), replace(images, places=places, positions=positions), sent)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ImagePrompt) and super().__eq__(other) and self.images.key == other.images.key

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((super().__hash__(), self.images.key))


def images_key(tokens: object) -> bytes:
    """A digest of a prompt's images, which distinguishes prompts with equal tokens; empty for text."""
    return tokens.images.key if isinstance(tokens, ImagePrompt) else b""


def images_of_pieces(pieces: Sequence[tuple[Sequence[int], int, int]]) -> ImageTokens | None:
    """The image tokens of pieces of prompts, one after the other; None if all are text.

    Args:
        pieces: Prompts, each with the index of the piece's first token and of the one behind its last.
    """
    shown = [prompt.images for prompt, _, _ in pieces if isinstance(prompt, ImagePrompt)]
    if not shown:
        return None
    places, positions = [], []
    pictures: list[Picture] = []
    before = 0
    for prompt, start, stop in pieces:
        if not isinstance(prompt, ImagePrompt):
            places.append(torch.full((stop - start,), -1))
            positions.append(torch.arange(start, stop)[:, None].expand(-1, 3))
            continue
        own = prompt.images.places[start:stop]
        places.append(torch.where(own >= 0, own + before, -1))
        if prompt.images.positions is not None:
            positions.append(prompt.images.positions[start:stop])
        pictures += prompt.images.pictures
        before += int(prompt.images.ends[-1]) if len(prompt.images.ends) else 0
    has_positions = shown[0].positions is not None
    return ImageTokens(torch.cat(places), torch.cat(positions) if has_positions else None, pictures, shown[0].model)
