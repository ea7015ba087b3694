"""The switches, and refusals at run time: nothing is lost, the switch goes off once, and never on again."""

import errno
import os
import socket
from ipaddress import ip_address

import pytest
from packets import tcp

from dataplane.batch import Batch
from dataplane.device.tun import TunDevice
from dataplane.offload import Offload, Offloads
from dataplane.underlay.udp import UdpUnderlay, _Family
from dataplane.verdict import Verdict
from encap import vnet


def test_all_on_until_switched_off_and_never_on_again(caplog):
    offloads = Offloads(frozenset({Offload.UDP_GRO}))
    assert [offloads.is_on(each) for each in Offload] == [each != Offload.UDP_GRO for each in Offload]
    offloads.refused(Offload.TUN_GRO, "EINVAL on a write")
    offloads.refused(Offload.TUN_GRO, "EINVAL on a write")
    offloads.lacking(Offload.TUN_GRO, "something else")
    assert offloads.report()["tun-gro"] == "off: refused at run time (EINVAL on a write)"
    assert offloads.report()["udp-gro"] == "off: by option"
    assert caplog.text.count("tun-gro") == 1
    assert not any(Offloads.none().is_on(each) for each in Offload)


class Socket:
    """A socket whose sendmsg refuses with `error`, and whose sendto works or refuses with `error_singly`."""

    def __init__(self, error: int, error_singly: int = 0) -> None:
        self.error, self.error_singly = error, error_singly
        self.trains, self.singles = 0, []

    def sendmsg(self, buffers, ancillary, flags, endpoint) -> int:
        self.trains += 1
        raise OSError(self.error, os.strerror(self.error))

    def sendto(self, data, endpoint) -> int:
        if self.error_singly:
            raise OSError(self.error_singly, os.strerror(self.error_singly))
        self.singles.append(bytes(data))
        return len(data)


def train(*payloads: bytes) -> Batch:
    batch = Batch(1)
    batch.put(b"".join(payloads), stride=len(payloads[0]))
    batch.verdict[0] = Verdict.FORWARDED
    return batch


@pytest.mark.parametrize("number", [errno.EIO, errno.EINVAL])
def test_a_refused_train_is_sent_datagram_by_datagram(number, caplog):
    sender, offloads = Socket(number), Offloads()
    underlay = UdpUnderlay({4: _Family(ip_address("192.0.2.1"), sender, [sender], sender)}, offloads)
    assert underlay.max_segments == 64
    batch = train(b"aa", b"bb", b"c")
    assert underlay.transmit(batch, [("192.0.2.2", 8472)]) == 1
    assert sender.singles == [b"aa", b"bb", b"c"]
    assert batch.verdict[0] == Verdict.FORWARDED
    assert underlay.max_segments == 1
    assert errno.errorcode[number] in offloads.report()["udp-segment"]
    assert caplog.text.count("udp-segment is off") == 1


def test_a_path_too_small_does_not_turn_segmentation_off():
    """Older kernels say EINVAL to a train that is too big for the path, where a single datagram gets EMSGSIZE."""
    for number, singly in ((errno.EMSGSIZE, 0), (errno.EINVAL, errno.EMSGSIZE)):
        sender, offloads = Socket(number, singly), Offloads()
        underlay = UdpUnderlay({4: _Family(ip_address("192.0.2.1"), sender, [sender], sender)}, offloads)
        batch = train(b"aa", b"bb")
        assert underlay.transmit(batch, [("192.0.2.2", 8472)]) == 0
        assert batch.verdict[0] == Verdict.TOO_BIG
        assert offloads.is_on(Offload.UDP_SEGMENT)


class Tun:
    """What python-pytun gives, over one end of a socket pair."""

    name = "tun7"

    def __init__(self) -> None:
        self.ours, self.host = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ours.setblocking(False)

    def fileno(self) -> int:
        return self.ours.fileno()

    def close(self) -> None:
        self.ours.close()


def test_a_refused_superpacket_is_written_packet_by_packet(monkeypatch, caplog):
    tun, offloads = Tun(), Offloads()
    device = TunDevice(tun, 1450, offloads)
    written = os.writev

    def refusing(fd: int, buffers) -> int:
        if bytes(buffers[0])[1]:
            raise OSError(errno.EINVAL, "Invalid argument")
        return written(fd, buffers)

    monkeypatch.setattr(os, "writev", refusing)
    batch = Batch(2)
    superpacket = tcp(payload=b"x" * 3000)
    header = bytearray(10)
    vnet.store(header, 0, 1, vnet.GSO_TCPV4, 40, 1400, 20, 16)
    batch.put(superpacket, vnet=bytes(header))
    batch.put(superpacket, vnet=bytes(header))
    batch.verdict[0] = batch.verdict[1] = Verdict.FORWARDED
    device.transmit(batch)
    got = [tun.host.recv(70000) for _ in range(6)]
    assert [packet[:10] for packet in got] == [bytes(10)] * 6
    assert [len(packet) - 50 for packet in got] == [1400, 1400, 200] * 2
    assert b"".join(packet[50:] for packet in got[:3]) == b"x" * 3000
    assert list(batch.verdict) == [Verdict.FORWARDED] * 2
    assert not offloads.is_on(Offload.TUN_GRO)
    assert caplog.text.count("tun-gro is off") == 1
    device.close()
    tun.host.close()
