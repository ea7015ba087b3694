"""The client of etcd: endpoints, certificates, passwords, and which server is asked."""

import asyncio
import contextlib
import gc
import logging
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from ipaddress import IPv4Address
from pathlib import Path

import etcd_server
import grpc
import pytest
from google.protobuf import descriptor_pb2

from routing.allocator import Subnets
from routing.config import parse_config
from routing.lease import LeaseAttributes
from routing.stores import StoreAwayError, StoreError
from routing.stores.etcd import Credentials, Endpoint, EtcdStore, parse_endpoints
from routing.stores.etcd import client as client_module
from routing.stores.etcd import etcd_pb2 as pb
from routing.stores.etcd.claims import FORBIDDEN, HELD
from routing.stores.etcd.client import RANGE, WATCH, Client, EtcdError

FOLDER = Path(__file__).parents[1] / "routing" / "stores" / "etcd"
CONFIG_TEXT = '{"Network":"10.5.0.0/16","Backend":{"Type":"udp"}}'
CONFIG = parse_config(CONFIG_TEXT)
ME = LeaseAttributes(IPv4Address("192.0.2.1"), None, "udp")
PREFIX = "/coreos.com/network"
READ_CONFIG = pb.RangeRequest(key=f"{PREFIX}/config".encode())


# endpoints


@pytest.mark.parametrize(
    ("text", "endpoints"),
    [
        ("http://10.0.0.1:2379", ["http://10.0.0.1:2379"]),
        ("https://etcd-1.example.org:2379", ["https://etcd-1.example.org:2379"]),
        ("10.0.0.1:2379", ["http://10.0.0.1:2379"]),
        ("HTTPS://10.0.0.1:2379/", ["https://10.0.0.1:2379"]),
        ("http://[2001:db8::1]:2379", ["http://[2001:db8::1]:2379"]),
        ("[2001:DB8:0::1]:2379", ["http://[2001:db8::1]:2379"]),
        ("localhost:4001", ["http://localhost:4001"]),
        ('"http://10.0.0.1:2379"', ["http://10.0.0.1:2379"]),
        ("'http://10.0.0.1:2379, http://10.0.0.2:2379' ", ["http://10.0.0.1:2379", "http://10.0.0.2:2379"]),
        ('"http://10.0.0.1:2379","http://10.0.0.2:2379",', ["http://10.0.0.1:2379", "http://10.0.0.2:2379"]),
        ("“http://10.0.0.1:2379”\n", ["http://10.0.0.1:2379"]),
        ("10.0.0.1:2379,http://10.0.0.1:2379", ["http://10.0.0.1:2379"]),
        ("10.0.0.1:2379,https://10.0.0.1:2379", ["http://10.0.0.1:2379", "https://10.0.0.1:2379"]),
    ],
)
def test_endpoints(text, endpoints):
    assert [str(one) for one in parse_endpoints(text)] == endpoints


def test_targets_are_what_grpc_wants():
    assert Endpoint("2001:db8::1", 2379).target == "[2001:db8::1]:2379"
    assert Endpoint("etcd", 2379, True).target == "etcd:2379"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "no endpoint"),
        (" , ,", "no endpoint"),
        ("''", "no endpoint"),
        ("10.0.0.1", "port"),
        ("http://10.0.0.1", "port"),
        ("http://10.0.0.1:", "port"),
        ("10.0.0.1:0", "port"),
        ("10.0.0.1:65536", "port"),
        ("10.0.0.1:-1", "port"),
        ("10.0.0.1:٢٣٧٩", "port"),
        ("10.0.0.1:2379/v3", "port"),
        ("ftp://10.0.0.1:2379", "ftp"),
        ("unix:///run/etcd.sock", "unix"),
        ("http://2001:db8::1:2379", "brackets"),
        ("http://[2001:db8::zz]:2379", "IPv6"),
        ("http://user:secret@10.0.0.1:2379", "--etcd-username and --etcd-password"),
        ("http://a b:2379", "a b"),
        ("http://:2379", "''"),
        ("10.0.0.1:2379;10.0.0.2:2379", "10.0.0.1:2379;10.0.0.2"),
    ],
)
def test_what_is_no_endpoint_is_named(text, part):
    with pytest.raises(ValueError, match=r"PORT|brackets|2379") as caught:
        parse_endpoints(text)
    assert part in str(caught.value)


