"""A TUN device: the kernel's side of the overlay.

Theory of operation: python-pytun opens and names the device, after which only its descriptor is used, with one readv or
write a packet. It is opened with IFF_VNET_HDR, so each packet stands behind ten bytes that tell of its checksum and
segmentation (``encap.vnet``). No offload is switched on (TUNSETOFFLOAD), so what is read are plain packets, no longer than
the MTU and with their checksums finished by the kernel; what is written may use the header, and must where a kernel
VXLAN peer left its work to be finished (see ``dataplane.inbound``).

Writing hands the packet to the kernel's stack at once; there is no queue that could fill, but the kernel may refuse for
want of memory (EAGAIN, ENOBUFS), while the link is down (EIO), or because it does not like the packet (EINVAL). The queue
towards us is the device's transmit queue, whose length is the host's business (``dataplane.host``) and whose overflow the
kernel counts (``queue_drops``).
"""

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytun

from dataplane.batch import Batch
from dataplane.device import DeviceLostError
from dataplane.verdict import Verdict
from encap.vnet import VNET_LENGTH

_IFF_VNET_HDR = 0x4000  # include/uapi/linux/if_tun.h
_TUN = Path("/dev/net/tun")
_FORWARDED = int(Verdict.FORWARDED)
_NO_ROOM = frozenset({errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM})
_GONE = frozenset({errno.EBADFD, errno.EBADF, errno.ENODEV})


class TunError(Exception):
    """The TUN device cannot be had; the text says why and what to do."""


class TunDevice:
    """A `Device` on the kernel's TUN driver. Made by `open_tun`."""

    def __init__(self, tun: pytun.TunTapDevice, mtu: int) -> None:
        self._tun = tun
        self._fd: int = tun.fileno()
        self._name: str = tun.name
        self._mtu = mtu
        self._watching = False

    @property
    def name(self) -> str:
        """The interface's name."""
        return self._name

    @property
    def mtu(self) -> int:
        """The MTU that the host sets on the link, in bytes."""
        return self._mtu

    def receive(self, batch: Batch) -> None:
        """One readv a packet, until nothing is there."""
        fd = self._fd
        slots = batch.vnet_slots
        try:
            while not batch.is_full:
                batch.add(os.readv(fd, (slots[batch.count],)) - VNET_LENGTH)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in _GONE:
                raise DeviceLostError(f"the device {self._name} is gone: {error.strerror}") from error
            if error.errno != errno.EIO:  # EIO: the link is down, which is the host's business
                raise

    def transmit(self, batch: Batch) -> None:
        """One write a packet."""
        data, offset, length, verdict = batch.data, batch.offset, batch.length, batch.verdict
        for i in range(batch.count):
            if verdict[i] != _FORWARDED:
                continue
            start = offset[i]
            try:
                os.write(self._fd, data[start - VNET_LENGTH : start + length[i]])
            except OSError as error:
                if error.errno in _GONE:
                    raise DeviceLostError(f"the device {self._name} is gone: {error.strerror}") from error
                verdict[i] = Verdict.QUEUE_FULL if error.errno in _NO_ROOM else Verdict.DEVICE_ERROR

    def watch(self, ready: Callable[[], None]) -> None:
        """By the loop's poll on the descriptor."""
        asyncio.get_running_loop().add_reader(self._fd, ready)
        self._watching = True

    def unwatch(self) -> None:
        """See `Device`."""
        if self._watching:
            asyncio.get_running_loop().remove_reader(self._fd)
            self._watching = False

    def close(self) -> None:
        """Close the descriptor; the kernel then removes the device with its addresses and routes."""
        if self._fd >= 0:
            self.unwatch()
            self._tun.close()
            self._fd = -1


def open_tun(name: str, mtu: int) -> TunDevice:
    """Open the TUN `name`, which must not exist or have nobody attached. Raises TunError."""
    try:
        tun = pytun.TunTapDevice(name=name, flags=pytun.IFF_TUN | pytun.IFF_NO_PI | _IFF_VNET_HDR)
    except (OSError, pytun.Error) as error:
        raise TunError(_explain(name, error)) from error
    os.set_inheritable(tun.fileno(), False)  # pytun opens without O_CLOEXEC
    os.set_blocking(tun.fileno(), False)
    return TunDevice(tun, mtu)


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
