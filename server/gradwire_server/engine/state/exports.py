"""Export of runs as folders for plain transformers or peft: weights, tokenizer, and the head if there is one."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gradwire_proto.v1 import training_pb2
from peft import PeftModel, set_peft_model_state_dict
from peft.tuners.lora.layer import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.adapters.lora_settings import lora_config, only_the_head_of_tied
from gradwire_server.engine.model.layers.head_files import (
    classifier_name,
    classifier_tensors,
    describe_classifier,
    save_value_head,
)
from gradwire_server.engine.model.layers.heads import Head
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.placement import Placement, whole_on_host, whole_tensors
from gradwire_server.engine.model.policy import HEAD_PREFIX, LoraPolicy, Policy
from gradwire_server.engine.model.split_model import ModelFacts
from gradwire_server.engine.scoring.token_scores import token_logits
from gradwire_server.engine.state.engine_run import EngineRun

PREFIX = "base_model.model."
"""Prefix of tensors' names in peft's files."""
FORMATS = ("auto", "hf", "peft", "merged")
COPIED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Files of the tokenizer and of the processor of images, which training leaves as they are."""


PROBE_TOKENS = 64
"""Tokens over which a merged model is compared with the served one."""


@dataclass(frozen=True)
class Exported:
    """An exported folder.

    Attributes:
        format: "hf" (a whole model) or "peft" (an adapter).
        logprob_difference: For an adapter on a quantized base, merged into the unquantized weights: the largest
            difference between the log-probabilities of both over :data:`PROBE_TOKENS` tokens, in nats; else None.
    """

    format: str
    logprob_difference: float | None = None


def whole_weights(run: EngineRun, *, keep: bool = True) -> Mapping[str, Tensor]:
    """All weights of a run's model that its export writes; none for an adapter. All ranks call it.

    Args:
        keep: Whether this process wants those that are divided among ranks.
    """
    if isinstance(run.policy, LoraPolicy):
        return {}
    run.policy.activate()
    return whole_on_host(run.policy.model.state_dict(), keep=keep)


def export_run(
    pool: ModelPool, run: EngineRun, folder: Path, requested: str, weights: Mapping[str, Tensor] | None = None
) -> Exported:
    """Write a run's weights as a folder.

    Args:
        weights: The result of :func:`whole_weights`, where it is known already.
        folder: An empty folder.
        requested: "auto" (as the run trains), "hf" or "merged" (a whole model, with the adapter merged into it), or
            "peft".
    """
    policy = run.policy
    if requested not in FORMATS:
        raise _refuse(f"there is no export format {requested!r}; there are: {', '.join(FORMATS)}")
    if requested == "peft" and not isinstance(policy, LoraPolicy):
        raise _refuse("this run trains all weights, so there is no adapter to export: use format 'hf'")
    difference: float | None = None
    as_adapter = isinstance(policy, LoraPolicy) and requested in ("auto", "peft")
    if isinstance(policy, LoraPolicy):
        if as_adapter:
            save_adapter(policy, folder, policy.head)
        else:
            merged = _merged(pool, run)
            if pool.quantize is not None:
                difference = _logprob_difference(policy, merged)
            nn.Module.to(merged, _stored_dtype(policy.facts.path))
            _save_model(merged, merged.state_dict(), policy.head, folder)
    else:
        _save_model(policy.model, weights or whole_weights(run), policy.head, folder)
    _copy_tokenizer(policy.facts, folder)
    if policy.head is not None and policy.head.kind == "value":
        save_value_head(policy.head, folder)
    elif policy.head is not None and not as_adapter:
        describe_classifier(policy.head, policy.model.config, folder)
    return Exported("peft" if as_adapter else "hf", difference)


def _save_model(model: PreTrainedModel, weights: Mapping[str, Tensor], head: Head | None, folder: Path) -> None:
    model.save_pretrained(folder, state_dict=whole_tensors(weights) | classifier_tensors(head, model.config))


