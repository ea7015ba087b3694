"""The loop that moves batches both ways.

Theory of operation: the event loop says that the device or the underlay has something; the engine then moves at most
`budget` batches, and returns, so that lease renewal, health checks and signals get their turn under any load; both
sides are watched level-triggered, so what is left comes right after. On a quiet link a wake-up begins with a single
packet, which then does not wait for the call that finds nothing behind it; under load it begins with a batch.

Outbound a batch is judged, laid out as trains, and sent; what a train met on its way is settled with the packets in it.
Inbound a batch is unpacked into pieces, judged, coalesced, and written to the device. Then the verdicts are tallied.

What needs more than a verdict is done here, from the columns, only for batches in which it occurs: ICMP errors (no route,
TTL, too big), and datagrams that the path takes in fragments only. Errors are limited in rate; when the limit is reached a
flood of such packets costs no more than their verdicts.

An ICMP error about a packet from the device goes back to the device. One about a packet from the underlay (its TTL ended
here, in the ip framing) goes to the inner source through the tunnel, like any packet for it.
"""

import logging
import time
from array import array
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address
from itertools import accumulate
from typing import Any

from dataplane.batch import Batch
from dataplane.device import Device
from dataplane.inbound import coalesce, decapsulate, unpack, write_vnet_headers
from dataplane.offload import Offload, Offloads
from dataplane.outbound import Outbound, judge_batch
from dataplane.ratelimit import TokenBucket
from dataplane.traffic import NANOSECONDS, RouteTraffic, Traffic
from dataplane.underlay import Underlay
from dataplane.verdict import Verdict, new_counts
from encap import icmp, segment, vnet
from encap.coalesce import Coalescer
from encap.fields import IPV4_DONT_FRAGMENT, IPV4_FRAGMENT, Octets, load16
from encap.overhead import overhead, path_mtu_floor, path_mtu_to_report
from routing.table import Table

log = logging.getLogger(__name__)

BATCH_CAPACITY = 32
"""Buffers of 64 KiB received at a time, each way; only those that superpackets filled cost memory."""

PIECES = 4096
BATCHES_PER_WAKEUP = 4
ICMP_PER_SECOND = 1000.0
"""With ICMP_BURST the limits of Linux (net.ipv4.icmp_msgs_per_sec, icmp_msgs_burst)."""
ICMP_BURST = 50.0


BATCH_BOUNDS = (1, 2, 4, 8, 16, 32)
"""By how many packets batches are told apart: up to so many, and more than the bound before."""
_LAST_BOUND = len(BATCH_BOUNDS) - 1


class Direction:
    """The counters of one direction: packets and bytes received, and their verdicts; and how large batches were.

    A packet is what is judged: outbound what one read brought, which may be a superpacket; inbound each inner packet.
    """

    def __init__(self) -> None:
        self.received = 0
        self.verdicts = new_counts()
        self._verdicts_c = self.verdicts
        self.forwarded_bytes = 0
        self.batches = array("q", bytes(8 * len(BATCH_BOUNDS)))
        """How many batches there were for each of BATCH_BOUNDS."""
        self._batches_c = self.batches
        self.batched = 0
        """The sizes of all of them: inbound what was received in one piece, which may be a run of datagrams."""

    def count(self, batch: Batch, peers: "array[int] | None" = None, now: int = 0) -> None:
        """Add a batch whose verdicts are final, and what was forwarded to `peers` (`Batch.tally`)."""
        self.received += batch.count
        self.forwarded_bytes += batch.tally(self._verdicts_c, peers, now)

    def count_batch(self, size: int) -> None:
        """Add a batch of `size` as it was received, 1 or more."""
        bound = 0
        while size > 1 << bound and bound < _LAST_BOUND:
            bound += 1
        self._batches_c[bound] += 1
        self.batched += size

    def report_batches(self) -> dict[str, Any]:
        """The sizes as a histogram for `status`: cumulative buckets [upper bound, count], the number, and the sum."""
        buckets = [[bound, count] for bound, count in zip(BATCH_BOUNDS, accumulate(self.batches), strict=True)]
        return {"buckets": buckets, "count": sum(self.batches), "sum": self.batched}


