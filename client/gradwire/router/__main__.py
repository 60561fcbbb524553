"""``python -m gradwire.router``: the command ``gradwire router`` where only the client is installed."""

from gradwire.router.commands import main

if __name__ == "__main__":
    main()
