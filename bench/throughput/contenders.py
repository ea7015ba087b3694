"""The programs that are compared, each able to connect two hosts.

Theory of operation: a contender's programs are started in the foreground, by the lab, which kills them when it closes. What
may start processes of its own, or does, runs in a PID namespace whose first process dies with the one that the lab
started (unshare --kill-child), and takes all others with it; so nothing is left after a failure or Ctrl-C either. Sockets
and databases that a program wants below /run are in its folder, or on a tmpfs that only it sees: two of a kind run side
by side, and one that serves the machine is not disturbed.
"""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bench.processes import children
from bench.throughput.hosts import NETWORK, End
from routing.lease import derive_vtep_mac, format_mac

_READY_SECONDS = 10.0
_OWN_PROCESSES = ("unshare", "--pid", "--fork", "--kill-child")
_OWN_RUN_FOLDER = ("unshare", "--mount", "sh", "-ec", 'mount -t tmpfs tmpfs /run; exec "$@"', "sh")
_OVS_SCHEMA = Path("/usr/share/openvswitch/vswitch.ovsschema")
_WIREGUARD_PORT, _N2N_PORT = 51820, 7654


class ContenderError(Exception):
    """A contender does not come up; the text holds what it said."""


@dataclass(frozen=True)
class Contender:
    """A way to connect two hosts. `missing` says what must be installed for it, or None."""

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


def ourselves(
    name: str, *options: str, environment: Mapping[str, str] | None = None, module: str = "dataplane.cli"
) -> Contender:
    """A pair of nodes of this project, with a static store and the given options; `module` is what Python runs."""

    def command(here: End, there: End, folder: Path) -> list[str]:
        return [
            "env", *(f"{key}={value}" for key, value in (environment or {}).items()),
            sys.executable, "-m", module, "--store", "static", "--iface", "eth0",
            "--network", str(NETWORK), "--subnet", str(here.subnet),
            "--peer", f"{there.subnet}={there.underlay}",
            "--run-dir", str(run_dir(folder, here)), "--subnet-file", str(folder / f"subnet{here.number}.env"),
            *options,
        ]  # fmt: skip

    return Contender(name, _started(command))


def run_dir(folder: Path, end: End) -> Path:
    """The run folder of our node at `end`, where it can be asked."""
    return folder / f"run{end.number}"


def socat() -> Contender:
    """Socat between a TUN and a UDP socket: one packet per system call, nothing else."""

    def command(here: End, there: End, folder: Path) -> list[str]:  # noqa: ARG001 - as above
        tun = f"TUN:{here.overlay}/16,tun-name=tun0,tun-type=tun,iff-no-pi,iff-up"
        return ["socat", f"UDP:{there.underlay}:8285,bind={here.underlay}:8285", tun]

    return Contender("socat", _started(command, device="tun0", mtu=1472), _lacking("socat"))


def wireguard_go() -> Contender:
    """WireGuard in userspace, in Go. It encrypts, which nobody else here but n2n does."""

    def command(here: End, there: End, folder: Path) -> list[str]:  # noqa: ARG001 - as above
        return [*_OWN_PROCESSES, *_OWN_RUN_FOLDER, "wireguard-go", "-f", "tun0"]

    def connect(first: End, second: End, folder: Path) -> None:
        ends = (first, second)
        logs = [_start(end, folder, "log", command(end, end, folder)) for end in ends]
        keys = {end.number: _wireguard_key(folder / f"key{end.number}") for end in ends}
        for here, there in ((first, second), (second, first)):
            _until(partial(_has_device, here, "tun0"), logs)
            wg = [
                "wg", "set", "tun0", "private-key", str(folder / f"key{here.number}"), "listen-port", str(_WIREGUARD_PORT),
                "peer", keys[there.number], "endpoint", f"{there.underlay}:{_WIREGUARD_PORT}",
                "allowed-ips", str(there.subnet),
            ]  # fmt: skip
            _until(partial(_beside, here, wg), logs)
            _set_up_device(here, "tun0", 1420)
        _until(partial(_reaches, first, second), logs)

    return Contender("wireguard-go (encrypts)", connect, _lacking("wireguard-go", "wg", "unshare", "nsenter"))


