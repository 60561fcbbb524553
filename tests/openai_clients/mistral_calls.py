"""An assistant's message with a call, as ``mistral-common`` encodes it for each version of Mistral's tokenizers.

Printed as JSON: version -> the message's text, with the special tokens and without.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

from mistral_common.protocol.instruct.messages import AssistantMessage, UserMessage
from mistral_common.protocol.instruct.request import InstructRequest
from mistral_common.protocol.instruct.tool_calls import FunctionCall, ToolCall
from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy, SpecialTokens
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

SPECIALS = [{"rank": rank, "token_str": token.value, "is_control": True} for rank, token in enumerate(SpecialTokens)]


def tekken(version: str) -> MistralTokenizer:
    """The newest vocabulary of the package, as a tokenizer of a later version, which lists its special tokens."""
    file = resources.files("mistral_common") / "data" / "tekken_240911.json"
    told = json.loads(file.read_text())
    told["config"] |= {"version": version, "default_num_special_tokens": 100}
    told["special_tokens"] = SPECIALS
    told.pop("multimodal", None)
    made = Path(tempfile.mkdtemp()) / "tekken.json"
    made.write_text(json.dumps(told))
    return MistralTokenizer.from_file(str(made))


def message(tokenizer: MistralTokenizer, call: dict[str, Any]) -> list[str]:
    """What a request with the assistant's call has more than one without."""
    called = ToolCall(id="call12345", function=FunctionCall(**call))
    asked = [UserMessage(content="Add.")]
    encode = tokenizer.instruct_tokenizer.encode_instruct
    prompt = encode(InstructRequest(messages=asked)).tokens
    whole = encode(InstructRequest(messages=[*asked, AssistantMessage(tool_calls=[called])])).tokens
    answer = whole[len(prompt) : -1]  # without the end of the answer
    decode = tokenizer.instruct_tokenizer.tokenizer.decode
    return [decode(answer, special_token_policy=each) for each in (SpecialTokenPolicy.KEEP, SpecialTokenPolicy.IGNORE)]


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    tokenizers = {"v2": MistralTokenizer.v2(), "v3": MistralTokenizer.v3(), "v7": MistralTokenizer.v7()}
    tokenizers |= {"v3 tekken": MistralTokenizer.v3(is_tekken=True)}
    tokenizers |= {f"{version} tekken": tekken(version) for version in ("v7", "v11", "v13")}
    print(json.dumps({version: message(tokenizer, given) for version, tokenizer in tokenizers.items()}))
