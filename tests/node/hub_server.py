"""A Hugging Face Hub on loopback: the calls that huggingface-hub makes to create, fill and tag a repository."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_test"
COMMIT = "c0ffee" + "0" * 34
REGULAR_SUFFIXES = (".json", ".md")


@dataclass
class Hub:
    """What the server holds. `refuses` is the status with which it answers every call from now on."""

    address: str = ""
    repositories: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    refuses: int = 0
    refuses_objects: bool = False
    calls: list[str] = field(default_factory=list)

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        """Return status and JSON of a POST or a PUT."""
        parts = path.partition("?")[0].strip("/").split("/")
        if path.startswith("/objects/"):
            return self._store(parts[1], body)
        if parts[-1] == "commit" or parts[-2:-1] == ["commit"]:
            return self._commit("/".join(parts[2:4]), body)
        values = json.loads(body or b"{}")
        match parts:
            case ["api", "repos", "create"]:
                return self._create(values)
            case ["api", "validate-yaml"]:
                return 200, {"errors": [], "warnings": []}
            case ["api", "models", _, _, "preupload", _]:
                return 200, {"files": [{**one, **self._mode(one["path"])} for one in values["files"]]}
            case ["api", "models", _, _, "tag", revision]:
                return self._tag(values["tag"], revision)
            case [_, _, "info", "lfs", "objects", "batch"]:
                return 200, {"transfer": "basic", "objects": [self._action(one) for one in values["objects"]]}
        return 404, {"error": f"unknown call {path}"}

    def _create(self, values: dict[str, Any]) -> tuple[int, Any]:
        name = f"{values['organization']}/{values['name']}"
        if name in self.repositories:
            return 409, {"error": "You already created this model repo", "url": f"{self.address}/{name}"}
        self.repositories[name] = values
        return 200, {"url": f"{self.address}/{name}", "name": name, "id": name}

    def _mode(self, path: str) -> dict[str, Any]:
        return {
            "uploadMode": "regular" if path.endswith(REGULAR_SUFFIXES) else "lfs",
            "shouldIgnore": False,
            "oid": None,
        }

    def _action(self, wanted: dict[str, Any]) -> dict[str, Any]:
        if wanted["oid"] in self.objects:
            return wanted
        return {**wanted, "actions": {"upload": {"href": f"{self.address}/objects/{wanted['oid']}"}}}

    def _store(self, oid: str, body: bytes) -> tuple[int, Any]:
        if self.refuses_objects or hashlib.sha256(body).hexdigest() != oid:
            return 400, {"error": "other bytes"}
        self.objects[oid] = body
        return 200, {}

    def _commit(self, name: str, body: bytes) -> tuple[int, Any]:
        if name not in self.repositories:
            return 404, {"error": "Repository not found"}
        for line in map(json.loads, body.splitlines()):
            match line["key"], line["value"]:
                case "header", header:
                    self.messages.append(header["summary"])
                case "file", file:
                    self.files[file["path"]] = base64.b64decode(file["content"])
                case "lfsFile", file:
                    self.files[file["path"]] = self.objects[file["oid"]]
        address = f"{self.address}/{name}/commit/{COMMIT}"
        return 200, {"success": True, "commitOid": COMMIT, "commitUrl": address, "hookOutput": ""}

    def _tag(self, tag: str, revision: str) -> tuple[int, Any]:
        if tag in self.tags:
            return 409, {"error": "Tag reference exists already"}
        self.tags[tag] = revision
        return 200, {}


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer_call(self) -> None:
            body = self._read_body()
            hub.calls.append(f"{self.command} {self.path}")
            is_known = self.headers.get("authorization") == f"Bearer {TOKEN}" or self.path.startswith("/objects/")
            status, values = (
                hub.answer(self.path, body) if is_known else (401, {"error": "Invalid username or password."})
            )
            if hub.refuses:
                status, values = hub.refuses, {"error": "the Hub is out of order"}
            answer = json.dumps(values).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def _read_body(self) -> bytes:
            if self.headers.get("transfer-encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("content-length") or 0))
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        do_POST = do_PUT = do_GET = answer_call  # noqa: N815

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.address = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield hub
        finally:
            server.shutdown()
