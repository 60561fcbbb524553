"""``/v1/fine_tuning``: OpenAI's fine-tuning jobs, each a job of the core that runs one of our recipes.

Files: ``routes``; ``requests``, the bodies; ``hyperparameters``, how ``auto`` becomes a number and numbers become
settings of a recipe; ``answers``, jobs, events and checkpoints in OpenAI's form.

May import: the rest of this protocol, and the core.
"""
