"""What all wrappers that watch have in common: they see each packet that passes, and change nothing.

Theory of operation: a tap stands around a `Device` or an `Underlay` and satisfies the same contract. What is received is
seen when the inner part has put it into the batch, before the engine touches it; what is transmitted is seen afterwards,
when its verdict says whether it went. Nobody pays for a tap that is not there: the node puts one around what it opened
only if the operator asks for it.

Strangers send what is seen, so nothing that goes wrong while it is put into words or into a file may harm the traffic: what
raises is counted as `unseen`, and told once.

An underlay moves runs of datagrams, a tap shows datagrams: a train is taken apart by its stride, and what was received as
``dataplane.inbound.unpack`` does it, which believes a stride only if the inner length agrees with it (`is_run`).

A batch tells the number of a datagram's sender, not its address, and of a stranger not even that. So the tap hands the
inner underlay a table of origins of its own (`Senders`), which numbers every host that is asked for, and puts the
engine's numbers back into the batch. Of a sender's port nothing is known.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence

from dataplane.batch import Batch
from dataplane.device import Device
from dataplane.underlay import Underlay
from dataplane.verdict import MEANING, Verdict
from dataplane.wrapping import DeviceWrapper, UnderlayWrapper
from encap.ip import stated_length
from routing.config import Address
from routing.table import UNKNOWN_VTEP, Endpoint

log = logging.getLogger(__name__)

MAX_STRANGERS = 4096
"""How many hosts that no lease names are told apart; any number of them may send."""

UNKNOWN_PORT = 0

UdpEnd = tuple[str, int]
"""A host, in the text form of ``ipaddress``, and a UDP port."""


class _Tap:
    """What both taps do about a packet that could not be shown."""

    def __init__(self) -> None:
        self.unseen = 0
        """How many entries of a batch were to be seen, and something went wrong."""

    def _miss(self, error: Exception) -> None:
        self.unseen += 1
        if self.unseen == 1:
            log.warning("%s cannot show a packet, which is carried on: %r; this is told once", type(self).__name__, error)


class DeviceTap(_Tap, DeviceWrapper, ABC):
    """A `Device` whose packets are seen by `_see`."""

    def __init__(self, inner: Device) -> None:
        super().__init__()
        self._inner = inner

    @abstractmethod
    def _see(self, batch: Batch, index: int, *, outbound: bool, remark: str) -> None:
        """Packet `index` of `batch` passed; `remark` says what is special about that, and may be empty."""

    def _look(self, batch: Batch, index: int, *, outbound: bool, remark: str) -> None:
        try:
            self._see(batch, index, outbound=outbound, remark=remark)
        except Exception as error:  # whatever it is, the packet goes on
            self._miss(error)

    def receive(self, batch: Batch) -> None:
        """The inner device's; seen as it comes."""
        first = batch.count
        self._inner.receive(batch)
        for i in range(first, batch.count):
            self._look(batch, i, outbound=True, remark="")

    def transmit(self, batch: Batch) -> None:
        """The inner device's; seen is what was to be delivered, with its verdict if it was not."""
        going = [i for i in batch.indices(Verdict.FORWARDED) if batch.head[i] == i]
        self._inner.transmit(batch)
        for i in going:
            self._look(batch, i, outbound=False, remark=_refusal(batch.verdict[i], "not delivered"))


