"""Numbers of a run: buckets beside exact percentiles, what a trace holds, and JSON that is right or told to be wrong."""

import json
import math
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packets import echo, tcp, udp
from scapy.layers.inet6 import UDP as UDP6
from scapy.layers.inet6 import IPv6, IPv6ExtHdrFragment, IPv6ExtHdrHopByHop
from scapy.packet import Raw

from bench.replay import results
from bench.replay.chunk import Chunk
from bench.replay.results import (
    SIZES,
    Delivery,
    Histogram,
    Latency,
    Lateness,
    Loop,
    Pacing,
    ResultError,
    Run,
    Stage,
    Trace,
    TraceCounter,
)

VALUES = st.one_of(st.integers(0, 300), st.integers(0, 10**7), st.integers(0, (1 << 63) - 1))


def histogram_of(values) -> Histogram:
    histogram = Histogram()
    for value in values:
        histogram.record(value)
    return histogram


@given(values=st.lists(VALUES, min_size=1, max_size=50), percent=st.sampled_from([0, 1, 50, 90, 99, 99.9, 100]))
def test_a_percentile_is_never_below_the_exact_one_and_little_above(values, percent):
    exact = sorted(values)[max(math.ceil(percent * len(values) / 100), 1) - 1]
    found = histogram_of(values).percentile(percent)
    assert exact <= found
    assert found - exact <= exact * Histogram.RELATIVE_ERROR
    if exact < 256:
        assert found == exact


@given(values=st.lists(VALUES, min_size=1, max_size=50))
def test_count_mean_and_maximum_are_exact(values):
    histogram = histogram_of(values)
    assert (histogram.count, histogram.maximum) == (len(values), max(values))
    assert histogram.mean == pytest.approx(sum(values) / len(values))
    assert histogram.percentile(100) == max(values)


@given(a=st.lists(VALUES, max_size=30), b=st.lists(VALUES, max_size=30))
def test_two_histograms_add_up(a, b):
    together, at_once = histogram_of(a), Histogram()
    together.add(histogram_of(b))
    at_once.record_all(iter(a + b))
    for one in (together, at_once):
        assert list(one.buckets()) == list(histogram_of(a + b).buckets())
        assert (one.count, one.total, one.maximum) == (len(a + b), sum(a + b), max(a + b, default=0))


def test_buckets_follow_each_other_without_gaps():
    indices = range(len(Histogram()._buckets))
    uppers = [Histogram._upper(index) for index in indices]
    assert uppers == sorted(set(uppers))
    assert uppers[-1] == (1 << 63) - 1
    lowers = [0, *(upper + 1 for upper in uppers[:-1])]
    assert [Histogram._index(upper) for upper in uppers] == list(indices)
    assert [Histogram._index(lower) for lower in lowers] == list(indices)


def test_the_rank_is_the_nearest_one_above():
    histogram = Histogram()
    histogram.record(1, 40_959)
    histogram.record(200, 41)
    assert histogram.percentile(99.9) == 1  # though in floats 99.9 % are 40 959.00000000001
    assert histogram.percentile(99.91) == 200


def test_memory_does_not_grow():
    histogram = Histogram()
    size = len(histogram._buckets)
    histogram.record_all([0, 1 << 20, 1 << 40, (1 << 63) - 1, 1 << 70])
    assert len(histogram._buckets) == size < 7500
    assert histogram.maximum == (1 << 63) - 1


def test_an_empty_histogram_is_all_zero():
    histogram = Histogram()
    assert (histogram.percentile(99), histogram.mean, list(histogram.buckets())) == (0, 0.0, [])
    assert Latency.of(histogram).max_microseconds == 0


def test_a_negative_number_is_a_defect():
    with pytest.raises(ValueError, match="-1"):
        Histogram().record(-1)


# --- the trace


def ipv6(*layers) -> bytes:
    packet = IPv6(src="fd00::1", dst="fd00::2")
    for layer in layers:
        packet /= layer
    return bytes(packet)


PACKETS = [
    tcp(), tcp(version=6), udp(), udp(version=6), echo(), udp(payload=b"x" * 1400), udp(payload=b"x" * 3000),
    ipv6(IPv6ExtHdrHopByHop(), UDP6(), Raw(b"x")), ipv6(IPv6ExtHdrFragment(offset=9), Raw(b"x" * 9)),
    bytes(udp()[:20]), b"", b"\x45", b"\x60" * 39, b"\x75" * 50,
]  # fmt: skip


def chunks_of(packets: list[bytes], cut: int) -> list[Chunk]:
    found = []
    for start in range(0, len(packets), cut):
        chunk = Chunk(1 << 14)
        for i, packet in enumerate(packets[start : start + cut], start):
            chunk.append(packet, 10**18 + i * 10**9)
        found.append(chunk)
    return found


