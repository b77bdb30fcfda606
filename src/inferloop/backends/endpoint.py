"""Where a server is: a URL, how its certificate is judged, and the key that opens it."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from inferloop.core.api_keys import KEY_VARIABLE
from inferloop.core.errors import EnvironmentLacksError, UsageError
from inferloop.core.secret import Secret

REFUSED = (401, 403)
_LOOKS = "it looks like http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`url` is an origin with an optional path ahead of /v1. `ca_file` is trusted instead of the system's authorities.
    `insecure` takes any certificate. `api_key` is sent as a bearer token; it is never shown.

    Raises UsageError for a URL that is none or that carries secrets itself, and for options that contradict it.
    """

    url: str
    api_key: Secret | None = None
    ca_file: Path | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            complete = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            shown = "what holds a password" if "@" in self.url else repr(self.url)
            raise UsageError(f"{shown} is not a complete URL; {_LOOKS}") from None
        if "@" in parts.netloc:
            raise UsageError(f"a URL is recorded, so it must hold no password: give a key in {KEY_VARIABLE}")
        if parts.query or parts.fragment:
            raise UsageError(f"a URL is recorded and extended by paths; it must end before its query: {self.bare!r}")
        if not complete:
            raise UsageError(f"{self.url!r} is not a complete URL; {_LOOKS}")
        if not (self.url.isascii() and self.url.isprintable()) or " " in self.url:
            raise UsageError(f"{self.url!r}: a URL is printable ASCII without spaces; write the name as xn--...")
        if self.insecure and (not self.is_tls or self.ca_file is not None):
            raise UsageError(f"{self.url}: no certificate is judged there that could be waved through")
        if self.ca_file is not None and not self.is_tls:
            raise UsageError(f"{self.url}: an authority is named, and the URL is not https")
        key = "" if self.api_key is None else self.api_key.reveal()
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise UsageError("the API key holds characters that no header may have")

    @property
    def bare(self) -> str:
        """Scheme, host and port."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"

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
        return urlsplit(self.url).netloc

    @property
    def base_path(self) -> str:
        """Ahead of /v1, which may be given or not."""
        return urlsplit(self.url).path.rstrip("/").removesuffix("/v1")

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """What every request says besides its own."""
        return () if self.api_key is None else (("authorization", f"Bearer {self.api_key.reveal()}"),)

    @property
    def caveats(self) -> tuple[str, ...]:
        """What a reader of a run should know of its connection."""
        found = []
        if self.insecure:
            found.append(f"{self.bare}: the certificate was not checked (--insecure)")
        if self.api_key is not None and not self.is_tls and not is_loopback(self.host):
            found.append(f"{self.bare}: the API key crossed the network unencrypted")
        return tuple(found)

    def redact(self, text: str) -> str:
        return text if self.api_key is None else self.api_key.redact(text)

    def redact_bytes(self, data: bytes) -> bytes:
        key = self.api_key
        return data if key is None else data.replace(key.reveal().encode(), str(key).encode())

    def check_entry(self, status: int) -> None:
        """Raises EnvironmentLacksError for a status that says that we may not enter."""
        if status not in REFUSED:
            return
        if self.api_key is None:
            raise EnvironmentLacksError(
                f"{self.bare} asks for an API key (HTTP {status})", fix=f"Put one into {KEY_VARIABLE}."
            )
        what = "does not know the API key" if status == REFUSED[0] else "forbids this to the API key"
        raise EnvironmentLacksError(f"{self.bare} {what} (HTTP {status})", fix=f"Put another into {KEY_VARIABLE}.")

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


def endpoint_of(target: Endpoint | str) -> Endpoint:
    """A URL alone is one without a key. Raises UsageError for what is none."""
    return target if isinstance(target, Endpoint) else Endpoint(target)


def is_loopback(host: str) -> bool:
    """Whether what listens there is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
