"""The forms in which models write what they think before they answer, each told by the model's chat template."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningForm:
    """One form.

    Attributes:
        family: Models that write it.
        taught_by: A text that templates of this form have, and those of the forms below it in :data:`FORMS` have not.
        opens, closes: Marks of the reasoning.
        header: Pattern of the head of each message, for models that write an answer as several; the group is the
            channel. Reasoning is then a message of the channel ``analysis``; the heads of others are left out, except
            those of calls, which belong to :mod:`.tool_forms`.
    """

    family: str
    taught_by: str
    opens: str
    closes: str
    header: re.Pattern[str] | None = None


FORMS = (
    ReasoningForm(
        "gpt-oss", "<|channel|>", "<|channel|>analysis<|message|>", "<|end|>",
        re.compile(r"(?:<\|start\|>assistant(?:\s+to=[^<]*)?)?<\|channel\|>(\w+)[^<]*(?:<\|constrain\|>\w+\s*)?<\|message\|>"),
    ),
    ReasoningForm("Gemma 4", "<|channel>", "<|channel>thought\n", "<channel|>"),
    ReasoningForm("Magistral", "[THINK]", "[THINK]", "[/THINK]"),
    ReasoningForm("Kimi", "◁/think▷", "◁think▷", "◁/think▷"),
    ReasoningForm("Qwen3, DeepSeek-R1, GLM-4.5, MiniMax-M2, Phi-4", "</think>", "<think>", "</think>"),
)  # fmt: skip


def reasoning_form_of(template: str) -> ReasoningForm | None:
    """The form that a chat template teaches; None if it teaches none."""
    return next((form for form in FORMS if form.taught_by in template), None)