def trace_of(packets: list[bytes], cut: int = 100) -> Trace:
    counter = TraceCounter()
    for chunk in chunks_of(packets, cut):
        counter.add(chunk)
    return counter.trace("a.pcap", {"truncated": 2})


def test_a_trace_is_counted():
    trace = trace_of(PACKETS)
    assert (trace.name, trace.packets, trace.inner_bytes) == ("a.pcap", len(PACKETS), sum(map(len, PACKETS)))
    assert trace.duration_seconds == len(PACKETS) - 1
    assert trace.packets_skipped_by_reason == {"truncated": 2}
    assert trace.packets_by_protocol == {
        "IPv4 TCP": 1, "IPv6 TCP": 1, "IPv4 UDP": 4, "IPv6 UDP": 2, "IPv4 ICMP": 1, "IPv6 later fragment": 1, "not IP": 4,
    }  # fmt: skip
    assert next(iter(trace.packets_by_protocol)) == "IPv4 UDP"  # the most frequent


def test_sizes_belong_to_the_class_whose_upper_end_they_do_not_exceed():
    lengths = [1, 64, 65, 128, 129, 1280, 1281, 1518, 1519, 9000]
    sizes = trace_of([b"\x75" * length for length in lengths]).packets_by_size_bytes
    assert sizes == {"64": 2, "128": 2, "256": 1, "512": 0, "1024": 0, "1280": 1, "1518": 2, "larger": 2}
    assert list(sizes) == [*map(str, SIZES), "larger"]


@pytest.mark.parametrize("cut", [1, 3, 5])
def test_how_a_trace_is_cut_into_chunks_makes_no_difference(cut):
    assert trace_of(PACKETS, cut) == trace_of(PACKETS)


def test_the_fingerprint_is_of_lengths_and_protocols_in_their_order():
    fingerprint = trace_of(PACKETS).fingerprint
    assert trace_of(PACKETS[::-1]).fingerprint != fingerprint
    assert trace_of(PACKETS[:-1]).fingerprint != fingerprint
    assert trace_of([tcp(3, 1), *PACKETS[1:]]).fingerprint == fingerprint  # other addresses
    same_length = udp(payload=b"x" * (len(tcp()) - 28))
    assert trace_of([same_length, *PACKETS[1:]]).fingerprint != fingerprint


def test_a_trace_of_nothing():
    trace = trace_of([])
    assert (trace.packets, trace.inner_bytes, trace.duration_seconds, trace.packets_by_protocol) == (0, 0, 0, {})


# --- JSON


def made_run(**changes) -> Run:
    run = Run(
        mode="memory",
        command=["pyflannel-dp", "replay", "a.pcap"],
        machine={"cpu": "A CPU", "cores": 2},
        settings={"framing": "vxlan", "mtu": 1450, "seed": -3, "spin": 0.5, "checksums": True, "limit": None},
        trace=trace_of(PACKETS),
        loops=[Loop(1000, 64000, 0.5), Loop(1000, 64000, 0.25), Loop(1000, 64000, 1.0)],
        delivery=Delivery(sent=3000, delivered=2999, lost=1, reordered=0),
        pacing=Pacing("as captured", Lateness(1.5, 2.5, 3.5)),
        stages=[Stage("read", 12.5, 40.0), Stage("lookup", 30)],
        latency=Latency.of(histogram_of(range(0, 100_000, 7))),
        verdicts={"outbound": {"forwarded": 2999, "too_big": 1}, "inbound": {"forwarded": 2999}},
        notes=["one thing"],
    )
    return replace(run, **changes)


def test_a_run_survives_json(tmp_path):
    run = made_run()
    results.write_json(tmp_path / "run.json", run)
    assert results.read_json(tmp_path / "run.json") == run
    bare = made_run(stages=[], latency=None, verdicts={}, notes=[], pacing=Pacing("as fast as possible"), loops=[])
    assert results.from_json(results.to_json(bare)) == bare


def test_rates_are_medians_and_stand_in_the_file_for_others():
    content = json.loads(results.to_json(made_run()))
    assert content["median_packets_per_second"] == 2000
    assert content["median_bits_per_second"] == 8 * 128000
    assert [one["packets_per_second"] for one in content["loops"]] == [2000, 4000, 1000]
    assert Loop(0, 0, 0.0).packets_per_second == Loop(0, 0, 0.0).bits_per_second == 0
    assert made_run(loops=[]).median_packets_per_second == 0


def test_every_number_in_the_file_has_its_unit_in_its_name():
    content = json.loads(results.to_json(made_run()))
    units = ("seconds", "_bytes", "_per_second", "_per_packet", "nanoseconds", "packets", "by_size_bytes", "error")
    counts = {"version", "sent", "delivered", "lost", "reordered", "corrupted"}

    def walk(part, path=""):
        for name, value in part.items():
            if name in {"machine", "settings", "verdicts"} or name.startswith("packets_"):
                continue
            if isinstance(value, dict):
                walk(value)
            elif isinstance(value, int | float):
                assert name in counts or name.endswith(units), name
            elif isinstance(value, list) and value and isinstance(value[0], dict):
                walk(value[0])

    walk(content)


