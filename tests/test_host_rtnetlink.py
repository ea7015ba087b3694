"""What is said to the kernel, and how its answers are taken: against another library's messages, scripted, and for real."""

import asyncio
import contextlib
import errno
import os
import socket
import struct
import sys
import threading
from ipaddress import ip_address, ip_interface, ip_network
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroute2 import IPRoute
from pyroute2.netlink import nlsocket

from dataplane.device.tun import open_tun
from dataplane.host import HostError, reading, setting
from dataplane.host.netlink import NetlinkHost
from dataplane.host.reading import OwnAddress
from dataplane.host.rtnetlink import (
    IFLA_MTU,
    LINK,
    RTM_GETLINK,
    Channel,
    RefusedError,
    Request,
    attribute,
    attributes,
    messages,
)
from dataplane.lab import Lab, Namespace, inside

NET, NET6 = ip_network("10.1.0.0/16"), ip_network("fd00::/48")
OWN, OWN6 = ip_address("10.1.2.0"), ip_address("fd00:0:0:2::")


@pytest.fixture
def namespace():
    with Lab("rtnl") as lab:
        made = Namespace(lab, lab.new_namespace("a"))
        with inside(made.name):
            yield made


# Against pyroute2


class Oracle:
    """What pyroute2 sends for a call; whether the kernel likes it does not matter."""

    def __init__(self, monkeypatch) -> None:
        self.sent: list[bytes] = []
        original = nlsocket.NetlinkRequest.send

        async def send(request):
            done = await original(request)
            self.sent.append(bytes(request.msg.data))
            return done

        monkeypatch.setattr(nlsocket.NetlinkRequest, "send", send)

    def message(self, what: str, *how: str, **values: object) -> bytes:
        self.sent.clear()
        loop = asyncio.SelectorEventLoop()
        try:
            with IPRoute(use_event_loop=loop) as netlink:
                try:
                    list(getattr(netlink, what)(*how, **values) or ())
                except Exception as error:
                    if not hasattr(error, "code"):
                        raise
        finally:
            loop.run_until_complete(asyncio.sleep(0))
            loop.close()
        (message,) = self.sent
        return message


def address_of(index, own, peer=None):
    own = ip_interface(own)
    return OwnAddress(index, own, ip_address(peer) if peer else own.ip)


SAME = {
    "properties": (
        lambda i: setting.properties(i, 1450, 1000, "pyflannel-dp:/run/ü"),
        lambda i: ("link", "set", {"index": i, "mtu": 1450, "txqlen": 1000, "ifalias": "pyflannel-dp:/run/ü"}),
    ),
    "superpackets": (
        lambda i: setting.superpackets(i, 61000), lambda i: ("link", "set", {"index": i, "gso_max_size": 61000})
    ),
    "up": (setting.switched_on, lambda i: ("link", "set", {"index": i, "state": "up"})),
    "no link": (setting.no_link, lambda i: ("link", "del", {"index": i})),
    "address": (
        lambda i: setting.address(i, OWN), lambda i: ("addr", "add", {"index": i, "address": str(OWN), "prefixlen": 32})
    ),
    "address6": (
        lambda i: setting.address(i, OWN6), lambda i: ("addr", "add", {"index": i, "address": str(OWN6), "prefixlen": 128})
    ),
    "no address": (
        lambda i: setting.no_address(address_of(i, "10.1.3.7/24")),
        lambda i: ("addr", "del", {"index": i, "address": "10.1.3.7", "local": "10.1.3.7", "prefixlen": 24}),
    ),
    "no address with a peer": (
        lambda i: setting.no_address(address_of(i, "fd00::7/128", "fd00::8")),
        lambda i: ("addr", "del", {"index": i, "address": "fd00::8", "local": "fd00::7", "prefixlen": 128}),
    ),
    "route": (
        lambda i: setting.route(NET, i),
        lambda i: ("route", "add", {"dst": str(NET), "oif": i, "proto": 241, "scope": 253, "family": 2}),
    ),
    "route6": (
        lambda i: setting.route(NET6, i),
        lambda i: ("route", "add", {"dst": str(NET6), "oif": i, "proto": 241, "scope": 253, "family": 10}),
    ),
    "no route": (
        lambda i: setting.no_route(NET, i),
        lambda i: ("route", "del", {"dst": str(NET), "oif": i, "proto": 241, "scope": 255, "family": 2}),
    ),
    "no route6": (
        lambda i: setting.no_route(NET6, i),
        lambda i: ("route", "del", {"dst": str(NET6), "oif": i, "proto": 241, "scope": 255, "family": 10}),
    ),
}  # fmt: skip