def test_pairs_of_options_go_together(tmp_path):
    with pytest.raises(ValueError, match="--etcd-certfile is given without --etcd-keyfile"):
        Credentials(cert_file=tmp_path)
    with pytest.raises(ValueError, match="--etcd-keyfile is given without --etcd-certfile"):
        Credentials(key_file=tmp_path)
    with pytest.raises(ValueError, match="--etcd-username is given without --etcd-password"):
        Credentials(username="me")


def test_a_password_is_not_shown():
    assert "secret" not in repr(Credentials(username="me", password="secret"))


# the messages


def test_the_descriptor_is_what_the_proto_says(tmp_path):
    from grpc_tools import protoc

    arguments = [f"-I{FOLDER}", f"--descriptor_set_out={tmp_path / 'desc'}", f"--pyi_out={tmp_path}", "etcd.proto"]
    assert protoc.main(["protoc", *arguments]) == 0
    made, kept = (descriptor_pb2.FileDescriptorSet() for _ in range(2))
    made.ParseFromString((tmp_path / "desc").read_bytes())
    kept.ParseFromString((FOLDER / "etcd.desc").read_bytes())
    assert made == kept
    names = {message.name for message in kept.file[0].message_type}
    assert names == {name for name in vars(pb) if isinstance(getattr(pb, name), type)}
    assert all(f"class {name}(" in (FOLDER / "etcd_pb2.pyi").read_text() for name in names)


def test_grpc_is_not_loaded_without_etcd():
    code = "import sys, dataplane.cli, routing.stores.local, routing.stores.static; print('grpc' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# which server


@pytest.fixture
async def clients() -> AsyncIterator[list[Client]]:
    """Clients that are closed at the end."""
    opened: list[Client] = []
    yield opened
    for client in opened:
        await client.close()


def nobody() -> Endpoint:
    return Endpoint("127.0.0.1", etcd_server.free_port())


