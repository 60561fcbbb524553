"""``/v1/responses``: OpenAI's newer form of conversations, translated into those of chat completions.

May import: the files of ``doors/http/openai`` beside it, ``core`` and what is below it.
"""
