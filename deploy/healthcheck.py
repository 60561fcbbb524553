"""Exit with 0 if the server of this container has a live engine, else with 1 and the reason.

It reads the metrics rather than the gRPC health service: they need neither the key nor the certificates that the
server may ask of its callers.
"""

from __future__ import annotations

import os
import sys
import urllib.request

READY = "gradwire_engine_ready"
TIMEOUT_S = 8.0


def main() -> str:
    """Return what is wrong, "" if nothing is."""
    port = os.environ["GRADWIRE_METRICS_ADDRESS"].rpartition(":")[2]
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT_S) as answer:
            lines = answer.read().decode().splitlines()
    except OSError as error:
        return f"no metrics on port {port}: {error}"
    values = [float(line.split()[1]) for line in lines if line.startswith(f"{READY}{{")]
    return "" if 1.0 in values else f"{READY} is {values}: no engine is ready; it starts, or does not answer"


if __name__ == "__main__":
    sys.exit(main() or 0)
