"""The settings of a new run: their check, and what an upload says of them."""

from __future__ import annotations

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.errors import ServiceError, check_length, limit_exceeded
from gradwire_server.limits import Limits

MAX_LANES = 64
HEADS = ("", "value", "reward", "classification")


def check_settings(config: pb.RunConfig, key: str, limits: Limits, durability: str) -> None:
    """Check the settings of a run that is to be created by a request with this idempotency key."""
    if config.head not in HEADS:
        raise _invalid(f'head is {config.head[:50]!r}; it is "", "value", "reward" or "classification"', "head")
    if config.head == "classification" and config.num_labels < 2:
        raise _invalid(f"num_labels is {config.num_labels}; a classification head has 2 at least", "num_labels")
    if config.head != "classification" and config.num_labels:
        raise _invalid('num_labels goes with head="classification"', "num_labels")
    if not 0.0 <= config.dropout < 1.0:
        raise _invalid(f"dropout is {config.dropout}; 0 <= dropout < 1", "dropout")
    if not 0.0 <= config.neftune_noise_alpha < float("inf"):
        message = f"neftune_noise_alpha is {config.neftune_noise_alpha}; it is a finite number of at least 0"
        raise _invalid(message, "neftune_noise_alpha")
    if not 0.0 <= config.router_aux_loss_coef < float("inf"):
        raise _invalid(
            f"router_aux_loss_coef is {config.router_aux_loss_coef}; it is a finite number of at least 0",
            "router_aux_loss_coef",
        )
    if config.lanes > MAX_LANES or config.lanes & (config.lanes - 1):
        raise _invalid(f"lanes is {config.lanes}; it is a power of two, up to {MAX_LANES}", "lanes")
    if config.keep_journal and durability != "journal":
        raise _invalid("keep_journal: the server keeps no journal (--durability checkpoint)", "keep_journal")
    if not 0.0 <= config.record_batches <= 1.0:
        message = f"record_batches is {config.record_batches}; it is a share from 0 to 1"
        raise _invalid(message, "record_batches")
    if config.kind not in ("", "rl"):
        raise _invalid(f'kind is {config.kind[:50]!r}; it is "" or "rl"', "kind")
    if config.HasField("lora"):
        if not config.lora.rank:
            raise _invalid("lora needs a rank of at least 1; leave lora out to train all weights", "lora.rank")
        if not 0.0 <= config.lora.dropout < 1.0:
            raise _invalid(f"lora.dropout is {config.lora.dropout}; 0 <= dropout < 1", "lora.dropout")
        if not 0.0 <= config.lora.alpha < float("inf"):
            raise _invalid(f"lora.alpha is {config.lora.alpha}; it is a finite number, 0 for 2 * rank", "lora.alpha")
    modules = config.lora.target_modules
    texts = [
        ("name", config.name),
        ("idempotency_key", key),
        *(("tags", text) for pair in config.tags.items() for text in pair),
    ]
    texts += [("lora.target_modules", module) for module in modules]
    for field, count in (("tags", len(config.tags)), ("lora.target_modules", len(modules))):
        if count > limits.max_tags:
            raise limit_exceeded(f"{count} {field}", "max_tags", limits.max_tags, field)
    for field, text in texts:
        check_length(text, "max_name_chars", limits.max_name_chars, field)


def take_settings(config: pb.RunConfig, upload: pb.Upload) -> None:
    """Complete a run's settings with those of the upload that it starts from.

    Raises:
        ServiceError: INVALID_ARGUMENT for a setting that differs from the upload's.
    """
    if config.base_model and config.base_model != upload.base_model:
        raise _differs("base_model", config.base_model, upload.base_model)
    config.base_model = upload.base_model
    if upload.kind == "model":
        if config.HasField("lora"):
            raise ServiceError(
                pb.ERROR_CODE_UNSUPPORTED,
                "LoRA runs share the server's copy of the base model, so they cannot start from an uploaded whole"
                " model: leave lora out to train all weights, or serve the folder itself with `gradwire serve --model`",
                field="lora",
            )
        return
    asked, own = config.lora, upload.lora
    for name in ("rank", "alpha"):
        if getattr(asked, name) and getattr(asked, name) != getattr(own, name):
            raise _differs(f"lora.{name}", getattr(asked, name), getattr(own, name))
    if asked.target_modules and sorted(asked.target_modules) != list(own.target_modules):
        raise _differs("lora.target_modules", list(asked.target_modules), list(own.target_modules) or "all-linear")
    dropout = asked.dropout or own.dropout  # a setting of the training, not of the weights
    config.lora.CopyFrom(own)
    config.lora.dropout = dropout


def _differs(field: str, given: object, own: object) -> ServiceError:
    return _invalid(f"{field} is {given!r}, and the uploaded adapter's is {own!r}: leave it out", field)


def _invalid(message: str, field: str) -> ServiceError:
    return ServiceError(pb.ERROR_CODE_INVALID_ARGUMENT, message, field=field)
