"""The five offloads, each with a switch that only ever goes from on to off.

Theory of operation: what an operator did not switch off is probed when the device or socket is opened, and may be refused
later, at run time, by a kernel that granted it (EIO and EINVAL on a send or a write). Then it is off for the life of the
node, the packets that met the refusal are carried without it, and one line in the log says so. With all five off everything
works, slower.
"""

import logging
from enum import StrEnum

log = logging.getLogger(__name__)


class Offload(StrEnum):
    """The names, as on the command line."""

    TUN_TSO = "tun-tso"
    TUN_USO = "tun-uso"
    UDP_SEGMENT = "udp-segment"
    UDP_GRO = "udp-gro"
    TUN_GRO = "tun-gro"


MEANING = {
    Offload.TUN_TSO: "TCP superpackets from the TUN (TUNSETOFFLOAD, TUN_F_TSO4 and TSO6)",
    Offload.TUN_USO: "UDP superpackets from the TUN (TUN_F_USO4 and USO6, Linux 6.2)",
    Offload.UDP_SEGMENT: "many datagrams in one send (UDP_SEGMENT, Linux 4.18)",
    Offload.UDP_GRO: "many datagrams in one receive (UDP_GRO, Linux 5.0)",
    Offload.TUN_GRO: "superpackets into the TUN",
}

ON = "on"


class Offloads:
    """Which offloads are on. `off` names those that the operator switched off."""

    def __init__(self, off: frozenset[Offload] = frozenset()) -> None:
        self._state = {offload: "off: by option" if offload in off else ON for offload in Offload}

    @classmethod
    def none(cls) -> "Offloads":
        """All of them off."""
        return cls(frozenset(Offload))

    def is_on(self, offload: Offload) -> bool:
        """Whether it may be used."""
        return self._state[offload] == ON

    def lacking(self, offload: Offload, reason: str) -> None:
        """The probe at start says that the kernel does not have it."""
        if self.is_on(offload):
            self._state[offload] = f"off: {reason}"
            log.info("offload %s is off: %s", offload, reason)

    def refused(self, offload: Offload, reason: str) -> None:
        """The kernel refused at run time; off from here on."""
        if self.is_on(offload):
            self._state[offload] = f"off: refused at run time ({reason})"
            log.warning("offload %s is off from now on: the kernel refused it (%s)", offload, reason)

    def report(self) -> dict[str, str]:
        """State by name: "on", or "off: " and the reason."""
        return {str(offload): state for offload, state in self._state.items()}
