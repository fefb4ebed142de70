"""A small Hugging Face hub on loopback: the few endpoints that downloads of a model call."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
TOKEN = "hf_of_a_reader"


@dataclass
class LocalHub:
    """models: files by name, by revision, by repository; a revision's commit is a digest of it.

    gated: repositories that need `TOKEN`. cuts: bytes after which the first answer with a file
    ends. requests: method, path and range of each request.
    """

    models: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    cuts: dict[str, int] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    address: str = ""

    def commit_of(self, repo: str, revision: str) -> str:
        return hashlib.sha1(f"{repo} {revision}".encode()).hexdigest()

    def files_sent(self) -> list[str]:
        """Of the GET requests of files, in their order."""
        return [p.partition("/resolve/")[2].partition("/")[2] for m, p, _ in self.requests
                if m == "GET" and "/resolve/" in p]  # fmt: skip


@contextlib.contextmanager
def serving(hub: LocalHub) -> Iterator[LocalHub]:
    """Until then, and after, its address refuses connections."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    port = int(hub.address.rpartition(":")[2]) if hub.address else 0
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def environment(hub: LocalHub, home: Path, **more: str) -> dict[str, str]:
    """Of a process whose hub this is and whose cache is below `home`."""
    own = {n: v for n, v in os.environ.items() if not n.startswith("HF_")}
    return {
        **own, "HF_ENDPOINT": hub.address, "HF_HOME": str(home), "PYTHONPATH": str(ROOT),
        "LEGATO_CACHE": str(home / "legato"), "NO_PROXY": "*", **more,
    }  # fmt: skip


def run(
    hub: LocalHub, home: Path, *command: str, cwd: Path = ROOT, **more: str
) -> subprocess.CompletedProcess[str]:
    """A Python process with this hub. more: variables of its environment."""
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment(hub, home, **more),
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    hub: LocalHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers["Range"]))
        is_api = path.startswith("/api/models/")
        if not is_api and "/resolve/" not in path:
            return self._refuse(404, "EntryNotFound")
        parts = path.removeprefix("/api/models").split("/")
        repo, kind, rest = "/".join(parts[1:3]), parts[3], parts[4:]
        if repo not in self.hub.models:  # the hub does not tell a stranger what is private
            return self._refuse(401, "RepoNotFound")
        revisions = self.hub.models[repo]
        by_commit = {self.hub.commit_of(repo, name): files for name, files in revisions.items()}
        revision = "/".join(rest) if is_api else rest[0]
        commit = revision if revision in by_commit else self.hub.commit_of(repo, revision)
        if commit not in by_commit:
            return self._refuse(404, "RevisionNotFound")
        files = by_commit[commit]
        if kind == "revision":
            return self._send(json.dumps({"id": repo, "sha": commit, "siblings": []}).encode())
        if kind == "tree":
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": _digest(data)}
                for name, data in files.items()
            ]
            return self._send(json.dumps(tree).encode())
        if repo in self.hub.gated and self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self._refuse(403, "GatedRepo", commit)
        name = "/".join(rest[1:])
        if name not in files:
            return self._refuse(404, "EntryNotFound", commit)
        return self._send(files[name], commit, name)

    def _send(self, data: bytes, commit: str = "", name: str = "") -> None:
        begin = int((self.headers["Range"] or "bytes=0-")[len("bytes=") :].partition("-")[0])
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(data) - begin))
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        if commit:
            self.send_header("X-Repo-Commit", commit)
            self.send_header("ETag", f'"{_digest(data)}"')
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = self.hub.cuts.pop(name, None)
        self.wfile.write(data[begin:] if cut is None else data[begin:cut])
        if cut is not None:
            self.close_connection = True

    def _refuse(self, status: int, code: str, commit: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.send_header("X-Error-Code", code)
        if commit:
            self.send_header("X-Repo-Commit", commit)
        self.end_headers()


def _digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
