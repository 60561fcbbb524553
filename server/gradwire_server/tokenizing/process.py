"""A tokenizing process: ``python -m gradwire_server.tokenizing.process SETTINGS``.

It is started by a :class:`gradwire_server.bounded.pool.ProcessPool` with the JSON of its settings.
"""

from __future__ import annotations

import sys

from gradwire_server.bounded import program
from gradwire_server.tokenizing.settings import METHODS, TokenizerSettings
from gradwire_server.tokenizing.tokenizers import Tokenizers

if __name__ == "__main__":
    settings = TokenizerSettings.model_validate_json(sys.argv[1])
    program.run(METHODS, settings, lambda: Tokenizers(settings).answer)
