"""The sources of a run that `murmur join` accepts and refuses."""

import contextlib
import ipaddress
import os
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from node.commands.join import invitation
from node.commands.join.invitation import Invitation, keep_own_addresses, open_invitation, require_paths_inside
from protocol.errors import ManifestError, MissingFileError, MurmurError, OrganiserError, UnreachableError, UsageError
from protocol.identity import Identity
from protocol.manifest.run import Manifest
from protocol.signing import sign_manifest
from tests.node.small_run import MANIFEST, TOML

ORGANISER = Identity.create()


@contextlib.contextmanager
def fixed_response_server(body: bytes, code: int = 200, headers: Mapping[str, str] | None = None) -> Iterator[str]:
    """Serve one fixed response; yields the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(code)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/run.toml"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def data(**values: str) -> Manifest:
    return MANIFEST.model_copy(update={"data": MANIFEST.data.model_copy(update=values)})


PEER = ORGANISER.peer_id
PUBLIC, LOOPBACK = f"/ip4/1.1.1.1/tcp/4001/p2p/{PEER}", f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}"
PRIVATE, METADATA = f"/ip4/192.168.1.9/tcp/4001/p2p/{PEER}", f"/ip4/169.254.169.254/tcp/80/p2p/{PEER}"
NAMED, UNKNOWN = f"/dns4/localhost/tcp/4001/p2p/{PEER}", f"/dns4/nowhere.invalid/tcp/4001/p2p/{PEER}"
RELAYED = f"/ip4/10.0.0.7/tcp/4001/p2p/{PEER}/p2p-circuit/p2p/{PEER}"
ALL = (PUBLIC, LOOPBACK, PRIVATE, METADATA, NAMED, UNKNOWN, RELAYED)


@pytest.mark.parametrize(
    ("source", "kept"),
    [
        ("8.8.8.8", (PUBLIC, UNKNOWN)),
        ("192.168.1.2", (PUBLIC, PRIVATE, UNKNOWN)),
        ("10.1.1.1", (PUBLIC, UNKNOWN, RELAYED)),
        ("127.0.0.1", (PUBLIC, LOOPBACK, PRIVATE, NAMED, UNKNOWN, RELAYED)),
        ("169.254.0.1", (PUBLIC, UNKNOWN)),
    ],
)
def test_downloaded_manifest_names_only_addresses_of_the_place_it_came_from(source: str, kept: tuple[str, ...]) -> None:
    manifest = MANIFEST.model_copy(update={"run": MANIFEST.run.model_copy(update={"bootstrap": ALL})})
    found = keep_own_addresses(manifest, (ipaddress.ip_address(source),))
    assert found.run.bootstrap == kept and found.run_id == manifest.run_id


def test_url_of_this_machine_keeps_its_loopback_addresses_and_a_file_keeps_all(tmp_path: Path) -> None:
    manifest = MANIFEST.model_copy(update={"run": MANIFEST.run.model_copy(update={"bootstrap": (LOOPBACK, METADATA)})})
    with fixed_response_server(sign_manifest(manifest, ORGANISER)) as url:
        assert open_invitation(url, False).manifest.run.bootstrap == (LOOPBACK,)
    file = tmp_path / "run.toml"
    file.write_text(manifest.to_toml())
    assert open_invitation(str(file), False).manifest.run.bootstrap == (LOOPBACK, METADATA)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("[model]", f'bootstrap = ["/unix/run/docker.sock/p2p/{PEER}"]\n[model]', "is not the address of a machine"),
        ('path = "*.txt"', 'path = "a\\u0000b"', "NUL"),
    ],
)
def test_manifest_with_a_socket_or_a_nul_is_refused(tmp_path: Path, old: str, new: str, text: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(TOML.format(target="", min_peers=1).replace(old, new, 1))
    with pytest.raises(ManifestError, match=text):
        open_invitation(str(file), False)


def test_signed_run_is_downloaded() -> None:
    with fixed_response_server(sign_manifest(MANIFEST, ORGANISER)) as url:
        assert open_invitation(url, False) == Invitation(MANIFEST, ORGANISER.peer_id, None, source=url)


@pytest.mark.parametrize(
    ("body", "fault", "text"),
    [
        (MANIFEST.to_toml().encode(), OrganiserError, "is not signed; ask for the URL"),
        (sign_manifest(MANIFEST, ORGANISER).replace(b"small", b"other"), OrganiserError, "is not what 12D3KooW"),
        (b"<html>", ManifestError, "not valid TOML"),
        (b"[run]\nname = 'x'\ncolour = 1\n", ManifestError, "unknown key run.colour .*may need another version"),
        (b"#" * 1_000_000, ManifestError, "is not a manifest \\(over .*\\); check the address"),
        (sign_manifest(data(path="/etc/passwd"), ORGANISER), OrganiserError, "is outside .*; ask the organiser"),
    ],
)
def test_invalid_downloads_are_refused(body: bytes, fault: type[MurmurError], text: str) -> None:
    with fixed_response_server(body) as url, pytest.raises(fault, match=text):
        open_invitation(url, False)


def test_redirects_errors_and_web_pages_are_refused() -> None:
    html = {"content-type": "text/html; charset=utf-8"}
    with fixed_response_server(b"<html>", headers=html) as url, pytest.raises(UsageError, match="is a web page"):
        open_invitation(url, False)
    with fixed_response_server(b"") as url, pytest.raises(UnreachableError, match="does not speak https"):
        open_invitation(url.replace("http:", "https:"), False)
    with (
        fixed_response_server(b"", 404) as url,
        pytest.raises(UnreachableError, match="answers with 404; check the address"),
    ):
        open_invitation(url, False)
    with (
        fixed_response_server(b"", 302, {"location": "https://elsewhere/"}) as url,
        pytest.raises(UsageError, match="join that URL"),
    ):
        open_invitation(url, False)
    with pytest.raises(UnreachableError, match="cannot get http://127.0.0.1:9/run.toml"):
        open_invitation("http://127.0.0.1:9/run.toml", False)


def test_endless_download_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invitation, "DOWNLOAD_SECONDS", 0.3)
    with (
        fixed_response_server(b"", headers={"content-length": "100"}) as url,
        pytest.raises(UnreachableError, match="cannot get"),
    ):
        open_invitation(url, False)


@pytest.mark.parametrize("host", ["93.184.216.34", "[2606:2800:220:1::1]"])
def test_plain_http_is_refused_on_the_internet(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """Control: with --insecure the URL is requested."""
    monkeypatch.setattr(invitation, "_download", lambda url: sign_manifest(MANIFEST, ORGANISER))
    with pytest.raises(OrganiserError, match="use https://, or --insecure if you compare the fingerprint"):
        open_invitation(f"http://{host}/run.toml", False)
    assert open_invitation(f"http://{host}/run.toml", True).organiser == ORGANISER.peer_id
    for private in ("127.0.0.1", "192.168.3.4", "10.0.0.1", "[::1]", "localhost"):
        assert open_invitation(f"http://{private}/run.toml", False).organiser == ORGANISER.peer_id
    assert open_invitation(f"https://{host}/run.toml", False).organiser == ORGANISER.peer_id


def test_unsigned_file_is_trusted(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(data(path="/anywhere").to_toml())
    assert open_invitation(str(path), False) == Invitation(
        data(path="/anywhere"), None, tmp_path.resolve(), source=str(path.resolve())
    )
    path.write_bytes(sign_manifest(MANIFEST, ORGANISER))
    assert open_invitation(str(path), False).organiser == ORGANISER.peer_id
    path.write_bytes(sign_manifest(MANIFEST, ORGANISER).replace(b"small", b"other"))
    with pytest.raises(OrganiserError, match="remove the last two lines"):
        open_invitation(str(path), False)
    with pytest.raises(MissingFileError, match="cannot read the manifest"):
        open_invitation(str(tmp_path / "none.toml"), False)


@pytest.mark.parametrize("run", ["run.example.org/run.toml", "127.0.0.1:8080/run.toml", "localhost:80/run.toml"])
def test_url_without_scheme_is_recognised(run: str) -> None:
    with pytest.raises(MissingFileError, match="if it is a URL, begin it with https://"):
        open_invitation(run, False)


@pytest.mark.parametrize(
    "run",
    [
        "ftp://here/run.toml",
        "http:///run.toml",
        "murmur://abc@/ip4/1.2.3.4",
        f"murmur://{'ab' * 32}@/ip4/1.2.3.4/tcp/1",
    ],
)
def test_other_sources_are_refused(run: str) -> None:
    with pytest.raises(UsageError):
        open_invitation(run, False)


@pytest.mark.parametrize("path", ["/etc/passwd", "../key", "a/../../key", "~/.ssh/id", "/"])
def test_downloaded_manifest_must_not_name_local_files(path: str) -> None:
    for manifest in (data(path=path), data(tokenizer=path)):
        with pytest.raises(OrganiserError):
            require_paths_inside(manifest)
    require_paths_inside(data(path="corpus/*.txt", tokenizer="tokenizer.json"))


def test_manifest_is_read_from_a_pipe_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths start in the working directory. Control: a pipe that is opened twice is empty the second time."""
    monkeypatch.chdir(tmp_path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for text, organiser in (
        (MANIFEST.to_toml().encode(), None),
        (sign_manifest(MANIFEST, ORGANISER), ORGANISER.peer_id),
    ):
        writer = threading.Thread(target=pipe.write_bytes, args=(text,))
        writer.start()
        assert open_invitation(str(pipe), False) == Invitation(MANIFEST, organiser, tmp_path)
        writer.join()


@pytest.mark.parametrize("run", ["x" * 5000, "murmur " + "y" * 300, "a\0b"])
def test_name_that_no_file_can_have_is_a_missing_file(run: str) -> None:
    with pytest.raises(MissingFileError, match="cannot read the manifest .*; name an existing file"):
        open_invitation(run, False)


@pytest.mark.parametrize("run", ["ftp://x/y", "murmur://abc@x", "http://a..b/run.toml", "http://[::1/run.toml"])
def test_usage_errors_come_before_a_request_is_logged(run: str, caplog: pytest.LogCaptureFixture) -> None:
    """Control: a request that can be made is logged."""
    caplog.set_level("INFO")
    with pytest.raises(UsageError):
        open_invitation(run, False)
    assert not caplog.records
    with pytest.raises(UnreachableError):
        open_invitation("http://127.0.0.1:9/run.toml", False)
    assert "http://127.0.0.1:9/run.toml" in caplog.text
