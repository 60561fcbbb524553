"""Text and conversations to token ids and back, with the models' own tokenizers, in processes of bounded memory.

``process.py`` is the program of these processes, with everything else in this folder; ``bounded`` starts them.

May import: ``bounded``, ``access``, ``config``, ``errors``. Never torch.
"""
