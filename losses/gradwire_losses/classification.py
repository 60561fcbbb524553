"""Classification of sequences and of tokens. ``C`` classes, those of the run's head, ``head="classification"``."""

from __future__ import annotations

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from gradwire_losses.batch import Batch, BatchError, Scores, segment_ids
from gradwire_losses.fields import INPUT_IDS, ROW_TOKENS, row_field
from gradwire_losses.outputs import LossOutput, Mean, Sum, Term
from gradwire_losses.reduction import ReductionConfig, reduced
from gradwire_losses.registry import FieldSpec, LossConfig, register_loss


class ClassificationConfig(LossConfig):
    """Arguments of the classification losses."""

    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="share of a label's probability that is spread over all classes"
    )


def _check_classes(labels: Tensor, field: str, rows: Tensor, classes: int) -> None:
    outside = (labels < 0) | (labels >= classes)
    if outside.any():
        at = int(outside.nonzero()[0])
        raise BatchError(
            f"{field}, row {int(rows[at])}: class {int(labels[at])}; the run's head has {classes} classes",
            field=field,
            row=int(rows[at]),
            rule=f"0 <= class < {classes}",
        )


def _most_probable(logits: Tensor, labels: Tensor) -> Tensor:
    """``[N, C], [N] -> [N]`` bool: whether every other class is less probable than the label."""
    return (logits >= logits.gather(1, labels[:, None])).sum(dim=1) == 1


@register_loss(
    "sequence_classification",
    config=ClassificationConfig,
    fields=(
        INPUT_IDS,
        FieldSpec("label", "int", ("[rows]",), "The class of each sequence.", required=True),
        row_field("weights", ("[rows]",), "Weight of each row; 1 by default."),
    ),
    scores=("class_logits",),
    metrics={"accuracy": "share of sequences whose class is more probable than every other", "num_rows": "sequences"},
    reference="cross-entropy; label_smoothing: Szegedy et al. 2016 (arXiv 1512.00567)",
    formula="-1/B sum w log softmax(z)_y",
    streams=True,
    head="classification",
)
def sequence_classification(batch: Batch, scores: Scores, config: ClassificationConfig) -> LossOutput:
    """Predicts the class of each sequence at its last token; a mean over sequences.

    Raises:
        BatchError: The head does not have the class.
    """
    logits, labels = scores.class_logits, batch["label"]
    _check_classes(batch.host["label"], "label", segment_ids(batch.group_sizes), logits.shape[1])
    losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=config.label_smoothing)
    if "weights" in batch.fields:
        losses = losses * batch["weights"]
    return LossOutput(
        {"classes": Term(losses.sum(), len(losses), "sequences")},
        {"accuracy": Mean.of(_most_probable(logits, labels)), "num_rows": Sum(len(losses))},
    )


class TokenClassificationConfig(ReductionConfig, ClassificationConfig):
    """Arguments of ``token_classification``."""


@register_loss(
    "token_classification",
    config=TokenClassificationConfig,
    fields=(
        INPUT_IDS,
        FieldSpec(
            "token_labels",
            "int",
            ROW_TOKENS,
            "The class of each token; -100 for tokens without a label.",
            required=True,
            aligned_with="input_ids",
        ),
    ),
    scores=("token_class_logits",),
    metrics={
        "accuracy": "share of labelled tokens whose class is more probable than every other",
        "num_tokens": "labelled tokens",
    },
    reference="cross-entropy; label_smoothing: Szegedy et al. 2016 (arXiv 1512.00567)",
    formula="-1/T sum_t log softmax(z_t)_y_t",
    streams=True,
    head="classification",
)
def token_classification(batch: Batch, scores: Scores, config: TokenClassificationConfig) -> LossOutput:
    """Predicts the class of each labelled token, after reading it; a mean over these tokens, or as ``reduction`` says.

    Raises:
        BatchError: The head does not have the class.
    """
    logits, labels = scores.token_class_logits, batch["token_labels"]
    _check_classes(batch.host["token_labels"], "token_labels", segment_ids(batch.row_lengths), logits.shape[1])
    losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=config.label_smoothing)
    return LossOutput(
        {"classes": reduced(losses, batch.row_lengths, config)},
        {"accuracy": Mean.of(_most_probable(logits, labels)), "num_tokens": Sum(len(losses))},
    )
