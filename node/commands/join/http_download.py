"""Fetch a small file from a URL that a user typed. Every failure is one line that says what to do.

Environment variables configure proxies and certificates, and the HTTP client refuses some values of them when it is
built, each with an exception of another type. `_open_client` names the variable.
"""

import asyncio
import os
import socket
import ssl
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies_environment

import httpx2

from protocol.errors import ManifestError, UnreachableError, UsageError, describe_error

MAX_URL_CHARACTERS = 2000
PROXY_SCHEMES = ("http", "https")
CERTIFICATE_VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
REFUSED_BY_CLIENT = (ImportError, ValueError, OSError, httpx2.InvalidURL)
REFUSED_BY_NETWORK = (OSError, ValueError, httpx2.HTTPError, httpx2.InvalidURL)  # TimeoutError is an OSError


def split_url(url: str) -> SplitResult:
    """Return the parts of an http(s) URL. Raises UsageError for a URL that nobody can request."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
        (host or "").encode("idna")
    except ValueError as error:
        raise UsageError(f"{url[:MAX_URL_CHARACTERS]} is not a URL ({_url_fault(error)}); correct it") from error
    if not host:
        raise UsageError(f"{url} names no host; write it like https://run.example.org/run.toml")
    if len(url) > MAX_URL_CHARACTERS or not url.isprintable() or " " in url:
        raise UsageError("the URL is too long, or has blanks or control characters; copy it again")
    return parts


def download(url: str, max_bytes: int, seconds: float) -> bytes:
    """Download at most `max_bytes` within `seconds`, without following redirects.

    Raises:
        UnreachableError: The server, the network or the settings of this machine do not let us.
        UsageError: There is no such file at the URL.
        ManifestError: The file is larger.
    """

    async def fetch() -> bytes:
        async with asyncio.timeout(seconds), _open_client(url, seconds) as client:
            return await _read_body(client, url, max_bytes)

    try:
        return asyncio.run(fetch())
    except REFUSED_BY_NETWORK as error:
        raise UnreachableError(
            f"cannot get {url}: {describe_network_error(error)}; check the address and the network"
        ) from error


def is_served(url: str, seconds: float) -> bool:
    """Return whether the web server has a file at the URL."""
    answer = _head(url, seconds)
    return answer is not None and answer.status_code == 200


def fetch_server_time(url: str, seconds: float) -> float | None:
    """Return the time of the web server, in seconds since the epoch; `None` if it does not say."""
    answer = _head(url, seconds)
    try:
        return None if answer is None else parsedate_to_datetime(answer.headers["date"]).timestamp()
    except (KeyError, ValueError):
        return None


def _head(url: str, seconds: float) -> httpx2.Response | None:
    async def fetch() -> httpx2.Response:
        async with asyncio.timeout(seconds), _open_client(url, seconds) as client:
            return await client.head(url)

    try:
        return asyncio.run(fetch())
    except (UnreachableError, *REFUSED_BY_NETWORK):
        return None


def describe_network_error(error: BaseException) -> str:
    """Return the cause of a failed connection in plain words."""
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"the certificate is not valid: {cause.verify_message}"
        if isinstance(cause, ssl.SSLError) and "WRONG_VERSION_NUMBER" in str(cause):
            return "the server does not speak https"
        if isinstance(cause, socket.gaierror):
            return "the name of the host is not known"
        if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
            return os.strerror(cause.errno).lower()
    return "no answer in time" if isinstance(error, httpx2.TimeoutException) else describe_error(error)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and the ones that led to it, the innermost first."""
    inner: BaseException | None = error.__cause__ or error.__context__
    if inner is not None:
        yield from _causes(inner)
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from _causes(member)
    yield error


def _open_client(url: str, seconds: float) -> httpx2.AsyncClient:
    try:
        return httpx2.AsyncClient(timeout=seconds)
    except REFUSED_BY_CLIENT as error:
        raise UnreachableError(f"cannot get {url}: {_blame_environment()}") from error


def _blame_environment() -> str:
    """Return which environment variable the HTTP client refuses, and what to do."""
    for kind, proxy in getproxies_environment().items():
        scheme = proxy.partition("://")[0].lower() if "://" in proxy else "http"
        if kind in ("http", "https", "all") and scheme not in PROXY_SCHEMES:
            return (
                f"{kind}_proxy (or {kind.upper()}_PROXY) names a {scheme} proxy, and only http and https proxies work; "
                "unset it, or fetch the file with another program and join the file"
            )
    for name in CERTIFICATE_VARIABLES:
        place = os.environ.get(name)
        if place and not Path(place).exists():
            return f"{name} names {place}, which does not exist; correct or unset it"
    return "the proxy or certificate settings (http_proxy, no_proxy, SSL_CERT_FILE, ...) are malformed; correct them"


def _url_fault(error: ValueError) -> str:
    if isinstance(error, UnicodeError):
        return "a part of the host's name is empty or too long"
    return "the port must be 0 to 65535" if str(error).startswith("Port") else "its host is malformed"


async def _read_body(client: httpx2.AsyncClient, url: str, max_bytes: int) -> bytes:
    text = bytearray()
    async with client.stream("GET", url) as response:
        if response.is_redirect:
            location = response.headers.get("location", "elsewhere")[:200]
            raise UsageError(f"{url} has moved to {location}; join that URL")
        if response.status_code != 200:
            raise UnreachableError(f"{url} answers with {response.status_code}; check the address")
        if response.headers.get("content-type", "").startswith("text/html"):
            raise UsageError(f"{url} is a web page; join the URL of its run.toml, which the page shows")
        async for chunk in response.aiter_bytes():
            text += chunk
            if len(text) > max_bytes:
                raise ManifestError(f"{url} is not a manifest (over {max_bytes} bytes); check the address")
    return bytes(text)
