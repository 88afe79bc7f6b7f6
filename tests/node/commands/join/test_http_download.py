"""Downloads in environments and from addresses that the HTTP client refuses: always one line that says what to do."""

import ssl
import time

import httpx2
import pytest

from node.commands.join.http_download import describe_network_error, download, fetch_server_time, is_served, split_url
from node.commands.join.invitation import normalize_run
from protocol.errors import UnreachableError, UsageError
from tests.node.commands.join.test_invitation import fixed_response_server

NOBODY = "http://127.0.0.1:9/run.toml"
VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "SSL_CERT_FILE", "SSL_CERT_DIR")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        (
            "ALL_PROXY",
            "socks5://127.0.0.1:1",
            r"all_proxy \(or ALL_PROXY\) names a socks5 proxy, and only http and https",
        ),
        ("http_proxy", "ftp://127.0.0.1:1", r"http_proxy \(or HTTP_PROXY\) names a ftp proxy"),
        ("https_proxy", "http://[::1", "are malformed; correct them"),
        ("no_proxy", "[::1", "are malformed; correct them|connection refused"),
        ("SSL_CERT_FILE", "/nonexistent.pem", "SSL_CERT_FILE names /nonexistent.pem, which does not exist"),
        ("SSL_CERT_FILE", "/dev/null", "are malformed; correct them|connection refused"),
    ],
)
def test_environment_that_the_client_refuses_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, text: str
) -> None:
    """Control: the client itself raises an exception of another type for most of these."""
    monkeypatch.setenv(name, value)
    with pytest.raises(UnreachableError, match=text) as caught:
        download(NOBODY, 100, 5.0)
    assert str(caught.value).isprintable()
    assert fetch_server_time(NOBODY, 5.0) is None and not is_served(NOBODY, 5.0)


def test_control_client_alone_raises_other_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1")
    with pytest.raises(ImportError):
        httpx2.AsyncClient()


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://localhost:99999/run.toml", "is not a URL \\(the port must be 0 to 65535\\)"),
        ("http://localhost:x/run.toml", "is not a URL \\(the port must be 0 to 65535\\)"),
        ("http://[::1/run.toml", "is not a URL \\(its host is malformed\\)"),
        ("http://[zz]/run.toml", "is not a URL \\(its host is malformed\\)"),
        ("http://a..b/run.toml", "a part of the host's name is empty or too long"),
        (f"http://{'a' * 70}.org/run.toml", "a part of the host's name is empty or too long"),
        ("http:///run.toml", "names no host"),
        ("http://here/a b", "has blanks or control characters"),
        (f"http://here/{'a' * 3000}", "is too long"),
    ],
)
def test_url_with_a_typo_is_described(url: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        split_url(url)


def test_pasted_blanks_and_the_case_of_the_scheme_do_not_matter() -> None:
    """Control: blanks around a path are part of its name."""
    assert normalize_run(" HTTP://Here/Run.toml\n") == "http://Here/Run.toml"
    assert normalize_run("MURMUR://abc@/ip4/1") == "murmur://abc@/ip4/1"
    assert normalize_run(" run.toml ") == " run.toml "


def test_cause_of_a_failed_connection_is_told() -> None:
    """Control: the client says `All connection attempts failed`."""
    with pytest.raises(UnreachableError, match=f"cannot get {NOBODY}: connection refused; check the address"):
        download(NOBODY, 100, 5.0)
    with pytest.raises(UnreachableError, match="the name of the host is not known; check the address"):
        download("http://nobody.invalid/run.toml", 100, 20.0)
    assert describe_network_error(httpx2.ReadTimeout("")) == "no answer in time"
    assert describe_network_error(ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER]")) == "the server does not speak https"


def test_time_of_a_server_is_read() -> None:
    with fixed_response_server(b"") as url:
        served = fetch_server_time(url, 5.0)
        assert not is_served(url, 5.0), "this server does not answer HEAD"
    assert served is not None and abs(served - time.time()) < 60
