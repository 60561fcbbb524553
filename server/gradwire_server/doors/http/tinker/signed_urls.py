"""URLs that work without a key, for an hour, or until the key that asked for them is revoked."""

from __future__ import annotations

from fastapi import Request
from gradwire_proto.v1 import training_pb2 as pb
from itsdangerous import BadSignature, URLSafeTimedSerializer

from gradwire_server.access.keys import Keys
from gradwire_server.access.signing import UrlSecret
from gradwire_server.doors.http.guard import SIGNED_FOR, check_signed
from gradwire_server.errors import ServiceError

VALID_S = 3600


class SignedUrls:
    """The URLs of one kind.

    Args:
        keys: The keys that may ask for them.
        beginning: Their path, relative to the protocol's prefix, up to the token.
    """

    def __init__(self, keys: Keys, secret: UrlSecret, beginning: str) -> None:
        self._keys, self._secret, self._beginning = keys, secret, beginning

    @property
    def _signer(self) -> URLSafeTimedSerializer:
        return URLSafeTimedSerializer(self._secret.value, salt=self._beginning)

    def make(self, request: Request, owner: str, name: str) -> str:
        """A URL for a key, of what it is for."""
        return str(request.base_url).rstrip("/") + self._beginning + self._signer.dumps([owner, name])

    def read(self, request: Request, token: str) -> str:
        """Return the name that a request's URL was signed for. The request ends once the key is revoked.

        Raises:
            ServiceError: PERMISSION_DENIED; UNAUTHENTICATED if it is revoked already.
        """
        try:
            owner, name = self._signer.loads(token, max_age=VALID_S)
        except BadSignature:
            message = "this URL is not valid, or not any more: ask for a new one"
            raise ServiceError(pb.ERROR_CODE_PERMISSION_DENIED, message) from None
        check_signed(self._keys, owner)
        request.scope[SIGNED_FOR] = owner
        return str(name)
