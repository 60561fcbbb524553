"""``/v1/responses``: OpenAI's newer form of conversations, translated into those of chat completions."""
