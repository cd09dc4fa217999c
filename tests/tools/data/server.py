"""A web server on this machine that plays the Hugging Face Hub, or COCO's image server, and can be told to fail."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

RESOLVE = re.compile(r"/datasets/(?P<repository>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<name>.+)")
COMMIT = "8049631c405ae6576f93f445c6b8166f76f5505a"


class Server(ThreadingHTTPServer):
    """Serves files below a folder, and datasets of the Hub by repository below it."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.requests: list[tuple[str, str, str | None]] = []
        """Method, path and range of each request."""
        self.status: dict[str, int] = {}
        """Answers by the end of the path, instead of the file."""
        self.gated: set[str] = set()
        """Repositories whose terms have to be accepted."""
        self.stop_after: int | None = None
        """Bytes of an answer after which it stands still."""
        self.stopped, self.release = threading.Event(), threading.Event()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Stay quiet."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        server = self.server
        server.requests.append((self.command, self.path, self.headers.get("Range")))
        hub = RESOLVE.fullmatch(self.path)
        path = server.folder / (f"{hub['repository']}/{hub['name']}" if hub else self.path.lstrip("/"))
        status = next((code for end, code in server.status.items() if self.path.endswith(end)), None)
        if hub and hub["repository"] in server.gated:
            self._say(403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."})
        elif status or not path.is_file():
            self._say(status or 404, {"X-Error-Code": "EntryNotFound"} if hub and not status else {})
        else:
            self._send(path, hub is not None, body)

    def _send(self, path: Path, hub: bool, body: bool) -> None:
        content = path.read_bytes()
        headers = {"Accept-Ranges": "bytes"}
        if hub:
            headers |= {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        start = int(re.findall(r"\d+", self.headers["Range"])[0]) if self.headers.get("Range") else 0
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        part = content[start:]
        self._say(206 if start else 200, {**headers, "Content-Length": str(len(part))}, end=False)
        if not body:
            return
        stop = self.server.stop_after
        if stop is not None and len(part) > stop:
            self.wfile.write(part[:stop])
            self.wfile.flush()
            self.server.stopped.set()
            self.server.release.wait(30)
            self.close_connection = True
            return
        self.wfile.write(part)

    def _say(self, status: int, headers: dict[str, str], end: bool = True) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if end:
            self.send_header("Content-Length", "0")
        self.end_headers()


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """A server in threads of its own."""
    server = Server(folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.release.set()
        server.shutdown()
        server.server_close()
        thread.join(5)
