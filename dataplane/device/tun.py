"""A TUN device: the kernel's side of the overlay.

Theory of operation: python-pytun opens and names the device, after which only its descriptor is used, with one readv or
writev a packet. It is opened with IFF_VNET_HDR, so each packet stands behind ten bytes that tell of its checksum and
segmentation (``encap.vnet``). With TUNSETOFFLOAD the kernel hands over TCP and UDP superpackets of up to 64 KiB and leaves
their checksums to us; the header may always be used for writing, so superpackets go in as they come out.

A kernel may take superpackets at start and refuse one later (EINVAL; 6.6.44 and some of its relatives did). Then they are
cut here, by `_write_in_segments`, the refused one first.

Writing hands the packet to the kernel's stack at once; there is no queue that could fill, but the kernel may refuse for
want of memory (EAGAIN, ENOBUFS), while the link is down (EIO), or because it does not like the packet (EINVAL). The queue
towards us is the device's transmit queue, whose length is the host's business (``dataplane.host``) and whose overflow the
kernel counts (``queue_drops``).

A device that is kept (TUNSETPERSIST) loses its carrier when its process ends, however that ends, and nothing else:
addresses and routes stay, and what is routed to it is dropped, instead of taking another way. Opening it again brings the
carrier back. What the process before asked of it (offloads, the length of the header) stays, too, so all is asked anew.
"""

import asyncio
import errno
import fcntl
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytun

from dataplane.batch import MAX_PACKET_LENGTH, Batch
from dataplane.device import DeviceLostError
from dataplane.kernel import Kernel
from dataplane.offload import Offload, Offloads
from dataplane.verdict import Verdict
from encap import segment, vnet
from encap.vnet import VNET_LENGTH

_IFF_VNET_HDR = 0x4000  # include/uapi/linux/if_tun.h
_TUNSETPERSIST, _TUNSETOFFLOAD, _TUNSETVNETHDRSZ = 0x400454CB, 0x400454D0, 0x400454D8
_TUN_F_CSUM, _TUN_F_TSO, _TUN_F_USO = 0x01, 0x02 | 0x04, 0x20 | 0x40  # each for IPv4 and IPv6
_NO_VNET_HEADER = bytes(VNET_LENGTH)
_TUN = Path("/dev/net/tun")
_NO_ROOM = frozenset({errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM})
_GONE = frozenset({errno.EBADFD, errno.EBADF, errno.ENODEV})
_NOTHING = frozenset({0, errno.EAGAIN, errno.EIO})
"""What a read says that only found nothing (any more). EIO: the link is down, which is the host's business."""


class TunError(Exception):
    """The TUN device cannot be had; the text says why and what to do."""


class TunDevice:
    """A `Device` on the kernel's TUN driver. Made by `open_tun`."""

    def __init__(self, tun: pytun.TunTapDevice, mtu: int, offloads: Offloads, kernel: Kernel | None = None) -> None:
        self._kernel = kernel or Kernel()
        self._offloads = offloads
        self._segment = memoryview(bytearray(MAX_PACKET_LENGTH))
        self._tun = tun
        self._fd: int = tun.fileno()
        self.name: str = tun.name
        self.mtu = mtu
        """What the host sets on the link, in bytes."""
        self._watching = False

    def receive(self, batch: Batch) -> None:
        """One readv a packet, until nothing is there."""
        error = self._kernel.read_packets(self._fd, batch)
        if error in _GONE:
            raise DeviceLostError(f"the device {self.name} is gone: {os.strerror(error)}")
        if error not in _NOTHING:
            raise OSError(error, os.strerror(error))

    def transmit(self, batch: Batch) -> None:
        """One writev a packet or superpacket."""
        kernel = self._kernel
        following = 0
        while True:
            superpackets = self._offloads.is_on(Offload.TUN_GRO)
            refused = kernel.write_packets(self._fd, batch, following, superpackets)
            if refused == batch.count:
                return
            self._refused(batch, refused, kernel.error)
            following = refused + 1

    def _refused(self, batch: Batch, index: int, error: int) -> None:
        """Deal with a packet that was not written: a superpacket may be cut, the rest is lost."""
        if batch.vnet[index * VNET_LENGTH + 1] and error in {0, errno.EINVAL}:
            if error:
                self._offloads.refused(Offload.TUN_GRO, "EINVAL on a write")
            error = self._write_in_segments(batch, index)
        if error in _GONE:
            raise DeviceLostError(f"the device {self.name} is gone: {os.strerror(error)}")
        if error:
            batch.verdict[index] = Verdict.QUEUE_FULL if error in _NO_ROOM else Verdict.DEVICE_ERROR

    def _write_in_segments(self, batch: Batch, index: int) -> int:
        """Write the packets of a superpacket one by one, complete as they are on a wire; 0, or the errno of a refusal."""
        packet, header = batch.packet(index), vnet.parse(batch.vnet_header(index), 0)
        try:
            for piece in segment.segments(packet, header, self._segment):
                written = self._kernel.write_packet(self._fd, _NO_VNET_HEADER, 0, piece, 0, len(piece))
                if written < 0:
                    return -written
        except ValueError:  # a virtio-net header that makes no sense: what the kernel would have said
            return errno.EBADMSG
        return 0

    def watch(self, ready: Callable[[], None]) -> None:
        """By the loop's poll on the descriptor."""
        asyncio.get_running_loop().add_reader(self._fd, ready)
        self._watching = True

    def unwatch(self) -> None:
        """See `Device`."""
        if self._watching:
            asyncio.get_running_loop().remove_reader(self._fd)
            self._watching = False

    def keep(self) -> None:
        """See `Device`."""
        try:
            fcntl.ioctl(self._fd, _TUNSETPERSIST, 1)
        except OSError as error:
            if error.errno in _GONE:
                raise DeviceLostError(f"the device {self.name} is gone: {error.strerror}") from error
            raise

    def close(self) -> None:
        """Close the descriptor; the kernel then removes the device with its addresses and routes, unless it is kept."""
        if self._fd >= 0:
            self.unwatch()
            self._tun.close()
            self._fd = -1


