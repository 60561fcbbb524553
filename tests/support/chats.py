"""Small models with chat templates in the forms of nine families: the same special tokens, headers and rules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from _support.small_model import PRINTABLE, small_model

LLAMA_3 = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set told = messages[0].content | trim %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set told = '' %}
    {%- set rest = messages %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- 'Today Date: 26 Jul 2024\\n\\n' + told + '<|eot_id|>' }}
{%- if tools %}
    {%- set first = rest[0].content | trim %}
    {%- set rest = rest[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nYou may call:\\n\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{%- endfor %}
    {{- first + '<|eot_id|>' }}
{%- endif %}
{%- for message in rest %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('one tool call at a time') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
    {%- elif message.role in ('tool', 'ipython') %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

QWEN_3 = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(asked=messages | length - 1, looking=true) %}
{%- for message in messages[::-1] %}
    {%- set place = messages | length - 1 - loop.index0 %}
    {%- if ns.looking and message.role == 'user' and not message.content.startswith('<tool_response>') %}
        {%- set ns.looking = false %}
        {%- set ns.asked = place %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content if message.content is string else '' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.asked and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

GEMMA_3 = """
{{ bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set before = messages[0].content + '\\n\\n' %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set before = '' %}
    {%- set rest = messages %}
{%- endif %}
{%- for message in rest %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {{- before if loop.first else '' }}
    {{- message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""

MISTRAL = """
{%- if messages[0].role == 'system' %}
    {%- set told = messages[0].content %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set told = none %}
    {%- set rest = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in rest %}
    {%- if message.role in ('user', 'assistant') and (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user and assistant') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {%- if tools and message == (rest | selectattr('role', 'equalto', 'user') | list | last) %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {%- if loop.last and told %}
            {{- '[INST] ' + told + '\\n\\n' + message.content + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + message.content + '[/INST]' }}
        {%- endif %}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content | trim + eos_token }}
    {%- else %}
        {{- raise_exception('only user, assistant and system are known') }}
    {%- endif %}
{%- endfor %}
"""

MARKED = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

PHI_3 = """
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|user|>\\n' + message.content + '<|end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|assistant|>\\n' + message.content + '<|end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- else %}{{- eos_token }}{%- endif %}
"""

OLMO = """
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{{- '<|system|>\\n' + message.content + '\\n' }}
    {%- elif message.role == 'user' %}{{- '<|user|>\\n' + message.content + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|assistant|>\\n' + message.content + eos_token }}{%- if not loop.last %}{{- '\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}
"""

GRANITE = """
{%- if messages[0].role != 'system' %}
    {{- '<|start_of_role|>system<|end_of_role|>You are helpful.<|end_of_text|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + message.content + '<|end_of_text|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}
"""

GLM_4 = """
{{- '[gMASK]<sop>' }}
{%- for message in messages %}
    {%- if message.role in ('system', 'user', 'assistant') %}
        {{- '<|' + message.role + '|>\\n' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""

FORMS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "llama": (LLAMA_3, "<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "qwen": (QWEN_3, "<|im_end|>", ("<|im_start|>", "<|im_end|>")),
    "gemma": (GEMMA_3, "<end_of_turn>", ("<start_of_turn>", "<end_of_turn>")),
    "mistral": (MISTRAL, "</s>", ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")),
    "phi": (PHI_3, "<|endoftext|>", ("<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>")),
    "olmo": (OLMO, "<|endoftext|>", ("<|endoftext|>",)),
    "granite": (GRANITE, "<|end_of_text|>", ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>")),
    "glm": (GLM_4, "<|endoftext|>", ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|endoftext|>")),
    "marked": (MARKED, "<|im_end|>", ("<|im_start|>", "<|im_end|>")),
}
"""Name -> template, the token that ends a turn, special tokens."""
NONE: Mapping[str, Any] = MappingProxyType({})
TEXTS = ("the answer to the question is four because two and two make four", "think of a number and add one\n\n" * 3)


def chat_model(
    path: Path, form: str, *, padded: int = 0, architecture: str = "", config: Mapping[str, Any] = NONE, **settings: Any
) -> Path:
    """A small model whose tokenizer has a template in the form of a family: byte-level BPE, or a character a token.

    Its vocabulary has ``padded`` ids more than its tokenizer. It is a Llama, unless ``architecture`` is another
    ``model_type``, made with ``config``.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    template, end, specials = FORMS[form]
    texts = {"characters": PRINTABLE} if form == "mistral" else {"texts": TEXTS, "vocab_size": 400}
    small_model(path, **{"hidden_size": 32, "num_layers": 2, "context_length": 1024, **texts, **settings})
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_special_tokens({"additional_special_tokens": list(specials)})
    if form == "qwen":
        tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.eos_token = end
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    with torch.random.fork_rng():
        torch.manual_seed(0)  # the new rows are random
        if architecture:
            sizes = {"vocab_size": len(tokenizer) + padded, "pad_token_id": 0, "bos_token_id": 1, **config}
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **sizes))
        else:
            model = AutoModelForCausalLM.from_pretrained(path)
            model.resize_token_embeddings(len(tokenizer) + padded, mean_resizing=False)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(path)
    return path
