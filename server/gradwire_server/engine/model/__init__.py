"""Models and what is put on them: loading, trunk and output head, heads, adapters, packing, attention, tokenizers.

May import: ``errors`` and the other single files of ``engine``.
"""