def test_derived_numbers_in_a_file_are_not_believed():
    content = json.loads(results.to_json(made_run()))
    content["median_packets_per_second"] = 1e12
    content["loops"][0]["packets_per_second"] = "fast"
    content["later"] = "addition"
    assert results.from_json(json.dumps(content)) == made_run()


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("mode",), 5, "mode: a text is wanted, not 5"),
        (("trace", "packets"), "many", 'trace.packets: a whole number of at least 0 is wanted, not "many"'),
        (("trace", "packets"), 1.5, "trace.packets: a whole number of at least 0 is wanted, not 1.5"),
        (("trace", "packets"), -1, "trace.packets: a whole number of at least 0 is wanted, not -1"),
        (("trace", "packets"), True, "trace.packets: a whole number of at least 0 is wanted, not true"),
        (("trace", "packets_by_protocol", "IPv4 TCP"), None, "trace.packets_by_protocol.IPv4 TCP: a whole number"),
        (("loops", 1, "seconds"), math.nan, "loops[1].seconds: a number of at least 0 is wanted, not NaN"),
        (("loops", 1, "seconds"), math.inf, "loops[1].seconds: a number of at least 0 is wanted, not Infinity"),
        (("loops", 1, "seconds"), 10**400, "loops[1].seconds: a number of at least 0 is wanted, not 1000"),
        (("loops",), {}, "loops: a list is wanted, not {}"),
        (("loops", 0), [], "loops[0]: an object is wanted, not []"),
        (("latency", "buckets_nanoseconds", 0), [1], "latency.buckets_nanoseconds[0]: a list of 2 is wanted, not [1]"),
        (("latency", "buckets_nanoseconds", 0), [1, "x"], "latency.buckets_nanoseconds[0][1]: a whole number"),
        (("latency",), "x" * 100, 'latency: an object is wanted, not "' + "x" * 56 + "..."),
        (("settings", "mtu"), [], "settings.mtu: a text, a number, true, false or null is wanted, not []"),
        (("settings", "mtu"), math.nan, "settings.mtu: a text, a number"),
        (("verdicts", "outbound"), 3, "verdicts.outbound: an object is wanted, not 3"),
        (("delivery", "lost"), "x", 'delivery.lost: a whole number of at least 0 is wanted, not "x"'),
        (("stages", 0, "cycles_per_packet"), "x", "stages[0].cycles_per_packet: a number"),
    ],
)
def test_what_is_wrong_is_told_by_its_path(path, value, said):
    content = json.loads(results.to_json(made_run()))
    part = content
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    with pytest.raises(ResultError) as error:
        results.from_json(json.dumps(content))
    assert str(error.value).startswith(said)


@pytest.mark.parametrize(
    "path", [("mode",), ("trace", "fingerprint"), ("loops", 0, "seconds"), ("pacing", "lateness"), ("latency",)]
)
def test_what_is_missing_is_told_by_its_path(path):
    content = json.loads(results.to_json(made_run()))
    part = content
    for name in path[:-1]:
        part = part[name]
    del part[path[-1]]
    with pytest.raises(ResultError, match=rf"^{path[0]}.*{path[-1]} is missing|^{path[0]} is missing"):
        results.from_json(json.dumps(content))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not the result of a replay"),
        ('{"ratios": {}}', "not the result of a replay"),
        ('{"format": "pyflannel-dp replay", "version": 2}', "version 2 of the format; this program knows version 1"),
    ],
)
def test_another_file_is_told(text, said):
    with pytest.raises(ResultError, match=said):
        results.from_json(text)


def test_errors_name_the_file(tmp_path):
    with pytest.raises(ResultError, match=r"none\.json: No such file"):
        results.read_json(tmp_path / "none.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ResultError, match=r"bytes\.json: not text"):
        results.read_json(tmp_path / "bytes.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ResultError, match=r"list\.json: not the result"):
        results.read_json(tmp_path / "list.json")


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)


@settings(max_examples=30)
@given(
    value=st.recursive(
        SCALARS, lambda one: st.lists(one, max_size=3) | st.dictionaries(st.text(max_size=5), one, max_size=3)
    )
)
def test_any_value_in_any_place_is_read_or_refused(value):
    content = json.loads(results.to_json(made_run()))
    for name in list(content):
        if name not in {"format", "version"}:
            with suppress(ResultError):
                results.from_json(json.dumps(content | {name: value}))


def test_a_number_that_is_not_finite_is_not_written():
    with pytest.raises(ValueError, match="JSON"):
        results.to_json(made_run(stages=[Stage("read", math.nan)]))