def open_vswitch() -> Contender:
    """Open vSwitch with its userspace datapath and VXLAN: one bridge that has eth0, one that has the tunnel."""

    def connect(first: End, second: End, folder: Path) -> None:
        logs: list[Path] = []
        for here, there in ((first, second), (second, first)):
            logs += _start_ovs(here, there, folder)
        for here, there in ((first, second), (second, first)):
            _until(partial(_reaches, here, there, str(there.underlay)), logs)
        _until(partial(_reaches, first, second), logs)

    programs = ("ovs-vswitchd", "ovsdb-server", "ovsdb-tool", "ovs-vsctl", "unshare")
    return Contender("Open vSwitch, userspace VXLAN", connect, _lacking(*programs))


def n2n() -> Contender:
    """N2n 1.x, as Debian has it: a peer-to-peer VPN on a TAP device. It encrypts (Twofish).

    Later versions read ``-f`` the other way round and would leave for the background; they are not taken.
    """

    def connect(first: End, second: End, folder: Path) -> None:
        logs = [_start(first, folder, "supernode", [*_OWN_PROCESSES, "supernode", "-l", str(_N2N_PORT)])]
        _until(lambda: "ready" in logs[0].read_text(encoding="utf-8"), logs)  # edges ask once in 20 s
        for end in (first, second):
            edge = [
                "edge", "-d", "tun0", "-a", str(end.overlay), "-s", str(NETWORK.netmask), "-c", "bench", "-k", "bench",
                "-u", "0", "-g", "0", "-M", "1400", "-l", f"{first.underlay}:{_N2N_PORT}",
            ]  # fmt: skip
            logs.append(_start(end, folder, "log", [*_OWN_PROCESSES, *edge]))
        for end in (first, second):
            _until(partial(_has_device, end, "tun0"), logs)
        _until(partial(_reaches, first, second), logs)

    return Contender("n2n 1.x (encrypts)", connect, _lacking("supernode", "edge", "unshare") or _n2n_of_another_kind())


def template(name: str, text: str) -> Contender:
    """Any program, started on each host by a command with {local}, {remote}, {overlay}, {subnet}, {number} in it.

    It must bring up an interface named ``tun0`` with the overlay address.
    """

    def command(here: End, there: End, folder: Path) -> list[str]:
        filled = text.format(
            local=here.underlay, remote=there.underlay, overlay=here.overlay, remote_overlay=there.overlay,
            subnet=here.subnet, number=here.number, folder=folder,
        )  # fmt: skip
        return [*_OWN_PROCESSES, "sh", "-c", filled]

    return Contender(name, _started(command))


def _lacking(*programs: str) -> str | None:
    """Those of `programs` that are not installed."""
    return " and ".join(one for one in programs if shutil.which(one) is None) or None


def _n2n_of_another_kind() -> str | None:
    told = subprocess.run(["edge", "-h"], capture_output=True, text=True, check=False)
    return None if re.search(r"n2n v\.?1\.", told.stdout + told.stderr) else "version 1 of edge"


def _started(
    command: Callable[[End, End, Path], Sequence[str]], device: str | None = None, mtu: int | None = None
) -> Callable[[End, End, Path], None]:
    """Start `command` on both hosts and wait until pings pass."""

    def connect(first: End, second: End, folder: Path) -> None:
        logs = [
            _start(here, folder, "log", command(here, there, folder))
            for here, there in ((first, second), (second, first))
        ]  # fmt: skip
        if device is not None:
            for end in (first, second):
                _until(partial(_has_device, end, device), logs)
                end.namespace.ip(f"link set {device} mtu {mtu} txqueuelen 1000")
        _until(partial(_reaches, first, second), logs)

    return connect


def _start(end: End, folder: Path, name: str, command: Sequence[str]) -> Path:
    """Start a program of the contender at `end`; returns the file in `folder` that gets what it says."""
    path = folder / f"{name}{end.number}"
    with open(path, "w", encoding="utf-8") as log:
        process = end.namespace.popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    end.processes.append(process.pid)
    return path


