"""The HTTP server that says how the node is: ``/healthz``, ``/readyz``, ``/metrics``.

Theory of operation: it runs in threads of its own, because it has to answer while the event loop hangs; that is what
``/healthz`` is for. The loop calls `HealthServer.beat` once in a while (`dataplane.loopmonitor`), and the answer is bad
when the last beat is too old. What the answers are made of is read from these threads, so it must be plain values that the
loop replaces and does not take apart.

It is for kubelet and Prometheus, but listens where anybody may come by, so nobody can make it cost much: it serves a few
connections at a time, one request each, for five seconds at most, the oldest gives way when there are too many, and the
metrics are made once a second at most, whoever asks. Nothing is looked up in the DNS, and requests are not logged.
"""

import contextlib
import errno
import http.server
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from ipaddress import IPv6Address, ip_address
from typing import Any

log = logging.getLogger(__name__)

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TEXT_TYPE = "text/plain; charset=utf-8"
_CONNECTIONS = 8
_CONNECTION_SECONDS = 5.0
_METRICS_SECONDS = 1.0
_POLL_SECONDS = 0.25


class HealthError(Exception):
    """The server cannot listen; the text says why and which option to change."""


class HealthServer:
    """Listens on `ip` and `port` (0: one that the kernel chooses) from `start` on; may be started and closed once.

    `is_ready` and `metrics` are called in the server's threads. `now` is a monotonic clock; the loop counts as stalled
    when its last beat is more than `stall_seconds` old.
    """

    def __init__(
        self,
        ip: str,
        port: int,
        *,
        is_ready: Callable[[], bool],
        metrics: Callable[[], bytes],
        now: Callable[[], float] = time.monotonic,
        stall_seconds: float = 5.0,
    ) -> None:
        self.port = port
        """The port that is listened on, once started."""
        self._ip = ip
        self._is_ready = is_ready
        self._metrics = metrics
        self._now = now
        self._stall_seconds = stall_seconds
        self._beaten = now()
        self._page: tuple[float, bytes] | None = None
        self._page_lock = threading.Lock()
        self._failing = False
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Listen and answer. Raises HealthError."""
        try:
            self._server = _Server((self._ip, self.port), self.answer)
        except (OSError, ValueError) as error:
            raise HealthError(_explain(self._ip, self.port, error)) from error
        self.port = self._server.server_address[1]
        self.beat()
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_SECONDS,), name="health", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening and cut off who is still being answered. Blocks for a quarter of a second at most, or as long as
        the callables take."""
        server, thread = self._server, self._thread
        self._server = self._thread = None
        if server is not None and thread is not None:
            server.shutdown()
            thread.join()
            server.cut_off(older_than=0.0)
            server.server_close()

    def beat(self) -> None:
        """The loop moves."""
        self._beaten = self._now()

    def answer(self, path: str) -> tuple[HTTPStatus, str, bytes]:
        """What a GET of `path` gives: status, content type, body."""
        try:
            if path == "/healthz":
                return self._answer_health()
            if path == "/readyz":
                ready = self._is_ready()
                return _text(HTTPStatus.OK, "ok") if ready else _text(HTTPStatus.SERVICE_UNAVAILABLE, "not ready")
            if path == "/metrics":
                page = self._metrics_page()
                self._failing = False
                return HTTPStatus.OK, METRICS_TYPE, page
        except Exception as error:  # a mistake of ours must cost this answer only
            if not self._failing:
                log.exception("%s cannot be answered", path)
            self._failing = True
            return _text(HTTPStatus.INTERNAL_SERVER_ERROR, f"cannot be told: {error!r}")
        return _text(HTTPStatus.NOT_FOUND, "not found: there are /healthz, /readyz and /metrics")

    def _answer_health(self) -> tuple[HTTPStatus, str, bytes]:
        age = self._now() - self._beaten
        if age <= self._stall_seconds:
            return _text(HTTPStatus.OK, "ok")
        return _text(HTTPStatus.SERVICE_UNAVAILABLE, f"the event loop has not moved for {age:.1f} s")

    def _metrics_page(self) -> bytes:
        """Made anew if the last one is a second old. One thread makes it, others wait for it."""
        with self._page_lock:
            if self._page is None or self._now() - self._page[0] >= _METRICS_SECONDS:
                self._page = self._now(), self._metrics()
            return self._page[1]


