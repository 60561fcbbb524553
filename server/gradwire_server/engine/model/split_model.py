"""One copy of a model, split into trunk and output head.

The *trunk* maps token ids to final hidden states, and the *output head* maps hidden states to logits, which
:mod:`gradwire_server.engine.scoring` computes in chunks. :mod:`.split_check` compares the split once, at load, with the
model's own logits, so that an architecture that does more between the two is refused rather than trained wrongly.

Both run inside the forward of one module, the *root*: see :meth:`SplitModel.compute`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from gradwire_losses.batch import sent
from torch import Tensor, nn
from transformers import PreTrainedModel

from gradwire_server.engine.model.attention.packed import BY_KERNEL, IN_ORDER, LAYOUT
from gradwire_server.engine.model.attention.paged import PagedDecode, PagedPrefill
from gradwire_server.engine.model.layers.dropout import DropoutPlaces, EmbeddingNoise, jittered
from gradwire_server.engine.model.layers.embedding import add_rows_in_place
from gradwire_server.engine.model.layers.exact_products import exact_product
from gradwire_server.engine.model.layers.feed_forward import FeedForward
from gradwire_server.engine.model.layers.rotary import fix_rotary_factors
from gradwire_server.engine.model.layers.routers import Routers
from gradwire_server.engine.model.packing import Layout, Packing, Padded, arrange
from gradwire_server.engine.model.placement import Placement
from gradwire_server.engine.model.trunk import trunk_of
from gradwire_server.engine.threads import products_apart

if TYPE_CHECKING:
    from gradwire_losses.images import ImageTokens

    from gradwire_server.engine.model.adapters.adapter_set import AdapterSet
    from gradwire_server.engine.model.adapters.products import Span
    from gradwire_server.engine.model.vision.image_tokens import Vision

T = TypeVar("T")

LOGIT_DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Names of the bound of the logits in configurations: Gemma and others, RecurrentGemma, xLSTM."""


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a model that are known without its weights; ``ModelInfo`` on the wire."""

    name: str
    path: str
    architecture: str
    num_parameters: int
    vocab_size: int
    context_length: int
    hidden_size: int
    num_layers: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    takes_images: bool = False
    image_token_id: int | None = None


@dataclass(frozen=True)
class HeadAdapter:
    """LoRA on the output head: it adds ``scale * dropout(h) A^T B^T`` to ``h W^T``.

    Attributes:
        a: ``[R, H]``.
        b: ``[V, R]``.
        scale: Factor of the product.
        dropout: Rate of the dropout on the hidden states.
        exact: As of :class:`OutputHead`.
    """

    a: Tensor
    b: Tensor
    scale: float
    dropout: float = 0.0
    exact: bool = False

    def inner(self, hidden: Tensor) -> Tensor:
        """``[T, R]`` ``scale * dropout(h) A^T`` in at least float32, differentiable."""
        dtype = torch.float64 if self.a.dtype == torch.float64 else torch.float32
        dropped = nn.functional.dropout(hidden, self.dropout) if self.dropout else hidden
        if self.exact and not torch.is_grad_enabled():
            return exact_product(dropped.to(dtype), self.a) * self.scale
        return nn.functional.linear(dropped.to(dtype), self.a.to(dtype)) * self.scale


@dataclass(frozen=True)
class OutputHead:
    """Map from hidden states to logits: ``softcap * tanh(scale * (h W^T + b) / softcap)``; without softcap, no tanh.

    With an adapter, its product is added to ``h W^T``.

    Attributes:
        weight: ``[V, H]``.
        bias: ``[V]`` or None.
        scale: Factor of the product.
        softcap: Bound of the logits, or None.
        adds_in_place: Whether a backward may add the weight's gradient to ``weight.grad`` itself, invisibly to
            autograd; valid with ``torch.autograd.backward`` only.
        adapter: LoRA on the head, or None.
        exact: Whether the bits of a token's log-probability depend on its state alone.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    adds_in_place: bool = False
    adapter: HeadAdapter | None = None
    exact: bool = False

    def operands(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """States and weights in turns, whose products ``states [T, ...] @ weight [V, ...]^T`` are to be added."""
        if self.adapter is None:
            return hidden, self.weight
        return hidden, self.weight, self.adapter.inner(hidden), self.adapter.b

    def transform(self, logits: Tensor) -> Tensor:
        """Apply scale and softcap to ``h W^T + b``, elementwise."""
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


class Root(nn.Module):
    """The module in whose forward a model computes, so that hooks on modules, such as sharding's, see every use."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, computation: Callable[[], T]) -> T:
        return computation()


class SplitModel:
    """One copy of a model.

    Attributes:
        model: The transformers model; frozen if it is a shared base.
        root: The module around ``model`` in whose forward everything is computed.
        trunk: The part of the model that ends in hidden states.
        routers: Its routers; None for a model without experts.
        adapters: Its LoRA adapters; None while there are none.
        mixed: Whether the trunk computes in bfloat16 (autocast) with float32 weights.
        weight_bytes: Bytes of the weights that it was loaded with.
        vision: The part that turns images into states of their tokens; None for a model of text.
        packing: Form in which the model takes ragged sequences; padded until
            :func:`.packing_check.choose_packing` finds a better one.
        replays: Whether a forward of one token of every row may be replayed as a graph of kernels.
        packs: Whether a sampler may copy its weights into a kernel's order (:mod:`.layers.packed_linear`).
        by_kernels: Whether a CPU's kernels (:mod:`.layers.cpu_kernels`) may attend, and draw for a sampler.
        in_order: Whether a CPU's attention takes each query's keys in order, as training so sampling, so that nothing
            beside a row changes attention: in bfloat16 and float16, and in an exact model.
        exact: Whether the bits of a token's states and log-probabilities depend on its sequence alone, in training and
            sampling (:mod:`.layers.exact_products`).
    """

    replays = packs = by_kernels = in_order = exact = False

    def __init__(self, facts: ModelFacts, model: PreTrainedModel, placement: Placement, *, mixed: bool = False) -> None:
        self.facts = facts
        self.model = model
        self.placement = placement
        self.root = Root(model)
        self.weight_bytes = sum(weight.nbytes for weight in (*model.parameters(), *model.buffers()))
        self._computing = False
        self._embeddings = model.get_input_embeddings()
        config = model.config.get_text_config()
        divisor = next((by for name in LOGIT_DIVISORS if (by := getattr(config, name, None))), 1.0)
        self._logit_scale = float(getattr(config, "logit_scale", None) or 1.0) / float(divisor)
        self._softcap = next((float(cap) for name in SOFTCAPS if (cap := getattr(config, name, None))), None)
        self.trunk = cast(nn.Module, trunk_of(model))
        self.mixed = mixed
        if mixed:
            self.trunk.forward = torch.autocast(self.device.type, torch.bfloat16)(self.trunk.forward)
        self.routers = Routers.of(model)
        self.adapters: AdapterSet | None = None
        self.vision: Vision | None = None
        self._training = False
        self._checkpointing = False
        self._dropout: float | None = None
        self._dropout_places = DropoutPlaces(model)
        self._noise = EmbeddingNoise(self._embeddings)
        self._jittered = jittered(model)
        fix_rotary_factors(model, facts.context_length)
        model.eval()
        self._feed_forward = FeedForward(model)
        add_rows_in_place(self._embeddings, placement)
        self.packing = Packing.PADDED

    @property
    def device(self) -> torch.device:
        return cast(torch.device, self._embeddings.weight.device)

    @property
    def dropout_names(self) -> list[str]:
        """Names of the model's own rates of dropout."""
        return self._dropout_places.names

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that the trunk computes in."""
        return torch.bfloat16 if self.mixed else self.weight_dtype

    @property
    def weight_dtype(self) -> torch.dtype:
        """Dtype of the weights that are not quantised."""
        return cast(torch.dtype, self._embeddings.weight.dtype)

    def compute(self, computation: Callable[[], T]) -> T:
        """Run a computation that uses the model's weights, which are whole within it; calls may be nested.

        Tensors whose gradient will be needed must be in the result, itself a tensor or a list or dict of them.
        """
        if self._computing:
            return computation()
        self._computing = True
        try:
            return cast(T, self.root(computation))
        except Exception:
            self.recover()
            raise
        finally:
            self._computing = False

    def recover(self) -> None:
        """Put the weights in order after an error within a forward or backward."""
        self.placement.recover(self.root)

    def expect_images(self, *, of_some: bool) -> None:
        """Say whether the next backward is of rows with images, which another process may not have."""
        self.placement.expect_unused(self.root, around_layers=of_some)

    @contextmanager
    def before_forwards(self, work: Callable[[], object]) -> Iterator[None]:
        """Do work before each forward of the trunk within the body."""

        def before(module: nn.Module, given: object) -> None:
            work()

        hook = self.trunk.register_forward_pre_hook(before)
        try:
            yield
        finally:
            hook.remove()

    @torch.no_grad()
    def forward_idly(self) -> None:
        """Go through the layers with one token, because other processes need this one's part of them."""
        self.activate()
        one = torch.ones(1, dtype=torch.int64)
        self.states(arrange(self.packing, 0 * one, one))

    def states(self, sequences: Layout | Padded, images: ImageTokens | None = None) -> Tensor:
        """``[M, H]`` final hidden states of all computed tokens, from one forward of the trunk."""
        if images is not None:
            images = images.arranged(sequences.places, sequences.input_ids.numel())
        return self.compute(lambda: self._states(sequences, images))

    def _states(self, sequences: Layout | Padded, images: ImageTokens | None) -> Tensor:
        if isinstance(sequences, Padded):
            rows = sent(sequences.input_ids, self.device)
            padded: Tensor = self.trunk(**self._inputs(rows, images), use_cache=False).last_hidden_state
            return padded.flatten(0, 1)
        return self.packed_states(sequences.input_ids, sequences.position_ids, sequences, images)

    def packed_states(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        layout: Layout | PagedPrefill | PagedDecode,
        images: ImageTokens | None = None,
    ) -> Tensor:
        """``[M, H]`` final hidden states of ``[M]`` tokens on one axis, whose attention follows a layout.

        Args:
            images: The image tokens among them, if there are images.
        """
        inputs = {"position_ids": sent(position_ids[None], self.device)}
        # What torch computes number by number, one thread computes in vectors from the first to the last: where several
        # cut the numbers, the ends of each part are computed one by one, by other functions.
        with products_apart() if self.exact else nullcontext():
            packed: Tensor = self.trunk(
                **inputs | self._inputs(sent(input_ids[None], self.device), images),
                # transformers passes a four-dimensional mask on unchanged; with a layout, attention ignores it.
                attention_mask=torch.empty(1, 1, 1, 1, dtype=torch.bool, device=self.device),
                use_cache=False,
                **{LAYOUT: layout, BY_KERNEL: self.by_kernels, IN_ORDER: self.in_order},
            ).last_hidden_state
        return packed[0]

    def _inputs(self, input_ids: Tensor, images: ImageTokens | None) -> dict[str, Any]:
        if images is None:
            return {"input_ids": input_ids}
        assert self.vision is not None  # the images were read by its processor
        return self.vision.trunk_inputs(input_ids, images)

    def output_head(self, adapter: str | None = None, *, dropout: float = 0.0) -> OutputHead:
        """The output head with the model's current weights; only within :meth:`compute`, where they are whole.

        Args:
            adapter: The peft adapter whose product is added if it is on the head too.
            dropout: Rate of dropout within the adapter.
        """
        if not self._computing:
            raise RuntimeError("the output head's weight may be sharded: use it within SplitModel.compute")
        linear = self.model.get_output_embeddings()
        # The CPU multiplies in float32 anyway; a GPU is many times faster in bfloat16.
        weight = linear.weight.to(self.dtype) if self.device.type == "cuda" else linear.weight
        bias, in_place = getattr(linear, "bias", None), self.placement.adds_in_place(weight)
        added = None
        pair = getattr(linear, "pairs", {}).get(adapter)
        if pair is not None:
            added = HeadAdapter(pair.a, pair.b, pair.scale, dropout, self.exact)
        return OutputHead(weight, bias, self._logit_scale, self._softcap, in_place, added, self.exact)

    def trains_output_head(self, adapter: str | None = None) -> bool:
        """Whether the output weight, or an adapter's product on it, gets a gradient."""
        linear = self.model.get_output_embeddings()
        return bool(linear.weight.requires_grad) or adapter in getattr(linear, "pairs", {})

    def activate(
        self,
        adapter: str | None = None,
        *,
        training: bool = False,
        checkpointing: bool = False,
        chunks: bool = False,
        dropout: float = 0.0,
        noise_alpha: float = 0.0,
    ) -> None:
        """Activate an adapter (None: the bare base), the mode and gradient checkpointing; free if active already.

        Args:
            chunks: Whether feed-forward layers compute the tokens in chunks.
            dropout: Rate of the model's own dropout in training mode.
            noise_alpha: Size of the noise on the embeddings in training mode.
        """
        self._noise.alpha = noise_alpha if training else 0.0
        self._feed_forward.chunked = chunks
        if self.adapters is not None:
            self.adapters.use(adapter)
        self._set_mode(training, checkpointing, dropout)

    def activate_spans(self, spans: Sequence[Span], *, training: bool, checkpointing: bool = False) -> None:
        """Activate several adapters, each for its span, and the mode, until the next :meth:`activate`."""
        assert self.adapters is not None
        self.adapters.use_spans(spans, self.device)
        self._noise.alpha = 0.0
        self._feed_forward.chunked = False  # spans are places among all tokens
        self._set_mode(training, checkpointing)

    def _set_mode(self, training: bool, checkpointing: bool, dropout: float = 0.0) -> None:
        rate = dropout if training else None
        if rate != self._dropout:
            self._dropout_places.restore() if rate is None else self._dropout_places.set(rate)
            self._dropout = rate
        if training != self._training:
            self.model.train(training)
            for module in self._jittered:
                module.training = False
            self._training = training
        if checkpointing != self._checkpointing:
            _set_checkpointing(self.model, checkpointing)
            self._checkpointing = checkpointing


def _set_checkpointing(model: PreTrainedModel, enabled: bool) -> None:
    # transformers 5.23 renames gradient_checkpointing_* and warns about the old name.
    kwargs = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        if enabled:
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
        else:
            model.activation_checkpointing_disable()
    elif enabled:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    else:
        model.gradient_checkpointing_disable()
