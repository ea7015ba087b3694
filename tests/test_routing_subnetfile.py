"""subnet.env, byte by byte as flannel writes it, and read with patience."""

import errno
import os
import stat
import threading
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.allocator import Subnets
from routing.subnetfile import DEFAULT_PATH, SubnetFile, read_previous, write

NET4, SUB4 = IPv4Network("10.5.0.0/16"), IPv4Network("10.5.34.0/24")
NET6, SUB6 = IPv6Network("fc00::/48"), IPv6Network("fc00:0:0:1::/64")

V4_TEXT = """\
FLANNEL_NETWORK=10.5.0.0/16
FLANNEL_SUBNET=10.5.34.1/24
FLANNEL_MTU=1450
FLANNEL_IPMASQ=false
"""
DUAL_TEXT = """\
FLANNEL_NETWORK=10.5.0.0/16
FLANNEL_SUBNET=10.5.34.1/24
FLANNEL_IPV6_NETWORK=fc00::/48
FLANNEL_IPV6_SUBNET=fc00:0:0:1::1/64
FLANNEL_MTU=1430
FLANNEL_IPMASQ=true
"""
V6_TEXT = """\
FLANNEL_IPV6_NETWORK=fc00::/48
FLANNEL_IPV6_SUBNET=fc00:0:0:1::1/64
FLANNEL_MTU=1430
FLANNEL_IPMASQ=false
"""
GOLDEN = [
    (SubnetFile(NET4, SUB4, None, None, 1450), V4_TEXT, Subnets(SUB4, None)),
    (SubnetFile(NET4, SUB4, NET6, SUB6, 1430, ip_masq=True), DUAL_TEXT, Subnets(SUB4, SUB6)),
    (SubnetFile(None, None, NET6, SUB6, 1430), V6_TEXT, Subnets(None, SUB6)),
]


def test_where_flannel_puts_it():
    assert Path("/run/flannel/subnet.env") == DEFAULT_PATH


@pytest.mark.parametrize(("content", "text", "subnets"), GOLDEN, ids=["v4", "dual", "v6"])
def test_golden_files(tmp_path, content, text, subnets):
    assert content.render() == text
    path = tmp_path / "subnet.env"
    write(path, content)
    assert path.read_bytes() == text.encode()
    assert read_previous(path) == subnets
    assert [one.name for one in tmp_path.iterdir()] == ["subnet.env"]


def test_the_folder_is_made(tmp_path):
    path = tmp_path / "run" / "flannel" / "subnet.env"
    write(path, GOLDEN[0][0])
    assert path.read_text() == V4_TEXT


