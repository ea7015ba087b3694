import http.client
import logging
import socket
import threading
import time

import pytest

from dataplane import health
from dataplane.health import HealthError, HealthServer


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def node():
    """What the callables tell; a test changes it."""
    return {"ready": True, "metrics": lambda: b"a 1\n"}


@pytest.fixture
def server(node, clock):
    made = HealthServer(
        "127.0.0.1",
        0,
        is_ready=lambda: node["ready"],
        metrics=lambda: bytes(node["metrics"]()),
        now=clock,
        stall_seconds=5.0,
    )
    made.start()
    yield made
    made.close()


def request(server, path, method="GET", ip="127.0.0.1"):
    connection = http.client.HTTPConnection(ip, server.port, timeout=5)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers
    finally:
        connection.close()


def raw(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def test_healthz_is_good_until_the_last_beat_is_too_old(server, clock):
    assert request(server, "/healthz")[:2] == (200, b"ok\n")
    clock.now += 5.0
    assert request(server, "/healthz")[0] == 200
    clock.now += 0.5
    assert request(server, "/healthz")[:2] == (503, b"the event loop has not moved for 5.5 s\n")
    server.beat()
    assert request(server, "/healthz")[0] == 200


def test_readyz(server, node):
    assert request(server, "/readyz")[:2] == (200, b"ok\n")
    node["ready"] = False
    assert request(server, "/readyz")[:2] == (503, b"not ready\n")


def test_metrics_have_the_type_of_the_text_format(server):
    status, body, headers = request(server, "/metrics?x=1")
    assert (status, body) == (200, b"a 1\n")
    assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert headers["Content-Length"] == "4"
    assert headers["Server"] == "pyflannel-dp"


def test_metrics_are_made_once_a_second_at_most(server, node, clock):
    calls = []
    node["metrics"] = lambda: calls.append(1) or b"%d\n" % len(calls)
    assert [request(server, "/metrics")[1] for _ in range(3)] == [b"1\n"] * 3
    clock.now += 1.0
    assert request(server, "/metrics")[1] == b"2\n"


def test_failing_metrics_cost_that_answer_only(server, node, clock, caplog):
    def fail():
        raise ValueError("no such thing")

    node["metrics"] = fail
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            status, body, _ = request(server, "/metrics")
            assert (status, body) == (500, b"cannot be told: ValueError('no such thing')\n")
    assert [record.getMessage() for record in caplog.records] == ["/metrics cannot be answered"]
    assert request(server, "/healthz")[0] == 200
    node["metrics"] = lambda: b"b 2\n"
    assert request(server, "/metrics")[:2] == (200, b"b 2\n")


def test_what_is_not_there(server):
    assert request(server, "/")[0] == 404
    assert request(server, "/metrics/")[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "BREW"])
def test_other_methods_are_refused(server, method):
    status, _, headers = request(server, "/healthz", method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


def test_head_has_no_body(server):
    status, body, headers = request(server, "/metrics", "HEAD")
    assert (status, body, headers["Content-Length"]) == (200, b"", "4")


@pytest.mark.parametrize("sent", [b"\x16\x03\x01\x02\x00\x01\n", b"GET /healthz HTTP/9.9\r\n\r\n", b"GET " + b"x" * 70000])
def test_nonsense_is_answered_or_cut_off_and_others_are_served(server, sent, capfd):
    with raw(server) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        try:
            answer = client.recv(65536)
        except ConnectionResetError:
            answer = b""
    assert not answer or b"Error code: 4" in answer or b"Error code: 5" in answer or answer.startswith(b"HTTP/1.0 4")
    assert request(server, "/healthz")[0] == 200
    assert capfd.readouterr() == ("", "")


def test_who_sends_nothing_is_cut_off(node, clock, monkeypatch):
    monkeypatch.setattr(health, "_CONNECTION_SECONDS", 0.1)
    server = HealthServer("127.0.0.1", 0, is_ready=bool, metrics=bytes, now=clock)
    server.start()
    try:
        with raw(server) as client:
            client.sendall(b"GET /hea")  # and no more
            assert client.recv(1) == b""
    finally:
        server.close()


def test_many_idle_connections_do_not_keep_others_out(server):
    idle = [raw(server) for _ in range(health._CONNECTIONS + 3)]
    try:
        assert request(server, "/healthz")[0] == 200
        assert threading.active_count() <= health._CONNECTIONS + 4
    finally:
        for client in idle:
            client.close()


def test_a_client_that_goes_away_is_told_to_nobody(server, node, capfd):
    node["metrics"] = lambda: b"x" * 8_000_000
    with raw(server) as client:
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        client.recv(1)
    assert request(server, "/healthz")[0] == 200
    assert capfd.readouterr() == ("", "")


def test_it_answers_while_the_thread_that_beats_is_stuck(server, clock):
    """The caller's thread is busy here, as an event loop may be."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(request(server, "/healthz")[0]))
    clock.now += 60.0
    thread.start()
    end = time.monotonic() + 5
    while not answers and time.monotonic() < end:
        pass
    thread.join()
    assert answers == [503]


def test_close_cuts_off_who_is_connected_and_frees_the_port(server):
    with raw(server) as client:
        assert request(server, "/healthz")[0] == 200
        begun = time.monotonic()
        server.close()
        assert time.monotonic() - begun < 2
        assert client.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        raw(server)
    server.close()  # again


@pytest.mark.parametrize("ip", ["::1", "::", "0.0.0.0"])
def test_bind_addresses(ip, clock):
    server = HealthServer(ip, 0, is_ready=bool, metrics=bytes, now=clock)
    server.start()
    try:
        for end in {"::1": ["::1"], "::": ["::1", "127.0.0.1"], "0.0.0.0": ["127.0.0.1"]}[ip]:
            assert request(server, "/healthz", ip=end)[0] == 200
    finally:
        server.close()


def test_a_port_that_is_taken(server, clock):
    second = HealthServer("127.0.0.1", server.port, is_ready=bool, metrics=bytes, now=clock)
    with pytest.raises(HealthError, match=rf"127\.0\.0\.1 port {server.port}: another process .* --healthz-port"):
        second.start()
    second.close()


def test_an_address_that_nobody_has(clock):
    with pytest.raises(HealthError, match="no interface has that address; choose another --healthz-ip"):
        HealthServer("203.0.113.1", 0, is_ready=bool, metrics=bytes, now=clock).start()
    with pytest.raises(HealthError, match="'nonsense' does not appear to be an IPv4 or IPv6 address"):
        HealthServer("nonsense", 0, is_ready=bool, metrics=bytes, now=clock).start()
