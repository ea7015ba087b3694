"""The switches, and refusals at run time: nothing is lost, the switch goes off once, and never on again."""

import errno
import socket
from ipaddress import ip_address

import pytest
from packets import tcp

from dataplane.batch import Batch
from dataplane.device.tun import TunDevice
from dataplane.kernel import Kernel
from dataplane.offload import Offload, Offloads
from dataplane.underlay.udp import DOUBTS, UdpUnderlay, _Family
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


class RefusingKernel(Kernel):
    """Refuses trains with `error`, superpackets with EINVAL, and single datagrams with `error_singly`."""

    def __init__(self, error: int = 0, error_singly: int = 0) -> None:
        super().__init__()
        self.refusals = error, error_singly
        self.singles = []

    def send(self, sender, data, at, length, stride, to):
        train, singly = self.refusals
        if stride != length:
            return -train
        if singly:
            return -singly
        self.singles.append(bytes(data[at : at + length]))
        return length

    def send_group(self, sender, data, offsets, lengths, order, count, stride, to):
        return -self.refusals[0]

    def write_packet(self, fd, vnet_headers, vnet_at, data, at, length):
        if vnet_headers[vnet_at + 1]:
            return -errno.EINVAL
        return super().write_packet(fd, vnet_headers, vnet_at, data, at, length)


def underlay_on(kernel: Kernel, offloads: Offloads) -> UdpUnderlay:
    return UdpUnderlay({4: _Family(ip_address("192.0.2.1"), None, [None], None)}, offloads, kernel)


def train(*payloads: bytes) -> Batch:
    batch = Batch(1)
    batch.put(b"".join(payloads), stride=len(payloads[0]))
    batch.verdict[0] = Verdict.FORWARDED
    return batch


@pytest.mark.parametrize(("number", "refusals"), [(errno.EIO, 1), (errno.EINVAL, DOUBTS)])
def test_a_refused_train_is_sent_datagram_by_datagram(number, refusals, caplog):
    kernel, offloads = RefusingKernel(number), Offloads()
    underlay = underlay_on(kernel, offloads)
    for _ in range(refusals):
        assert underlay.max_segments == 64
        assert offloads.is_on(Offload.UDP_SEGMENT)
        kernel.singles.clear()
        batch = train(b"aa", b"bb", b"c")
        assert underlay.transmit(batch, [("192.0.2.2", 8472)]) == 1
        assert kernel.singles == [b"aa", b"bb", b"c"]
        assert batch.verdict[0] == Verdict.FORWARDED
    assert underlay.max_segments == 1
    assert errno.errorcode[number] in offloads.report()["udp-segment"]
    assert caplog.text.count("udp-segment is off") == 1


def test_a_path_too_small_does_not_turn_segmentation_off():
    """Older kernels say EINVAL to a train that is too big for the path, where a single datagram gets EMSGSIZE."""
    for number, singly in ((errno.EMSGSIZE, 0), (errno.EINVAL, errno.EMSGSIZE)):
        offloads = Offloads()
        underlay = underlay_on(RefusingKernel(number, singly), offloads)
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


def test_a_refused_superpacket_is_written_packet_by_packet(caplog):
    tun, offloads = Tun(), Offloads()
    device = TunDevice(tun, 1450, offloads, RefusingKernel())
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