class Silent:
    """A server that takes connections and says nothing."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint("127.0.0.1", self.socket.getsockname()[1])


@pytest.fixture
def silent() -> Iterator[Silent]:
    one = Silent()
    with one.socket:
        yield one


@pytest.fixture(scope="module")
def etcd(tmp_path_factory) -> Iterator[etcd_server.Etcd]:
    with etcd_server.running(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd


async def test_an_endpoint_that_is_down_is_passed_over(etcd, silent, clients):
    for endpoints, seeds in (([nobody(), *etcd.endpoints], range(3)), ([nobody(), silent.endpoint, *etcd.endpoints], [2])):
        for seed in seeds:
            client = Client(endpoints, Credentials(), random.Random(seed))
            clients.append(client)
            await client.call(RANGE, READ_CONFIG)
            assert client.endpoint == etcd.endpoints[0]
            begun = time.monotonic()
            await client.call(RANGE, READ_CONFIG)
            assert time.monotonic() - begun < 1, "the one that answered is asked first"


async def test_a_stream_passes_over_an_endpoint_that_is_down(etcd, silent, clients):
    request = pb.WatchRequest(create_request=pb.WatchCreateRequest(key=b"/x"))
    client = Client([silent.endpoint, nobody(), *etcd.endpoints], Credentials(), random.Random(1))
    clients.append(client)
    async with client.stream(WATCH, request) as stream:
        assert stream.first.created
    assert client.endpoint == etcd.endpoints[0]


async def test_nobody_answers(silent, clients):
    endpoints = [nobody(), silent.endpoint]
    client = Client(endpoints, Credentials(), random.Random(1))
    clients.append(client)
    begun = time.monotonic()
    with pytest.raises(StoreAwayError) as caught:
        await client.call(RANGE, READ_CONFIG)
    assert time.monotonic() - begun < 5
    assert f"{endpoints[0]}: " in str(caught.value)
    assert "refused" in str(caught.value)
    assert f"{endpoints[1]}: no answer within 2.0 s" in str(caught.value)
    assert "UNKNOWN" not in str(caught.value)


async def test_many_endpoints_share_the_time(silent, clients):
    endpoints = [Endpoint("127.0.0.1", silent.endpoint.port), *(Endpoint(f"127.0.0.{n}", 1) for n in range(2, 12))]
    client = Client(endpoints, Credentials(), random.Random(1))
    clients.append(client)
    assert client._try_seconds * len(endpoints) == pytest.approx(6)
    with pytest.raises(StoreAwayError):
        await client.call(RANGE, READ_CONFIG)


async def test_a_server_that_comes_up_is_found_by_the_next_call(tmp_path, clients):
    etcd = etcd_server.Etcd(tmp_path / "etcd")
    client = Client(etcd.endpoints, Credentials(), random.Random(1))
    clients.append(client)
    for _ in range(8):  # gRPC itself would wait for a minute by now
        with pytest.raises(StoreAwayError):
            await client.call(RANGE, READ_CONFIG)
    try:
        etcd.start()
        await client.call(RANGE, READ_CONFIG)
    finally:
        etcd.kill()


async def test_what_is_not_etcd_is_no_answer(clients):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        with contextlib.suppress(OSError):
            await writer.drain()
            await reader.read()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        client = Client([Endpoint("127.0.0.1", server.sockets[0].getsockname()[1])], Credentials(), random.Random(1))
        clients.append(client)
        with pytest.raises(StoreAwayError):
            await client.call(RANGE, READ_CONFIG)
        await client.close()


async def test_a_closed_client_says_so(etcd):
    client = Client(etcd.endpoints, Credentials(), random.Random(1))
    waiting = asyncio.create_task(watch_for_ever(client))
    await client.call(RANGE, READ_CONFIG)
    await client.close()
    await client.close()
    with pytest.raises(StoreAwayError, match="ended"):
        await waiting
    with pytest.raises(StoreError, match="closed"):
        await client.call(RANGE, READ_CONFIG)


async def watch_for_ever(client: Client) -> None:
    request = pb.WatchRequest(create_request=pb.WatchCreateRequest(key=b"/x"))
    async with client.stream(WATCH, request) as stream:
        await stream.read()


async def test_a_cancelled_call_is_cancelled_and_no_failure(silent, clients):
    client = Client([silent.endpoint], Credentials(), random.Random(1))
    clients.append(client)
    task = asyncio.create_task(client.call(RANGE, READ_CONFIG))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await client.call(RANGE, READ_CONFIG)


async def test_attempts_leave_no_connections_behind(silent, clients, monkeypatch):
    """An outage of hours must not use up descriptors; gRPC closes what it gave up after min_reconnect_backoff_ms."""
    assert 0 < dict(client_module._OPTIONS)["grpc.min_reconnect_backoff_ms"] <= 3000
    monkeypatch.setattr(client_module, "_OPTIONS", [*client_module._OPTIONS, ("grpc.min_reconnect_backoff_ms", 300)])

    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    client = Client([silent.endpoint], Credentials(), random.Random(1))
    client._try_seconds = 0.02
    clients.append(client)
    for _ in range(40):
        with pytest.raises(StoreAwayError):
            await client.call(RANGE, READ_CONFIG)
    await etcd_server.until("the connections to be closed", lambda: descriptors() <= before + 1)


# TLS


@pytest.fixture
def authority(tmp_path) -> etcd_server.Authority:
    return etcd_server.Authority(tmp_path / "ca")


@contextlib.asynccontextmanager
async def asking(etcd: etcd_server.Etcd, **credentials: object) -> AsyncIterator[Client]:
    client = Client(etcd.endpoints, Credentials(**credentials), random.Random(1))
    try:
        yield client
    finally:
        await client.close()


async def test_tls_with_the_ca_alone(tmp_path, authority):
    other = etcd_server.Authority(tmp_path / "other")
    with etcd_server.running(tmp_path / "etcd", authority=authority) as etcd:
        async with asking(etcd, ca_file=authority.ca_file) as client:
            await client.call(RANGE, READ_CONFIG)
        for details in ({"ca_file": other.ca_file}, {}):
            async with asking(etcd, **details) as client:
                with pytest.raises(StoreAwayError) as caught:
                    await client.call(RANGE, READ_CONFIG)
                assert str(etcd.endpoints[0]) in str(caught.value)
        plain = Endpoint("127.0.0.1", etcd.endpoints[0].port)
        client = Client([plain], Credentials(), random.Random(1))
        with pytest.raises(StoreAwayError):
            await client.call(RANGE, READ_CONFIG)
        await client.close()


async def test_certificates_are_swapped_while_the_node_runs(tmp_path, authority):
    """A new authority for everybody, the files in their old places, and no restart."""
    trusted = tmp_path / "etcd" / "clients.pem"
    install(authority, trusted)
    options = ["--client-cert-auth", "--trusted-ca-file", str(trusted)]
    with etcd_server.running(tmp_path / "etcd", authority=authority, options=options) as etcd:
        certificate, key = authority.issue("node")
        files = {"ca_file": authority.ca_file, "cert_file": certificate, "key_file": key}
        async with asking(etcd, **files) as client:
            await client.call(RANGE, READ_CONFIG)
            replacement = etcd_server.Authority(tmp_path / "new")
            new_certificate, new_key = replacement.issue("node")
            etcd.kill()
            etcd.issue_server(replacement)
            install(replacement, trusted)
            etcd.start()
            with pytest.raises(StoreAwayError):
                await client.call(RANGE, READ_CONFIG)
            for source, target in (
                (replacement.ca_file, authority.ca_file),
                (new_certificate, certificate),
                (new_key, key),
            ):
                target.write_bytes(source.read_bytes())
            await client.call(RANGE, READ_CONFIG)
        async with asking(etcd, ca_file=authority.ca_file) as client:
            with pytest.raises(StoreAwayError):
                await client.call(RANGE, READ_CONFIG)


def install(authority: etcd_server.Authority, target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(authority.ca_file.read_bytes())


@pytest.mark.parametrize(
    ("option", "name"), [("--etcd-cafile", "ca_file"), ("--etcd-certfile", "cert_file"), ("--etcd-keyfile", "key_file")]
)
@pytest.mark.parametrize("what", ["missing", "folder", "junk"])
async def test_files_that_cannot_be_used_are_named(tmp_path, authority, option, name, what):
    certificate, key = authority.issue("node")
    files = {"ca_file": authority.ca_file, "cert_file": certificate, "key_file": key}
    files[name] = tmp_path / "bad"
    if what == "folder":
        files[name].mkdir()
    elif what == "junk":
        files[name].write_text("not a certificate")
    client = Client([Endpoint("127.0.0.1", 1, True)], Credentials(**files), random.Random(1))
    with pytest.raises(StoreError) as caught:
        await client.call(RANGE, READ_CONFIG)
    assert not isinstance(caught.value, StoreAwayError)
    assert str(caught.value).startswith(f"{option}: {tmp_path / 'bad'} ")
    await client.close()


async def test_certificates_for_plain_http_are_told(authority, caplog):
    Client([Endpoint("127.0.0.1", 1)], Credentials(ca_file=authority.ca_file), random.Random(1))
    assert ["https" in record.getMessage() for record in caplog.records] == [True]


# passwords


class Guarded:
    """An etcd with users: root, and `node`, which may do what a node must."""

    def __init__(self, etcd: etcd_server.Etcd) -> None:
        self.etcd = etcd
        self.node = Credentials(username="node", password="hunter2")
        self.root = Credentials(username="root", password="secret")

    def store(self, credentials: Credentials | None = None, **details: object) -> EtcdStore:
        return EtcdStore(self.etcd.endpoints, PREFIX, credentials or self.node, **{"identity": "one", **details})


@pytest.fixture(params=etcd_server.PROGRAMS)
async def guarded(request, tmp_path) -> AsyncIterator[Guarded]:
    # It takes a snapshot after each entry: a restart would bring tokens back that are in the log behind the last one.
    with etcd_server.running(tmp_path / "etcd", request.param, options=["--snapshot-count", "1"]) as etcd:
        async with etcd_server.other_client(etcd) as other:
            await other.put(f"{PREFIX}/config", CONFIG_TEXT)
            await other.add_role(
                "node",
                "hunter2",
                (f"{PREFIX}/config", pb.Permission.READ),
                (f"{PREFIX}/subnets/", pb.Permission.READWRITE),
                (f"{PREFIX}/pyflannel-dp/", pb.Permission.READWRITE),
            )
            await other.enable_authentication()
        yield Guarded(etcd)


@contextlib.asynccontextmanager
async def open_store(store: EtcdStore) -> AsyncIterator[EtcdStore]:
    try:
        yield store
    finally:
        await store.close()


async def test_the_least_role_is_enough_and_tokens_are_renewed(guarded):
    """The role in docs/etcd.md does for all that a node does; a restart makes etcd forget all tokens."""
    async with open_store(guarded.store()) as store:
        lease = await store.acquire(await store.config(), ME, Subnets())
        assert store.report()["claim"]["state"] == HELD
        watch = store.watch()
        assert [one.key for one in await anext(watch)] == [lease.key]
        token = store._client._token
        assert token
        await asyncio.to_thread(guarded.etcd.restart)
        moved = await etcd_server.again(lambda: store.update(lease, LeaseAttributes(IPv4Address("192.0.2.9"), None, "udp")))
        assert [one.attributes for one in await asyncio.wait_for(anext(watch), 20)] == [moved.attributes]
        assert store._client._token not in {None, token}
        await etcd_server.until("the watch to be back", lambda: store.report()["away_since"] is None)
        renewed = await store.renew(moved)
        await store.release(renewed)
        assert await asyncio.wait_for(anext(watch), 20) == []
        await watch.aclose()


async def test_a_changed_role_makes_tokens_old_and_is_no_trouble(guarded):
    """etcd refuses a token that is older than the last change of any user or role ("revision of auth store is old")."""
    async with open_store(guarded.store()) as store:
        lease = await store.acquire(await store.config(), ME, Subnets())
        async with etcd_server.other_client(guarded.etcd, guarded.root) as root:
            await root.add_role("somebody", "else")
        assert (await store.renew(lease)).key == lease.key


async def test_a_wrong_password_is_not_an_outage(guarded):
    async with open_store(guarded.store(Credentials(username="node", password="wrong"))) as store:
        with pytest.raises(StoreError, match="user name 'node' or its password is wrong") as caught:
            await store.config()
        assert not isinstance(caught.value, StoreAwayError)
        assert "wrong" not in str(caught.value).replace("is wrong", "")


async def test_no_password_at_all(guarded):
    async with open_store(guarded.store(Credentials())) as store:
        with pytest.raises(StoreError, match="--etcd-username and --etcd-password") as caught:
            await store.config()
        assert not isinstance(caught.value, StoreAwayError)


async def test_a_password_that_etcd_does_not_ask_for(etcd):
    store = EtcdStore(etcd.endpoints, PREFIX, Credentials(username="node", password="x"), identity="one")
    async with open_store(store):
        await store.write_config(CONFIG_TEXT)
        assert await store.config() == CONFIG


async def test_a_role_that_may_not_write(guarded):
    async with etcd_server.other_client(guarded.etcd, guarded.root) as root:
        await root.add_role("reader", "r", (f"{PREFIX}/", pb.Permission.READ))
    async with open_store(guarded.store(Credentials(username="reader", password="r"))) as store:
        config = await store.config()
        with pytest.raises(EtcdError, match="denies Txn: the user reader lacks a permission") as caught:
            await store.acquire(config, ME, Subnets())
        assert caught.value.code is grpc.StatusCode.PERMISSION_DENIED
        watch = store.watch()
        assert await anext(watch) == []
        await watch.aclose()


async def test_a_role_that_may_not_claim(guarded, caplog):
    async with etcd_server.other_client(guarded.etcd, guarded.root) as root:
        await root.withdraw("node", f"{PREFIX}/pyflannel-dp/")
    async with open_store(guarded.store()) as store:
        lease = await store.acquire(await store.config(), ME, Subnets())
        assert await store.renew(lease)
        assert store.report()["claim"] == {"address": "192.0.2.1", "state": FORBIDDEN, "holder": None}
        await store.acquire(await store.config(), ME, Subnets())
    (message,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "without a claim on 192.0.2.1" in message


async def test_a_permission_that_is_withdrawn_and_given_back(guarded, caplog):
    """The watch that etcd refuses is no silent one: `report` says so, and what is known stays."""
    caplog.set_level(logging.INFO)
    async with (
        open_store(guarded.store()) as store,
        etcd_server.other_client(guarded.etcd, guarded.root) as root,
    ):
        lease = await store.acquire(await store.config(), ME, Subnets())
        watch = store.watch()
        assert [one.key for one in await anext(watch)] == [lease.key]
        await root.withdraw("node", f"{PREFIX}/subnets/")
        await asyncio.to_thread(guarded.etcd.restart)
        await etcd_server.until("the trouble", lambda: "lacks a permission" in (store.report()["trouble"] or ""))
        assert store.report()["away_since"] is not None
        await etcd_server.again(lambda: root.grant("node", f"{PREFIX}/subnets/", pb.Permission.READWRITE))
        await root.put(f"{PREFIX}/subnets/10.5.99.0-24", '{"PublicIP":"192.0.2.99","BackendType":"udp"}')
        assert len(await asyncio.wait_for(anext(watch), 20)) == 2
        await etcd_server.until("the end of the trouble", lambda: store.report()["trouble"] is None)
        await watch.aclose()
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("following")]
    assert len(lines) == 2, "one line when it goes, one when it is back"
