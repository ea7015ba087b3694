"""A third host on the underlay that injects: nothing of it arrives, and each refusal is counted under its name."""

import socket

import pytest
from cluster import NETWORK, Tap, add_up, cluster, pings, until
from scapy.layers.inet import IP, UDP
from scapy.packet import Raw

from dataplane.lab import inside
from encap import vxlan
from routing.lease import parse_mac

SHARES_A_LAB = True
pytestmark = pytest.mark.netns
MARK = b"forged-by-the-third-host"


@pytest.fixture(scope="module", params=["checked", "unchecked"])
def scene(request, tmp_path_factory):
    options = ["--no-check-sources"] if request.param == "unchecked" else []
    with cluster(tmp_path_factory.mktemp("forged"), "--network", NETWORK, *options) as made:
        made.a, made.b = made.lab.hosts
        made.intruder = made.lab.add_host()
        made.checked = request.param == "checked"
        made.mac = parse_mac(made.status(made.b)["lease"]["vtep_mac"])
        made.foreign_mac = parse_mac(made.status(made.a)["lease"]["vtep_mac"])
        yield made


def inner(scene, source: str | None = None, destination: str | None = None) -> bytes:
    packet = IP(src=source or str(scene.a.pods[0].ipv4), dst=destination or str(scene.b.pods[0].ipv4))
    return bytes(packet / UDP(sport=7, dport=7) / Raw(MARK))


def inject(scene, host, payload: bytes) -> tuple[dict[str, int], bool]:
    """Send `payload` from `host` to node b: which counters moved, and whether the mark came through to the pod."""
    before = scene.status(scene.b)["inbound"]
    with Tap(scene.b.pods[0].name, "eth0") as tap, inside(host.name):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(payload, (str(scene.b.ipv4), 8472))
        until("the datagram to be judged", lambda: scene.status(scene.b)["inbound"]["received"] > before["received"])
        status = scene.status(scene.b)
        arrived = any(MARK in frame for frame in tap.caught())
    assert add_up(status)
    after = status["inbound"]["verdicts"]
    return {
        name: after[name] - before["verdicts"][name] for name in after if after[name] != before["verdicts"][name]
    }, arrived


def frame(scene, packet: bytes, vni: int = 1, mac: bytes | None = None, ethertype: int = 0x0800) -> bytes:
    return vxlan.header(vni, mac or scene.mac, scene.foreign_mac, ethertype) + packet


def test_an_unknown_outer_source(scene):
    moved, arrived = inject(scene, scene.intruder, frame(scene, inner(scene)))
    assert (moved, arrived) == (({"unknown_vtep": 1}, False) if scene.checked else ({"forwarded": 1}, True))


def test_a_peer_that_speaks_for_somebody_else(scene):
    moved, arrived = inject(scene, scene.a, frame(scene, inner(scene, source="10.244.251.9")))
    assert (moved, arrived) == (({"spoofed_source": 1}, False) if scene.checked else ({"forwarded": 1}, True))


def test_a_destination_that_is_not_ours(scene):
    moved, arrived = inject(scene, scene.a, frame(scene, inner(scene, destination="10.244.251.9")))
    assert moved == ({"not_for_us": 1} if scene.checked else {"forwarded": 1})
    assert not arrived


@pytest.mark.parametrize(
    ("make", "verdict"),
    [
        (lambda s: b"", "truncated"),
        (lambda s: frame(s, b""), "truncated"),
        (lambda s: frame(s, inner(s)[:-1]), "truncated"),
        (lambda s: b"\0" + frame(s, inner(s))[1:], "bad_flags"),
        (lambda s: frame(s, inner(s), vni=2), "wrong_vni"),
        (lambda s: frame(s, inner(s), mac=b"\x02\0\0\0\0\x99"), "wrong_mac"),
        (lambda s: frame(s, b"\0\x01\x08\0\x06\x04\0\x01" + bytes(20), ethertype=0x0806), "not_ip"),
        (lambda s: frame(s, b"\x41" + inner(s)[1:]), "bad_length"),
    ],
    ids=["empty", "header only", "cut", "flags", "VNI", "MAC", "ARP", "IHL"],
)
def test_what_is_no_frame_of_ours(scene, make, verdict):
    moved, arrived = inject(scene, scene.a, make(scene))
    assert (moved, arrived) == ({verdict: 1}, False)


def test_the_peers_traffic_goes_on(scene):
    assert pings(scene.a.pods[0], scene.b.pods[0].ipv4)
