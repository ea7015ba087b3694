"""Calls and streams to etcd over gRPC: which server, how long, as whom.

Theory of operation: a call goes to the endpoint that answered last and, as long as none answers, to each of the others,
with a deadline for each, so that it ends within seconds whatever state the servers are in. There is one connection an
endpoint. One that failed is not used again: gRPC would wait longer and longer before it tries an endpoint again, and would
keep the certificates that it began with. Its successor is made by the next call, with the files read anew; streams that
still run on the old one are left to end by themselves, and the last of them closes it.

A call may have been carried out although no answer came, and is then repeated elsewhere. Whoever writes must therefore
compare, in a transaction, or write what may be written twice; a grant has an identifier that we choose.

A server that stops answering without closing the connection is noticed by pings (`_OPTIONS`): they are sent on a connection
with a stream on it, and only as often as etcd allows (``--grpc-keepalive-min-time``, 5 s). All calls carry ``hasleader``: a
member that has lost its quorum refuses them at once, and ends its streams, instead of letting them wait.

With a password a token is fetched before the first call and again whenever etcd does not accept it: tokens end after
minutes, and with a server's restart.
"""

import asyncio
import contextlib
import logging
import os
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # it writes to stderr, past our log, what its errors say, too
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # children run other programs; its fork handlers only complain
import grpc
import grpc.aio

from routing.stores import StoreAwayError, StoreError
from routing.stores.etcd import etcd_pb2 as pb
from routing.stores.etcd.credentials import Credentials
from routing.stores.etcd.endpoints import Endpoint

if TYPE_CHECKING:
    from google.protobuf.message import Message

log = logging.getLogger(__name__)

TRY_SECONDS = 2.0
"""The deadline of a call to one endpoint."""

CALL_SECONDS = 6.0
"""What a call may take over all endpoints; with more than three of them each gets less than `TRY_SECONDS`."""

_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.keepalive_time_ms", 6_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    (
        "grpc.http2.ping_timeout_ms",
        3_000,
    ),  # without it grpcio 1.85 noticed nothing within 45 s, whatever the line above says
    ("grpc.http2.max_pings_without_data", 0),  # no limit: a quiet watch may last for days
    ("grpc.http2.bdp_probe", 0),  # its pings would count as ours
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.min_reconnect_backoff_ms", 3_000),  # how long an attempt to connect that is given up keeps its socket; else 20 s
    ("grpc.use_local_subchannel_pool", 1),  # else a new channel inherits the waiting times of the old one
    ("grpc.max_receive_message_length", 64 << 20),
]
_BASE_METADATA = (("hasleader", "true"),)

_Request = TypeVar("_Request", bound="Message")
_Response = TypeVar("_Response", bound="Message")


@dataclass(frozen=True)
class Method(Generic[_Request, _Response]):
    """A method of etcd's API."""

    path: str
    response: type[_Response]

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]


RANGE = Method[pb.RangeRequest, pb.RangeResponse]("/etcdserverpb.KV/Range", pb.RangeResponse)
PUT = Method[pb.PutRequest, pb.PutResponse]("/etcdserverpb.KV/Put", pb.PutResponse)
TXN = Method[pb.TxnRequest, pb.TxnResponse]("/etcdserverpb.KV/Txn", pb.TxnResponse)
GRANT = Method[pb.LeaseGrantRequest, pb.LeaseGrantResponse]("/etcdserverpb.Lease/LeaseGrant", pb.LeaseGrantResponse)
REVOKE = Method[pb.LeaseRevokeRequest, pb.LeaseRevokeResponse]("/etcdserverpb.Lease/LeaseRevoke", pb.LeaseRevokeResponse)
TIME_TO_LIVE = Method[pb.LeaseTimeToLiveRequest, pb.LeaseTimeToLiveResponse](
    "/etcdserverpb.Lease/LeaseTimeToLive", pb.LeaseTimeToLiveResponse
)
KEEP_ALIVE = Method[pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse](
    "/etcdserverpb.Lease/LeaseKeepAlive", pb.LeaseKeepAliveResponse
)
"""A stream in etcd's API, called here with one request for one response, which is the same on the wire."""
AUTHENTICATE = Method[pb.AuthenticateRequest, pb.AuthenticateResponse](
    "/etcdserverpb.Auth/Authenticate", pb.AuthenticateResponse
)
WATCH = Method[pb.WatchRequest, pb.WatchResponse]("/etcdserverpb.Watch/Watch", pb.WatchResponse)

