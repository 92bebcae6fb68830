"""The HTTP server that Prometheus scrapes, on loopback: whoever else connects can neither hold it up nor fill it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http import HTTPStatus
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

ADDRESS = "127.0.0.1"
CONNECTIONS = 8  #: at once, each with a thread; a scrape takes milliseconds
SILENT_S = 5.0  #: after which a connection that says nothing, or takes nothing, is closed


class Exposition:
    """Answers with a registry's metrics from its making to `close`."""

    def __init__(self, registry: CollectorRegistry, port: int, on_refused: Callable[[], None]) -> None:
        """port: 0 for any that is free. on_refused: called, from any thread, for each connection that is not answered
        with the metrics because of what it said, or did not say. Raises OSError when the port is taken."""
        self._server = _Server(port, on_refused)
        self._server.set_app(make_wsgi_app(registry))
        self.port = int(self._server.server_port)
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Free the port. Takes up to half a second."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingMixIn, WSGIServer):
    request_queue_size = 128  # with the 5 there are, a crowd at the door makes a scrape wait for seconds
    daemon_threads = True  # else every thread there ever was is kept for the end

    def __init__(self, port: int, on_refused: Callable[[], None]) -> None:
        self.on_refused = on_refused
        self._free = threading.BoundedSemaphore(CONNECTIONS)
        super().__init__((ADDRESS, port), _Handler)

    def server_bind(self) -> None:
        """As HTTPServer does, without its question to a name server who 127.0.0.1 is: where none answers, a start waits
        for seconds. Source: `socket.getfqdn` in http.server."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.on_refused()
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread for it
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """It has hung up, or was silent: counted, where the standard library writes a traceback to stderr."""
        self.on_refused()


class _Handler(WSGIRequestHandler):
    timeout = SILENT_S
    server: _Server

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what is not HTTP."""
        self.server.on_refused()
        self.close_connection = True
        self.send_response(HTTPStatus(code))
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a stranger's words need not be in our log."""
