"""Requests to an object store through ``obstore``, repeated while it does not answer.

Credentials and endpoints come from the environment, as for the stores' own tools (``AWS_ACCESS_KEY_ID``,
``AWS_ENDPOINT_URL``, ``GOOGLE_SERVICE_ACCOUNT``, ``AZURE_STORAGE_ACCOUNT_NAME`` and so on).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore import exceptions
from obstore.store import from_url

from gradwire_server.stores.store import StoreError, StoreUnreachable

T = TypeVar("T")

PART_BYTES = 16 << 20
"""Bytes of one part of an upload or a download."""
PARTS = 4
"""Parts that travel at a time."""
COPY_BYTES = 5 << 30
"""The most that S3 copies in one request."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0


class Missing(Exception):
    """There is no such object."""


class Conflict(Exception):
    """The object is no longer the version that was read."""


class Bucket:
    """A bucket below a prefix.

    Args:
        url: Its address, ``s3://BUCKET/PREFIX`` or the like.
        patience_s: Seconds for which a request is repeated before it fails.

    Raises:
        StoreError: The address or the environment's settings cannot be used.
    """

    def __init__(self, url: str, patience_s: float) -> None:
        self.url, self._patience_s = url, patience_s
        self._given_up = False  # then nobody else waits for long, until it answers
        seconds = timedelta(seconds=patience_s)
        try:
            self._store: Any = from_url(
                url,
                client_options={
                    "connect_timeout": min(seconds, timedelta(seconds=5)),
                    "timeout": seconds,
                    "allow_http": True,  # where the environment names an endpoint that is
                },
                retry_config={"max_retries": 0, "retry_timeout": seconds},
            )
        except (exceptions.BaseError, ValueError) as error:
            raise StoreError(f"--store {url} cannot be used: {_first_line(error)}") from error

    def get(self, key: str) -> tuple[bytes, Any]:
        """An object and its version.

        Raises:
            Missing: There is none.
        """

        def get() -> tuple[bytes, Any]:
            found = obstore.get(self._store, key)
            versions = {name: found.meta[name] for name in ("e_tag", "version") if found.meta[name] is not None}
            return bytes(found.bytes()), versions

        return self._repeat("read", key, get)

    def put(self, key: str, content: bytes, version: Any) -> None:
        """Write a small object in place of a version of it, or as a new one where that is None.

        Raises:
            Conflict: It has another version, which may be what an earlier attempt wrote of this.
        """
        mode: Any = "create" if version is None else version
        self._repeat("write", key, lambda: obstore.put(self._store, key, content, mode=mode))

    def upload(self, key: str, file: Path, size: int) -> None:
        """Write a file as an object, in parts where it is large; it is whole or not there."""

        def upload() -> None:
            obstore.put(self._store, key, file, chunk_size=PART_BYTES, max_concurrency=PARTS)
            if (found := int(obstore.head(self._store, key)["size"])) != size:
                raise exceptions.GenericError(f"{found} of {size} bytes arrived")

        self._repeat("write", key, upload)

    def download(self, key: str, size: int) -> Iterator[bytes]:
        """The pieces of an object of so many bytes.

        Raises:
            Missing: There is none.
        """
        for start in range(0, size, PART_BYTES * PARTS):
            starts = list(range(start, min(size, start + PART_BYTES * PARTS), PART_BYTES))
            ends = [min(size, each + PART_BYTES) for each in starts]

            def read(starts: list[int] = starts, ends: list[int] = ends) -> list[bytes]:
                pieces = obstore.get_ranges(self._store, key, starts=starts, ends=ends, coalesce=0)
                return [bytes(piece) for piece in pieces]

            yield from self._repeat("read", key, read)

    def size(self, key: str) -> int:
        """Size of an object in bytes.

        Raises:
            Missing: There is none.
        """
        return self._repeat("read", key, lambda: int(obstore.head(self._store, key)["size"]))

    def copy(self, key: str, to: str, size: int) -> None:
        """Copy an object within the store.

        Raises:
            Missing: There is none.
        """
        if size > COPY_BYTES:  # what no store copies at once passes through this machine
            self._repeat("write", to, lambda: obstore.put(self._store, to, self.download(key, size)))
        else:
            self._repeat("copy", key, lambda: obstore.copy(self._store, key, to))

    def listing(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Names and sizes of the objects below a prefix."""

        def read() -> list[tuple[str, int]]:
            pages: Iterable[Any] = obstore.list(self._store, prefix=prefix)
            return [(str(each["path"]), int(each["size"])) for page in pages for each in page]

        yield from self._repeat("list", prefix, read)

    def delete(self, keys: list[str]) -> None:
        """Delete objects, those that are there."""

        def delete() -> None:
            try:
                obstore.delete(self._store, keys)
            except FileNotFoundError:  # not on S3; some of the others may have been deleted
                for key in keys if len(keys) > 1 else []:
                    with suppress(FileNotFoundError):
                        obstore.delete(self._store, key)

        if keys:
            self._repeat("delete", keys[0], delete)

    def _repeat(self, verb: str, key: str, request: Callable[[], T]) -> T:
        """Carry out a request, again after a pause while the store does not answer.

        Raises:
            Missing, Conflict: As the store says.
            StoreError: It refuses, or did not answer for the patience that it is given.
        """
        began, pause = time.monotonic(), FIRST_PAUSE_S
        while True:
            try:
                answer = request()
                self._given_up = False
                return answer
            except (FileNotFoundError, exceptions.NotFoundError) as error:
                if verb not in ("read", "copy"):
                    raise StoreError(
                        f"the store {self.url} cannot {verb} {key}: {_first_line(error)}. Create the bucket, or correct"
                        " the address"
                    ) from error
                raise Missing(key) from error
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
                raise Conflict(key) from error
            except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
                raise StoreError(
                    f"the store {self.url} refuses to {verb} {key}: {_first_line(error)}. Check the credentials in the"
                    " server's environment and what they are allowed; nothing was lost"
                ) from error
            except (exceptions.BaseError, OSError) as error:
                if isinstance(error, OSError) and error.filename is not None:  # of this machine's disk
                    raise
                waited = time.monotonic() - began
                if self._given_up or waited + pause > self._patience_s:
                    self._given_up = True
                    raise StoreUnreachable(
                        f"the store {self.url} did not {verb} {key} within {waited:.0f} s (--store-patience):"
                        f" {_first_line(error)}. Nothing was lost: try again once it answers"
                    ) from error
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_PAUSE_S)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:300]
