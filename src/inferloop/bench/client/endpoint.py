"""Where load goes to: a URL, how its certificate is judged, and the key that opens it."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from inferloop.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`url` is an origin with an optional path ahead of /v1. `ca_file` is trusted instead of the system's authorities.
    `insecure` takes any certificate. `api_key` is sent as a bearer token; it is never shown.

    Raises UsageError for a URL that is none, and for options that contradict it.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)
    ca_file: Path | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            complete = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            complete = False
        if not complete:
            raise UsageError(f"not an http(s) URL: {self.url!r}")
        if not (self.url.isascii() and self.url.isprintable()) or " " in self.url:
            raise UsageError(f"{self.url!r}: a URL is printable ASCII without spaces; write the name as xn--...")
        if parts.username is not None:
            raise UsageError(f"{self.host}: a user's name would not be sent; an API key is")
        if parts.query or parts.fragment:
            raise UsageError(f"{self.url}: {parts.query or parts.fragment!r} would not be sent")
        if self.insecure and (not self.is_tls or self.ca_file is not None):
            raise UsageError(f"{self.url}: no certificate is judged there that could be waved through")
        if self.ca_file is not None and not self.is_tls:
            raise UsageError(f"{self.url}: an authority is named, and the URL is not https")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise UsageError("the API key holds characters that no header may have")

    @property
    def is_tls(self) -> bool:
        return urlsplit(self.url).scheme == "https"

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or (443 if self.is_tls else 80)

    @property
    def authority(self) -> str:
        """What the Host header says."""
        return urlsplit(self.url).netloc.rpartition("@")[2]

    @property
    def base_path(self) -> str:
        return urlsplit(self.url).path.rstrip("/")

    def tls(self) -> ssl.SSLContext | None:
        """A fresh context; None without TLS. Raises UsageError for a file without usable certificates."""
        if not self.is_tls:
            return None
        try:
            context = ssl.create_default_context(cafile=None if self.ca_file is None else str(self.ca_file))
        except (OSError, ssl.SSLError) as error:
            raise UsageError(f"{self.ca_file}: no certificates of authorities: {error}") from error
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context
