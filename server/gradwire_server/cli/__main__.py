"""Entry point of ``python -m gradwire_server.cli``, which starts a server without the client's package."""

from gradwire_server.cli.app import main

if __name__ == "__main__":
    main()
