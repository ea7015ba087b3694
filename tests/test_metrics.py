"""What `render` says, read back with prometheus-client's own parser."""

import math
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from dataplane.metrics import METRICS, PREFIX, render
from dataplane.verdict import by_name, new_counts


def peer(number, **traffic):
    return {"subnet": f"10.244.{number}.0/24", "address": f"192.0.2.{number}", "mac": None} | traffic


def direction(received, **counts):
    return {
        "received": received,
        "forwarded_bytes": 100 * received,
        "verdicts": by_name(new_counts()) | counts,
        "batches": {"count": 9, "sum": 40, "buckets": [[1, 4], [2, 5], [4, 5], [8, 7], [16, 8], [32, 9]]},
    }


def full_status():
    return {
        "state": "running",
        "ready": True,
        "pid": 1,
        "version": "0.1.0",
        "compiled": True,
        "framing": "vxlan",
        "device": {"name": "flannel.1", "mtu": 1450, "queue_drops": 2},
        "lease": {"key": "10.244.7.0-24", "subnet": "10.244.7.0/24", "expiration": 1700086400.5, "renewed": 23},
        "peers": [
            peer(1, sent_packets=3, sent_bytes=300, received_packets=4, received_bytes=400, last_heard=1700000123.25),
            peer(2, sent_packets=0, sent_bytes=0, received_packets=0, received_bytes=0, last_heard=None),
        ],
        "unreachable": [{"key": "k", "reason": "r"}],
        "failures": ["one", "two"],
        "outbound": direction(11, forwarded=10, no_route=1),
        "inbound": direction(7, forwarded=7),
        "offloads": {"tun-tso": "on", "udp-gro": "off: by option"},
        "icmp_errors": {"sent": 1, "suppressed": 0},
        "send_errors": {"EPERM": 5},
        "socket_drops": 6,
        "store": {
            "kind": "etcd", "away_since": None, "endpoint": "https://192.0.2.9:2379", "trouble": None, "skipped": 1,
            "relists": 2,
        },
        "firewall": {"masquerade": True, "restored": 3},
        "restored": 4,
        "loop": {"lag_seconds": 0.002, "worst_lag_seconds": 0.25, "buckets": [[0.001, 5], [0.25, 6]],
            "sum": 0.3, "count": 6},
        "capture": None,
        "source_ports": {"ipv4": [1, 2]},
        "uptime_seconds": 3.5,
    }  # fmt: skip


def read(status):
    """Sample values by name (ours without the prefix) and labels, and the metrics' kinds by name."""
    values, kinds = {}, {}
    for family in text_string_to_metric_families(render(status).decode()):
        kinds[family.name.removeprefix(PREFIX)] = family.type
        assert family.documentation
        assert family.samples
        for sample in family.samples:
            key = (sample.name.removeprefix(PREFIX), tuple(sorted(sample.labels.items())))
            assert key not in values, f"{key} twice"
            values[key] = sample.value
    return values, kinds


def ours(values):
    return {key for key in values if not key[0].startswith("process_")}


