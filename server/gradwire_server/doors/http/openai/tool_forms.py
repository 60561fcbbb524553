"""The forms in which models write calls of tools, each told by the chat template that teaches it.

Special tokens are left out of a sample's text unless a form's marks are some, so a form is read with and without them.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradwire_server.doors.http.openai.call_readers import (
    PYTHON_MARKS,
    Reader,
    python_between,
    read_gemma,
    read_mistral,
    read_whole_answer,
    tagged,
    written,
)


@dataclass(frozen=True)
class ToolForm:
    """One form.

    Attributes:
        family: Models that write it.
        taught_by: Texts of which templates of this form have one, and those of the forms below it in :data:`FORMS`
            have none.
        read: Finds the whole calls in a text.
        begins: Texts with which a call begins, anywhere in an answer.
        first: Characters with which an answer that is nothing but calls begins.
        stop: Text with which the model waits for a tool's answer, where it would go on to make one up.
    """

    family: str
    taught_by: tuple[str, ...]
    read: Reader
    begins: tuple[str, ...] = ()
    first: str = ""
    stop: str = ""


def form_of(template: str) -> ToolForm:
    """The form that a chat template teaches."""
    return next(form for form in FORMS if any(text in template for text in form.taught_by))


_ATEM, _DSML, _M3 = "atem:", "｜DSML｜", r"(?:\]<\]minimax\[>\[)?"
_INVOKE = f"(?:{_ATEM}|{_DSML})?"
_INVOKES = f"(?:minimax:tool_call|{_INVOKE}(?:function|tool)_calls)"

FORMS = (
    ToolForm(
        "Qwen3.5, Qwen3-Coder, Nemotron 3, Step 3.5, Seed-OSS",
        ("<parameter=",),
        tagged(
            r"<(?:seed:)?tool_call>\s*<function=([^>\n]{1,256})>",
            r"</function>\s*</(?:seed:)?tool_call>",
            r"<parameter=([^>\n]{1,256})>\n?",
            r"\n?</parameter>",
        ),
        ("<tool_call>", "<seed:tool_call>"),
    ),
    ToolForm(
        "Functionary 3.1",
        ("<function=",),
        written(r"<function=([\w.-]{1,256})>(?=\{)", r"\s*</function>"),
        ("<function=",),
    ),
    ToolForm(
        "GLM-4.5 and later, Laguna, Ling 3, Hy3",
        ("<arg_key", "arg_key_"),
        tagged(
            r"<tool_call(?::\w+)?>\s*([\w.-]+)(?:<tool_sep(?::\w+)?>)?",
            r"</tool_call(?::\w+)?>(?:\s*</tool_calls(?::\w+)?>)?",
            r"<arg_key(?::\w+)?>([^<]{1,256})</arg_key(?::\w+)?>\s*<arg_value(?::\w+)?>",
            r"</arg_value(?::\w+)?>",
        ),
        ("<tool_call>", "<tool_call:", "<tool_calls:"),
    ),
    ToolForm(
        "MiniMax-M3",
        ("<mm:think>",),
        tagged(
            rf"(?:{_M3}<tool_call>\s*)?{_M3}<invoke name=\"([^\"]{{1,256}})\">",
            rf"{_M3}</invoke>(?:\s*{_M3}</tool_call>)?",
            rf"{_M3}<([\w.-]{{1,256}})>",
            rf"{_M3}</[\w.-]{{1,256}}>",
        ),
        ("]<]minimax[>[", "<tool_call>", "<invoke name="),
    ),
    ToolForm(
        "MiniMax-M2, DeepSeek-V3.2 and V4, Muse Glimmer",
        ("invoke name=",),
        tagged(
            rf"(?: to=[\w.-]{{1,256}}<\|message\|>)?"
            rf"(?:<{_INVOKES}>\s*)?<{_INVOKE}invoke name=\"([^\"]{{1,256}})\">",
            rf"</{_INVOKE}invoke>(?:\s*</{_INVOKES}>)?",
            rf"<{_INVOKE}parameter name=\"([^\"]{{1,256}})\"(?: string=\"(?:(?P<text>true)|false)\")?>\n?",
            rf"\n?</{_INVOKE}parameter>",
        ),
        ("<minimax:tool_call>", "<invoke name=", f"<{_ATEM}", f"<{_DSML}", " to="),
    ),
    ToolForm(
        "MiniCPM5",
        ("<function name",),
        tagged(
            r"<function name=\"([^\"]{1,256})\">",
            r"</function>",
            r"<param name=\"([^\"]{1,256})\">",
            r"</param>",
        ),
        ("<function name=",),
    ),
    ToolForm(
        "Kimi K3",
        ("open_tag('call'",),
        tagged(
            r"(?:<\|open\|>tools<\|sep\|>)?<\|open\|>call tool=\"([^\"]{1,256})\"[^<]{0,99}<\|sep\|>",
            r"<\|close\|>call<\|sep\|>(?:<\|close\|>tools<\|sep\|>)?",
            r"<\|open\|>argument key=\"([^\"]{1,256})\"(?: type=\"(?:(?P<text>string)|\w+)\")?<\|sep\|>",
            r"<\|close\|>argument<\|sep\|>",
        ),
        ("<|open|>",),
    ),
    ToolForm(
        "Kimi K2",
        ("<|tool_calls_section_begin|>",),
        written(
            r"(?:<\|tool_calls_section_begin\|>\s*)?(?:<\|tool_call_begin\|>)?\s{0,3}functions\.([\w.-]{1,256}):\d+\s*"
            r"(?:<\|tool_call_argument_begin\|>)?\s*(?=\{)",
            r"\s*(?:<\|tool_call_end\|>)?(?:\s*<\|tool_calls_section_end\|>)?",
        ),
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions."),
    ),
    ToolForm(
        "MiniMax-M1, Jamba, Apriel",
        ("<tool_calls>",),
        written(r"(?:<tool_calls>\s*|^)(?=[{\[])", r"(?:\s*</tool_calls>|(?=\n))"),
        ("<tool_calls>",),
    ),
    ToolForm(
        "Hermes, Qwen2.5, Qwen3, Granite 3.1 and 4, EXAONE 4",
        ("<tool_call>",),
        written(r"<tool_call>\s*(?=[{\[])", r"\s*</tool_call>|(?<=\])"),  # Granite 3.1 closes no list
        ("<tool_call>",),
    ),
    ToolForm(
        "DeepSeek-V3, R1, V3.1",
        ("<｜tool▁call▁begin｜>",),
        written(
            r"(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?([\w.-]+)"
            r"(?:<｜tool▁sep｜>|\s*```json\s*)",
            r"\s*(?:```)?\s*<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?\s*",
        ),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    ),
    ToolForm(
        "gpt-oss",
        ("<|channel|>",),
        written(
            r"(?:<\|start\|>assistant)?(?:(?:<\|channel\|>)?commentary)?\s{0,3}to=functions\.([\w.-]+)\s*"
            r"(?:<\|channel\|>commentary\s*)?(?:<\|constrain\|>)?(?:json)?(?:<\|message\|>)?\s*",
            r"(?:<\|call\|>)?",
        ),
        ("<|start|>", "<|channel|>", "commentary to=", " to=functions."),
    ),
    ToolForm("Mistral v3 to v13, Devstral, Ministral", ("[TOOL_CALLS]",), read_mistral, ("[TOOL_CALLS]",), "["),
    ToolForm(
        "FunctionGemma",
        ("<start_function_call>",),
        read_gemma,
        ("<start_function_call>", "call:"),
        stop="<start_function_response>",
    ),
    ToolForm("Gemma 4", ("<|tool_call>",), read_gemma, ("<|tool_call>", "call:")),
    ToolForm(
        "LFM2",
        ("<|tool_call_start|>", "List of tools: "),
        python_between("<|tool_call_start|>", "<|tool_call_end|>"),
        ("<|tool_call_start|>",),
    ),
    ToolForm(
        "Command R7B, Command A",
        ("<|START_ACTION|>",),
        written(r"<\|START_ACTION\|>\s*(?=\[)", r"\s*<\|END_ACTION\|>"),
        ("<|START_ACTION|>",),
    ),
    ToolForm(
        "Command R, Command R+",
        ("followed by a json-formatted list of actions",),
        written(r"Action:\s*```(?:json)?\s*(?=\[)", r"\s*```"),
        ("Action:",),
    ),
    ToolForm(
        "Granite 3.0, 3.2 and 3.3",
        ("<|tool_call|>",),
        written(r"<\|tool_call\|>\s*(?=[{\[])", r"\s*(?:<\|/tool_call\|>)?"),
        ("<|tool_call|>",),
    ),
    ToolForm(
        "Phi-4-mini",
        ("<|/tool|>", "functools["),
        written(r"(?:<\|tool_call\|>|functools)\s*(?=[{\[])", r"\s*(?:<\|/tool_call\|>)?"),
        ("<|tool_call|>", "functools["),
    ),
    ToolForm(
        "Nemotron Nano 2",
        ("<TOOLCALL>",),
        written(r"<TOOLCALL>\s*(?=[{\[])", r"\s*</TOOLCALL>"),
        ("<TOOLCALL>",),
    ),
    ToolForm(
        "Apertus",
        ("<|tools_prefix|>",),
        written(r"<\|tools_prefix\|>\s*(?=\[)", r"\s*<\|tools_suffix\|>", by_key=True),
        ("<|tools_prefix|>",),
    ),
    ToolForm(
        "GigaChat 3",
        ("<|function_call|>", "'function call'"),
        written(r"(?:<\|message_sep\|>\s*)?(?:<\|function_call\|>|function call<\|role_sep\|>\n)(?=\{)"),
        ("<|function_call|>", "<|message_sep|>", "function call<|role_sep|>"),
    ),
    ToolForm(
        "Solar Open",
        ("<|tool_call:begin|>",),
        written(
            r"(?:<\|tool_calls\|>)?<\|tool_call:begin\|>[^<]{0,99}<\|tool_call:name\|>([^<]{1,256})<\|tool_call:args\|>",
            r"<\|tool_call:end\|>(?:<\|calls\|>)?",
        ),
        ("<|tool_calls|>", "<|tool_call:begin|>"),
    ),
    ToolForm("Llama 3.1 to 4, and all others", ("",), read_whole_answer, PYTHON_MARKS, "{["),
)
"""Every form; a template's is the first one that it teaches, and the last is that of all others."""
