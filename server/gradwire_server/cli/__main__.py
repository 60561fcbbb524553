"""``python -m gradwire_server.cli``: the same as the command ``gradwire``."""

from gradwire_server.cli.app import main

if __name__ == "__main__":
    main()