def test_a_full_status():
    values, kinds = read(full_status())
    expected = {
        ("build_info", (("compiled", "true"), ("framing", "vxlan"), ("version", "0.1.0"))): 1,
        ("ready", ()): 1,
        ("failures", ()): 2,
        ("packets_total", (("direction", "outbound"), ("verdict", "forwarded"))): 10,
        ("packets_total", (("direction", "outbound"), ("verdict", "no_route"))): 1,
        ("packets_total", (("direction", "inbound"), ("verdict", "too_big"))): 0,
        ("received_packets_total", (("direction", "inbound"),)): 7,
        ("forwarded_bytes_total", (("direction", "outbound"),)): 1100,
        ("batch_packets_bucket", (("direction", "outbound"), ("le", "1.0"))): 4,
        ("batch_packets_bucket", (("direction", "outbound"), ("le", "+Inf"))): 9,
        ("batch_packets_sum", (("direction", "outbound"),)): 40,
        ("icmp_errors_total", (("result", "suppressed"),)): 0,
        ("send_errors_total", (("error", "EPERM"),)): 5,
        ("device_queue_drops_total", ()): 2,
        ("socket_drops_total", ()): 6,
        ("device_mtu_bytes", ()): 1450,
        ("offload_active", (("offload", "tun-tso"),)): 1,
        ("offload_active", (("offload", "udp-gro"),)): 0,
        ("peers", ()): 2,
        ("unreachable_leases", ()): 1,
        ("peer_sent_packets_total", (("address", "192.0.2.1"), ("subnet", "10.244.1.0/24"))): 3,
        ("peer_sent_bytes_total", (("address", "192.0.2.1"), ("subnet", "10.244.1.0/24"))): 300,
        ("peer_received_packets_total", (("address", "192.0.2.1"), ("subnet", "10.244.1.0/24"))): 4,
        ("peer_received_bytes_total", (("address", "192.0.2.1"), ("subnet", "10.244.1.0/24"))): 400,
        ("peer_last_heard_timestamp_seconds", (("address", "192.0.2.1"), ("subnet", "10.244.1.0/24"))): 1700000123.25,
        ("lease_expiration_timestamp_seconds", ()): 1700086400.5,
        ("lease_renewals_total", ()): 23,
        ("store_up", (("kind", "etcd"),)): 1,
        ("store_skipped_entries", (("kind", "etcd"),)): 1,
        ("store_relists_total", (("kind", "etcd"),)): 2,
        ("masquerade_active", ()): 1,
        ("firewall_restored_total", ()): 3,
        ("host_restored_total", ()): 4,
        ("loop_lag_seconds_bucket", (("le", "0.25"),)): 6,
        ("loop_lag_seconds_count", ()): 6,
        ("loop_lag_seconds_sum", ()): 0.3,
        ("loop_lag_last_seconds", ()): 0.002,
        ("loop_lag_worst_seconds", ()): 0.25,
    }
    assert {key: values[key] for key in expected} == expected
    silent_peer = (("address", "192.0.2.2"), ("subnet", "10.244.2.0/24"))
    assert ("peer_last_heard_timestamp_seconds", silent_peer) not in values
    assert ("store_away_since_timestamp_seconds", (("kind", "etcd"),)) not in values
    assert {name: kinds[name.removesuffix("_total")] for name in METRICS if name.removesuffix("_total") in kinds} == {
        name: METRICS[name].kind for name in METRICS if name != "store_away_since_timestamp_seconds"
    }
    assert values["process_start_time_seconds", ()] < time.time()
    assert values["process_resident_memory_bytes", ()] > 1_000_000
    assert ("process_cpu_seconds_total", ()) in values


def test_a_store_that_is_away():
    status = full_status()
    status["store"] |= {"away_since": 1700000001.0, "trouble": "refused"}
    values, _ = read(status)
    assert values["store_up", (("kind", "etcd"),)] == 0
    assert values["store_away_since_timestamp_seconds", (("kind", "etcd"),)] == 1700000001


def test_a_reservation_ends_never():
    status = full_status()
    status["lease"]["expiration"] = None
    assert read(status)[0]["lease_expiration_timestamp_seconds", ()] == math.inf


def test_a_node_that_is_starting():
    values, _ = read({"state": "starting", "pid": 1, "version": "0.1.0", "compiled": False, "ready": False})
    assert ours(values) == {
        ("build_info", (("compiled", "false"), ("framing", ""), ("version", "0.1.0"))),
        ("ready", ()),
    }
    assert values["ready", ()] == 0


@pytest.mark.parametrize("value", [None, "absent"])
@pytest.mark.parametrize("key", sorted(full_status()))
def test_any_part_may_be_missing(key, value):
    status = full_status()
    del status[key]
    if value is None:
        status[key] = None
    values, _ = read(status)
    assert ours(values) <= ours(read(full_status())[0]) | {key for key in values if key[0] == "build_info"}


def test_a_store_and_batches_that_say_little():
    status = full_status() | {"store": {"kind": "static"}, "firewall": None}
    del status["outbound"]["batches"]["sum"]
    values, _ = read(status)
    assert not [key for key in values if key[0].startswith(("store_", "masquerade", "firewall"))]
    assert values["batch_packets_bucket", (("direction", "outbound"), ("le", "+Inf"))] == 9
    assert ("batch_packets_sum", (("direction", "outbound"),)) not in values


@given(text=st.text(st.characters(exclude_categories=["Cs", "Cc"])), number=st.integers(0, 2**53))
def test_labels_and_numbers_come_through(text, number):
    status = {"send_errors": {text: number}, "version": text}
    values, _ = read(status)
    assert values["send_errors_total", (("error", text),)] == number


def test_a_thousand_peers_are_cheap():
    status = full_status()
    status["peers"] = [
        peer(1, sent_packets=n, sent_bytes=n, received_packets=n, received_bytes=n, last_heard=1.7e9 + n)
        | {"subnet": f"10.{n >> 8}.{n & 255}.0/24"}
        for n in range(1000)
    ]
    used = min(_processor_seconds(lambda: render(status)) for _ in range(3))
    assert used < 0.1
    assert len(read(status)[0]) > 5000


def _processor_seconds(function):
    begun = time.thread_time()
    function()
    return time.thread_time() - begun


def test_a_node_without_a_health_server_does_not_pay_for_it():
    code = "import sys; import dataplane.cli; print('prometheus_client' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