@pytest.mark.netns
@pytest.mark.parametrize(("ours", "theirs"), SAME.values(), ids=SAME)
def test_a_request_is_the_message_that_pyroute2_sends(namespace, monkeypatch, ours, theirs):
    index = 7654321  # of no link
    request = ours(index)
    what, how, values = theirs(index)
    message = Oracle(monkeypatch).message(what, how, **values)
    length, kind, flags = struct.unpack_from("=IHH", message)
    assert (kind, flags, message[16:length]) == (request.kind, request.flags | 0x1, request.body)


# Scripted answers


class Scripted(socket.socket):
    """Answers each request with the next of `script`, as the kernel might; errors are raised."""

    script: ClassVar[list[bytes | OSError]] = []
    requests = 0

    def sendto(self, data, *_: object) -> int:
        Scripted.requests += 1
        self.sequence = data[8:12]
        return len(data)

    def recv(self, *_: object) -> bytes:
        answer = Scripted.script.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer.replace(b"SEQ!", self.sequence)


def message(kind: int, flags: int, body: bytes, sequence: bytes = b"SEQ!") -> bytes:
    return struct.pack("=IHH4sI", 16 + len(body), kind, flags, sequence, 0) + body + bytes(-len(body) % 4)


def code(number: int, kind: int = 2) -> bytes:
    return message(kind, 0, struct.pack("=i", -number) + bytes(16))


def link_message(index: int, flags: int = 2) -> bytes:
    """A RTM_NEWLINK of a link called lo with an MTU, of a dump (NLM_F_MULTI)."""
    return message(16, flags, struct.pack("=BxHiII", 0, 0, index, 0, 0) + attribute(3, b"lo\0") + attribute(4, 1500))


DONE = message(3, 2, bytes(4))
ACKNOWLEDGED = code(0)
ADDRESSES = [DONE]
INTERRUPTED = 2 | 0x10


@pytest.fixture
def scripted(monkeypatch):
    monkeypatch.setattr("dataplane.host.rtnetlink.socket.socket", Scripted)
    Scripted.requests = 0
    return Scripted


def lost() -> OSError:
    return OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))


@pytest.mark.parametrize(
    "interrupted",
    [
        [link_message(1), link_message(3, INTERRUPTED), DONE],
        [link_message(1), message(3, INTERRUPTED, bytes(4))],
        [link_message(1), lost()],
    ],
)
def test_an_interrupted_dump_is_made_again(scripted, interrupted):
    scripted.script = [*interrupted, *interrupted, link_message(1) + link_message(2), link_message(3) + DONE, *ADDRESSES]
    assert [one.index for one in reading.interfaces()] == [1, 2, 3]
    assert (scripted.requests, scripted.script) == (4, [])


def test_a_dump_that_is_always_interrupted_is_better_than_none(scripted):
    scripted.script = [link_message(1, INTERRUPTED), DONE] * 5 + ADDRESSES
    assert [one.index for one in reading.interfaces()] == [1]
    assert (scripted.requests, scripted.script) == (6, [])


@pytest.mark.parametrize("kind", [2, 3])
def test_what_the_kernel_refuses_is_said(scripted, kind):
    scripted.script = [code(errno.EPERM, kind)]
    with pytest.raises(HostError, match=r"^cannot read the interfaces and routes: Operation not permitted$"):
        reading.interfaces()


def test_an_answer_that_was_lost_is_asked_for_again_but_not_for_ever(scripted):
    scripted.script = [lost(), ACKNOWLEDGED]
    with Channel() as kernel:
        assert kernel.ask(setting.switched_on(1)) == []
        assert scripted.requests == 2
        scripted.script = [lost() for _ in range(5)]
        with pytest.raises(OSError, match="No buffer space"):
            kernel.ask(setting.switched_on(1))
    assert (scripted.requests, scripted.script) == (7, [])


def test_the_answer_to_an_earlier_request_is_passed_over(scripted):
    stale = code(errno.EEXIST).replace(b"SEQ!", struct.pack("=I", 1))
    scripted.script = [lost(), stale, stale + ACKNOWLEDGED]
    with Channel() as kernel:
        assert kernel.ask(setting.switched_on(1)) == []
    assert (scripted.requests, scripted.script) == (2, [])


@pytest.mark.parametrize("error", [TimeoutError("timed out"), OSError(errno.ENOMEM, "Cannot allocate memory")])
def test_no_answer_is_an_error_that_says_so(scripted, error):
    for ask in (lambda: reading.routes(4), lambda: NetlinkHost("mark").remove_ours()):
        scripted.script = [error]
        with pytest.raises(HostError, match=f"^cannot read the interfaces and routes: {error.strerror or error}$"):
            ask()
    assert scripted.requests == 2


