"""Entry point of ``python -m gradwire.cli``, which is the command ``gradwire``."""

from gradwire.cli.app import main

if __name__ == "__main__":
    main()