def open_tun(name: str, mtu: int, offloads: Offloads | None = None) -> TunDevice:
    """Open the TUN `name`, which must not exist or have nobody attached: a kept one is taken over. Raises TunError.

    Of `offloads` (none if not given) those that the kernel does not grant are noted as lacking.
    """
    offloads = offloads or Offloads.none()
    try:
        tun = pytun.TunTapDevice(name=name, flags=pytun.IFF_TUN | pytun.IFF_NO_PI | _IFF_VNET_HDR)
        os.set_inheritable(tun.fileno(), False)  # pytun opens without O_CLOEXEC
        os.set_blocking(tun.fileno(), False)
        fcntl.ioctl(tun.fileno(), _TUNSETVNETHDRSZ, struct.pack("=i", VNET_LENGTH))
        _set_offloads(tun.fileno(), offloads)
    except (OSError, pytun.Error) as error:
        raise TunError(_explain(name, error)) from error
    return TunDevice(tun, mtu, offloads)


def is_attached(name: str) -> bool:
    """Whether a process holds the TUN `name` open. Raises OSError if that cannot be told."""
    try:
        pytun.TunTapDevice(name=name, flags=pytun.IFF_TUN | pytun.IFF_NO_PI | _IFF_VNET_HDR).close()
    except (OSError, pytun.Error) as error:
        return bool(error.args) and error.args[0] == errno.EBUSY
    return False


def _set_offloads(fd: int, offloads: Offloads) -> None:
    """Ask for nothing, for TSO, then for USO besides: a kernel that lacks the second must not lose us the first, and a
    device that was kept must lose what is off now."""
    granted = 0
    fcntl.ioctl(fd, _TUNSETOFFLOAD, granted)
    for offload, bits in ((Offload.TUN_TSO, _TUN_F_TSO), (Offload.TUN_USO, _TUN_F_USO)):
        if offloads.is_on(offload):
            try:
                fcntl.ioctl(fd, _TUNSETOFFLOAD, granted | _TUN_F_CSUM | bits)
                granted |= _TUN_F_CSUM | bits
            except OSError as error:
                offloads.lacking(offload, f"the TUN driver does not grant it ({error.strerror})")


def _explain(name: str, error: Exception) -> str:
    number = error.args[0] if error.args and isinstance(error.args[0], int) else None
    if not _TUN.exists():
        return (
            f"{_TUN} does not exist: load the module (modprobe tun), or in a container pass the device in "
            "(--device /dev/net/tun)"
        )
    reasons = {
        errno.EPERM: "not permitted: run as root or with CAP_NET_ADMIN (in a user namespace: unshare -Urn)",
        errno.EACCES: f"no access to {_TUN}: run as root, or have it opened to you (chmod 0666 {_TUN})",
        errno.EBUSY: f"another process is attached to {name}: is another node running on this host?",
        errno.EINVAL: f"an interface {name} exists that is no TUN of this kind (see: ip -d link show {name})",
        errno.ENODEV: f"the kernel has no TUN driver behind {_TUN}",
        errno.ENXIO: f"the kernel has no TUN driver behind {_TUN}",
    }
    return f"cannot open the TUN device {name}: " + reasons.get(number or 0, str(error))