@pytest.mark.parametrize("mask", [0, 0o022, 0o077, 0o777])
def test_all_may_read_it_whatever_the_umask(tmp_path, mask):
    path = tmp_path / "subnet.env"
    before = os.umask(mask)
    try:
        write(path, GOLDEN[0][0])
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_reader_never_sees_a_part(tmp_path):
    path = tmp_path / "subnet.env"
    write(path, GOLDEN[0][0])
    done = threading.Event()
    seen: set[str] = set()

    def read():
        while not done.is_set():
            seen.add(path.read_text())

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for count in range(150):
            write(path, GOLDEN[count % 3][0])
    finally:
        done.set()
        reader.join()
    assert seen <= {V4_TEXT, DUAL_TEXT, V6_TEXT}
    assert V4_TEXT in seen


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failing_write_leaves_the_old_one(tmp_path, monkeypatch, call):
    path = tmp_path / "subnet.env"
    write(path, GOLDEN[0][0])

    def fail(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="No space left"):
        write(path, GOLDEN[1][0])
    assert path.read_text() == V4_TEXT
    assert [one.name for one in tmp_path.iterdir()] == ["subnet.env"]


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "run").write_text("x")
    with pytest.raises(OSError, match="run"):
        write(tmp_path / "run" / "subnet.env", GOLDEN[0][0])
    with pytest.raises(OSError, match="run"):
        write(tmp_path / "run" / "flannel" / "subnet.env", GOLDEN[0][0])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", Subnets()),
        (b"\n\n=\n==\nFLANNEL_SUBNET\n", Subnets()),
        (b"FLANNEL_SUBNET=\n", Subnets()),
        (b"FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_MTU=1450\n", Subnets()),
        (b"FLANNEL_SUBNET=10.5.34.1/24", Subnets(SUB4)),
        (b"FLANNEL_IPV6_SUBNET=fc00:0:0:1::1/64\n", Subnets(None, SUB6)),
        (DUAL_TEXT.replace("\n", "\r\n").encode(), Subnets(SUB4, SUB6)),
        (b"FLANNEL_SUBNET=\"10.5.34.1/24\"\nFLANNEL_IPV6_SUBNET='fc00:0:0:1::1/64'\n", Subnets(SUB4, SUB6)),
        (b"  FLANNEL_SUBNET = 10.5.34.1/24  \n", Subnets(SUB4)),
        (b"FLANNEL_SUBNET=10.5.34.1/24,10.5.35.1/24\n", Subnets(SUB4)),
        (b'FLANNEL_SUBNET="10.5.34.1/24 , 10.5.35.1/24"\n', Subnets(SUB4)),
        (b"FLANNEL_SUBNET=,10.5.34.1/24\n", Subnets()),
        (b"FLANNEL_SUBNET=10.5.34.0/24\n", Subnets(SUB4)),
        (b"FLANNEL_SUBNET=10.5.34.1/33\nFLANNEL_IPV6_SUBNET=fc00:0:0:1::1/64\n", Subnets(None, SUB6)),
        (b"FLANNEL_SUBNET=10.5.34/24\n", Subnets()),
        (b"FLANNEL_SUBNET=fc00:0:0:1::1/64\nFLANNEL_IPV6_SUBNET=10.5.34.1/24\n", Subnets()),
        (b"FLANNEL_SUBNET=10.5.35.1/24\nFLANNEL_SUBNET=10.5.34.1/24\n", Subnets(SUB4)),
        (b"# FLANNEL_SUBNET=10.5.35.1/24\nFLANNEL_SUBNET=10.5.34.1/24\n", Subnets(SUB4)),
        (b"flannel_subnet=10.5.34.1/24\n", Subnets()),
        (b"\xff\xfe\x00\x01\nFLANNEL_SUBNET=10.5.34.1/24\n\xff=\xff\n", Subnets(SUB4)),
        (b"FLANNEL_SUBNET=10.5.34.1/24\xff\n", Subnets()),
        (bytes(range(256)) * 4, Subnets()),
        (V4_TEXT.encode()[:48], Subnets()),
    ],
)
def test_reading(tmp_path, text, expected):
    path = tmp_path / "subnet.env"
    path.write_bytes(text)
    assert read_previous(path) == expected


def test_reading_what_is_no_file(tmp_path):
    assert read_previous(tmp_path / "missing") == Subnets()
    assert read_previous(tmp_path) == Subnets()
    (tmp_path / "file").write_text("x")
    assert read_previous(tmp_path / "file" / "subnet.env") == Subnets()


LINES = st.lists(
    st.binary(max_size=20)
    | st.tuples(
        st.sampled_from([b"FLANNEL_SUBNET", b"FLANNEL_IPV6_SUBNET", b"FLANNEL_MTU"]),
        st.binary(max_size=20) | st.from_regex(rb"[0-9a-f:./,\"%]{0,20}", fullmatch=True),
    ).map(b"=".join),
    max_size=5,
)


@given(lines=LINES)
def test_reading_never_raises(tmp_path_factory, lines):
    path = tmp_path_factory.getbasetemp() / "hypothesis.env"
    path.write_bytes(b"\n".join(lines))
    found = read_previous(path)
    assert found.ipv4 is None or isinstance(found.ipv4, IPv4Network)
    assert found.ipv6 is None or isinstance(found.ipv6, IPv6Network)
