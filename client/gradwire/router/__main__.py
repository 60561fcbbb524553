"""``python -m gradwire.router``: the command ``gradwire router``."""

from gradwire.router.commands import main

if __name__ == "__main__":
    main()