def _wireguard_key(path: Path) -> str:
    """Write a new private key to `path`; returns the public one."""
    path.touch(mode=0o600)
    private = subprocess.run(["wg", "genkey"], capture_output=True, text=True, check=True).stdout
    path.write_text(private, encoding="ascii")
    return subprocess.run(["wg", "pubkey"], input=private, capture_output=True, text=True, check=True).stdout.strip()


def _beside(end: End, command: Sequence[str]) -> bool:
    """Run `command` where the contender's first process at `end` has its /run, and its network; whether it succeeds."""
    child = next(iter(children(end.processes[0])), None)
    if child is None:
        return False
    inside = ["nsenter", "--target", str(child), "--mount", "--net", *command]
    return subprocess.run(inside, capture_output=True, check=False).returncode == 0


def _start_ovs(here: End, there: End, folder: Path) -> list[Path]:
    """Database and switch at `here`, then the bridges; the underlay's address moves from eth0 to the first bridge."""
    place = folder / f"ovs{here.number}"
    place.mkdir()
    database, remote = place / "conf.db", f"unix:{place / 'db.sock'}"
    subprocess.run(["ovsdb-tool", "create", str(database), str(_OVS_SCHEMA)], check=True, capture_output=True)
    own_folders = [f"OVS_{name}DIR={place}" for name in ("RUN", "LOG", "DB", "SYSCONF", "PKGDATA")]
    started = [*_OWN_PROCESSES, "env", *own_folders]
    server = [
        "ovsdb-server", str(database), f"--remote=p{remote}", f"--unixctl={place / 'ovsdb.ctl'}", "--no-chdir",
    ]  # fmt: skip
    logs = [_start(here, folder, "ovsdb", [*started, *server])]
    _until((place / "db.sock").exists, logs)
    vsctl = ["env", *own_folders, "ovs-vsctl", f"--db={remote}", "--timeout=10"]
    _require(here, [*vsctl, "--no-wait", "init"])
    switch = ["ovs-vswitchd", remote, f"--unixctl={place / 'switch.ctl'}", "--no-chdir"]
    logs.append(_start(here, folder, "switch", [*started, *switch]))
    mac = here.namespace.run(["cat", "/sys/class/net/eth0/address"]).stdout.strip()
    overlay_mac = format_mac(derive_vtep_mac(here.underlay))
    bridge = "datapath_type=netdev other_config:hwaddr"
    _require(here, [
        *vsctl,
        *f"-- add-br br-phy -- set bridge br-phy {bridge}=\"{mac}\" -- add-port br-phy eth0 "
        f"-- add-br tun0 -- set bridge tun0 {bridge}=\"{overlay_mac}\" -- add-port tun0 vxlan0 "
        f"-- set interface vxlan0 type=vxlan options:remote_ip={there.underlay} options:key=1".split(),
    ])  # fmt: skip
    here.namespace.ip(
        f"addr del {here.underlay}/24 dev eth0", "link set br-phy up", f"addr add {here.underlay}/24 dev br-phy"
    )
    _set_up_device(here, "tun0", 1450)
    return logs


def _require(end: End, command: Sequence[str]) -> None:
    done = end.namespace.run(command)
    if done.returncode:
        raise ContenderError(f"{' '.join(command)}: {done.stderr.strip()}")


def _set_up_device(end: End, device: str, mtu: int) -> None:
    end.namespace.ip(
        f"link set {device} mtu {mtu} txqueuelen 1000 up", f"addr add {end.overlay}/{NETWORK.prefixlen} dev {device}"
    )


def _has_device(end: End, device: str) -> bool:
    return end.namespace.run(["ip", "link", "show", device]).returncode == 0


def _reaches(here: End, there: End, address: str | None = None) -> bool:
    """Whether a ping from `here` to the overlay address of `there` (or to `address`) comes back."""
    return here.namespace.run(["ping", "-c1", "-W1", address or str(there.overlay)]).returncode == 0


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
            open_vswitch(),
            wireguard_go(),
            n2n(),
        ])  # fmt: skip
