"""The vision part of a model: the places of image tokens in a sequence, and what the language model reads there.

Four kinds of models: those of Qwen-VL (2, 2.5 and 3), with positions of time, height and width and, in the third,
further features that are added in the first layers (DeepStack); those of Idefics3 and SmolVLM, with tiles of one size;
LLaVA, with as many tokens for every image; and Gemma 3, like it, with further tokens around them. Their language model
is the trunk, which reads embeddings of image tokens that the vision part computed. Its attention is causal, also among
the tokens of an image, so rows are packed and share prefixes as rows of text do. Only in Gemma 3 an image's tokens
attend to all of their image, so its rows with images are padded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from gradwire_losses.batch import sent
from gradwire_losses.images import ImageTokens
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from gradwire_server.engine.model.vision.decoders import ImageRefused
from gradwire_server.engine.model.vision.processing import ImageProcessor, ProcessedImage

QWEN = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl"})
IDEFICS = frozenset({"idefics3", "smolvlm"})
FIXED = frozenset({"llava"})
BIDIRECTIONAL = frozenset({"gemma3"})
PARTS = {
    **dict.fromkeys(QWEN, ("model.visual.",)),
    **dict.fromkeys(IDEFICS, ("model.vision_model.", "model.connector.")),
    **dict.fromkeys(FIXED | BIDIRECTIONAL, ("model.vision_tower.", "model.multi_modal_projector.")),
}
"""By model type: how the names of the vision part's parameters begin."""


def takes_images(config: PreTrainedConfig) -> bool:
    """Whether the vision part of models of this configuration is supported."""
    return config.model_type in PARTS


def image_token_of(config: PreTrainedConfig) -> int | None:
    """The token that all tokens of an image are, for doors that count them by a grid; None for other models."""
    return int(config.image_token_id) if config.model_type in QWEN else None


def auto_class(images: bool) -> Any:
    """The class of transformers that loads a model whole, which takes images or does not."""
    return AutoModelForImageTextToText if images else AutoModelForCausalLM


@dataclass(frozen=True)
class Expanded:
    """A sequence with all of its image tokens.

    Attributes:
        ids: ``[L]``.
        sources: ``[L]`` index of the token of the given sequence that each one is; -1 for those that were inserted.
            What stood for an image is its last token.
        places: ``[L]`` number of each image token among those of the sequence's images; -1 for text.
        positions: ``[L, 3]``, or None; see :class:`~gradwire_losses.images.ImageTokens`.
    """

    ids: Tensor
    sources: Tensor
    places: Tensor
    positions: Tensor | None