def save_adapter(policy: LoraPolicy, folder: Path, head: Head | None = None) -> None:
    """Write an adapter in peft's format; with a reward or classification head, it is one for sequences."""
    config = copy.copy(policy.peft_config)
    config.base_model_name_or_path = policy.facts.path
    config.inference_mode = True
    beside = classifier_tensors(head, policy.model.config)
    if beside:
        config.task_type, config.modules_to_save = "SEQ_CLS", [classifier_name(policy.model.config)]
    config.save_pretrained(str(folder))
    weights = _without_head(policy) | beside
    save_file(
        {f"{PREFIX}{name}": weight for name, weight in whole_tensors(weights).items()},
        folder / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )


def _merged(pool: ModelPool, run: EngineRun) -> PreTrainedModel:
    """Load a copy of the base model and merge the run's adapter into its weights."""
    base = pool.load(run.config.base_model, placement=None if pool.placement.parts == 1 else Placement()).model
    config = lora_config(base, run.config.lora)
    with only_the_head_of_tied():
        merged = PeftModel(base, config, adapter_name="merged", autocast_adapter_dtype=False)
    weights = whole_tensors(_without_head(run.policy))
    state = {f"{PREFIX}{name}": value for name, value in weights.items()}
    loaded: Any = set_peft_model_state_dict(merged, state, "merged")
    if unknown := loaded.unexpected_keys:
        raise ValueError(f"peft does not know {len(unknown)} tensors of the adapter, first {unknown[0]}")
    _untie(base)
    _refuse_shared(merged)
    model: PreTrainedModel = merged.merge_and_unload(adapter_names=["merged"])
    return model


def _stored_dtype(path: str) -> torch.dtype:
    """The dtype in which a model's own weights are stored, which a merged model keeps."""
    config: Any = AutoConfig.from_pretrained(path, trust_remote_code=False)
    return config.dtype or config.get_text_config().dtype or torch.float32


def _refuse_shared(model: nn.Module) -> None:
    """Refuse to merge several adapters into a weight that several layers share (Zamba's blocks)."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    weights = [id(layer.get_base_layer().weight) for layer in layers]
    if len(set(weights)) < len(weights):
        raise _refuse(
            "layers of this model share their weights, and the run's adapter is another one in each of them: it cannot"
            " be merged. Use format 'peft'"
        )


@torch.no_grad()
def _logprob_difference(policy: Policy, merged: PreTrainedModel) -> float:
    count = min(PROBE_TOKENS, policy.facts.context_length)
    ids = (7 * torch.arange(count) + 1) % policy.facts.vocab_size

    def served_logits() -> Tensor:
        return token_logits(policy.hidden(ids, torch.tensor([count])), policy.output_head())

    served = policy.compute(served_logits).float().log_softmax(dim=-1)
    own = merged(input_ids=ids[None].to(merged.device), use_cache=False).logits[0].float().log_softmax(dim=-1)
    difference = (served[:-1] - own[:-1].to(served.device)).gather(1, ids[1:, None].to(served.device))
    return difference.abs().max().item() if count > 1 else 0.0


def _untie(model: PreTrainedModel) -> None:
    """Give the output head a weight of its own where it shares the embedding's and either of them has an adapter.

    An adapter is on one of the two uses, so merging it into the shared weight would change the other use as well.
    """
    layers: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    embedding, head = (getattr(layer, "base_layer", layer) for layer in layers)
    if head is None or head.weight is not embedding.weight or layers == [embedding, head]:
        return
    head.weight = nn.Parameter(head.weight.detach().clone())
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False


def _without_head(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in policy.state_tensors().items() if not name.startswith(HEAD_PREFIX)}


def _copy_tokenizer(facts: ModelFacts, folder: Path) -> None:
    source = Path(facts.path)
    for name in COPIED_FILES:
        if source.is_dir():
            file: str | Path | None = source / name if (source / name).is_file() else None
        else:
            from huggingface_hub import try_to_load_from_cache

            cached = try_to_load_from_cache(facts.path, name)
            file = cached if isinstance(cached, str) else None
        if file is not None:
            shutil.copyfile(file, folder / name)


def _refuse(message: str) -> OperationError:
    return OperationError(
        training_pb2.ERROR_CODE_INVALID_ARGUMENT, message, field="format", rule=f"one of {', '.join(FORMATS)}"
    )
