"""The Anthropic door: the messages API of Anthropic's clients, under ``/v1/messages``.

May import: the files of ``doors/http``, the conversations of ``doors/http/openai``, ``core`` and what is below it.
"""
