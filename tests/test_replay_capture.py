"""The reader of captures and what finds the packet in a record; real tools write the files and say what is in them."""

import gc
import gzip
import io
import itertools
import json
import os
import shutil
import struct
import subprocess
import sys
import threading
import tracemalloc

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from packets import echo, tcp, udp
from scapy.layers.inet import IP, UDP, IPOption
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import ARP, Ether
from scapy.layers.vxlan import VXLAN
from scapy.packet import Raw
from scapy.utils import RawPcapWriter

from bench.replay import capture
from bench.replay.capture import EARLIEST, LATEST, CaptureError, Record, probe, read, read_all
from bench.replay.linklayer import MEANING, Datagram, Unusable, encapsulated, inner_packet
from dataplane import pcapng

TIME = 1_700_000_000_123_456_789
FRAMES = [bytes(Ether() / IP(udp(payload=b"x" * size))) for size in (0, 18, 700, 1400)] + [
    bytes(Ether() / ARP()),
    bytes(Ether() / IPv6(tcp(version=6))),
]

needs_wireshark = pytest.mark.skipif(shutil.which("tshark") is None, reason="needs tshark, editcap and mergecap")
needs_tcpdump = pytest.mark.skipif(shutil.which("tcpdump") is None, reason="needs tcpdump")
needs_zstd = pytest.mark.skipif(shutil.which("zstd") is None, reason="needs zstd")