class Buffers:
    """What an engine works in, some six megabytes. Engines that run in one thread may share it: nothing in it outlives
    the handling of one batch."""

    def __init__(self) -> None:
        self.out_batch = Batch(BATCH_CAPACITY)
        self.in_batch = Batch(BATCH_CAPACITY)
        self.pieces = Batch(PIECES, self.in_batch.data)
        self.own_batch = Batch(1)
        self.layout = Outbound()
        self.own_layout = Outbound()
        self.coalescer = Coalescer()


class Engine:
    """Moves packets between `device` and `underlay` by `table`, which may be replaced at any time.

    `offloads` tells whether packets may be merged for the device. `failed` is called once if a side is lost or
    something unforeseen happens; the engine has stopped then. `now` is a monotonic clock in seconds. With `by_peer` it
    counts for each route what passed (`traffic`), 48 bytes a route.
    """

    def __init__(
        self,
        device: Device,
        underlay: Underlay,
        table: Table,
        *,
        offloads: Offloads | None = None,
        failed: Callable[[Exception], None] | None = None,
        now: Callable[[], float] = time.monotonic,
        budget: int = BATCHES_PER_WAKEUP,
        buffers: Buffers | None = None,
        by_peer: bool = False,
    ) -> None:
        self._table = table
        self._traffic: Traffic | None = None
        self._sent: array[int] | None = None
        self._received: array[int] | None = None
        if by_peer:
            self._follow(Traffic(table))
        self.outbound = Direction()
        self.inbound = Direction()
        self.icmp_sent = 0
        self.icmp_suppressed = 0
        self._device = device
        self._underlay = underlay
        self._failed = failed
        self._now = now
        self._budget = budget
        self._is_running = False
        self._out_limit = self._in_limit = 1
        """How many packets the next wake-up begins with: 1 if the last one found no two at a time, 0 for a batch."""
        self._icmp_limit = TokenBucket(ICMP_PER_SECOND, ICMP_BURST)
        self._mtu_limit = TokenBucket(ICMP_PER_SECOND, ICMP_BURST)
        """For TOO_BIG alone, as Linux exempts it: a flood of other errors must not hide the path's MTU."""
        self._offloads = offloads or Offloads()
        buffers = buffers or Buffers()
        self._coalescer = buffers.coalescer
        self._out_batch = buffers.out_batch
        self._layout = buffers.layout
        self._in_batch = buffers.in_batch
        self._pieces = buffers.pieces
        self._own_batch = buffers.own_batch
        self._own_layout = buffers.own_layout

    @property
    def table(self) -> Table:
        """Where packets go. What was counted by peer goes over to a new one, for the routes that stay."""
        return self._table

    @table.setter
    def table(self, table: Table) -> None:
        self._table = table
        if self._traffic is not None:
            self._follow(Traffic(table, self._traffic))

    def _follow(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._sent, self._received = traffic.sent, traffic.received

    def traffic(self, epoch: float) -> list[RouteTraffic]:
        """What passed by route, row by row of the table, and last what belongs to none; nothing without `by_peer`.

        `epoch` is now, in seconds since the epoch; `last_heard` counts back from it: the wall clock may be set meanwhile.
        """
        traffic = self._traffic
        return [] if traffic is None else [*traffic.report(self._now(), epoch), traffic.others]

    def start(self) -> None:
        """Watch both sides, for the first time or again after `stop` or a failure. Needs a running event loop."""
        self._is_running = True
        self._device.watch(lambda: self._guarded(self.pump_outbound))
        self._underlay.watch(lambda: self._guarded(self.pump_inbound))

    def stop(self) -> None:
        """Watch them no more. What was received is delivered already."""
        self._is_running = False
        self._device.unwatch()
        self._underlay.unwatch()

    def replace_device(self, device: Device) -> None:
        """Go on with `device` instead of the one before, which is watched no more and stays its owner's to close.

        The one before may be closed already. An engine that runs goes on running; one that stopped, since the device was
        lost, needs `start`. Meanwhile the underlay keeps what arrives, as far as its buffers hold it.
        """
        self._device.unwatch()
        self._device = device
        self._out_limit = 1
        if self._is_running:
            device.watch(lambda: self._guarded(self.pump_outbound))

    def _guarded(self, pump: Callable[[], None]) -> None:
        """Run `pump`; on an exception stop, since a level-triggered watch would call it for ever."""
        try:
            pump()
        except Exception as error:  # whatever it is, the owner must hear of it
            self.stop()
            if self._failed is None:
                raise
            self._failed(error)

    def pump_outbound(self) -> None:
        """Move up to `budget` batches from the device to the underlay."""
        limit = self._out_limit
        self._out_limit = 1
        for _ in range(self._budget):
            received = self._move_outbound(limit)
            if received > 1:
                self._out_limit = 0
            if not self._out_batch.is_full:
                return
            limit = 0

    def pump_inbound(self) -> None:
        """Move up to `budget` batches from the underlay to the device."""
        limit = self._in_limit
        self._in_limit = 1
        for _ in range(self._budget):
            received = self._move_inbound(limit)
            if received > 1:
                self._in_limit = 0
            if not self._in_batch.is_full:
                return
            limit = 0

    def _move_outbound(self, limit: int) -> int:
        """One batch of at most `limit` packets (0: as many as fit); returns how many there were."""
        batch, peers = self._out_batch, self._sent
        batch.clear(limit)
        self._device.receive(batch)
        if batch.count:
            self.outbound.count_batch(batch.count)
            self._send(batch)
            self.outbound.count(batch, peers, 0)
        return batch.count

    def _move_inbound(self, limit: int) -> int:
        """The same in the other direction."""
        batch = self._in_batch
        batch.clear(limit)
        self._underlay.receive(batch, self._table.origins)
        if batch.count:
            self.inbound.count_batch(batch.count)
            self._deliver(batch)
        return batch.count

    def _send(self, batch: Batch) -> None:
        table = self._table
        to_send = judge_batch(batch, table)
        if to_send < batch.count:
            self._answer_to_device(batch, Verdict.NO_ROUTE, icmp.NO_ROUTE)
            self._answer_to_device(batch, Verdict.TTL_EXPIRED, icmp.TIME_EXCEEDED)
        if to_send:
            self._send_trains(batch, table)

    def _send_trains(self, batch: Batch, table: Table) -> None:
        layout, underlay = self._layout, self._underlay
        trains = layout.trains
        layout.start(underlay.lanes, underlay.max_segments)
        more = True
        while more:
            more = layout.lay_out(batch, table)
            if underlay.transmit(trains, table.endpoints) < trains.count:
                self._settle(batch, trains, table)

    def _settle(self, batch: Batch, trains: Batch, table: Table) -> None:
        """Give the packets of the trains that were refused their verdicts."""
        for train in range(trains.count):
            verdict = trains.verdict[train]
            if verdict == Verdict.FORWARDED:
                continue
            for index in range(trains.head[train], trains.last[train] + 1):
                if batch.verdict[index] != Verdict.FORWARDED:
                    continue
                batch.verdict[index] = verdict
                if verdict == Verdict.TOO_BIG:
                    self._too_big(batch, index, table)

    def _deliver(self, batch: Batch) -> None:
        pieces, table, mtu = self._pieces, self._table, self._device.mtu
        peers, now = self._received, 0
        if peers is not None:
            moment = self._now()
            now = int(moment * NANOSECONDS)
        following = 0
        while following < batch.count:
            following = unpack(batch, pieces, table, following)
            forwarded = decapsulate(pieces, table)
            if forwarded < pieces.count:
                self._answer_through_tunnel(pieces)
            if forwarded:
                merging = forwarded > 1 and self._offloads.is_on(Offload.TUN_GRO)
                merged = coalesce(pieces, self._coalescer, mtu) if merging else 0
                write_vnet_headers(pieces, mtu)
                self._device.transmit(pieces)
                if merged:
                    pieces.share_verdicts()
            self.inbound.count(pieces, peers, now)

    def _answer_to_device(self, batch: Batch, verdict: Verdict, kind: icmp.ErrorKind) -> None:
        self._answer(batch, verdict, kind, self._inject)

    def _answer_through_tunnel(self, pieces: Batch) -> None:
        self._answer(pieces, Verdict.TTL_EXPIRED, icmp.TIME_EXCEEDED, self._originate)

    def _answer(self, batch: Batch, verdict: Verdict, kind: icmp.ErrorKind, send: Callable[[bytes], None]) -> None:
        """Send an ICMP error of `kind` about each packet with `verdict`, as far as the limit goes."""
        indices = batch.indices(verdict)
        for done, index in enumerate(indices):
            packet = batch.packet(index)
            source = self._own_address(packet[0] >> 4)
            if source is None or not icmp.may_answer(packet):
                continue
            if not self._icmp_limit.take(self._now()):
                self.icmp_suppressed += len(indices) - done
                return
            send(icmp.error(kind, packet, source))

    def _too_big(self, batch: Batch, index: int, table: Table) -> None:
        """A packet whose datagrams the path does not take whole: tell the inner sender, or send them in fragments.

        Fragments it is where the inner packet may be fragmented by anybody (IPv4 without DF), and where it is so short
        that its sender would not make it shorter.
        """
        packet = batch.packet(index)
        endpoint = table.endpoints[batch.peer[index]]
        family = packet[0] >> 4
        if _may_be_fragmented(packet) or _longest_segment(batch, index) <= path_mtu_floor(family):
            self._send_in_fragments(batch, index, table)
            return
        source = self._own_address(family)
        if source is None or not icmp.may_answer(packet):
            return
        if not self._mtu_limit.take(self._now()):
            self.icmp_suppressed += 1
            return
        overhead_length = overhead(table.header_length, 4 if len(endpoint) == 2 else 6)
        try:
            path_mtu = self._underlay.path_mtu(endpoint)
        except OSError as error:  # no descriptor left, no route any more: the sender will try again
            log.warning("cannot tell the path MTU to %s: %s", endpoint[0], error)
            return
        mtu = path_mtu_to_report(path_mtu, overhead_length, family)
        self._inject(icmp.error(icmp.TOO_BIG, packet, source, mtu))

    def _send_in_fragments(self, batch: Batch, index: int, table: Table) -> None:
        """Lay packet `index` out once more, by itself, and send its trains in fragments."""
        own = self._hold(batch.packet(index), batch.vnet_header(index))
        own.verdict[0] = Verdict.FORWARDED
        own.peer[0], own.flow[0] = batch.peer[index], batch.flow[index]
        layout, underlay = self._own_layout, self._underlay
        layout.start(underlay.lanes, underlay.max_segments)
        verdict = int(Verdict.FORWARDED)
        more = True
        while more:
            more = layout.lay_out(own, table)
            for train in range(layout.trains.count):
                underlay.transmit_in_fragments(layout.trains, train, table.endpoints[own.peer[0]])
                if layout.trains.verdict[train] != Verdict.FORWARDED:
                    verdict = layout.trains.verdict[train]
        batch.verdict[index] = verdict

    def _own_address(self, family: int) -> IPv4Address | IPv6Address | None:
        """The node's address in the overlay: the first of its subnet, which is the device's."""
        identity = self._table.identity
        subnet = identity.subnet if family == 4 else identity.ipv6_subnet
        return subnet.network_address if subnet is not None else None

    def _inject(self, error: bytes) -> None:
        """Hand an ICMP error to the device's host."""
        own = self._hold(error)
        own.verdict[0] = Verdict.FORWARDED
        self._device.transmit(own)
        self.icmp_sent += own.verdict[0] == Verdict.FORWARDED

    def _originate(self, error: bytes) -> None:
        """Send an ICMP error of our own through the tunnel."""
        own, layout = self._hold(error), self._own_layout
        table = self._table
        if judge_batch(own, table):
            layout.start(self._underlay.lanes, 1)
            layout.lay_out(own, table)
            self.icmp_sent += self._underlay.transmit(layout.trains, table.endpoints)

    def _hold(self, packet: Octets, header: Octets = bytes(vnet.VNET_LENGTH)) -> Batch:
        """The batch for packets of our own making, holding `packet`."""
        self._own_batch.clear()
        self._own_batch.put(packet, vnet=bytes(header))
        return self._own_batch


def _may_be_fragmented(packet: Octets) -> bool:
    return packet[0] >> 4 == 4 and not load16(packet, IPV4_FRAGMENT) & IPV4_DONT_FRAGMENT


def _longest_segment(batch: Batch, index: int) -> int:
    """The length of the longest packet in entry `index`, which was judged: its own, or that of a superpacket's segments.

    The virtio-net header's own hdr_len is not asked: on a forwarding path it can cover the whole first packet.
    """
    packet, header = batch.packet(index), vnet.parse(batch.vnet_header(index), 0)
    if not header.gso_type:
        return len(packet)
    header_length = segment.check(packet, 0, len(packet), header.gso_type, header.gso_size, header.csum_start)
    return min(len(packet), header_length + header.gso_size)
