"""``pyflannel-dp replay``: the options, and the order of things.

Theory of operation: each loop goes once through the capture. Loading stands between the measured times; the run's result is
made of what the loops took. What is to be written of the underlay is written before anything is measured, in a pass of its
own.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bench import html
from bench.replay import compare, report, results, tunnel
from bench.replay.capture import CaptureError, probe
from bench.replay.chunk import CHUNK_BYTES
from bench.replay.loading import Decapsulation, Loader
from bench.replay.pacing import Pace, Pacer
from bench.replay.paths import BATCH, LoopbackPath, MemoryPath, ReplayPath, ReversePath, verdicts
from bench.replay.results import Delivery, Latency, Loop, ResultError, Run, Stage
from bench.replay.rewrite import Rewriter
from bench.replay.sides import MAX_LEASES, MAX_PEERS, RECEIVERS, SENDER, Sides, make_sides
from bench.replay.wire import write_underlay
from bench.throughput.report import machine
from dataplane.offload import Offloads
from dataplane.underlay.udp import SOURCE_PORTS, UnderlayError, open_udp
from encap import ipudp, vxlan
from encap.pure import is_compiled
from routing import table as table_module
from routing.lease import derive_vtep_mac
from routing.route import FRAMING_IP, FRAMING_VXLAN

MEMORY, LOOPBACK, TUN = "memory", "loopback", "tun"
_SENDER_HOST, _RECEIVER_HOST = ip_address("127.0.0.1"), ip_address("127.0.0.2")
_PACED_CHUNK_BYTES = 1 << 20  # small, so that the progress bar moves
_VNI = 1
_PORTS = {FRAMING_VXLAN: vxlan.DEFAULT_PORT, FRAMING_IP: ipudp.DEFAULT_PORT}
_FAILURES = (CaptureError, ResultError, compare.ComparisonError, UnderlayError, tunnel.TunnelError, html.PageError)


@dataclass(frozen=True)
class _Settings:
    """The options that decide what is measured."""

    mode: str
    framing: str
    decap: bool
    peers: int
    leases: int
    seed: int
    via: str


def _rate(text: str) -> float:
    """A number with a decimal unit, like 1.5M. Raises ValueError."""
    factor = {"k": 1e3, "m": 1e6, "g": 1e9}.get(text[-1:].lower(), 1.0)
    return float(text[:-1] if factor != 1.0 else text) * factor


class _Rate(click.ParamType[float]):
    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return value if isinstance(value, float) else _rate(str(value))
        except ValueError:
            self.fail(f"{value!r} is not a number, like 50000, 50k or 1.5M", param, ctx)


_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option(
    "--mode",
    type=click.Choice([MEMORY, LOOPBACK, TUN]),
    default=MEMORY,
    show_default=True,
    help="Without system calls; over two UDP sockets; or between two namespaces with real devices (root).",
)
@click.option(
    "--framing",
    type=click.Choice([FRAMING_VXLAN, FRAMING_IP]),
    default=FRAMING_VXLAN,
    show_default=True,
    help="What is put around a packet: VXLAN, or nothing but UDP.",
)
@click.option("--decap", is_flag=True, help="The capture holds datagrams of an overlay: replay the way in (memory).")
@click.option(
    "--via",
    type=click.Choice([tunnel.NODE, tunnel.KERNEL]),
    default=tunnel.NODE,
    show_default=True,
    help="Mode tun: through this program, or through kernel VXLAN devices.",
)
@click.option("--peers", type=click.IntRange(1, MAX_PEERS), default=1, show_default=True, help="VTEPs to spread over.")
@click.option(
    "--leases", type=click.IntRange(1, MAX_LEASES), default=1, show_default=True, help="Leases in the sender's table."
)
@click.option("--loops", type=click.IntRange(1), default=5, show_default=True, help="How often to go through the capture.")
@click.option("--speed", type=float, metavar="FACTOR", help="As captured, FACTOR times as fast.")
@click.option("--pps", type=_Rate(), metavar="RATE", help="So many packets a second, like 50k.")
@click.option("--bps", type=_Rate(), metavar="RATE", help="So many bits of inner packets a second, like 1.5G.")
@click.option("--max-gap", type=float, metavar="SECONDS", help="With --speed: shorten longer gaps of the capture.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the addresses that are put in.")
@click.option("--json", "json_path", type=_FILE, metavar="FILE", help="Write the result there.")
@click.option("--report", "page_path", type=_FILE, metavar="FILE", help="Write a page with plots there (HTML).")
@click.option("--write", "write_path", type=_FILE, metavar="FILE", help="Write what goes over the underlay (pcapng).")
@click.option(
    "--baseline",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    metavar="FILE",
    help="Compare with the result of an earlier --json; exit code 3 if it is worse.",
)
@click.option("--threshold", type=click.FloatRange(0), default=5.0, show_default=True, metavar="PERCENT",
              help="With --baseline: how much worse, beyond noise, is too much.")  # fmt: skip
def replay(
    files: tuple[Path, ...], mode: str, framing: str, decap: bool, via: str, peers: int, leases: int, loops: int,
    speed: float | None, pps: float | None, bps: float | None, max_gap: float | None, seed: int, json_path: Path | None,
    page_path: Path | None, write_path: Path | None, baseline: Path | None, threshold: float,
) -> None:  # fmt: skip
    """Carry the packets of captures through the encapsulation path: how fast, and how correctly.

    FILES are pcap or pcapng, plain, .gz or .zst, one after the other. Their addresses are replaced by the overlay's.
    """
    settings = _Settings(mode, framing, decap, peers, leases, seed, via)
    try:
        pace = Pace(speed, pps, bps, max_gap_seconds=max_gap, loops=loops)
        _check(settings, write_path)
        _check_files(files, [one for one in (json_path, page_path, write_path) if one is not None])
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    console = Console(width=None if sys.stdout.isatty() else 200)
    try:
        before = results.read_json(baseline) if baseline is not None else None
        if page_path is not None:
            html.require_matplotlib()
        for path in files:
            probe(path)
        run = _replay(console, files, settings, pace, write_path)
        report.print_run(console, run)
        if json_path is not None:
            results.write_json(json_path, run)
        comparison = compare.compare(before, run) if before is not None else None
        if page_path is not None:
            report.write_page(page_path, run, comparison)
    except _FAILURES as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"{error.filename or 'the machine'}: {error.strerror}") from None
    if comparison is not None:
        compare.print_comparison(console, comparison, threshold)
    if report.is_wrong(run) or not run.delivery.delivered:
        sys.exit(1)
    if comparison is not None:
        sys.exit(comparison.exit_code(threshold))


def _check(settings: _Settings, write_path: Path | None) -> None:
    """Raises ValueError for options that do not go together."""
    if settings.decap and settings.mode != MEMORY:
        raise ValueError("--decap is for --mode memory")
    if settings.decap and write_path is not None:
        raise ValueError("--write writes what is encapsulated, and with --decap nothing is")
    if settings.via == tunnel.KERNEL and (settings.mode != TUN or settings.framing != FRAMING_VXLAN):
        raise ValueError("--via kernel is for --mode tun and --framing vxlan")
    if settings.peers > settings.leases > 1:
        raise ValueError("there cannot be more peers than leases")
    if settings.leases > 1 and (settings.mode == TUN or settings.decap):
        raise ValueError("--leases is for the sender's table, which neither --mode tun nor --decap uses")


def _check_files(files: Sequence[Path], written: Sequence[Path]) -> None:
    """Raises ValueError if a result would be written over a capture, or over another result."""
    for number, one in enumerate(written):
        if one.is_file() and any(one.samefile(other) for other in files):
            raise ValueError(f"{one} is a capture that is to be replayed; name another file for the result")
        if one.absolute() in {other.absolute() for other in written[:number]}:
            raise ValueError(f"{one} cannot hold two results")


def _replay(console: Console, files: Sequence[Path], settings: _Settings, pace: Pace, write_path: Path | None) -> Run:
    notes: list[str] = []

    def trouble(text: str) -> None:
        if text not in notes:  # each loop meets it again
            notes.append(text)

    with ExitStack() as stack:
        sides, path = stack.enter_context(_open(settings))
        source, destinations = (SENDER, sides.peer_subnets) if not settings.decap else (SENDER, RECEIVERS)
        loader = Loader(
            files,
            Rewriter(source, destinations, settings.seed, keep_multicast=True),
            trouble=trouble,
            decapsulation=_decapsulation(settings, sides) if settings.decap else None,
            chunk_bytes=_PACED_CHUNK_BYTES if pace.has_schedule else CHUNK_BYTES,
        )
        if write_path is not None:
            write_underlay(write_path, loader, _sides(settings, _PORTS[settings.framing]), (_SENDER_HOST, _RECEIVER_HOST))
        pacer = Pacer(pace)
        loops = _run(console, loader, path, pacer)
    trace = loader.trace(" ".join(str(one.name) for one in files))
    if not loader.records:
        trouble("there is no packet in the capture")
    elif not trace.packets:
        trouble(f"none of the {loader.records} packets of the capture can be replayed: see what was skipped")
    elif not path.delivered_packets:
        trouble("no packet came out: see the verdicts")
    counted = verdicts(path)
    sent = sum(counted["outbound"].values())
    return Run(
        mode=settings.mode
        + (f" via {settings.via}" if settings.mode == TUN else "")
        + (" decap" if settings.decap else ""),
        command=sys.argv,
        machine=machine(),
        settings={
            "framing": settings.framing,
            "peers": settings.peers,
            "leases": settings.leases,
            "seed": settings.seed,
            "batch": BATCH,
            "compiled": is_compiled(table_module),
        },
        trace=trace,
        loops=loops,
        delivery=Delivery(
            sent=sent,
            delivered=counted["inbound"].get("forwarded", 0),
            lost=None if settings.decap else path.lost,
            reordered=None if settings.decap else path.reordered,
            corrupted=None if settings.decap else path.corrupted,
        ),
        pacing=pacer.result(),
        stages=_stages(path, loader, sent),
        latency=Latency.of(path.latency) if path.latency.count else None,
        verdicts=counted,
        notes=notes,
    )


def _run(console: Console, loader: Loader, path: ReplayPath, pacer: Pacer) -> list[Loop]:
    loops: list[Loop] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("packets", total=None)
        total = 0
        while pacer.next_loop():
            packets, inner_bytes, taken = path.delivered_packets, path.delivered_bytes, 0
            for chunk in loader.chunks():
                if not loops:
                    total += len(chunk)
                taken += path.carry(chunk, pacer)
                progress.advance(task, len(chunk))
            loops.append(Loop(path.delivered_packets - packets, path.delivered_bytes - inner_bytes, taken / 1e9))
            progress.update(task, total=total * pacer.pace.loops)
    return loops


def _stages(path: ReplayPath, loader: Loader, sent: int) -> list[Stage]:
    """What each stage costs a packet. Cycles are those of the clock that the processor says it runs at."""
    per_packet = {"read": loader.read_ns / max(loader.records, 1)}
    per_packet |= {name: spent / max(sent, 1) for name, spent in path.stages_ns.items()}
    megahertz = _megahertz()
    return [
        Stage(name, nanoseconds, nanoseconds * megahertz / 1e3 if megahertz else None)
        for name, nanoseconds in per_packet.items()
    ]


def _megahertz() -> float | None:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("cpu MHz"):
            return float(line.partition(":")[2])
    return None


def _decapsulation(settings: _Settings, sides: Sides) -> Decapsulation:
    mac = sides.receiving.identity.vtep_mac or derive_vtep_mac(ip_address("192.0.2.2"))
    return Decapsulation(settings.framing, _VNI, mac)


@contextmanager
def _open(settings: _Settings) -> Iterator[tuple[Sides, ReplayPath]]:
    """The tables and the path; what it holds is given back at the end."""
    if settings.mode == TUN:
        with tunnel.open_tunnel(settings.framing, settings.via, settings.peers) as path:
            yield path.sides, path
        return
    if settings.mode == MEMORY:
        sides = _sides(settings, _PORTS[settings.framing])
        yield sides, ReversePath(sides) if settings.decap else MemoryPath(sides)
        return
    with ExitStack() as stack:
        receiver = open_udp([_RECEIVER_HOST], 0, 0, Offloads())
        stack.callback(receiver.close)
        sender = open_udp([_SENDER_HOST], 0, SOURCE_PORTS, Offloads())
        stack.callback(sender.close)
        sides = _sides(settings, receiver.port)
        yield sides, LoopbackPath(sides, sender, receiver)


def _sides(settings: _Settings, port: int) -> Sides:
    return make_sides(
        framing=settings.framing,
        peers=settings.peers,
        leases=settings.leases,
        sender_host=_SENDER_HOST,
        peer_hosts=(_RECEIVER_HOST,),
        port=port,
        vni=_VNI,
    )