class Vision:
    """The vision part of one copy of a model.

    Args:
        path: Its folder or hub name.
        mixed: Whether it computes in bfloat16 with float32 weights.

    Attributes:
        image_token: Id of each token of an image.
        mark: Id of the token that stands for an image in a row; mostly the same.
        bidirectional: Whether the tokens of an image attend to all of them.
    """

    def __init__(self, model: PreTrainedModel, path: str, *, mixed: bool = False) -> None:
        self._model: Any = model
        self._path, self._mixed = path, mixed
        self.image_token = int(model.config.image_token_id)
        self.bidirectional = model.config.model_type in BIDIRECTIONAL
        self.mark = int(model.config.boi_token_id) if self.bidirectional else self.image_token
        self._has_grids = model.config.model_type in QWEN
        self._has_tiles = model.config.model_type in IDEFICS

    @cached_property
    def processor(self) -> ImageProcessor:
        """Make the reader of images for the model.

        Raises:
            OperationError: UNSUPPORTED without Pillow, or if the model has no settings for images.
        """
        config = self._model.config
        tile_tokens = image_tokens = around = None
        if not self._has_grids:
            vision = config.vision_config
            patches = (vision.image_size // vision.patch_size) ** 2
            if self._has_tiles:
                tile_tokens = patches // config.scale_factor**2
            elif self.bidirectional:
                image_tokens = int(config.mm_tokens_per_image)
                around = (self.mark, int(config.eoi_token_id))
            else:
                further = vision.model_type == "clip_vision_model"  # the token of the whole image
                image_tokens = patches + further - (config.vision_feature_select_strategy == "default")
        return ImageProcessor(self._path, self.image_token, tile_tokens, image_tokens, around)

    def marked(self, ids: Tensor) -> Tensor:
        """Whether each token stands for an image, or is one of an image's tokens."""
        return (ids == self.image_token) | (ids == self.mark)

    def expand(self, ids: Tensor, images: Sequence[ProcessedImage]) -> Expanded:
        """Put all tokens of its images into a sequence, which has one token for each or all of them already.

        Raises:
            ImageRefused: The sequence has another number of image tokens.
        """
        marks = (ids == self.mark).nonzero().squeeze(1).tolist()
        total = sum(image.count for image in images)
        placeholders = int((ids == self.image_token).sum())
        if placeholders == total and (self.mark == self.image_token or len(marks) == len(images)):
            whole, source = ids, torch.arange(len(ids))
        elif len(marks) == len(images) and placeholders in (0, len(marks)):
            parts: list[Tensor] = []
            sources: list[Tensor] = []
            ids, start = ids.clone(), 0
            for mark, image in zip(marks, images, strict=True):
                tokens = self.processor.joined(ids, mark, image.tokens)
                if parts and start == mark:
                    parts[-1], tokens = self.processor.side_by_side(parts[-1], tokens)
                parts += [ids[start:mark], tokens]
                inserted = torch.full((len(tokens),), -1)
                inserted[-1] = mark
                sources += [torch.arange(start, mark), inserted]
                start = mark + 1
            whole = torch.cat([*parts, ids[start:]])
            source = torch.cat([*sources, torch.arange(start, len(ids))])
        else:
            raise ImageRefused(
                f"{len(images)} images and {len(marks)} image tokens (id {self.mark}): a row has one such token"
                f" in the place of each image, as the chat template writes, or all {total} that the processor makes"
            )
        seen = whole == self.image_token
        places = torch.where(seen, seen.cumsum(0) - 1, -1)
        return Expanded(whole, source, places, self._positions(whole, seen, images))

    def _positions(self, ids: Tensor, seen: Tensor, images: Sequence[ProcessedImage]) -> Tensor | None:
        """``[L, 3]`` each token's time, height and width, as the model itself numbers them; None if it does not."""
        if not self._has_grids:
            return None
        if not images:
            return torch.arange(len(ids))[:, None].expand(-1, 3)
        runs = [(value, len(list(run))) for value, run in groupby(seen.tolist())]
        if [length for value, length in runs if value] != [image.count for image in images]:
            raise ImageRefused(
                "the tokens of two images stand side by side, or those of one are divided: text stands between two"
                " images, and none within one"
            )
        grids = torch.cat([image.inputs["image_grid_thw"] for image in images])
        found: Tensor = self._model.model.get_rope_index(ids[None], seen[None].int(), image_grid_thw=grids)[0]
        return found[:, 0].T

    def trunk_inputs(self, input_ids: Tensor, images: ImageTokens, mask: Tensor | None = None) -> dict[str, Any]:
        """Arguments of the trunk for tokens with images.

        Args:
            input_ids: ``[S, W]`` on the model's device.
            images: Their image tokens, ``S * W`` entries.
            mask: ``[S, W]`` 1 for tokens and 0 for padding, if padding has to be left out.
        """
        device = input_ids.device
        embedded: Tensor = self._model.get_input_embeddings()(input_ids)
        where = (images.places >= 0).nonzero().squeeze(1)
        inputs: dict[str, Any] = {}
        if len(where):
            on_device = sent(where, device)
            features = self._features(images, images.places[where])
            first = features[0].to(device, embedded.dtype)
            embedded = embedded.flatten(0, 1).index_copy(0, on_device, first).view_as(embedded)
            if len(features) > 1:
                mask = sent(images.places >= 0, device).view(input_ids.shape)
                inputs |= {"visual_pos_masks": mask, "deepstack_visual_embeds": features[1:]}
        if images.positions is not None:
            inputs["position_ids"] = sent(images.positions.T.contiguous(), device).view(3, *input_ids.shape)
        if self.bidirectional:
            inputs["attention_mask"] = self._masks(embedded, images.places.view(input_ids.shape) >= 0, mask)
        return inputs | {"inputs_embeds": embedded}

    def _masks(self, embedded: Tensor, seen: Tensor, mask: Tensor | None) -> dict[str, Any]:
        """The trunk's masks, by kind of layer; ``seen [S, W]`` are the image tokens."""
        from transformers.models.gemma3.modeling_gemma3 import (
            create_masks_for_vision_model,
            get_block_sequence_ids_for_mask,
        )

        masks: dict[str, Any] = create_masks_for_vision_model(
            config=self._model.config.get_text_config(),
            inputs_embeds=embedded,
            attention_mask=mask,
            past_key_values=None,
            position_ids=None,
            block_sequence_ids=get_block_sequence_ids_for_mask(sent(seen.long(), embedded.device)),
        )
        return masks

    def _features(self, images: ImageTokens, places: Tensor) -> list[Tensor]:
        """``[K, H]`` of the image tokens at ``[K]`` places: embeddings, and what is added in the first layers."""
        ends = images.ends
        which = torch.searchsorted(ends, places, right=True)
        used, own = which.unique(return_inverse=True)
        shown = [images.pictures[number] for number in used.tolist()]
        counts = torch.tensor([picture.count for picture in shown])
        within = places - (ends - torch.tensor([picture.count for picture in images.pictures]))[which]
        index = (counts.cumsum(0) - counts)[own] + within
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._mixed):
            features = self._seen([picture for picture in shown if isinstance(picture, ProcessedImage)])
        return [each.index_select(0, sent(index, each.device)) for each in features]

    @property
    def depth(self) -> int:
        """Number of the vision part's layers."""
        return len(self._layers)

    @property
    def width(self) -> int:
        """Entries of a patch's state."""
        config = self._model.config.vision_config
        return int(getattr(config, "embed_dim", None) or config.hidden_size)

    @property
    def patches(self) -> int:
        """Patches that make one image token."""
        config = self._model.config
        if self._has_grids:
            return int(config.vision_config.spatial_merge_size) ** 2
        if self._has_tiles:
            return int(config.scale_factor) ** 2
        vision = config.vision_config
        return (vision.image_size // vision.patch_size) ** 2 // config.mm_tokens_per_image if self.bidirectional else 1

    def trains(self, names: Iterable[str]) -> bool:
        """Whether any of these parameters is of the vision part."""
        return any(name.startswith(PARTS[self._model.config.model_type]) for name in names)

    def layer_states(self, patches: int, *, differentiable: bool) -> Tensor:
        """Compute one layer on so many patches of zeros, to measure its memory.

        Args:
            differentiable: Whether the layers before it are trained.
        """
        layer: Any = self._layers[0]
        dtype = next(layer.parameters()).dtype
        states = torch.zeros(patches, self.width, device=self._device, dtype=dtype, requires_grad=differentiable)
        with torch.autocast(self._device.type, torch.bfloat16) if self._mixed else nullcontext():
            if not self._has_grids:
                after: Tensor = layer(states[None], attention_mask=None)
                return after
            angles = torch.zeros(patches, self.width // self._model.config.vision_config.num_heads, device=self._device)
            ends = torch.tensor([0, patches])
            after = layer(states, cu_seqlens=ends, max_seqlen=patches, position_embeddings=(angles, angles))
            return after

    @property
    def _layers(self) -> nn.ModuleList:
        inner = self._model.model
        if self._has_grids:
            blocks: nn.ModuleList = inner.visual.blocks
            return blocks
        encoder = inner.vision_model if self._has_tiles else inner.vision_tower
        layers: nn.ModuleList = getattr(encoder, "vision_model", encoder).encoder.layers
        return layers

    def _seen(self, images: Sequence[ProcessedImage]) -> list[Tensor]:
        """``[I, H]`` what the vision part computes of images, one after the other."""
        if self._has_grids:
            found = self._model.get_image_features(**self._joined(images, dim=0))
            deeper = getattr(found, "deepstack_features", None) or []
            return [torch.cat(tuple(each)) for each in (found.pooler_output, *deeper)]
        parts: list[Tensor] = []
        dim = 1 if self._has_tiles else 0
        for _, alike in groupby(images, key=lambda image: image.inputs["pixel_values"].shape[dim + 1 :]):
            parts += self._model.get_image_features(**self._joined(list(alike), dim=dim)).pooler_output
        return [torch.cat(parts)]

    def _joined(self, images: Sequence[ProcessedImage], *, dim: int) -> dict[str, Tensor]:
        joined = {name: torch.cat([image.inputs[name] for image in images], dim) for name in images[0].inputs}
        return {name: sent(each, self._device) for name, each in joined.items()}

    @property
    def _device(self) -> torch.device:
        device: torch.device = self._model.get_input_embeddings().weight.device
        return device