class UnderlayTap(_Tap, UnderlayWrapper, ABC):
    """An `Underlay` whose datagrams are seen by `_see`.

    `hosts` are our own addresses by family, `port` is where we receive; `header_length` is that of the tunnel header, 0 in
    the ip framing.
    """

    def __init__(self, inner: Underlay, *, hosts: Mapping[int, str], port: int, header_length: int) -> None:
        super().__init__()
        self._inner = inner
        self._hosts = dict(hosts)
        self._port = port
        self._header_length = header_length
        self._senders = Senders({})
        self._ports: Mapping[str, Sequence[int]] = inner.report()["source_ports"]

    def rebind(self, addresses: Sequence[Address]) -> None:
        """The inner underlay's; what is seen from now on has the new addresses and source ports."""
        self._inner.rebind(addresses)
        self._hosts = {address.version: str(address) for address in addresses}
        self._ports = self._inner.report()["source_ports"]

    @abstractmethod
    def _see(self, source: UdpEnd, destination: UdpEnd, payload: memoryview, *, outbound: bool, remark: str) -> None:
        """A datagram passed; `remark` says what is special about that, and may be empty."""

    def receive(self, batch: Batch, origins: Mapping[str, int]) -> None:
        """The inner underlay's; seen as it comes."""
        senders = self._senders
        if origins is not senders.origins:
            senders = self._senders = Senders(origins)
        first = batch.count
        self._inner.receive(batch, senders)
        for i in range(first, batch.count):
            host, batch.peer[i] = senders.resolve(batch.peer[i])
            self._look_received(batch, i, host)

    def _look_received(self, batch: Batch, index: int, host: str | None) -> None:
        try:
            family = _family(host) if host else min(self._hosts, default=4)
            source = (host or _unspecified(family), UNKNOWN_PORT)
            destination = (self._hosts.get(family, _unspecified(family)), self._port)
            remark = "" if host and self._senders.is_leased(host) else "from a host that is in no lease"
            run, stride = batch.packet(index), batch.stride[index]
            for payload in pieces(run, stride) if is_run(run, stride, self._header_length) else (run,):
                self._see(source, destination, payload, outbound=False, remark=remark)
        except Exception as error:  # whatever it is, the datagrams go on
            self._miss(error)

    def transmit(self, batch: Batch, endpoints: Sequence[Endpoint]) -> int:
        """The inner underlay's; seen is what was to be sent, with its verdict if it was not."""
        going = batch.indices(Verdict.FORWARDED)
        sent = self._inner.transmit(batch, endpoints)
        for i in going:
            self._look_sent(batch, i, endpoints[batch.peer[i]], _refusal(batch.verdict[i], "not sent"))
        return sent

    def transmit_in_fragments(self, batch: Batch, index: int, endpoint: Endpoint) -> None:
        """The inner underlay's; seen are the datagrams, not their fragments."""
        self._inner.transmit_in_fragments(batch, index, endpoint)
        remark = _refusal(batch.verdict[index], "not sent") or "sent in fragments where the path asks for it"
        self._look_sent(batch, index, endpoint, remark, in_fragments=True)

    def _look_sent(self, batch: Batch, index: int, endpoint: Endpoint, remark: str, *, in_fragments: bool = False) -> None:
        try:
            family = _family(endpoint[0])
            ports = () if in_fragments else self._ports.get(f"ipv{family}", ())
            port = ports[batch.flow[index] % len(ports)] if ports else UNKNOWN_PORT
            source = (self._hosts.get(family, _unspecified(family)), port)
            for payload in pieces(batch.packet(index), batch.stride[index]):
                self._see(source, (endpoint[0], endpoint[1]), payload, outbound=True, remark=remark)
        except Exception as error:  # as above
            self._miss(error)


class Senders(Mapping[str, int]):
    """Origins for an inner underlay: a number of our own for every host that it asks for, known or not.

    The numbers of `origins` would not do: one of a VTEP with two addresses names both. `origins` may be the `Senders` of a
    wrapper further out, whose numbers say nothing about leases.
    """

    def __init__(self, origins: Mapping[str, int]) -> None:
        self.origins = origins
        self._leased: Mapping[str, int] = origins._leased if isinstance(origins, Senders) else origins
        self._numbers: dict[str, int] = {}
        self._found: list[tuple[str, int]] = []
        self._strangers = 0

    def resolve(self, number: int) -> tuple[str | None, int]:
        """The host that was given `number`, if any was, and the number that it has in `origins`."""
        return self._found[number] if 0 <= number < len(self._found) else (None, UNKNOWN_VTEP)

    def is_leased(self, host: str) -> bool:
        """Whether the engine's table has it."""
        return host in self._leased

    def __getitem__(self, host: str) -> int:
        number = self._numbers.get(host)
        if number is None:
            if not self.is_leased(host):
                if self._strangers == MAX_STRANGERS:
                    raise KeyError(host)
                self._strangers += 1
            number = self._numbers[host] = len(self._found)
            self._found.append((host, self.origins.get(host, UNKNOWN_VTEP)))
        return number

    def __iter__(self) -> Iterator[str]:
        return iter(self.origins)

    def __len__(self) -> int:
        return len(self.origins)


def is_run(run: memoryview, stride: int, tunnel: int) -> bool:
    """Whether `run`, an entry as it was received, is datagrams of `stride` bytes behind tunnel headers of `tunnel` bytes.

    It is if the first one's inner length agrees; otherwise the kernel may have told the segment size of something inside a
    single datagram (``dataplane.inbound.unpack``).
    """
    return 0 < stride < len(run) and stated_length(run, tunnel, len(run) - tunnel) == stride - tunnel


def pieces(run: memoryview, stride: int) -> Iterable[memoryview]:
    """`run` in pieces of `stride` bytes, the last maybe shorter; the run itself if it is empty or has no stride."""
    if not len(run) or stride <= 0:
        return [run]
    return [run[at : at + stride] for at in range(0, len(run), stride)]


def _refusal(verdict: int, what: str) -> str:
    """What to say of a packet that was to be transmitted and has this verdict now: nothing, if it went."""
    if verdict == Verdict.FORWARDED:
        return ""
    found = Verdict(verdict)
    return f"{what}: {found.name.lower()} ({MEANING[found]})"


def _family(host: str) -> int:
    return 6 if ":" in host else 4


def _unspecified(family: int) -> str:
    return "0.0.0.0" if family == 4 else "::"  # noqa: S104 - in a packet's header it means that the address is not known
