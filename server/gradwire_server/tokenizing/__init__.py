"""Text and conversations to token ids and back, with the models' own tokenizers, in processes of bounded memory.

``pool.py`` is what the front calls; ``process.py`` is the program that it starts, with everything else in this folder.

May import: ``access``, ``config``, ``errors``. Never torch.
"""
