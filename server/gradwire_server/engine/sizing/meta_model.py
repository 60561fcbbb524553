"""Sizes of one model and of a run on it, from meta tensors.

Where all layers are alike, bytes are linear in their number, and models of two and three layers stand for the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from gradwire_proto.v1 import training_pb2
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.attention import packed
from gradwire_server.engine.model.attention.packed import NotCausal
from gradwire_server.engine.model.layers.activations import Activations
from gradwire_server.engine.model.layers.exact_products import panel_bytes_of
from gradwire_server.engine.model.loading.configuration import read_configuration, without_weights
from gradwire_server.engine.model.loading.fused_kernels import use_fused_kernels
from gradwire_server.engine.model.loading.pool import ModelPool, check_quantization
from gradwire_server.engine.model.loading.quantization import Quantization, QuantizedLinear, quantized_layers
from gradwire_server.engine.model.meta_device import DeviceKind, estimating
from gradwire_server.engine.model.packing import Packing
from gradwire_server.engine.model.placement import Placement
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.model.policy_from_config import make_policy
from gradwire_server.engine.model.split_model import SplitModel
from gradwire_server.engine.model.trunk import trunk_of
from gradwire_server.engine.model.vision.image_tokens import Vision
from gradwire_server.engine.scoring.memory import TokenBytes, measured_image_bytes, measured_token_bytes
from gradwire_server.engine.scoring.planner import Budget
from gradwire_server.engine.sizing.meta_step import TooManyOperationsError, step_bytes
from gradwire_server.engine.sizing.parts import master_bytes, weight_bytes


class MetaPool(ModelPool):
    """Models without weights, each assumed to be computed as the server computes most of them: packed.

    Args:
        models: Name -> folder, ``config.json`` or hub name.
        layers: Number of layers; None for each model's own.
        quantize: How shared copies hold their linear layers.
    """

    def __init__(
        self,
        models: dict[str, str],
        dtype: torch.dtype,
        *,
        layers: int | None = None,
        quantize: Quantization | None = None,
    ) -> None:
        super().__init__(models, Placement("meta"), dtype, quantize=quantize)
        self._layers = layers

    def load(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        quantize: Quantization | None = None,
        *,
        offload: bool = False,
        placement: Placement | None = None,
        exact: bool | None = None,
    ) -> SplitModel:
        facts = self.facts(name)
        check_quantization(facts, quantize)
        config = read_configuration(facts.path)
        if self._layers is not None:
            shorten(config, self._layers)
        model = without_weights(config, dtype or self.dtype)
        if self.kernels is not None:
            use_fused_kernels(model, self.kernels)
        if quantize is not None:
            for layer in quantized_layers(model):
                layer.__class__ = _MetaQuantizedLinear
        split_model = SplitModel(facts, model, placement or self.placement)
        split_model.by_kernels = self.kernels is not None
        if model.config._attn_implementation == "sdpa":
            model.config._attn_implementation = packed.NAME
            split_model.packing = Packing.SHARED
        if facts.takes_images:
            split_model.vision = Vision(model, facts.path)
        return split_model


class _MetaQuantizedLinear(QuantizedLinear):
    """A layer whose weight has its whole shape here; a pass makes another tensor of it, as dequantising does."""

    def dequantised(self) -> Tensor:
        return torch.empty_like(self.weight)


def shorten(config: PreTrainedConfig, layers: int) -> None:
    """Give a configuration fewer layers."""
    text = config.get_text_config()
    text.num_hidden_layers = layers
    if vars(text).get("layer_types"):  # of some configurations it is computed from the number of layers
        text.layer_types = text.layer_types[:layers]


def layers_alike(model: PreTrainedModel) -> bool:
    """Whether all layers of a model have the same shapes and kind, so that fewer of them tell what each takes."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    stack = getattr(trunk_of(model), "layers", None)
    if len(kinds) > 1 or not isinstance(stack, nn.ModuleList) or len(stack) != config.num_hidden_layers:
        return False
    shapes = [[(name, each.shape) for name, each in layer.named_parameters()] for layer in stack]
    return all(each == shapes[0] for each in shapes)


MODEL = "model"
"""Name of the model in a run's configuration."""
SHORT = (2, 3)
MOST_OPERATIONS = 20_000
"""Operations of a step that are computed one by one, besides half of one a token: some seconds.

Without loops over the tokens a layer has about 100, and scoring has one for each third token.
"""
WALKED = (8, 16)
"""Tokens of the short rows from which a model whose code loops over the tokens is extrapolated."""


@dataclass(frozen=True)
class _Run:
    """A run's properties that its memory limits depend on."""

    policy: Policy
    config: training_pb2.RunConfig
    step: int = 1