_NO_ANSWER = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DATA_LOSS,
}
_TOKEN_TEXTS = (
    "invalid auth token",  # expired, or the server has been started again
    "revision of auth store is old",  # users or roles have been changed
    "revision in header is old",  # the same, from etcd up to 3.5.1
    "user name is empty",  # authentication has been switched on meanwhile
)


class EtcdError(StoreError):
    """etcd answered, and the answer is no. `details` is what it said."""

    def __init__(self, text: str, code: grpc.StatusCode, details: str) -> None:
        super().__init__(text)
        self.code = code
        self.details = details

    @property
    def is_denied(self) -> bool:
        """Whether the role of our user does not allow it."""
        return self.code is grpc.StatusCode.PERMISSION_DENIED

    @property
    def is_compacted(self) -> bool:
        """Whether a revision was asked for that etcd no longer has, or, after it lost its data, does not have yet."""
        return self.code is grpc.StatusCode.OUT_OF_RANGE


class _NoAnswerError(Exception):
    """An endpoint gives no answer now; the text says why."""


class _TokenError(Exception):
    """The token is not, or no longer, good."""


class _Connection:
    """A channel, how many use it now, and whether another has taken its place."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.users = 0
        self.is_retired = False


class Stream(Generic[_Response]):
    """An open stream. `first` is its first response."""

    def __init__(self, client: "Client", number: int, call: "grpc.aio.StreamStreamCall[Any, _Response]", name: str) -> None:
        self._client, self._number, self._call, self._name = client, number, call, name
        self.first: _Response

    async def read(self) -> _Response:
        """The next response. Raises StoreAwayError if the stream has ended, EtcdError if etcd refuses it."""
        try:
            return await self._read()
        except _NoAnswerError as error:
            raise StoreAwayError(f"etcd at {self._client.endpoints[self._number]}: {error}") from None
        except _TokenError as error:
            self._client.forget_token()
            raise StoreAwayError(f"etcd at {self._client.endpoints[self._number]}: {error}") from None

    async def open(self, request: "Message", seconds: float) -> None:
        """Send `request` and wait for the first response. Raises _NoAnswerError, _TokenError, EtcdError."""
        try:
            async with asyncio.timeout(seconds):
                with contextlib.suppress(asyncio.InvalidStateError):  # it has ended already; reading tells why
                    await self._write(request)
                self.first = await self._read()
        except TimeoutError:
            raise _NoAnswerError(f"no answer within {seconds:.1f} s") from None

    async def _write(self, request: "Message") -> None:
        try:
            await self._call.write(request)
        except grpc.aio.AioRpcError as error:
            raise self._client.judge(self._number, self._name, error) from None
        except asyncio.CancelledError:
            _require_own_cancellation()

    async def _read(self) -> _Response:
        try:
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise self._client.judge(self._number, self._name, error) from None
        except asyncio.CancelledError:
            _require_own_cancellation()
        else:
            if response is not grpc.aio.EOF:
                return response  # type: ignore[return-value] # what is not EOF is a response
        raise _NoAnswerError("the stream has ended")


class Client:
    """etcd at `endpoints`, of which one picked by `rng` is tried first. Belongs to one event loop."""

    def __init__(self, endpoints: Sequence[Endpoint], credentials: Credentials, rng: random.Random) -> None:
        if not endpoints:
            raise ValueError("no endpoint of etcd is given")
        self.endpoints = tuple(endpoints)
        self._credentials = credentials
        self._good = rng.randrange(len(self.endpoints))
        self._try_seconds = min(TRY_SECONDS, CALL_SECONDS / len(self.endpoints))
        self._connections: dict[int, _Connection] = {}
        self._retired: set[_Connection] = set()
        self._token: str | None = None
        self._authenticating = asyncio.Lock()
        self._is_closed = False
        if any((credentials.ca_file, credentials.cert_file)) and not all(one.is_tls for one in self.endpoints):
            log.warning("an endpoint of etcd is plain http, for which certificates are not used: write https://...")

    @property
    def endpoint(self) -> Endpoint:
        """The one that answered last, or will be tried first."""
        return self.endpoints[self._good]

    async def call(self, method: Method[_Request, _Response], request: _Request) -> _Response:
        """Ask. Raises StoreAwayError if no endpoint answers, EtcdError if etcd refuses, StoreError if a file is missing."""
        troubles = []
        for number in self._order():
            try:
                response = await self._ask(number, method, request)
            except _NoAnswerError as error:
                troubles.append(f"{self.endpoints[number]}: {error}")
            else:
                self._good = number
                return response
        raise StoreAwayError("etcd does not answer: " + "; ".join(troubles))

    @contextlib.asynccontextmanager
    async def stream(self, method: Method[_Request, _Response], request: _Request) -> AsyncIterator[Stream[_Response]]:
        """A stream that begins with `request` and has had a first response; it ends with the context. Raises as `call`."""
        async with contextlib.AsyncExitStack() as stack:
            yield await self._open(method, request, stack)

    async def _open(
        self, method: Method[_Request, _Response], request: _Request, stack: contextlib.AsyncExitStack
    ) -> Stream[_Response]:
        troubles = []
        for number in self._order():
            async with contextlib.AsyncExitStack() as attempt:
                try:
                    opened = await self._open_at(number, method, request, attempt)
                except _NoAnswerError as error:
                    troubles.append(f"{self.endpoints[number]}: {error}")
                else:
                    stack.push_async_exit(attempt.pop_all())
                    self._good = number
                    return opened
        raise StoreAwayError("etcd does not answer: " + "; ".join(troubles))

    async def _open_at(
        self, number: int, method: Method[_Request, _Response], request: _Request, stack: contextlib.AsyncExitStack
    ) -> Stream[_Response]:
        for may_repeat in (True, False):
            metadata = await self._metadata(number)
            connection = await stack.enter_async_context(self._connected(number))
            call = connection.channel.stream_stream(
                method.path, request_serializer=_serialize, response_deserializer=method.response.FromString
            )(metadata=metadata)
            stack.callback(call.cancel)
            stream = Stream(self, number, call, method.name)
            try:
                await stream.open(request, self._try_seconds)
            except _NoAnswerError:
                self._retire(number, connection)
                raise
            except _TokenError as error:
                self._token_refused(number, error, may_repeat)
            else:
                return stream
        raise AssertionError("unreachable: the second attempt returns or raises")

    async def close(self) -> None:
        """End all calls and streams. The process keeps gRPC's threads.

        Since grpcio 1.83 a call is part of a reference cycle, so that the sockets are closed with the next garbage
        collection (github.com/grpc/grpc/issues/42125).
        """
        self._is_closed = True
        connections = [*self._connections.values(), *self._retired]
        self._connections.clear()
        self._retired.clear()
        for connection in connections:
            await connection.channel.close()

    def forget_token(self) -> None:
        """Fetch another one before the next call."""
        self._token = None

    def _order(self) -> list[int]:
        count = len(self.endpoints)
        return [(self._good + offset) % count for offset in range(count)]

    async def _ask(self, number: int, method: Method[_Request, _Response], request: _Request) -> _Response:
        for may_repeat in (True, False):
            try:
                return await self._once(number, method, request, await self._metadata(number))
            except _TokenError as error:
                self._token_refused(number, error, may_repeat)
        raise AssertionError("unreachable: the second attempt returns or raises")

    def _token_refused(self, number: int, error: _TokenError, may_repeat: bool) -> None:
        """Raises EtcdError, unless another token may help."""
        self.forget_token()
        if self._credentials.username is None:
            text = "wants a user: give --etcd-username and --etcd-password"
        elif not may_repeat:
            text = f"does not accept the token that it has just given ({error})"
        else:
            return
        raise EtcdError(f"etcd at {self.endpoints[number]} {text}", grpc.StatusCode.UNAUTHENTICATED, str(error))

    async def _metadata(self, number: int) -> tuple[tuple[str, str], ...]:
        """What goes with a call: the token, fetched if there is none."""
        if self._credentials.username is None:
            return _BASE_METADATA
        async with self._authenticating:
            if self._token is None:
                self._token = await self._authenticate(number)
        return (*_BASE_METADATA, ("token", self._token)) if self._token else _BASE_METADATA

    async def _authenticate(self, number: int) -> str:
        """A token; an empty one if etcd does not ask for passwords."""
        request = pb.AuthenticateRequest(name=self._credentials.username, password=self._credentials.password)
        try:
            return (await self._once(number, AUTHENTICATE, request, _BASE_METADATA)).token
        except EtcdError as error:
            if "authentication is not enabled" in error.details:
                log.info("etcd does not ask for a password; going on without")
                return ""
            if "authentication failed" in error.details:
                text = f"the user name {self._credentials.username!r} or its password is wrong"
                where = f"etcd at {self.endpoints[number]}"
                raise EtcdError(f"{where}: {text}", error.code, error.details) from None
            raise

    async def _once(
        self,
        number: int,
        method: Method[_Request, _Response],
        request: _Request,
        metadata: tuple[tuple[str, str], ...],
    ) -> _Response:
        async with self._connected(number) as connection:
            call = connection.channel.unary_unary(
                method.path, request_serializer=_serialize, response_deserializer=method.response.FromString
            )
            try:
                return await call(request, timeout=self._try_seconds, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                judged = self.judge(number, method.name, error)
                if isinstance(judged, _NoAnswerError) and "etcdserver: " not in (error.details() or ""):
                    self._retire(number, connection)
                raise judged from None
            except asyncio.CancelledError:
                _require_own_cancellation()
                raise _NoAnswerError("the connection was closed") from None

    @contextlib.asynccontextmanager
    async def _connected(self, number: int) -> AsyncIterator[_Connection]:
        """The connection to an endpoint, which stays open as long as the context."""
        if self._is_closed:
            raise StoreError("the connection to etcd has been closed")
        connection = self._connections.get(number)
        if connection is None:
            connection = self._connections[number] = _Connection(self._make_channel(self.endpoints[number]))
        connection.users += 1
        try:
            yield connection
        finally:
            connection.users -= 1
            if connection.is_retired and not connection.users:
                self._retired.discard(connection)
                await connection.channel.close()

    def _make_channel(self, endpoint: Endpoint) -> grpc.aio.Channel:
        if not endpoint.is_tls:
            return grpc.aio.insecure_channel(endpoint.target, _OPTIONS)
        files = self._credentials.read_certificates()
        credentials = grpc.ssl_channel_credentials(files.authorities, files.key, files.chain)
        return grpc.aio.secure_channel(endpoint.target, credentials, _OPTIONS)

    def _retire(self, number: int, connection: _Connection) -> None:
        """Let the next call make another connection."""
        if self._connections.get(number) is connection:
            del self._connections[number]
            self._retired.add(connection)
            connection.is_retired = True

    def judge(self, number: int, name: str, error: grpc.aio.AioRpcError) -> Exception:
        """What the end of a call means: _NoAnswerError, _TokenError or EtcdError."""
        code, details = error.code(), error.details() or ""
        plain = _plain(details)
        if code is grpc.StatusCode.UNAUTHENTICATED or any(text in details for text in _TOKEN_TEXTS):
            return _TokenError(plain)
        if code in _NO_ANSWER or "too many requests" in details:
            seconds = f" within {self._try_seconds:.1f} s" if code is grpc.StatusCode.DEADLINE_EXCEEDED else ""
            return _NoAnswerError(f"no answer{seconds}" if seconds else plain or code.name)
        where = f"etcd at {self.endpoints[number]}"
        if code is grpc.StatusCode.PERMISSION_DENIED:
            user = self._credentials.username or "of the certificate"
            return EtcdError(f"{where} denies {name}: the user {user} lacks a permission for it", code, details)
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return EtcdError(f"{where} does not know {name}: is it etcd, version 3?", code, details)
        if "database space exceeded" in details:
            advice = "compact and defragment it, then `etcdctl alarm disarm`"
            return EtcdError(f"{where} does not write, its database is full: {advice}", code, details)
        return EtcdError(f"{where} refuses {name}: {plain or code.name}", code, details)


def _require_own_cancellation() -> None:
    """Raises CancelledError if the current task is being cancelled; else it was the call that was, by `Client.close`."""
    task = asyncio.current_task()
    if task is None or task.cancelling():
        raise asyncio.CancelledError


def _serialize(message: "Message") -> bytes:
    return message.SerializeToString()


def _plain(details: str) -> str:
    """`details` without what only gRPC's developers want to read."""
    return details.rpartition("last error: ")[2].removeprefix("UNKNOWN: ").removeprefix("etcdserver: ")
