"""What Prometheus is told: the text that ``/metrics`` gives, made from what ``Node.status`` says.

Theory of operation: the node counts in plain integers, and only who asks pays. `render` is pure: it goes through a status,
section by section, and makes a sample of each value that is there; a section or value that is missing (the node is
starting, the store has no such thing) makes none. `METRICS` says what each metric means; nothing else is exposed, but for
``process_…``, which prometheus-client reads from /proc. The text itself is prometheus-client's work.

`render` runs in a thread beside the event loop, and both need the interpreter. With 1000 peers it takes 40 ms of processor
time, in parts of five milliseconds at most (sys.getswitchinterval), for which the loop then waits. Shorter parts were
tried: the loop's delays stayed as they were, and under full load the page took seconds.

Importing this module costs two mebibytes, which a node without a health server does not spend.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from dataplane.offload import ON

PREFIX = "pyflannel_dp_"


class Description(NamedTuple):
    """What there is to say of a metric; `kind` is counter, gauge or histogram."""

    kind: str
    help: str
    labels: tuple[str, ...] = ()


_PEER = ("subnet", "address")
METRICS = {
    "build_info": Description("gauge", "Always 1; its labels say what runs.", ("version", "framing", "compiled")),
    "ready": Description("gauge", "Whether the node is ready: lease, routes, rules and subnet.env are in place."),
    "failures": Description("gauge", "What does not work at the moment and is reported in the status."),
    "packets_total": Description("counter", "Packets by what became of them.", ("direction", "verdict")),
    "received_packets_total": Description("counter", "Packets received: the sum of the verdicts.", ("direction",)),
    "forwarded_bytes_total": Description("counter", "Bytes of the inner packets that were carried on.", ("direction",)),
    "batch_packets": Description("histogram", "Packets or superpackets moved at a time.", ("direction",)),
    "icmp_errors_total": Description("counter", "ICMP errors for inner senders, sent and suppressed.", ("result",)),
    "send_errors_total": Description("counter", "Sends that the kernel refused, by errno.", ("error",)),
    "device_queue_drops_total": Description("counter", "Packets that the kernel dropped in the device's full queue."),
    "socket_drops_total": Description("counter", "Datagrams that the kernel dropped in the sockets' full queues."),
    "device_mtu_bytes": Description("gauge", "The MTU of the overlay's device."),
    "offload_active": Description("gauge", "Whether an offload is in use.", ("offload",)),
    "peers": Description("gauge", "Subnets of other nodes that packets are sent to."),
    "unreachable_leases": Description("gauge", "Leases of other nodes that no route can be made from."),
    "peer_sent_packets_total": Description("counter", "Packets sent to a peer.", _PEER),
    "peer_sent_bytes_total": Description("counter", "Bytes of the inner packets sent to a peer.", _PEER),
    "peer_received_packets_total": Description("counter", "Packets received from a peer.", _PEER),
    "peer_received_bytes_total": Description("counter", "Bytes of the inner packets received from a peer.", _PEER),
    "peer_last_heard_timestamp_seconds": Description("gauge", "When a peer sent something last; absent if never.", _PEER),
    "lease_expiration_timestamp_seconds": Description("gauge", "When our lease ends; +Inf for a reservation."),
    "lease_renewals_total": Description("counter", "How often our lease was renewed."),
    "store_up": Description("gauge", "Whether the store of leases answers.", ("kind",)),
    "store_away_since_timestamp_seconds": Description("gauge", "Since when it does not; absent if it does.", ("kind",)),
    "store_skipped_entries": Description("gauge", "Entries in the store that are no leases.", ("kind",)),
    "store_relists_total": Description("counter", "How often all leases had to be read again.", ("kind",)),
    "masquerade_active": Description("gauge", "Whether what leaves the overlay is masqueraded (--ip-masq)."),
    "firewall_restored_total": Description("counter", "How often firewall rules were put back."),
    "host_restored_total": Description("counter", "How often the device or routes were put back."),
    "loop_lag_seconds": Description("histogram", "How late the event loop woke up, measured twice a second."),
    "loop_lag_last_seconds": Description("gauge", "The last of these delays."),
    "loop_lag_worst_seconds": Description("gauge", "The longest of these delays since the start."),
}
"""All metrics of ours by name, without the prefix."""

_FAMILIES: dict[str, Any] = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
_PEER_KEYS = (
    ("peer_sent_packets_total", "sent_packets"),
    ("peer_sent_bytes_total", "sent_bytes"),
    ("peer_received_packets_total", "received_packets"),
    ("peer_received_bytes_total", "received_bytes"),
    ("peer_last_heard_timestamp_seconds", "last_heard"),
)


class _Histogram(NamedTuple):
    """Cumulative buckets (upper bound, how many) without the last, +Inf, `all_of_them`. `total` None: not known."""

    buckets: Sequence[tuple[float, int]]
    all_of_them: int
    total: float | None


_Sample = tuple[str, tuple[str, ...], float | _Histogram]
"""A name in `METRICS`, the values of its labels, and its value."""


def render(status: Mapping[str, Any]) -> bytes:
    """The text (Prometheus 0.0.4) for a status as `Node.status` gives it."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Page(status))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class _Page(Collector):
    """What `generate_latest` takes the metrics from."""

    def __init__(self, status: Mapping[str, Any]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """One metric after the other, with all its samples."""
        families: dict[str, Any] = {}
        for name, labels, value in _samples(self._status):
            family = families.get(name)
            if family is None:
                kind, text, label_names = METRICS[name]
                family = families[name] = _FAMILIES[kind](PREFIX + name, text, labels=label_names)
            if isinstance(value, _Histogram):
                buckets = [(str(float(bound)), count) for bound, count in value.buckets]
                family.add_metric(labels, [*buckets, ("+Inf", value.all_of_them)], value.total)
            else:
                family.add_metric(labels, value)
        yield from families.values()


def _samples(status: Mapping[str, Any]) -> Iterator[_Sample]:
    yield from _about_the_node(status)
    for direction in ("outbound", "inbound"):
        yield from _about_a_direction(direction, status.get(direction) or {})
    yield from _about_drops(status)
    yield from _about_peers(status.get("peers") or ())
    yield from _about_the_lease(status.get("lease") or {})
    yield from _about_the_store(status.get("store") or {})
    yield from _about_the_host(status)
    yield from _about_the_loop(status.get("loop") or {})


def _plain(source: Mapping[str, Any], **names: str) -> Iterator[_Sample]:
    """A sample without labels for each of `names`, from the key that it is given, where there is a number."""
    for name, key in names.items():
        value = source.get(key)
        if value is not None:
            yield name, (), value


def _about_the_node(status: Mapping[str, Any]) -> Iterator[_Sample]:
    build = (str(status.get(key, "")).lower() for key in ("version", "framing", "compiled"))
    yield "build_info", tuple(build), 1
    yield from _plain(status, ready="ready")
    for name, key in (("failures", "failures"), ("peers", "peers"), ("unreachable_leases", "unreachable")):
        if status.get(key) is not None:
            yield name, (), len(status[key])
    for offload, state in (status.get("offloads") or {}).items():
        yield "offload_active", (offload,), state == ON


def _about_a_direction(name: str, direction: Mapping[str, Any]) -> Iterator[_Sample]:
    for verdict, count in (direction.get("verdicts") or {}).items():
        yield "packets_total", (name, verdict), count
    if "received" in direction:
        yield "received_packets_total", (name,), direction["received"]
    if "forwarded_bytes" in direction:
        yield "forwarded_bytes_total", (name,), direction["forwarded_bytes"]
    if batches := direction.get("batches"):
        yield "batch_packets", (name,), _histogram(batches)


def _about_drops(status: Mapping[str, Any]) -> Iterator[_Sample]:
    yield from _plain(status.get("device") or {}, device_queue_drops_total="queue_drops", device_mtu_bytes="mtu")
    yield from _plain(status, socket_drops_total="socket_drops")
    for error, count in (status.get("send_errors") or {}).items():
        yield "send_errors_total", (error,), count
    for result, count in (status.get("icmp_errors") or {}).items():
        yield "icmp_errors_total", (result,), count


def _about_peers(peers: Sequence[Mapping[str, Any]]) -> Iterator[_Sample]:
    for peer in peers:
        labels = (peer["subnet"], peer["address"])
        for name, key in _PEER_KEYS:
            value = peer.get(key)
            if value is not None:
                yield name, labels, value


def _about_the_lease(lease: Mapping[str, Any]) -> Iterator[_Sample]:
    if "expiration" in lease:
        expiration = lease["expiration"]
        yield "lease_expiration_timestamp_seconds", (), math.inf if expiration is None else expiration
    yield from _plain(lease, lease_renewals_total="renewed")


def _about_the_store(store: Mapping[str, Any]) -> Iterator[_Sample]:
    kind = (str(store.get("kind", "")),)
    if "away_since" in store:
        since = store["away_since"]
        yield "store_up", kind, since is None
        if since is not None:
            yield "store_away_since_timestamp_seconds", kind, since
    for name, _, value in _plain(store, store_skipped_entries="skipped", store_relists_total="relists"):
        yield name, kind, value


def _about_the_host(status: Mapping[str, Any]) -> Iterator[_Sample]:
    firewall = status.get("firewall") or {}
    yield from _plain(firewall, masquerade_active="masquerade", firewall_restored_total="restored")
    yield from _plain(status, host_restored_total="restored")


def _about_the_loop(loop: Mapping[str, Any]) -> Iterator[_Sample]:
    if "buckets" in loop:
        yield "loop_lag_seconds", (), _histogram(loop)
    yield from _plain(loop, loop_lag_last_seconds="lag_seconds", loop_lag_worst_seconds="worst_lag_seconds")


def _histogram(report: Mapping[str, Any]) -> _Histogram:
    return _Histogram(report["buckets"], report["count"], report.get("sum"))
