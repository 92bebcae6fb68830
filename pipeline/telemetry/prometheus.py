"""The HTTP server that Prometheus scrapes, on loopback. Its connections are bounded in number and in silence."""

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
SILENT_S = 5.0  #: a connection that sends or receives nothing for so long is closed


class Exposition:
    """Serves a registry's metrics from construction to `close`."""

    def __init__(self, registry: CollectorRegistry, port: int, on_refused: Callable[[], None]) -> None:
        """port: 0 for any free one. on_refused: called, from any thread, for each connection that sends no valid
        request. Raises OSError if the port is taken."""
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
    request_queue_size = 128  # with the default of 5, many connections make a scrape wait for seconds
    daemon_threads = True  # otherwise the server keeps every thread that has ended

    def __init__(self, port: int, on_refused: Callable[[], None]) -> None:
        self.on_refused = on_refused
        self._free = threading.BoundedSemaphore(CONNECTIONS)
        super().__init__((ADDRESS, port), MetricsHandler)

    def server_bind(self) -> None:
        """Bind as HTTPServer does, but without asking a name server for 127.0.0.1, which takes seconds if none answers.
        Source: `socket.getfqdn` in http.server."""
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
        """Count a connection that closed or was silent. The standard library writes a traceback to stderr."""
        self.on_refused()


class MetricsHandler(WSGIRequestHandler):
    timeout = SILENT_S
    server: _Server

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that is not valid HTTP."""
        self.server.on_refused()
        self.close_connection = True
        self.send_response(HTTPStatus(code))
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, because any local user can connect."""
