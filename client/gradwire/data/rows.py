"""Rows of the kinds that trainings take, whatever layout they were read from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradwire.data.sources import Row

Message = Mapping[str, Any]
"""``role`` (user, assistant, system or tool), ``content`` (a text, or parts where it has images), and where it has them
``reasoning_content``, ``tool_calls`` with objects as arguments, ``weight``, and other keys that a template may read."""


@dataclass(frozen=True)
class Conversation:
    """Messages to learn from.

    Attributes:
        messages: With ``role`` and ``content``, for :meth:`gradwire.ServiceClient.render`; ``weight`` is 1 or 0 where
            the row says of a message whether it is learned.
        tools: JSON schemas of the tools that it calls, if the row has any.
        template_kwargs: Further variables of the chat template.
        weight: Weight of its tokens, in the loss and in the number that it is averaged over.
        text: Plain text in place of messages: all of it is learned, as it is.
        images: Files of the images of the messages' parts ``{"type": "image"}``, in order.
        place: File and line that it came from.
    """

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    text: str = ""
    images: tuple[bytes, ...] = ()
    place: str = field(default="", compare=False)

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The messages before the assistant's first."""
        first = next((i for i, each in enumerate(self.messages) if each["role"] == "assistant"), len(self.messages))
        return self.messages[:first]


@dataclass(frozen=True)
class Preference:
    """Two answers to one prompt.

    Attributes:
        prompt: The messages before the answers.
        chosen, rejected: The messages of the better and of the worse answer.
        tools: JSON schemas of the tools that they may call, if the row has any.
        template_kwargs: Further variables of the chat template.
        margin: By how much the better answer's reward should exceed the other's, for a reward model.
        place: File and line that it came from.
    """

    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    tools: tuple[Any, ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    margin: float = 0.0
    place: str = field(default="", compare=False)


@dataclass(frozen=True)
class Prompt:
    """A prompt to sample answers to.

    Attributes:
        prompt: Messages.
        answer: The reference answer for a reward; None if the row has none.
        columns: The whole row.
        place: File and line that it came from.
    """

    prompt: tuple[Message, ...]
    answer: Any = None
    columns: Row = field(default_factory=dict, compare=False, repr=False)
    place: str = field(default="", compare=False)


def learned(conversations: Sequence[Conversation], train_on: Any) -> Any:
    """Return ``train_on`` for rendering, which for "assistant" follows what messages say of being learned."""
    said = any("weight" in message for each in conversations for message in each.messages)
    return is_learned if train_on == "assistant" and said else train_on


def is_learned(message: Message) -> bool:
    """Whether a message is learned: the assistant's, if the message does not say it itself."""
    return bool(message.get("weight", message["role"] == "assistant"))


@dataclass(frozen=True)
class Rating:
    """One answer to a prompt, and whether it is a good one.

    Attributes:
        prompt: The messages before the answer.
        completion: The messages of the answer.
        label: Whether it is good.
        tools, template_kwargs: As those of :class:`Preference`.
        place: File and line that it came from.
    """

    prompt: tuple[Message, ...]
    completion: tuple[Message, ...]
    label: bool
    tools: tuple[Any, ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    place: str = field(default="", compare=False)


@dataclass(frozen=True)
class Steps:
    """An answer in steps, each right or wrong, for a process reward model.

    Attributes:
        prompt: The messages before the answer.
        steps: Text of each step.
        labels: Whether each is right.
        place: File and line that it came from.
    """

    prompt: tuple[Message, ...]
    steps: tuple[str, ...]
    labels: tuple[bool, ...]
    place: str = field(default="", compare=False)


class Unfit(ValueError):
    """Error for a row that has no known layout, or breaks it; the message says how.

    Attributes:
        unnamed: Fields whose columns were not recognised.
    """

    def __init__(self, reason: str, *unnamed: str) -> None:
        super().__init__(reason)
        self.unnamed = unnamed


class OtherKind(Unfit):
    """Error for a row without the columns of a kind, or with other things in them: not a defective row of that kind."""
