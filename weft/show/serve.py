"""One page on the loopback address: ``with PageServer(text) as server: server.run()``.

Only this machine can reach it, only ``/`` is there, and only under the names that a browser on this machine uses for
it: a foreign page that makes its own name point here gets nothing.
"""

from __future__ import annotations

from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from weft.base.errors import InputError

ADDRESS: Final = "127.0.0.1"
_HEADERS: Final = {
    "Content-Type": "text/html; charset=utf-8", "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer", "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin"}


class PageServer(ThreadingHTTPServer):
    """Serves one page until it is closed or interrupted."""

    daemon_threads = True

    def __init__(self, text: str, *, port: int = 0) -> None:
        """Bind to the port; 0 takes a free one. Raise ``InputError`` where that is not possible."""
        if not 0 <= port <= 65535:
            raise InputError(f"port {port} does not exist: give one from 0 to 65535 (0 takes a free one)")
        self.page = text.encode()
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as problem:
            raise InputError(f"cannot listen on {ADDRESS}:{port}: {problem.strerror}. Try another --port, or 0 for "
                             "any free one") from problem

    @property
    def address(self) -> str:
        """Return where the page is: ``http://127.0.0.1:40123/``."""
        return f"http://{ADDRESS}:{self.server_port}/"

    def run(self) -> None:
        """Serve until ``shutdown`` is called from another thread, or Ctrl-C."""
        self.serve_forever()


class _Handler(BaseHTTPRequestHandler):
    """Answers with the page, or with an empty refusal."""

    server: PageServer
    server_version = "weft"
    sys_version = ""
    timeout = 30

    def do_GET(self) -> None:
        status = self._status()
        body = self.server.page if status is HTTPStatus.OK else b""
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def _status(self) -> HTTPStatus:
        if self.headers.get("Host", "") not in (f"{name}:{self.server.server_port}" for name in (ADDRESS, "localhost")):
            return HTTPStatus.FORBIDDEN
        return HTTPStatus.OK if self.path == "/" else HTTPStatus.NOT_FOUND

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name in the base class
        """Say nothing."""
