"""Requests that a browser makes on behalf of a foreign page, refused before an application sees them.

A page can send requests to a server on its visitor's machine or network, and by a name of its own that it makes resolve
to that address (DNS rebinding), also read the answers. Programs send none of the headers that are looked at here.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from gradwire_http.request_headers import media_type

LOOPBACK_NAMES = ("localhost",)
TRUSTED_SITES = ("same-origin", "none")
"""Values of Sec-Fetch-Site for a page's own requests, and for what a person opens."""
PLAIN_TYPES = ("text/plain", "application/x-www-form-urlencoded")
"""Types of bodies that a foreign page may send without asking, and that nothing here takes."""


@dataclass(frozen=True)
class BrowserGuard:
    """The rules for requests from browsers.

    Attributes:
        names: Host names that are answered to, beside addresses and those of loopback; None: every name, for an
            application where each caller presents a key that no browser adds by itself.
        pages: Whether people may follow links from other sites to this application's pages.
    """

    names: Collection[str] | None
    pages: bool = False

    def refusal(self, method: str, headers: Mapping[str, str]) -> tuple[int, str] | None:
        """The status and the reason for which a request is refused; None for one that is let in.

        Args:
            headers: By name in lower case.
        """
        host = headers.get("host", "")
        if host and self.names is not None and not self._answers_to(host):
            return (
                421,
                f"this server does not answer to the name {host[:100]!r}: use its address, or start it with"
                f" --host-name {_name(host)[:100]}",
            )
        site, origin = headers.get("sec-fetch-site", ""), headers.get("origin", "")
        followed = self.pages and method in ("GET", "HEAD") and headers.get("sec-fetch-mode") == "navigate"
        if site in TRUSTED_SITES or (site and followed):
            return None
        if site or (origin and urlsplit(origin).netloc.lower() != host.lower()):
            return 403, "this request comes from a page of another site, which may not use this server"
        return None

    def _answers_to(self, host: str) -> bool:
        name = _name(host)
        known = {each.lower() for each in (*LOOPBACK_NAMES, *(self.names or ()))}
        return name in known or _is_address(name)


def body_refusal(headers: Mapping[str, str]) -> tuple[int, str] | None:
    """The status and the reason for which a body of this type is refused; None for one that may be read."""
    kind = media_type(headers.get("content-type", ""))
    if kind not in PLAIN_TYPES:
        return None
    return 415, f"a body of type {kind!r} is not taken here; send it with Content-Type: application/json"


def local_path(path: str, otherwise: str) -> str:
    """A path of this application to which a browser may be sent, as a request names it.

    Browsers drop tabs and newlines, and read a backslash as a slash: ``/\\t/elsewhere`` is another host.
    """
    safe = path.startswith("/") and not path.startswith("//") and "\\" not in path and path.isprintable()
    return path if safe else otherwise


def _name(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.rpartition(":")[0].lower() if ":" in host else host.lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
