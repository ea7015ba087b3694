"""The programs that are compared, each able to connect two hosts."""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bench.throughput.hosts import NETWORK, End
from routing.lease import derive_vtep_mac, format_mac

_READY_SECONDS = 10.0


class ContenderError(Exception):
    """A contender does not come up; the text holds what it said."""


@dataclass(frozen=True)
class Contender:
    """A way to connect two hosts. `missing` names the program that is not installed, or None."""

    name: str
    connect: Callable[[End, End, Path], None]
    missing: str | None = None


def kernel_vxlan() -> Contender:
    """The kernel's own VXLAN device, set up as flannel does."""

    def connect(first: End, second: End, folder: Path) -> None:  # noqa: ARG001 - every contender is called alike
        for here, there in ((first, second), (second, first)):
            own, other = (format_mac(derive_vtep_mac(end.underlay)) for end in (here, there))
            here.namespace.ip(
                f"link add flannel.1 address {own} mtu 1450 type vxlan id 1 dev eth0 local {here.underlay} "
                "dstport 8472 nolearning",
                "link set flannel.1 up",
                f"addr add {here.overlay}/32 dev flannel.1",
                f"neigh add {there.overlay} lladdr {other} dev flannel.1 nud permanent",
                f"route add {there.subnet} via {there.overlay} dev flannel.1 onlink",
            )
            fdb = ["bridge", "-n", here.namespace.name, "fdb", "add", other, "dev", "flannel.1", "dst", str(there.underlay)]
            subprocess.run(fdb, check=True, capture_output=True)

    return Contender("kernel VXLAN", connect)


def ourselves(name: str, *options: str, environment: Mapping[str, str] | None = None) -> Contender:
    """A pair of nodes of this project, with a static store and the given options."""

    def command(here: End, there: End, folder: Path) -> list[str]:
        return [
            "env", *(f"{key}={value}" for key, value in (environment or {}).items()),
            sys.executable, "-m", "dataplane.cli", "--store", "static", "--iface", "eth0",
            "--network", str(NETWORK), "--subnet", str(here.subnet),
            "--peer", f"{there.subnet}={there.underlay}",
            "--run-dir", str(folder / f"run{here.number}"), "--subnet-file", str(folder / f"subnet{here.number}.env"),
            *options,
        ]  # fmt: skip

    return Contender(name, _started(command))


def socat() -> Contender:
    """Socat between a TUN and a UDP socket: one packet per system call, nothing else."""

    def command(here: End, there: End, folder: Path) -> list[str]:  # noqa: ARG001 - as above
        tun = f"TUN:{here.overlay}/16,tun-name=tun0,tun-type=tun,iff-no-pi,iff-up"
        return ["socat", f"UDP:{there.underlay}:8285,bind={here.underlay}:8285", tun]

    return Contender("socat", _started(command, device="tun0", mtu=1472), _lacking("socat"))


def template(name: str, text: str) -> Contender:
    """Any program, started on each host by a command with {local}, {remote}, {overlay}, {subnet}, {number} in it.

    It must bring up an interface named ``tun0`` with the overlay address.
    """

    def command(here: End, there: End, folder: Path) -> list[str]:
        filled = text.format(
            local=here.underlay, remote=there.underlay, overlay=here.overlay, remote_overlay=there.overlay,
            subnet=here.subnet, number=here.number, folder=folder,
        )  # fmt: skip
        return ["sh", "-c", filled]

    return Contender(name, _started(command))


def _lacking(program: str) -> str | None:
    return None if shutil.which(program) else program


def _started(
    command: Callable[[End, End, Path], Sequence[str]], device: str | None = None, mtu: int | None = None
) -> Callable[[End, End, Path], None]:
    """Start `command` on both hosts and wait until pings pass."""

    def connect(first: End, second: End, folder: Path) -> None:
        logs = []
        for here, there in ((first, second), (second, first)):
            logs.append(folder / f"log{here.number}")
            with open(logs[-1], "w", encoding="utf-8") as log:
                process = here.namespace.popen(command(here, there, folder), stdout=log, stderr=log)
            here.processes.append(process.pid)
        if device is not None:
            for end in (first, second):
                _until(partial(_has_device, end, device), logs)
                end.namespace.ip(f"link set {device} mtu {mtu} txqueuelen 1000")
        _until(lambda: first.namespace.run(["ping", "-c1", "-W1", str(second.overlay)]).returncode == 0, logs)

    return connect


def _has_device(end: End, device: str) -> bool:
    return end.namespace.run(["ip", "link", "show", device]).returncode == 0


def _until(condition: Callable[[], bool], logs: Sequence[Path]) -> None:
    end = time.monotonic() + _READY_SECONDS
    while not condition():
        if time.monotonic() > end:
            raise ContenderError("\n".join(path.read_text(encoding="utf-8", errors="replace") for path in logs).strip())
        time.sleep(0.05)


@dataclass
class Registry:
    """All contenders by the names that ``--only`` takes."""

    contenders: list[Contender] = field(default_factory=list)

    @classmethod
    def default(cls) -> "Registry":
        """Kernel VXLAN first, since ratios are to it; then this project in its modes, then peers."""
        pure = {"PYFLANNEL_DP_PURE": "1"}
        return cls([
            kernel_vxlan(),
            ourselves("pyflannel-dp"),
            ourselves("pyflannel-dp, ip framing", "--framing", "ip"),
            ourselves("pyflannel-dp, uncompiled", environment=pure),
            socat(),
        ])  # fmt: skip