class MetaModel:
    """A model without weights, and a run on it.

    Args:
        path: Folder, ``config.json`` or hub name.
        config: The run's configuration, whose model is :data:`MODEL`.
        quantize: How the frozen base holds its linear layers; None in ``dtype``.

    Raises:
        OperationError: UNSUPPORTED if the model is not a causal LM of transformers.
    """

    def __init__(
        self,
        path: str,
        dtype: torch.dtype,
        config: training_pb2.RunConfig,
        quantize: Quantization | None = None,
        kind: DeviceKind = "cpu",
    ) -> None:
        self._kind = kind
        self._walks = set[Budget]()
        self._steps: dict[tuple[int, int, frozenset[str], Budget, Activations, int], dict[str, float]] = {}
        self._path, self._dtype, self._config, self._quantize = path, dtype, config, quantize
        pool = MetaPool({MODEL: path}, dtype)
        self.model: PreTrainedModel = pool.meta_model(MODEL)
        self._num_layers = pool.facts(MODEL).num_layers
        self.num_parameters = pool.facts(MODEL).num_parameters
        self.context_length = pool.facts(MODEL).context_length
        alike = layers_alike(self.model) and self._num_layers > max(SHORT)
        self._layers = SHORT if alike else (self._num_layers,)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the frozen weights."""
        return weight_bytes(self.model, self._dtype, self._quantize)

    @cached_property
    def run(self) -> _Run:
        return _Run(self._policies[-1], self._config)

    @cached_property
    def trained_parameters(self) -> int:
        """Parameters that the run trains."""
        return round(self._whole(lambda policy: policy.num_trainable_parameters))

    @cached_property
    def adapter_bytes(self) -> int:
        """Bytes of what the run trains, and of its float32 masters."""

        def held(policy: Policy) -> int:
            return sum(each.nbytes + each.numel() * master_bytes(each.dtype) for each in parameters(policy))

        def parameters(policy: Policy) -> list[nn.Parameter]:
            return list(policy.trainable_parameters().values())

        return round(self._whole(held))

    @cached_property
    def adapter_panel_bytes(self) -> int:
        """Bytes of the copies of an adapter that exact products are computed with."""

        def held(policy: Policy) -> int:
            adapter = policy.trainable_parameters() if policy.adapter else {}
            return sum(panel_bytes_of(each) for each in adapter.values() if each.ndim == 2)

        return round(self._whole(held))

    def token_bytes(self) -> TokenBytes:
        """Bytes per token of a forward and backward, as the engine measures them."""
        with _without_numbers(self._kind):
            found = [measured_token_bytes(policy) for policy in self._policies]
        return TokenBytes(*(self._extrapolated(list(sizes)) for sizes in zip(*found, strict=True)))

    def image_bytes(self, *, recompute: bool) -> float:
        """Bytes that the vision part takes for an image token, as the engine measures them."""
        with _without_numbers(self._kind):
            return measured_image_bytes(self._policies[0], recompute=recompute)

    @property
    def takes_images(self) -> bool:
        return self._policies[0].split_model.vision is not None

    def step(
        self, rows: int, tokens: int, scores: set[str], budget: Budget, activations: Activations, shared: int = 0
    ) -> dict[str, float]:
        """Bytes of a micro-batch: ``activations``, ``logits`` and ``passing``; see :func:`.meta_step.step_bytes`.

        Code that loops over the tokens (Mamba's) takes minutes for a long row. Its bytes are extrapolated from two
        short rows, in proportion to the tokens: more than there are where logits are computed in parts.
        """
        most = None if tokens <= WALKED[1] else MOST_OPERATIONS + tokens // 2
        if most is None or budget not in self._walks:
            try:
                return self._step(rows, tokens, scores, budget, activations, most, shared)
            except TooManyOperationsError:
                self._walks.add(budget)  # another may have no tiny parts of logits, which are as many operations
        short, longer = (self._step(rows, count, scores, budget, activations, None) for count in WALKED)
        times = (tokens - WALKED[0]) / (WALKED[1] - WALKED[0])
        return {name: max(short[name], short[name] + times * (longer[name] - short[name])) for name in short}

    def _step(
        self,
        rows: int,
        tokens: int,
        scores: set[str],
        budget: Budget,
        activations: Activations,
        most: int | None,
        shared: int = 0,
    ) -> dict[str, float]:
        key = (rows, tokens, frozenset(scores), budget, activations, shared)
        if key not in self._steps:
            with _without_numbers(self._kind):
                steps = [
                    step_bytes(policy, rows, tokens, scores, budget, activations, self._kind, most, shared)
                    for policy in self._policies
                ]
            self._steps[key] = {
                name: self._extrapolated([getattr(each, name) for each in steps])
                for name in ("activations", "logits", "passing")
            }
        return self._steps[key]

    @cached_property
    def _policies(self) -> list[Policy]:
        def pool(layers: int) -> MetaPool:
            return MetaPool({MODEL: self._path}, self._dtype, layers=layers, quantize=self._quantize)

        with (
            _without_numbers(self._kind),
            torch.device("meta"),
        ):  # peft makes adapters on the default device, and those of experts are large
            policies = [make_policy(pool(layers), self._config, "run") for layers in self._layers]
        for policy in policies:
            policy.gradient_checkpointing = False  # steps say what becomes of their activations
        return policies

    def _whole(self, size: Callable[[Policy], float]) -> float:
        return self._extrapolated([size(policy) for policy in self._policies])

    def _extrapolated(self, sizes: list[float]) -> float:
        """The size of the whole model, from those of the short ones."""
        if len(sizes) == 1:
            return sizes[0]
        return sizes[0] + (sizes[1] - sizes[0]) / (SHORT[1] - SHORT[0]) * (self._num_layers - SHORT[0])


@contextmanager
def _without_numbers(kind: DeviceKind) -> Iterator[None]:
    """Compute on meta tensors, as a device of this kind would.

    Raises:
        OperationError: UNSUPPORTED if a model's computation depends on numbers.
    """
    try:
        with estimating(kind):
            yield
    except (OperationError, TooManyOperationsError):
        raise
    except NotCausal:
        raise OperationError(
            training_pb2.ERROR_CODE_UNSUPPORTED,
            "its tokens attend to later ones, so it is no model that predicts the next token: give a causal LM",
            field="base_model",
        ) from None
    except Exception as error:  # whatever a model's own code raises where it looks at numbers
        raise OperationError(
            training_pb2.ERROR_CODE_UNSUPPORTED,
            "the memory of this model cannot be computed from its configuration, as its layers do not compute without"
            f" weights: {str(error).partition(chr(10))[0] or type(error).__name__}",
        ) from None