def run(*command: object) -> bytes:
    done = subprocess.run([*map(str, command)], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def whole(path) -> list[Record]:
    """The records of a file that nothing is wrong with."""
    said: list[str] = []
    records = list(read(path, said.append))
    assert said == []
    return records


def tolerant(path) -> tuple[list[Record], list[str]]:
    said: list[str] = []
    return list(read(path, said.append)), said


def seen_by_tshark(path) -> list[tuple[int | None, int, bytes]]:
    """Time, length on the wire and data of each packet, as tshark reads them."""
    fields = ["-T", "fields", "-e", "frame.time_epoch", "-e", "frame.len"]
    rows = [line.split("\t") for line in run("tshark", "-n", "-r", path, *fields).decode().splitlines()]
    frames = json.loads(run("tshark", "-n", "-r", path, "-T", "jsonraw", "-j", "frame"))
    found = []
    for (time, length), frame in zip(rows, frames, strict=True):
        seconds, _, fraction = time.partition(".")
        time_ns = int(seconds) * 10**9 + int(fraction.ljust(9, "0")[:9]) if time else None
        found.append((time_ns, int(length), bytes.fromhex(frame["_source"]["layers"]["frame_raw"][0])))
    return found


def as_tshark(path) -> list[Record]:
    """Read a file and compare with tshark."""
    records = whole(path)
    assert [(record.time_ns, record.original_length, record.data) for record in records] == seen_by_tshark(path)
    return records


# --- writing files by hand


def pcap(frames, *, order="<", magic=0xA1B2C3D4, unit=1000, link_type=1, version=(2, 4), original=None) -> bytes:
    parts = [struct.pack(order + "IHHiIII", magic, *version, 0, 0, 65535, link_type)]
    for number, frame in enumerate(frames):
        seconds, nanoseconds = divmod(TIME + number * 1000, 10**9)
        header = (seconds, nanoseconds // unit, len(frame), original or len(frame))
        parts += [struct.pack(order + "IIII", *header), frame]
    return b"".join(parts)


def block(kind: int, body: bytes, order: str = "<") -> bytes:
    body += bytes(-len(body) % 4)
    total = struct.pack(order + "I", len(body) + 12)
    return struct.pack(order + "I", kind) + total + body + total


def section(order: str = "<", version=(1, 0), length: int = -1) -> bytes:
    return block(0x0A0D0D0A, struct.pack(order + "IHHq", 0x1A2B3C4D, *version, length), order)


def option(code: int, value: bytes, order: str = "<") -> bytes:
    return struct.pack(order + "HH", code, len(value)) + value + bytes(-len(value) % 4)


def interface(link_type: int = 1, snaplen: int = 0, options: bytes = b"", order: str = "<") -> bytes:
    return block(1, struct.pack(order + "HHI", link_type, 0, snaplen) + options, order)


def enhanced(ticks: int, data: bytes, number: int = 0, original: int | None = None, order: str = "<", more=b"") -> bytes:
    length = len(data) if original is None else original
    header = struct.pack(order + "IIIII", number, ticks >> 32, ticks & 0xFFFFFFFF, len(data), length)
    return block(6, header + data + bytes(-len(data) % 4) + more, order)


def simple(data: bytes, original: int | None = None, order: str = "<") -> bytes:
    return block(3, struct.pack(order + "I", len(data) if original is None else original) + data, order)


def obsolete(ticks: int, data: bytes, number: int = 0, order: str = "<") -> bytes:
    header = struct.pack(order + "HHIIII", number, 7, ticks >> 32, ticks & 0xFFFFFFFF, len(data), len(data))
    return block(2, header + data, order)


NANOSECONDS = option(9, b"\x09") + option(0, b"")
BLOCKS = [
    section(), interface(), interface(101, 0, NANOSECONDS), enhanced(TIME // 1000, b"first"),
    block(4, bytes(4)), simple(b"second, simple"), enhanced(TIME, b"third", 1, 99, more=option(1, b"hm")),
    obsolete(TIME, b"fourth", 1), section(">"), interface(113, order=">"),
    enhanced(TIME // 1000, b"fifth", order=">"), block(0x12345, b"unknown", ">"), simple(b"", order=">"),
]  # fmt: skip
PCAPNG = b"".join(BLOCKS)
PCAPNG_RECORDS = [
    Record(TIME // 1000 * 1000, b"first", 5, 1),
    Record(TIME // 1000 * 1000, b"second, simple", 14, 1),
    Record(TIME, b"third", 99, 101),
    Record(TIME, b"fourth", 6, 101),
    Record(TIME // 1000 * 1000, b"fifth", 5, 113),
    Record(TIME // 1000 * 1000, b"", 0, 113),
]
PCAP = pcap([b"first", b"", b"a third one"])
PCAP_RECORDS = [
    Record((TIME + number * 1000) // 1000 * 1000, data, len(data), 1)
    for number, data in enumerate([b"first", b"", b"a third one"])
]


@pytest.fixture
def put(tmp_path):
    def write(data: bytes, name: str = "capture"):
        path = tmp_path / name
        path.write_bytes(data)
        return path

    return write


# --- pcap


@pytest.mark.parametrize("nano", [False, True])
@pytest.mark.parametrize("order", ["<", ">"])
@needs_wireshark
def test_scapys_files_of_every_magic(tmp_path, order, nano):
    path = tmp_path / "a.pcap"
    with RawPcapWriter(str(path), linktype=1, endianness=order, nano=nano, sync=True) as writer:
        writer.write_header(None)
        for number, frame in enumerate(FRAMES):
            fraction = (123_456_789 if nano else 123_456) + number
            writer.write_packet(frame, sec=1_700_000_000, usec=fraction, caplen=len(frame), wirelen=len(frame))
    records = as_tshark(path)
    assert [record.data for record in records] == FRAMES
    assert {record.link_type for record in records} == {1}
    unit = 1 if nano else 1000
    assert [record.time_ns % 1_000_000_000 for record in records] == [
        ((123_456_789 if nano else 123_456) + number) * unit for number in range(len(FRAMES))
    ]


@pytest.mark.parametrize(("magic", "unit"), [(0xA1B2C3D4, 1000), (0xA1B23C4D, 1)])
@pytest.mark.parametrize("order", ["<", ">"])
@needs_wireshark
def test_files_by_hand_of_every_magic(put, order, magic, unit):
    records = as_tshark(put(pcap(FRAMES, order=order, magic=magic, unit=unit)))
    assert [record.time_ns for record in records] == [
        (TIME + number * 1000) // unit * unit for number in range(len(FRAMES))
    ]


@pytest.mark.parametrize("bits", [0x1400_0000, 0x0400_0000, 0xF400_0000, 0x03FF_0000])
def test_bits_above_the_link_type_are_not_part_of_it(put, bits):
    assert [record.link_type for record in whole(put(pcap([b"x"], link_type=bits | 113)))] == [113]


@needs_tcpdump
@pytest.mark.parametrize("precision", ["micro", "nano"])
@needs_wireshark
def test_what_tcpdump_writes(put, tmp_path, precision):
    source = put(pcap(FRAMES, magic=0xA1B23C4D, unit=1))
    run("tcpdump", "-r", source, f"--time-stamp-precision={precision}", "-w", tmp_path / "b.pcap")
    assert len(as_tshark(tmp_path / "b.pcap")) == len(FRAMES)


@pytest.mark.parametrize("form", ["pcap", "nsecpcap", "pcapng"])
@needs_wireshark
def test_what_editcap_writes(put, tmp_path, form):
    source = put(pcap(FRAMES, magic=0xA1B23C4D, unit=1))
    run("editcap", "-F", form, source, tmp_path / "b")
    records = as_tshark(tmp_path / "b")
    assert [record.data for record in records] == FRAMES


@pytest.mark.parametrize("form", ["pcap", "pcapng"])
@needs_wireshark
def test_a_snap_length_shows_in_the_lengths(put, tmp_path, form):
    run("editcap", "-F", form, "-s", 40, put(pcap(FRAMES)), tmp_path / "b")
    records = as_tshark(tmp_path / "b")
    assert [(record.data, record.original_length) for record in records] == [(frame[:40], len(frame)) for frame in FRAMES]


@needs_wireshark
def test_what_tshark_writes(put, tmp_path):
    run("tshark", "-n", "-r", put(pcap(FRAMES)), "-w", tmp_path / "b")
    assert [record.data for record in as_tshark(tmp_path / "b")] == FRAMES


# --- pcapng


@needs_wireshark
def test_what_mergecap_makes_of_two_link_types(put, tmp_path):
    raw = put(pcap([udp(), tcp(version=6)], link_type=101, magic=0xA1B23C4D, unit=1), "raw")
    run("mergecap", "-w", tmp_path / "both", put(pcap(FRAMES), "ethernet"), raw)
    records = as_tshark(tmp_path / "both")
    assert sorted(record.link_type for record in records) == [1] * len(FRAMES) + [101, 101]


@needs_wireshark
def test_our_own_captures(tmp_path):
    with open(tmp_path / "a", "wb") as file:
        writer = pcapng.Writer(file, application="test", snaplen=60)
        device = writer.add_interface("flannel.1", pcapng.LINKTYPE_RAW, "a device")
        wire = writer.add_interface("eth0", pcapng.LINKTYPE_ETHERNET)
        for number, frame in enumerate(FRAMES):
            writer.packet((device, wire)[number % 2], TIME + number, frame, outbound=True, comment="ä" * number)
    records = as_tshark(tmp_path / "a")
    assert [record.link_type for record in records] == [101, 1] * 3
    assert [record.time_ns for record in records] == [TIME + number for number in range(6)]


@needs_wireshark
def test_sections_interfaces_and_every_kind_of_packet(put):
    path = put(PCAPNG)
    assert whole(path) == PCAPNG_RECORDS
    theirs = seen_by_tshark(path)
    assert [(length, data) for _, length, data in theirs] == [(r.original_length, r.data) for r in PCAPNG_RECORDS]
    timed = [0, 2, 3, 4]  # tshark gives a Simple Packet Block no time
    assert [theirs[i][0] for i in timed] == [PCAPNG_RECORDS[i].time_ns for i in timed]


@pytest.mark.parametrize(
    ("resolution", "ticks", "time_ns"),
    [
        (None, TIME // 1000, TIME // 1000 * 1000),
        (0, 1_700_000_000, 1_700_000_000 * 10**9),
        (3, TIME // 10**6, TIME // 10**6 * 10**6),
        (9, TIME, TIME),
        (10, TIME * 10 + 9, TIME),
        (0x80 | 1, 3_400_000_001, 1_700_000_000_500_000_000),
        (0x80 | 10, (1_700_000_000 << 10) + 1, 1_700_000_000_000_976_562),
        (0x80 | 30, (1_700_000_000 << 30) + (1 << 29), 1_700_000_000_500_000_000),
    ],
)
@needs_wireshark
def test_every_resolution_of_time(put, resolution, ticks, time_ns):
    options = b"" if resolution is None else option(9, bytes([resolution])) + option(0, b"")
    record, again = as_tshark(put(section() + interface(options=options) + enhanced(ticks, b"x") + obsolete(ticks, b"y")))
    assert record.time_ns == again.time_ns == time_ns


@pytest.mark.parametrize(
    ("resolution", "ticks", "offset", "time_ns"),
    [
        (9, 5, 1_700_000_000, 1_700_000_000 * 10**9 + 5),
        (9, 5, -3, 5 - 3 * 10**9),
        (0, 2**64 - 1, 0, LATEST),
        (9, 2**64 - 1, 0, LATEST),
        (9, 2**63 - 1, 0, LATEST),
        (9, 0, -(2**63), EARLIEST),
        (0xFF, 2**64 - 1, 0, 0),
        (0x7F, 2**64 - 1, 7, 7 * 10**9),
    ],
)
@pytest.mark.parametrize("order", ["<", ">"])
def test_offsets_of_time_and_times_beyond_64_bits(put, order, resolution, ticks, offset, time_ns):
    options = option(9, bytes([resolution]), order) + option(14, struct.pack(order + "q", offset), order)
    head = section(order) + interface(options=options, order=order)
    data = head + enhanced(ticks, b"x", order=order) + obsolete(ticks, b"x", order=order) + simple(b"x", order=order)
    assert [record.time_ns for record in whole(put(data))] == [time_ns] * 3


def test_a_simple_packet_is_cut_by_the_snap_length(put):
    path = put(section() + interface(snaplen=4) + simple(b"1234", 9) + simple(b"123"))
    assert [(record.time_ns, record.data, record.original_length) for record in whole(path)] == [
        (0, b"1234", 9), (0, b"123", 3),
    ]  # fmt: skip


def test_a_new_section_has_none_of_the_interfaces_before(put):
    found, said = tolerant(put(section() + interface() + enhanced(1, b"x") + section() + enhanced(2, b"y")))
    assert [record.data for record in found] == [b"x"]
    assert said[0].endswith(
        f"offset {48 + 36 + 28}: a packet of interface 0, which the section does not describe; "
        "what is before that was read, what follows is left out"
    )


# --- compressed, several, and not from a disk


def gzipped(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


def zstandardized(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


COMPRESSORS = pytest.mark.parametrize("compress", [gzipped, zstandardized])


@COMPRESSORS
@pytest.mark.parametrize(("data", "records"), [(PCAP, PCAP_RECORDS), (PCAPNG, PCAPNG_RECORDS)], ids=["pcap", "pcapng"])
def test_compressed_files_are_told_by_their_content(put, compress, data, records):
    assert whole(put(compress(data), "capture.txt")) == records
    parts = [compress(data[at : at + 50]) for at in range(0, len(data), 50)]  # members, frames
    assert whole(put(b"".join(parts))) == records


def test_the_gzip_program(put):
    path = put(PCAP)
    run("gzip", path)
    assert whole(f"{path}.gz") == PCAP_RECORDS


@needs_zstd
@pytest.mark.parametrize("options", [["-1"], ["-19", "--check"], ["--long=27"]])
def test_the_zstd_program(put, options):
    data = pcap(FRAMES * 2000)
    path = put(data)
    run("zstd", *options, path)
    assert whole(f"{path}.zst") == whole(path)


@pytest.mark.skipif(shutil.which("pzstd") is None, reason="needs pzstd")
def test_pzstd_begins_with_a_frame_that_is_to_be_skipped(put):
    path = put(pcap(FRAMES))
    run("pzstd", "-q", path)
    with open(f"{path}.zst", "rb") as file:
        assert file.read(4) == b"\x50\x2a\x4d\x18"
    assert whole(f"{path}.zst") == whole(path)


@needs_wireshark
def test_what_scapy_compresses(tmp_path):
    path = tmp_path / "a.gz"
    with RawPcapWriter(str(path), linktype=101, gz=True, sync=False) as writer:
        writer.write([udp(), tcp(), echo()])
    assert [record.data for record in as_tshark(path)] == [udp(), tcp(), echo()]


def test_files_follow_each_other(put):
    paths = [put(PCAP, "a"), str(put(gzipped(PCAPNG), "b")), put(PCAP[:-1], "c"), put(PCAP, "d")]
    said = []
    found = list(read_all(paths, said.append))
    assert found == PCAP_RECORDS + PCAPNG_RECORDS + PCAP_RECORDS[:2] + PCAP_RECORDS
    assert len(said) == 1
    assert said[0].startswith(f"{paths[2]}: offset ")


def test_a_pipe(put, tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    data = pcap(FRAMES * 500)
    sender = threading.Thread(target=path.write_bytes, args=(data,))
    sender.start()
    probe(path)  # must not take anything out of it
    found = list(read(path, pytest.fail))
    sender.join()
    assert found == whole(put(data))


@pytest.mark.parametrize("data", [PCAP, gzipped(PCAP), zstandardized(PCAP)])
def test_a_pipe_that_drips(tmp_path, data):
    path = tmp_path / "pipe"
    os.mkfifo(path)

    def drip():
        with open(path, "wb", buffering=0) as file:
            for at in range(len(data)):
                file.write(data[at : at + 1])

    sender = threading.Thread(target=drip)
    sender.start()
    found = list(read(path, pytest.fail))
    sender.join()
    assert found == PCAP_RECORDS


@pytest.mark.parametrize("loaded", [1, 13, 100, 1000])
def test_where_a_piece_ends_makes_no_difference(put, monkeypatch, loaded):
    monkeypatch.setattr(capture, "_LOADED", loaded)
    monkeypatch.setattr(capture, "_ZSTD_PIECE", loaded)
    assert whole(put(PCAP)) == PCAP_RECORDS
    for data in (PCAPNG, gzipped(PCAPNG), zstandardized(PCAPNG)):
        assert whole(put(data)) == PCAPNG_RECORDS
    assert [record.data for record in whole(put(pcap(FRAMES)))] == FRAMES


def test_an_iterator_that_is_given_up_leaves_no_file_open(put):
    for data in (PCAP, gzipped(PCAP), zstandardized(PCAP)):
        records = read(put(data), pytest.fail)
        assert next(records) == PCAP_RECORDS[0]
        del records
    gc.collect()  # the descriptors are counted when the test is over


# --- memory


def peak(work) -> int:
    gc.collect()
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("compress", [bytes, gzipped, zstandardized])
def test_memory_does_not_grow_with_the_file(put, compress):
    path = put(compress(pcap([bytes(1400)] * 12_000)))

    def work():
        assert sum(1 for _ in read(path, pytest.fail)) == 12_000

    assert peak(work) < 4 << 20


@pytest.mark.parametrize("claimed", [0x7FFF_FFFC, 0xFFFF_FFFC, capture.LONGEST_BLOCK, capture.LONGEST_BLOCK + 4])
def test_a_length_takes_no_memory(put, claimed):
    head = section() + interface()
    for data in (
        head + struct.pack("<II", 6, claimed) + bytes(100),
        head + struct.pack("<II", 0xBAD, claimed) + bytes(100),
        head + struct.pack("<IIIIIII", 6, claimed, 0, 0, 0, claimed - 32, 0) + bytes(100),
        pcap([]) + struct.pack("<IIII", 0, 0, claimed, claimed) + bytes(100),
    ):
        path, said = put(data), []
        assert peak(lambda path=path, said=said: list(read(path, said.append))) < 2 << 20
        assert len(said) == 1
        assert f"{claimed} bytes" in said[0]


def test_little_zstd_may_not_become_much_at_once():
    data = zstandard.ZstdCompressor(level=19).compress(bytes(150 << 20))
    assert len(data) < 20_000
    with io.BufferedReader(io.BytesIO(data)) as file:  # type: ignore[arg-type]
        sizes = [len(part) for part in capture._unzstd(file)]
    assert sum(sizes) == 150 << 20
    assert max(sizes) <= (32 << 20) + capture._LOADED


# --- no captures


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "offset 0: the file is empty; capture again"),
        (b"\xd4\xc3", "offset 0: 2 bytes are no capture; give a pcap or pcapng file"),
        (b"hello, world", "offset 0: neither pcap nor pcapng: it begins with 68 65 6c 6c; .*editcap -F pcapng"),
        (pcap([])[:23], "offset 0: the file ends within the header of a pcap file, after 23 bytes; copy it or"),
        (pcap([], version=(2, 3)), "offset 0: version 2.3 of pcap, .*editcap"),
        (pcap([], version=(0x0200, 0x0400)), "version 512.1024 of pcap"),
        (section()[:11], "offset 0: the file ends within a block, after 11 bytes"),
        (section()[:27], "offset 0: the file ends within a block, after 27 of 28 bytes"),
        (section(version=(2, 0)), "version 2.0 of pcapng, where only 1 is known"),
        (
            section().replace(b"\x4d\x3c\x2b\x1a", b"ABCD"),
            "a section without a byte order: its magic number is 41 42 43 44",
        ),
        (block(0x0A0D0D0A, b"\x4d\x3c\x2b\x1a"), "a Section Header Block of 16 bytes, where 28 is the least"),
        (section()[:-4] + bytes(4), "a block of 28 bytes whose length is 0 at its end"),
        (gzipped(b""), "offset 0 of the unpacked data: the file is empty"),
        (gzipped(b"hello, world"), "offset 0 of the unpacked data: neither pcap nor"),
        (b"\x1f\x8b\x08\x00", "offset 0 of the unpacked data: the file cannot be read beyond"),
        (b"\x28\xb5\x2f\xfd", "offset 0 of the unpacked data: the compressed data ends early"),
        (b"\x28\xb5\x2f\xfd" + b"\xff" * 20, "offset 0 of the unpacked data: the file cannot be unpacked"),
    ],
)
def test_what_is_no_capture_is_refused_in_words(put, data, said):
    path = put(data)
    with pytest.raises(CaptureError, match=said) as caught:
        next(read(path, pytest.fail))
    assert str(caught.value).startswith(f"{path}: offset 0")
    with pytest.raises(CaptureError, match=said):
        probe(path)


@pytest.mark.parametrize("form", ["snoop", "modpcap"])
@needs_wireshark
def test_other_captures_are_refused_with_the_way_out(put, tmp_path, form):
    run("editcap", "-F", form, put(pcap(FRAMES)), tmp_path / "other")
    with pytest.raises(CaptureError, match="editcap -F pcapng OLD NEW"):
        next(read(tmp_path / "other", pytest.fail))


def test_files_that_cannot_be_opened(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CaptureError, match=r"cannot be opened: .*; name a file"):
            next(read(path, pytest.fail))
    with pytest.raises(CaptureError, match="No such file"):
        probe(tmp_path / "missing")


def test_without_the_zstandard_package(put, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(
        CaptureError, match=r"zstandard is not installed; pip install 'pyflannel-dp\[bench\]', or .*zstd -d"
    ):
        next(read(put(zstandardized(PCAP)), pytest.fail))


# --- damaged captures


def prefixes(records: list[Record], path, boundaries: set[int] | None, length: int) -> None:
    """Whatever was cut off, a prefix of `records` comes, and one message unless the cut is between two blocks."""
    try:
        found, said = tolerant(path)
    except CaptureError:
        return
    assert found == records[: len(found)]
    assert len(said) == (0 if boundaries is not None and length in boundaries else 1), said
    assert all(str(path) in text and "offset" in text for text in said)


def test_a_pcap_cut_at_every_offset(put):
    ends = [24, 24 + 21, 24 + 21 + 16, len(PCAP)]
    for length in range(len(PCAP)):
        path = put(PCAP[:length])
        if length < 24:
            with pytest.raises(CaptureError):
                tolerant(path)
            continue
        found, said = tolerant(path)
        assert found == PCAP_RECORDS[: sum(end <= length for end in ends) - 1]
        assert len(said) == (length not in ends)
        if said:
            assert f"{path}: offset {max(end for end in ends if end <= length)}: the file ends within" in said[0]


def test_a_pcapng_cut_at_every_offset(put):
    ends = list(itertools.accumulate(map(len, BLOCKS)))
    packets = [len(BLOCKS[i]) > 0 and struct.unpack_from("<>"[i >= 8] + "I", BLOCKS[i])[0] in {2, 3, 6} for i in range(13)]
    for length in range(len(PCAPNG)):
        path = put(PCAPNG[:length])
        if length < ends[0]:
            with pytest.raises(CaptureError):
                tolerant(path)
            continue
        found, said = tolerant(path)
        complete = sum(end <= length for end in ends)
        assert found == PCAPNG_RECORDS[: sum(packets[:complete])]
        assert len(said) == (length not in ends)
        if said:
            assert f"{path}: offset {ends[complete - 1]}: the file ends within a block" in said[0]


@COMPRESSORS
def test_a_compressed_file_cut_at_every_offset(put, compress):
    data = compress(PCAPNG)
    for length in range(len(data)):
        prefixes(PCAPNG_RECORDS, put(data[:length]), None, length)
    # What was unpacked before the cut is not lost: of gzip all but the check at the end is there.
    found, said = tolerant(put(data[:-1]))
    assert found == PCAPNG_RECORDS or compress is zstandardized
    assert len(said) == 1


@pytest.mark.parametrize("tail", [b"x", b"\x1f\x8b", b"\x28\xb5\x2f\xfd", bytes(3) + b"\xff" * 9])
@COMPRESSORS
def test_what_follows_compressed_data_and_is_none(put, compress, tail):
    found, said = tolerant(put(compress(PCAP) + tail))
    assert found == PCAP_RECORDS
    assert len(said) == 1
    assert f"offset {len(PCAP)} of the unpacked data: " in said[0]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (enhanced(1, b"x", number=2), "interface 2, which the section does not describe"),
        (obsolete(1, b"x", number=2), "interface 2, which the section does not describe"),
        (block(6, struct.pack("<IIIII", 0, 0, 0, 9, 9) + bytes(8)), "a packet of 9 bytes in a block with 8 for it"),
        (block(2, struct.pack("<IIIII", 0, 0, 0, 9, 9) + bytes(8)), "a packet of 9 bytes in a block with 8 for it"),
        (simple(b"12345678", 9), "a packet of 9 bytes in a block with 8 for it"),
        (enhanced(1, bytes(capture.LONGEST_PACKET + 1)), f"a packet of {capture.LONGEST_PACKET + 1} bytes in a block"),
        (block(6, bytes(16)), "a packet block of 28 bytes, where 32 is the least"),
        (block(3, b""), "a Simple Packet Block of 12 bytes, where 16 is the least"),
        (block(1, bytes(4)), "an? Interface Description Block of 16 bytes, where 20 is the least"),
        (interface(options=option(9, b"12")), "option 9 of an interface has 2 bytes"),
        (interface(options=option(14, b"12")), "option 14 of an interface has 2 bytes"),
        (interface(options=struct.pack("<HH", 2, 40)), "option 2 has 40 bytes, and its block 0 more"),
        (struct.pack("<II", 6, 8), "a block of 8 bytes, where a multiple of 4 from 12"),
        (struct.pack("<IIIIIIII", 6, 34, 0, 0, 0, 0, 0, 34) + bytes(8), "a block of 34 bytes, where a multiple of 4"),
        (enhanced(1, b"x")[:-4] + struct.pack("<I", 40), "a block of 36 bytes whose length is 40 at its end"),
        (block(0x0A0D0D0A, b"ABCD" + bytes(12)), "a section without a byte order"),
        (bytes(64), "a block of 0 bytes"),
    ],
)
def test_a_block_that_contradicts_itself_ends_the_file(put, bad, said):
    before = section() + interface() + interface() + enhanced(7, b"before")
    found, troubles = tolerant(put(before + bad + enhanced(8, b"after")))
    assert [record.data for record in found] == [b"before"]
    assert len(troubles) == 1
    assert f"offset {len(before)}: " in troubles[0]
    assert said.replace("an?", "a") in troubles[0]


def test_a_packet_that_no_capture_can_hold_ends_the_file(put):
    longest = capture.LONGEST_PACKET
    found, said = tolerant(put(pcap([b"x", bytes(longest), bytes(longest + 1), b"y"])))
    assert [len(record.data) for record in found] == [1, longest]
    assert f"a packet of {longest + 1} bytes, where {longest} is the most" in said[0]


def test_a_disk_that_fails_ends_the_file(put, monkeypatch):
    def failing(file):
        yield PCAP[:50]
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(capture, "_blocks", failing)
    found, said = tolerant(put(PCAP))
    assert found == PCAP_RECORDS[:1]
    assert "offset 45: the file cannot be read beyond this packet: [Errno 5] Input/output error" in said[0]


WELL = {"pcap": PCAP, "pcapng": PCAPNG, "gzip": gzipped(PCAPNG), "zstd": zstandardized(PCAPNG)}
CHANGES = st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 2), st.binary(min_size=1, max_size=4)), max_size=6)


def changed(data: bytes, changes) -> bytes:
    for at, how, new in changes:
        where = at % (len(data) + 1)
        end = where + (0, len(new), 4)[how]  # insert, overwrite, replace four bytes
        data = data[:where] + new + data[end:]
    return data


def bounded(path) -> None:
    """Nothing but CaptureError, an end, and records that keep their promises."""
    try:
        found, said = tolerant(path)
    except CaptureError:
        return
    assert len(said) <= 1
    for record in found:
        assert EARLIEST <= record.time_ns <= LATEST
        assert len(record.data) <= capture.LONGEST_PACKET
        assert isinstance(inner_packet(record), tuple | Unusable)


@pytest.mark.parametrize("kind", WELL)
def test_mutated_files_end_in_order(tmp_path_factory, kind):
    path = tmp_path_factory.mktemp("mutated") / "capture"

    @given(CHANGES)
    def mutate(changes):
        path.write_bytes(changed(WELL[kind], changes))
        bounded(path)

    mutate()


@pytest.mark.parametrize("magic", [PCAP[:24], PCAP[:4], section(), section() + interface(), PCAPNG[:4], b"\x1f\x8b", b""])
def test_random_bytes_end_in_order(tmp_path_factory, magic):
    path = tmp_path_factory.mktemp("random") / "capture"

    @given(st.binary(max_size=200))
    def follow(data):
        path.write_bytes(magic + data)
        bounded(path)

    follow()


@pytest.mark.parametrize("loaded", [7, 64])
def test_mutated_blocks_give_the_same_however_they_are_loaded(tmp_path_factory, monkeypatch, loaded):
    """The fast path and the careful path judge alike: with small pieces nearly all blocks take the careful one."""
    path = tmp_path_factory.mktemp("loaded") / "capture"

    def outcome() -> object:
        try:
            return tolerant(path)
        except CaptureError as error:
            return str(error)

    @given(CHANGES, st.sampled_from(["pcap", "pcapng"]))
    def mutate(changes, kind):
        path.write_bytes(changed(WELL[kind], changes))
        monkeypatch.setattr(capture, "_LOADED", 256 << 10)
        at_once = outcome()
        monkeypatch.setattr(capture, "_LOADED", loaded)
        assert outcome() == at_once

    mutate()


# --- the packet in a record


def of(link_type: int, data: bytes, original: int | None = None) -> Record:
    return Record(TIME, data, len(data) if original is None else original, link_type)


def packet_in(record: Record) -> bytes:
    found = inner_packet(record)
    assert isinstance(found, tuple), found
    offset, length = found
    return record.data[offset : offset + length]


V4, V6 = udp(), tcp(version=6)
MACS = bytes.fromhex("020000000002020000000001")


def ethernet(ethertypes: list[int], packet: bytes) -> bytes:
    """A frame with a tag for each ethertype but the last."""
    return MACS + b"\0\x07".join(struct.pack("!H", one) for one in ethertypes) + packet


def cooked(protocol: int) -> bytes:
    return struct.pack("!HHH8sH", 0, 1, 6, bytes(8), protocol)


def cooked_2(protocol: int) -> bytes:
    return struct.pack("!HHIHBB8s", protocol, 0, 3, 1, 0, 6, bytes(8))


LINKS = [
    (1, ethernet([0x0800], V4), V4),
    (1, ethernet([0x86DD], V6), V6),
    (1, ethernet([0x8100, 0x0800], V4), V4),
    (1, ethernet([0x88A8, 0x8100, 0x86DD], V6), V6),
    (1, ethernet([0x9100, 0x9100, 0x88A8, 0x8100, 0x0800], V4), V4),
    (101, V4, V4), (101, V6, V6),
    (228, V4, V4), (229, V6, V6),
    (113, cooked(0x0800) + V4, V4), (113, cooked(0x86DD) + V6, V6),
    (276, cooked_2(0x0800) + V4, V4), (276, cooked_2(0x86DD) + V6, V6),
    *[(0, struct.pack(order + "I", 2) + V4, V4) for order in "<>"],
    *[(0, struct.pack(order + "I", family) + V6, V6) for order in "<>" for family in (24, 28, 30)],
    (108, struct.pack(">I", 2) + V4, V4), (108, struct.pack(">I", 24) + V6, V6),
]  # fmt: skip
OURS_ALONE = [
    (12, V4, V4), (14, V6, V6),  # tshark takes 12 and 14 for other things: they have other meanings elsewhere
    *[(0, struct.pack(order + "I", 10) + V6, V6) for order in "<>"],  # Linux's AF_INET6
    (113, cooked(0x8100) + b"\0\x07\x08\0" + V4, V4),
    (276, cooked_2(0x88A8) + b"\0\x07\x86\xdd" + V6, V6),
]  # fmt: skip


@pytest.mark.parametrize(("link_type", "data", "packet"), LINKS + OURS_ALONE)
def test_the_packet_of_every_link_type(link_type, data, packet):
    assert packet_in(of(link_type, data)) == packet
    assert packet_in(of(link_type, data + b"padding, and FCS")) == packet


@pytest.mark.parametrize(("link_type", "data", "packet"), LINKS)
@needs_wireshark
def test_tshark_sees_the_same_packet(put, link_type, data, packet):
    path = put(pcap([data + bytes(6)], link_type=link_type))
    (record,) = whole(path)
    frames = json.loads(run("tshark", "-n", "-r", path, "-T", "jsonraw"))
    layers = frames[0]["_source"]["layers"]
    _, offset, _, _, _ = layers["ip_raw" if packet == V4 else "ipv6_raw"]
    assert inner_packet(record) == (offset, len(packet))


@pytest.mark.parametrize(("link_type", "data", "packet"), LINKS + OURS_ALONE)
def test_the_snap_length_may_cut_padding_but_not_the_packet(link_type, data, packet):
    padded = data + bytes(10)
    for length in range(len(padded)):
        found = inner_packet(of(link_type, padded[:length], len(padded)))
        assert isinstance(found, tuple) == (length >= len(data)), length
        if length < len(data):
            assert found == Unusable.CUT, length
            assert inner_packet(of(link_type, padded[:length])) == Unusable.MALFORMED


@needs_wireshark
def test_what_editcap_cuts_is_cut(put, tmp_path):
    run("editcap", "-s", 60, put(pcap(FRAMES)), tmp_path / "b")
    found = [inner_packet(record) for record in whole(tmp_path / "b")]
    assert found == [(14, 28), (14, 46), Unusable.CUT, Unusable.CUT, Unusable.NOT_IP, Unusable.CUT]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (of(1, bytes(Ether() / ARP())), Unusable.NOT_IP),
        (of(1, MACS + b"\x00\x26\x42\x42\x03" + bytes(40)), Unusable.NOT_IP),  # 802.3 with LLC: spanning tree
        (of(1, ethernet([0x8100, 0x0806], bytes(28))), Unusable.NOT_IP),
        (of(1, ethernet([0x8847], V4)), Unusable.NOT_IP),
        (of(101, b"\x50" + bytes(40)), Unusable.NOT_IP),
        (of(0, struct.pack("<I", 23) + V6), Unusable.NOT_IP),
        (of(108, struct.pack("<I", 2) + V4), Unusable.NOT_IP),
        (of(113, cooked(0x0004) + V4), Unusable.NOT_IP),
        (of(105, V4), Unusable.UNKNOWN_LINK_TYPE),
        (of(1, ethernet([0x0800], V6)), Unusable.MALFORMED),
        (of(1, ethernet([0x86DD], V4)), Unusable.MALFORMED),
        (of(228, V6), Unusable.MALFORMED),
        (of(229, V4), Unusable.MALFORMED),
        (of(101, b""), Unusable.MALFORMED),
        (of(1, MACS + b"\x08"), Unusable.MALFORMED),
        (of(101, V4[:-1]), Unusable.MALFORMED),
        (of(101, V4[:-2], len(V4) - 1), Unusable.MALFORMED),  # cut, but it never was as long as it says
        (of(101, b"\x44" + V4[1:]), Unusable.MALFORMED),
        (of(101, V4[:2] + b"\0\x13" + V4[4:]), Unusable.MALFORMED),
        (of(101, V4[:2] + b"\0\0" + V4[4:]), Unusable.MALFORMED),
        (of(101, V6[:4] + b"\0\0\0\x40" + V6[8:]), Unusable.MALFORMED),  # jumbogram
    ],
)
def test_what_is_not_usable_has_its_reason(record, reason):
    assert inner_packet(record) == reason


def test_every_reason_has_a_phrase():
    assert set(MEANING) == set(Unusable)


@given(st.sampled_from([0, 1, 12, 14, 101, 108, 113, 228, 229, 276, 7]), st.binary(max_size=100), st.integers(0, 200))
def test_nothing_in_a_record_raises(link_type, data, original):
    found = inner_packet(Record(0, data, original, link_type))
    if isinstance(found, tuple):
        offset, length = found
        assert 0 <= offset < offset + length <= len(data)
        encapsulated(data, offset, length)


# --- overlay datagrams


def outer(payload: bytes, version: int = 4, dport: int = 8472, **fields) -> bytes:
    header = IP(src="192.0.2.1", dst="192.0.2.2", **fields) if version == 4 else IPv6(src="2001:db8::1", dst="2001:db8::2")
    return bytes(header / UDP(sport=40000, dport=dport) / Raw(payload))


INNER_FRAME = bytes(VXLAN(vni=1, flags=8) / Ether() / IP(V4))


@pytest.mark.parametrize(
    ("packet", "framing", "payload"),
    [
        (outer(INNER_FRAME), "vxlan", INNER_FRAME),
        (outer(INNER_FRAME, 6), "vxlan", INNER_FRAME),
        (outer(INNER_FRAME, dport=4789), "vxlan", INNER_FRAME),
        (outer(INNER_FRAME, options=[IPOption(b"\x94\x04\0\0")]), "vxlan", INNER_FRAME),
        (outer(V4, dport=8285), "ip", V4),
        (outer(V6, 6, dport=8285), "ip", V6),
        (outer(b""), "vxlan", b""),
    ],
)
@pytest.mark.parametrize("tag", [[], [0x8100]])
def test_a_datagram_of_an_overlay_and_its_payload(packet, framing, payload, tag):
    data = ethernet([*tag, 0x0800 if packet[0] >> 4 == 4 else 0x86DD], packet) + bytes(5)
    found = inner_packet(of(1, data))
    assert isinstance(found, tuple)
    datagram = encapsulated(data, *found)
    assert datagram is not None
    assert datagram.framing == framing
    assert data[datagram.offset : datagram.offset + datagram.length] == payload


def test_the_ports_may_be_others():
    packet = outer(V4, dport=9999)
    assert encapsulated(packet, 0, len(packet)) is None
    assert encapsulated(packet, 0, len(packet), vxlan_ports={9999}) == Datagram("vxlan", 28, len(V4))
    assert encapsulated(packet, 0, len(packet), ip_ports=[9999]) == Datagram("ip", 28, len(V4))


@pytest.mark.parametrize(
    "packet",
    [
        tcp(), tcp(version=6), udp(), V4,
        outer(INNER_FRAME, flags="MF"), outer(INNER_FRAME, frag=3),
        outer(INNER_FRAME)[:20], outer(INNER_FRAME)[:27],
        outer(INNER_FRAME)[:24] + b"\0\x07" + outer(INNER_FRAME)[26:],
        outer(INNER_FRAME)[:24] + b"\xff\xff" + outer(INNER_FRAME)[26:],
    ],
)  # fmt: skip
def test_what_is_no_datagram_of_an_overlay(packet):
    assert encapsulated(packet, 0, len(packet)) is None
