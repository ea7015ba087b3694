"""An underlay in memory: hosts in one process that exchange datagrams, with an MTU.

The twin of ``udp``. A `FakeNetwork` knows its hosts by address and hands a datagram to the addressee at once, in order;
what is sent to nobody is lost, as on a real network. `crossed` keeps what went over it, for tests to look at.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from dataplane.batch import MAX_PACKET_LENGTH, Batch
from dataplane.mailbox import Mailbox
from dataplane.verdict import Verdict
from encap.overhead import overhead
from routing.table import UNKNOWN_VTEP, Endpoint

QUEUE_LENGTH = 4096
MAX_SEGMENTS = 64
_LARGEST_UDP_PAYLOAD = 65507


@dataclass(frozen=True)
class Datagram:
    """What crossed the network: from whom, to whom, the UDP payload, and whether it had to be cut."""

    source: str
    destination: str
    port: int
    payload: bytes
    in_fragments: bool = False


class FakeNetwork:
    """Hosts by address. `mtu` is that of every link, in bytes of the outer IP packet."""

    def __init__(self, mtu: int = 1500) -> None:
        self.mtu = mtu
        self.crossed: list[Datagram] = []
        self._hosts: dict[tuple[str, int], FakeUnderlay] = {}

    def attach(self, port: int, *hosts: str) -> "FakeUnderlay":
        """A host with the addresses `hosts` (at most one of each family), listening on UDP `port`."""
        underlay = FakeUnderlay(self, hosts)
        for host in hosts:
            self._hosts[host, port] = underlay
        return underlay

    def detach(self, underlay: "FakeUnderlay") -> None:
        """Forget a host: what is sent to it from now on is lost."""
        self._hosts = {key: value for key, value in self._hosts.items() if value is not underlay}

    def send(self, datagram: Datagram) -> None:
        """Hand `datagram` to its addressee, if there is one."""
        self.crossed.append(datagram)
        addressee = self._hosts.get((datagram.destination, datagram.port))
        if addressee is not None:
            addressee.queue.put(datagram)


class FakeUnderlay:
    """An `Underlay` on a `FakeNetwork`. `refuse` maps a host to the verdict that sending to it shall have.

    With `gro` on, datagrams of one origin and one size that wait behind one another are received in one slot, as with
    UDP_GRO.
    """

    lanes = 8
    max_segments = MAX_SEGMENTS

    def __init__(self, network: FakeNetwork, hosts: Sequence[str]) -> None:
        self.gro = True
        self._network = network
        self._host_by_family = {ip_address(host).version: host for host in hosts}
        self.queue: Mailbox[Datagram] = Mailbox(QUEUE_LENGTH)
        self.refuse: dict[str, Verdict] = {}

    @property
    def families(self) -> frozenset[int]:
        """Those of the host's addresses."""
        return frozenset(self._host_by_family)

    def receive(self, batch: Batch, origins: Mapping[str, int]) -> None:
        """Take from the queue."""
        while self.queue and not batch.is_full:
            first = self.queue.take()
            run = [first.payload]
            while self.gro and self.queue and len(run) < MAX_SEGMENTS and _continues(run, first.source, self.queue.peek()):
                run.append(self.queue.take().payload)
            stride = len(first.payload) if len(run) > 1 else 0
            batch.put(b"".join(run), origins.get(first.source, UNKNOWN_VTEP), stride)

    def transmit(self, batch: Batch, endpoints: Sequence[Endpoint]) -> int:
        """Through the network, at once."""
        sent = 0
        for i in batch.indices(Verdict.FORWARDED):
            endpoint = endpoints[batch.peer[i]]
            family = 4 if len(endpoint) == 2 else 6
            too_big = batch.stride[i] + overhead(0, family) > self._network.mtu
            batch.verdict[i] = Verdict.TOO_BIG if too_big else self._send(batch, i, endpoint, in_fragments=False)
            sent += batch.verdict[i] == Verdict.FORWARDED
        return sent

    def transmit_in_fragments(self, batch: Batch, index: int, endpoint: Endpoint) -> None:
        """Through the network, whatever its MTU."""
        fits = batch.stride[index] <= _LARGEST_UDP_PAYLOAD
        batch.verdict[index] = self._send(batch, index, endpoint, in_fragments=True) if fits else Verdict.TOO_BIG

    def _send(self, batch: Batch, index: int, endpoint: Endpoint, *, in_fragments: bool) -> Verdict:
        host, port = endpoint[0], endpoint[1]
        source = self._host_by_family.get(4 if len(endpoint) == 2 else 6)
        if source is None:
            return Verdict.SEND_ERROR
        if host in self.refuse:
            return self.refuse[host]
        train, stride = bytes(batch.packet(index)), batch.stride[index]
        for at in range(0, max(len(train), 1), max(stride, 1)):
            self._network.send(Datagram(source, host, port, train[at : at + stride], in_fragments))
        return Verdict.FORWARDED

    def path_mtu(self, endpoint: Endpoint) -> int:
        """The network's MTU: all links are alike."""
        return self._network.mtu

    def watch(self, ready: Callable[[], None]) -> None:
        """From now on; datagrams that arrived before count."""
        self.queue.watch(ready)

    def unwatch(self) -> None:
        """Datagrams go on arriving in the queue."""
        self.queue.unwatch()

    def close(self) -> None:
        """Leave the network."""
        self.unwatch()
        self._network.detach(self)


def _continues(run: list[bytes], source: str, following: Datagram) -> bool:
    """Whether `following` may stand behind `run` in a slot: same origin, no longer than the first, none after a rest."""
    size = len(run[0])
    return (
        following.source == source
        and 0 < len(following.payload) <= size
        and len(run[-1]) == size
        and (len(run) + 1) * size <= MAX_PACKET_LENGTH
    )
