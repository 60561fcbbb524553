"""Entry point of ``python -m gradwire_server.cli``, which is the command ``gradwire``."""

from gradwire_server.cli.app import main

if __name__ == "__main__":
    main()