@pytest.mark.parametrize("cut", [8, 17, 30])
def test_an_answer_that_is_cut_short_is_an_error(scripted, cut):
    scripted.script = [link_message(1)[:cut]]
    with pytest.raises(HostError, match="a message of the kernel's is cut short"):
        reading.interfaces()


@given(
    st.lists(st.binary(max_size=20).map(lambda body: message(16, 0, body, b"1234"))).map(b"".join), st.binary(max_size=20)
)
def test_a_datagram_is_read_up_to_what_is_no_message(whole, rest):
    data = whole + rest
    read = 0
    with contextlib.suppress(OSError):
        for _, _, _, payload in messages(memoryview(data)):
            read += (16 + len(payload) + 3) & ~3
    rest = data[read:]
    assert len(rest) < 16 or not 16 <= int.from_bytes(rest[:4], sys.byteorder) <= len(rest)


@given(st.dictionaries(st.integers(0, 0x3FFF), st.binary(max_size=9)))
def test_attributes_come_back(values):
    data = b"".join(attribute(kind, value) for kind, value in values.items())
    assert {kind: bytes(value) for kind, value in attributes(memoryview(data)).items()} == values


# The kernel


def test_the_kernel_s_sentence_is_told_in_full():
    """Of a request that makes no sense: a link by its MTU. The socket is of use afterwards."""
    with Channel() as kernel:
        with pytest.raises(RefusedError) as refused:
            kernel.ask(Request(RTM_GETLINK, 0, LINK.pack(0, 0, 1, 0, 0) + attribute(IFLA_MTU, 1500)))
        (answer,) = kernel.ask(Request(RTM_GETLINK, 0, LINK.pack(0, 0, 1, 0, 0)))
    assert refused.value.errno == errno.EINVAL
    assert refused.value.strerror == "Invalid argument (Unsupported attribute in get link request)"
    assert LINK.unpack_from(answer)[2] == 1


@pytest.mark.netns
def test_what_a_device_may_not_have_is_explained(namespace):
    device = open_tun("flannel.1", 1450)
    with pytest.raises(HostError, match=r"^cannot set up the device flannel\.1: Invalid argument \(mtu greater than .*\)$"):
        NetlinkHost("mark").configure_device("flannel.1", [OWN], 70000, 61000)
    device.close()


@pytest.mark.netns
def test_each_change_may_be_asked_for_twice(namespace):
    device = open_tun("flannel.1", 1450)
    (link,) = reading.interfaces(["flannel.1"])
    with Channel() as kernel:

        def twice(request: Request) -> int:
            """What the kernel says the second time."""
            assert kernel.ask(request) == []
            try:
                kernel.ask(request)
            except RefusedError as error:
                return error.errno
            return 0

        assert twice(setting.properties(link.index, 1400, 900, "mark")) == 0
        assert twice(setting.superpackets(link.index, 61000)) == 0
        assert twice(setting.own_source(link.index)) == 0
        assert twice(setting.switched_on(link.index)) == 0
        for own, network in ((OWN, NET), (OWN6, NET6)):
            assert twice(setting.address(link.index, own)) == errno.EEXIST
            assert twice(setting.route(network, link.index)) == errno.EEXIST
        (now,) = reading.interfaces(["flannel.1"])
        assert (now.mtu, now.queue_length, now.alias, now.superpacket_limit) == (1400, 900, "mark", 61000)
        assert (now.accepts_own_source, now.is_up) == (True, True)
        sysctl = namespace.run(["cat", "/proc/sys/net/ipv4/conf/flannel.1/accept_local"]).stdout
        assert sysctl.strip() == "1"
        assert {one for one in now.addresses if not one.ip.is_link_local} == {ip_interface(OWN), ip_interface(OWN6)}
        for own, network in ((OWN, NET), (OWN6, NET6)):
            assert twice(setting.no_route(network, link.index)) == errno.ESRCH
            assert twice(setting.no_address(address_of(link.index, own))) == errno.EADDRNOTAVAIL
        assert [one for one in reading.addresses(link.index) if not one.interface.ip.is_link_local] == []
        assert twice(setting.no_link(link.index)) == errno.ENODEV
    device.close()


@pytest.mark.netns
def test_a_socket_is_in_the_namespace_of_the_thread_that_makes_it(namespace):
    namespace.ip("link add here type bridge")
    found = {}

    def look(name: str) -> None:
        found[name] = [one.name for one in reading.interfaces()]

    def look_inside() -> None:
        with Lab("else") as lab, inside(lab.new_namespace("b")):
            look("other thread")

    thread = threading.Thread(target=look_inside)
    thread.start()
    thread.join()
    look("this thread")
    assert found == {"other thread": ["lo"], "this thread": ["lo", "here"]}