def _text(status: HTTPStatus, text: str) -> tuple[HTTPStatus, str, bytes]:
    return status, _TEXT_TYPE, f"{text}\n".encode()


def _explain(ip: str, port: int, error: Exception) -> str:
    number = error.errno if isinstance(error, OSError) else None
    reasons = {
        errno.EADDRINUSE: f"another process listens there (see: ss -ltnp sport = :{port}); choose another --healthz-port",
        errno.EADDRNOTAVAIL: "no interface has that address; choose another --healthz-ip",
        errno.EACCES: "that port needs CAP_NET_BIND_SERVICE; choose a --healthz-port above 1023",
    }
    return f"the health server cannot listen on {ip} port {port}: " + reasons.get(number or 0, str(error))


class _Server(socketserver.ThreadingTCPServer):
    """A thread a connection, of which there are few. Not http.server's HTTPServer, which asks the DNS for its own name."""

    allow_reuse_address = True  # or a restart would have to wait for the connections of the last run to be forgotten
    daemon_threads = False  # so that `server_close` waits for them
    request_queue_size = 16

    def __init__(self, address: tuple[str, int], answer: Callable[[str], tuple[HTTPStatus, str, bytes]]) -> None:
        self.address_family = socket.AF_INET6 if ip_address(address[0]).version == 6 else socket.AF_INET
        self.answer = answer
        self._is_wildcard = ip_address(address[0]) == IPv6Address("::")
        self._slots = threading.Semaphore(_CONNECTIONS)
        self._connections: dict[socket.socket, float] = {}
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """On ``::`` for IPv4, too, whatever net.ipv6.bindv6only says."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not self._is_wildcard)
        super().server_bind()

    def service_actions(self) -> None:
        """Called by the accepting thread several times a second."""
        self.cut_off(older_than=_CONNECTION_SECONDS)

    def cut_off(self, older_than: float) -> None:
        """End connections that are older than that (seconds); their threads see the end of the stream."""
        limit = time.monotonic() - older_than
        for connection, since in list(self._connections.items()):
            if since <= limit:
                _end(connection)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Take the connection, if need be at the cost of the oldest."""
        if not self._slots.acquire(blocking=False):
            for oldest in list(self._connections)[:1]:
                _end(oldest)
            if not self._slots.acquire(timeout=_POLL_SECONDS):
                self.shutdown_request(request)
                return
        self._connections[request] = time.monotonic()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """In the connection's thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def shutdown_request(self, request: Any) -> None:
        """Forget it before its descriptor is free for others."""
        self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The client went away, or was cut off; to be told to nobody."""
        log.debug("the answer to %s was not delivered", client_address, exc_info=True)


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(http.server.BaseHTTPRequestHandler):
    """One request of HTTP/1.0."""

    server: _Server
    timeout = _CONNECTION_SECONDS

    def do_GET(self) -> None:
        """Both methods; HEAD is without the body."""
        self._send(*self.server.answer(self.path.partition("?")[0]))

    do_HEAD = do_GET  # noqa: N815 - as above

    def __getattr__(self, name: str) -> Any:
        """``do_`` and any other method: it would be answered with 501."""
        if name.startswith("do_"):
            return self._refuse
        raise AttributeError(name)

    def _refuse(self) -> None:
        self._send(*_text(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD"))

    def _send(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def version_string(self) -> str:
        """The Server header: without versions."""
        return "pyflannel-dp"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name in http.server
        """Requests are not logged."""
