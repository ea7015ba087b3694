"""The pcapng writer, judged by tshark, capinfos and scapy's reader."""

import io
import shutil
import struct
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packets import echo, tcp, udp
from scapy.utils import RawPcapNgReader

from dataplane import pcapng

TIME = 1_700_000_000_123_456_789

needs_tshark = pytest.mark.skipif(shutil.which("tshark") is None, reason="needs tshark")


def read(data: bytes) -> list:
    """Each packet and what scapy says about it."""
    reader = RawPcapNgReader(io.BytesIO(data))
    found = []
    while True:
        try:
            found.append(reader._read_packet())
        except EOFError:
            return found


def blocks(data: bytes) -> list[tuple[int, bytes]]:
    """Type and body of each block; both lengths must agree, and nothing may be left."""
    found = []
    while data:
        kind, length = struct.unpack_from("<II", data)
        assert length % 4 == 0
        assert struct.unpack_from("<I", data, length - 4) == (length,)
        found.append((kind, data[8 : length - 4]))
        data = data[length:]
    return found


def written(write) -> bytes:
    file = io.BytesIO()
    write(pcapng.Writer(file, application="pyflannel-dp"))
    return file.getvalue()


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)


def test_a_file_without_packets_is_one_section_header():
    data = written(lambda writer: None)
    assert read(data) == []
    body = struct.pack("<IHHq", 0x1A2B3C4D, 1, 0, -1) + struct.pack("<HH", 4, 12) + b"pyflannel-dp" + bytes(4)
    assert blocks(data) == [(0x0A0D0D0A, body)]


def test_without_options_there_is_no_end_of_options():
    file = io.BytesIO()
    pcapng.Writer(file)
    assert len(file.getvalue()) == 28


def test_everything_comes_back():
    def write(writer):
        device = writer.add_interface("flannel.1", pcapng.LINKTYPE_RAW, "the device")
        wire = writer.add_interface("eth0", pcapng.LINKTYPE_ETHERNET)
        writer.packet(device, TIME, b"12345", outbound=True)
        writer.packet(wire, TIME + 1, b"", outbound=False, comment="größer als erlaubt")
        writer.packet(device, TIME + 2, b"1234", length=9)

    found = read(written(write))
    assert [data for data, _ in found] == [b"12345", b"", b"1234"]
    about = [one for _, one in found]
    assert [one.linktype for one in about] == [101, 1, 101]
    assert [one.ifname for one in about] == [b"flannel.1", b"eth0", b"flannel.1"]
    assert [one.direction for one in about] == [2, 1, None]
    assert [one.comments for one in about] == [None, ["größer als erlaubt".encode()], None]
    assert [one.wirelen for one in about] == [5, 0, 9]
    assert [(one.tshigh << 32) + one.tslow - TIME for one in about] == [0, 1, 2]
    assert {one.tsresol for one in about} == {10**9}


def test_a_snap_length_cuts_and_says_what_was_there():
    file = io.BytesIO()
    writer = pcapng.Writer(file, snaplen=6)
    writer.packet(writer.add_interface("a", pcapng.LINKTYPE_RAW), 0, memoryview(b"123456789"))
    (data, about), *_ = read(file.getvalue())
    assert (data, about.wirelen) == (b"123456", 9)
    assert blocks(file.getvalue())[1][1][4:8] == b"\x06\0\0\0"


def test_a_packet_of_no_interface_is_refused():
    with pytest.raises(ValueError, match="no interface 0"):
        written(lambda writer: writer.packet(0, 0, b"x"))


@pytest.mark.parametrize("text", ["x" * 65535, "x" * 65536, "ä" * 40000, "x" + "ä" * 40000])
def test_a_comment_longer_than_an_option_is_cut_between_characters(text):
    data = written(lambda writer: writer.packet(writer.add_interface("a", 101), 0, b"x", comment=text))
    comment = read(data)[0][1].comments[0].decode()
    assert text.startswith(comment)
    assert 65533 <= len(comment.encode()) <= 65535


def test_a_comment_that_is_no_unicode_does_no_harm():
    data = written(lambda writer: writer.packet(writer.add_interface("a", 101), 0, b"x", comment="\udcff"))
    assert read(data)[0][1].comments == [b"?"]


PACKETS = st.lists(
    st.tuples(
        st.integers(0, 1), st.integers(0, 2**64 - 1), st.binary(max_size=40), st.sampled_from([None, False, True]),
        st.text(max_size=9).filter(lambda text: text.isprintable()),
    )
)  # fmt: skip


@given(PACKETS)
def test_whatever_is_written_is_read(packets):
    def write(writer):
        for name in ("a", "b"):
            writer.add_interface(name, pcapng.LINKTYPE_RAW)
        for interface, time, data, outbound, comment in packets:
            writer.packet(interface, time, data, outbound=outbound, comment=comment)

    data = written(write)
    assert len(blocks(data)) == 3 + len(packets)
    directions = {None: None, False: 1, True: 2}
    expected = [
        (b"ab"[interface : interface + 1], time, packet, directions[outbound], [comment.encode()] if comment else None)
        for interface, time, packet, outbound, comment in packets
    ]
    assert [(m.ifname, m.tshigh << 32 | m.tslow, found, m.direction, m.comments) for found, m in read(data)] == expected


@pytest.fixture
def capture(tmp_path):
    def write(writer):
        device = writer.add_interface("flannel.1", pcapng.LINKTYPE_RAW, "the device")
        wire = writer.add_interface("eth0", pcapng.LINKTYPE_RAW)
        for i, packet in enumerate([udp(), tcp(), echo(), udp(version=6), tcp(version=6)]):
            writer.packet(
                (device, wire)[i % 2], TIME + i, packet, outbound=i % 2 == 0, comment="a comment" if i == 2 else ""
            )

    path = tmp_path / "a.pcapng"
    path.write_bytes(written(write))
    return path


@needs_tshark
def test_tshark_reads_it_without_complaint(capture):
    done = run(
        "tshark", "-n", "-r", capture, "-T", "fields", "-E", "separator=|", "-e", "frame.interface_name",
        "-e", "frame.time_epoch", "-e", "frame.packet_flags_direction", "-e", "frame.comment", "-e", "_ws.expert.severity",
        "-e", "_ws.malformed",
    )  # fmt: skip
    assert done.returncode == 0
    assert "cut short" not in done.stderr
    assert "damaged" not in done.stderr
    rows = [line.split("|") for line in done.stdout.splitlines()]
    assert [row[0] for row in rows] == ["flannel.1", "eth0", "flannel.1", "eth0", "flannel.1"]
    assert [row[1] for row in rows] == [f"1700000000.{123456789 + i}" for i in range(5)]
    assert [int(row[2], 0) for row in rows] == [2, 1, 2, 1, 2]
    assert [row[3] for row in rows] == ["", "", "a comment", "", ""]
    assert all(not row[5] for row in rows)


@needs_tshark
def test_capinfos_reads_it(capture):
    done = run("capinfos", "-M", capture)
    assert done.returncode == 0, done.stderr
    assert "Number of packets:   5" in done.stdout
    assert "Number of interfaces in file: 2" in done.stdout
    assert "nanoseconds" in done.stdout
    assert "Capture application: pyflannel-dp" in done.stdout
