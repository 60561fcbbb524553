"""Batch fields that several losses share."""

from __future__ import annotations

from gradwire_losses.registry import FieldSpec

ROW_TOKENS = ("[rows, tokens]",)
ROWS_OR_TOKENS = ("[rows]", "[rows, tokens]")

INPUT_IDS = FieldSpec(
    "input_ids", "int", ROW_TOKENS, "Token ids.", required=True, ids=True, padding_mask="attention_mask"
)
LOSS_MASK = FieldSpec(
    "loss_mask",
    "bool",
    ROW_TOKENS,
    "1 for scored tokens (those that the policy wrote); by default all but a row's first.",
    aligned_with="input_ids",
)
PROMPT_LENGTHS = FieldSpec(
    "prompt_lengths", "int", ("[rows]",), "Number of prompt tokens at the start, which are not scored."
)


def row_field(name: str, shapes: tuple[str, ...], description: str, *, required: bool = False) -> FieldSpec:
    """A float field of the layout ``rows``."""
    aligned_with = "input_ids" if any("tokens" in shape for shape in shapes) else ""
    return FieldSpec(name, "float", shapes, description, required=required, aligned_with=aligned_with)


OLD_LOG_PROBS = row_field(
    "old_log_probs",
    ROW_TOKENS,
    "Log-probability of each token under the policy that wrote it, at the temperature of this call.",
    required=True,
)
REF_LOG_PROBS = row_field(
    "ref_log_probs", ROW_TOKENS, "Log-probability of each token under the reference, instead of reference_model."
)


def _side(side: str) -> tuple[FieldSpec, FieldSpec, FieldSpec]:
    ids = f"{side}_input_ids"
    return (
        FieldSpec(
            ids,
            "int",
            ROW_TOKENS,
            f"Token ids of prompt and {side} response.",
            required=True,
            ids=True,
            padding_mask=f"{side}_attention_mask",
        ),
        FieldSpec(
            f"{side}_loss_mask",
            "bool",
            ROW_TOKENS,
            f"1 for tokens of the {side} response; by default all but the first.",
            aligned_with=ids,
        ),
        FieldSpec(
            f"{side}_ref_log_probs",
            "float",
            ROWS_OR_TOKENS,
            f"Log-probability of the {side} response, or of each of its tokens, under the reference, instead of "
            "reference_model.",
            aligned_with=ids,
        ),
    )


CHOSEN_IDS, CHOSEN_LOSS_MASK, CHOSEN_REF_LOG_PROBS = _side("chosen")
REJECTED_IDS, REJECTED_LOSS_MASK, REJECTED_REF_LOG_PROBS = _side("rejected")
PAIR_FIELDS = (CHOSEN_IDS, REJECTED_IDS, PROMPT_LENGTHS, CHOSEN_LOSS_MASK, REJECTED_LOSS_MASK)
PAIR_REF_LOG_PROBS = (CHOSEN_REF_LOG_PROBS, REJECTED_REF_LOG_PROBS)

SAMPLE_TOKENS = ("[rows, samples, tokens]",)


def sample_field(name: str, shapes: tuple[str, ...], description: str) -> FieldSpec:
    """A float field of the layout ``groups``."""
    aligned_with = "response_ids" if any("tokens" in shape for shape in shapes) else ""
    return FieldSpec(name, "float", shapes, description, aligned_with=aligned_with)


GROUP_FIELDS = (
    FieldSpec(
        "prompt_ids",
        "int",
        ROW_TOKENS,
        "Token ids of each prompt.",
        required=True,
        ids=True,
        padding_mask="prompt_masks",
    ),
    FieldSpec(
        "response_ids",
        "int",
        SAMPLE_TOKENS,
        "Token ids of each prompt's sampled responses.",
        required=True,
        ids=True,
        padding_mask="response_masks",
    ),
    FieldSpec(
        "response_masks",
        "bool",
        SAMPLE_TOKENS,
        "1 for scored response tokens. Tokens with 0 are context for later tokens; those after the last 1 are dropped, "
        "because nothing depends on them.",
        aligned_with="response_ids",
    ),
    sample_field("rewards", ("[rows, samples]",), "One reward per response; required without advantages."),
    sample_field(
        "old_log_probs",
        SAMPLE_TOKENS,
        "Log-probability of each response token under the policy that wrote it; if absent, the current policy.",
    ),
    sample_field(
        "ref_log_probs",
        SAMPLE_TOKENS,
        "Log-probability of each response token under the reference, instead of reference_model.",
    ),
)

SAMPLER_LOG_PROBS = row_field(
    "sampler_log_probs",
    ROW_TOKENS,
    "Log-probability of each token as the sampler computed it, for sampler_correction and the sampler's metrics.",
)

GROUP_ADVANTAGES = sample_field(
    "advantages",
    ("[rows, samples]", SAMPLE_TOKENS[0]),
    "Advantage of each response, or of each of its tokens; overrides the advantages from rewards.",
)
GROUP_POLICY_FIELDS = (
    *GROUP_FIELDS,
    GROUP_ADVANTAGES,
    sample_field(
        "sampler_log_probs",
        SAMPLE_TOKENS,
        "Log-probability of each response token as the sampler computed it, for sampler_correction.",
    ),
    FieldSpec("truncated", "bool", ("[rows, samples]",), "1 for responses that were cut off at the length limit."),
    FieldSpec(
        "planning_mask",
        "bool",
        SAMPLE_TOKENS,
        "1 for planning tokens (part of a strategic gram): planning_alpha raises their advantage.",
        aligned_with="response_ids",
    ),
)
