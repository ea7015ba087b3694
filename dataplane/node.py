"""One node from start to stop: store + host + engine.

Theory of operation. Start goes from what can fail without a trace to what others see: choose the interface, read the
configuration, take the control socket, bind the UDP port, take a lease, build the table, open and set up the device,
start the engine, and last of all write subnet.env, which is what tells everybody else that the node is ready. Then
three tasks run beside the engine: one follows the store and swaps in a new table after each change, one renews the
lease, one waits for the end. Stop undoes it in the other order, but leaves subnet.env and the lease, which the next
start reuses.

The families are independent: one that cannot be set up is reported and left out, and the node runs on the other;
without any it does not start.
"""

import asyncio
import contextlib
import logging
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import routing.table
from dataplane import footprint
from dataplane.control import ControlServer
from dataplane.device import Device
from dataplane.device.tun import open_tun
from dataplane.engine import Direction, Engine
from dataplane.host import ALIAS, Host, HostError
from dataplane.host.external import Choice, External, choose
from dataplane.offload import Offload, Offloads
from dataplane.underlay import Underlay
from dataplane.underlay.udp import SOURCE_PORTS, UnderlayError, open_udp
from dataplane.verdict import by_name
from encap.overhead import MINIMUM_IPV4_MTU, MINIMUM_IPV6_MTU, overhead, superpacket_limit
from encap.pure import is_compiled
from encap.vxlan import HEADER_LENGTH
from routing import route, subnetfile
from routing.config import BACKEND_UDP, BACKEND_VXLAN, Address, NetworkConfig, Pool
from routing.lease import Lease, LeaseAttributes, VtepData, derive_vtep_mac, format_mac
from routing.leaseset import LeaseSet
from routing.route import FRAMING_IP, FRAMING_VXLAN
from routing.stores import LeaseLostError, StoreError, SubnetStore
from routing.table import Identity, Table

if TYPE_CHECKING:
    from dataplane.capture import Recorder
    from dataplane.trace import Tracer
    from dataplane.underlay.link import LinkSpec

log = logging.getLogger(__name__)
_T = TypeVar("_T")

_RETRY_SECONDS = 5.0
_CHECK_SECONDS = 5.0
_LONGEST_IP_PACKET = 65535
_LONGEST_SLEEP_SECONDS = 60.0
_LONGEST_INTERFACE_NAME = 15  # IFNAMSIZ, less the final zero
_FRAMING_OF_BACKEND = {BACKEND_VXLAN: FRAMING_VXLAN, BACKEND_UDP: FRAMING_IP}


class NodeError(Exception):
    """The node cannot start or go on; the text says why and what to do."""


@dataclass(frozen=True)
class Settings:
    """What the operator chose. `renew_margin` is in seconds; `device` empty means flannel's name for the framing.

    `capture` is the file for packets, `trace` whether each is told on stderr, `faults` what our own link is to do to them.
    """

    choice: Choice = field(default_factory=Choice)
    device: str = ""
    vtep_mac: bytes | None = None
    check_sources: bool = True
    source_ports: int = SOURCE_PORTS
    offloads_off: frozenset[Offload] = frozenset()
    ipv6_underlay: bool = False
    renew_margin: float = 3600.0
    subnet_file: Path = subnetfile.DEFAULT_PATH
    run_dir: Path = Path("/run/pyflannel-dp")
    capture: Path | None = None
    trace: bool = False
    faults: "LinkSpec | None" = None


OpenDevice = Callable[[str, int, Offloads], Device]
OpenUnderlay = Callable[[Sequence[Address], int, int, Offloads], Underlay]


class Node:
    """A node of the overlay.

    `open_device`, `open_underlay`, `sleep` and `now` are the kernel and the clock; `now_ns` is the clock of captures and
    traces, `rng` decides which packets meet the faults that the settings ask for.
    """

    def __init__(
        self,
        settings: Settings,
        store: SubnetStore,
        host: Host,
        *,
        open_device: OpenDevice = open_tun,
        open_underlay: OpenUnderlay = open_udp,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        now: Callable[[], float] = time.time,
        now_ns: Callable[[], int] = time.time_ns,
        rng: random.Random | None = None,
    ) -> None:
        self._settings = settings
        self._store = store
        self._host = host
        self._open_device = open_device
        self._open_underlay = open_underlay
        self._sleep = sleep
        self._now = now
        self._now_ns = now_ns
        self._rng = rng or random.Random()
        self._started = now()
        self._failure: asyncio.Future[None] | None = None
        self._state = _State(Offloads(settings.offloads_off))

    async def run(self, stop: asyncio.Event, ready: Callable[[], None] = lambda: None) -> None:
        """Run until `stop` is set; `ready` is called once packets are carried. Raises what made it fail."""
        self._failure = asyncio.get_running_loop().create_future()
        async with contextlib.AsyncExitStack() as undo:
            try:
                starting = asyncio.ensure_future(self._start(undo))
                leases = await unless_stopped(stop, starting)
                if leases is not None:
                    ready()
                    await self._serve(stop, leases)
            except (UnderlayError, OSError) as error:
                raise NodeError(str(error)) from error

    async def _start(self, undo: contextlib.AsyncExitStack) -> AsyncIterator[Sequence[Lease]]:
        state = self._state
        state.external = await asyncio.to_thread(choose, self._host, self._settings.choice)
        state.config = await self._store.config()
        state.device_name = self._device_name()
        await self._require_device_name_free()
        for warning in state.config.warnings:
            log.warning("%s", warning)
        control = ControlServer(self._settings.run_dir, self.status)
        undo.push_async_callback(control.close)
        await control.start()
        self._open_taps(undo)
        state.underlay = await self._bind()
        undo.callback(self._close_underlay)
        self._wrap_underlay()
        state.mtu = device_mtu(state.external.mtu, state.config, state.framing, state.underlay.families)
        attributes = self._attributes()
        previous = subnetfile.read_previous(self._settings.subnet_file)
        state.lease = await self._store.acquire(state.config, attributes, previous)
        log.info("lease %s until %s", state.lease.key, _date(state.lease.expiration))
        state.peers = LeaseSet(state.lease.key)
        leases = self._store.watch()
        undo.push_async_callback(_close_iterator, leases)
        first = await anext(leases)
        self._require_own_lease(first)
        state.peers.replace(first)
        state.table = self._table()
        await self._open_engine(undo)
        await self._announce()
        return leases

    async def _bind(self) -> Underlay:
        state = self._state
        external = state.external
        wanted: list[Address] = [external.ipv4] if external.ipv4 else []
        if external.ipv6 and (state.config.ipv6 or self._settings.ipv6_underlay or not external.ipv4):
            wanted.append(external.ipv6)
        port = state.config.backend.port
        pool = self._settings.source_ports if state.framing == FRAMING_VXLAN else 0
        try:
            return self._open_underlay(wanted, port, pool, state.offloads)
        except UnderlayError as error:
            if not error.port_taken:
                raise NodeError(str(error)) from error
            raise NodeError(f"{error}: {await asyncio.to_thread(self._port_holder, port)}") from error

    def _open_taps(self, undo: contextlib.AsyncExitStack) -> None:
        """What `--capture` and `--trace` need, if they are asked for: only a node that runs here empties the file."""
        state, settings = self._state, self._settings
        if settings.capture is not None:
            from dataplane.capture import open_recorder  # noqa: PLC0415 - only then

            try:
                state.recorder = open_recorder(settings.capture, now_ns=self._now_ns, underlay=state.external.name)
            except OSError as error:
                raise NodeError(f"cannot write the capture file {settings.capture}: {error.strerror}") from error
            undo.callback(state.recorder.close)
        if settings.trace:
            from dataplane.trace import Tracer  # noqa: PLC0415 - as above

            state.tracer = Tracer(now_ns=self._now_ns)

    def _close_underlay(self) -> None:
        self._state.underlay.close()

    def _wrap_underlay(self) -> None:
        """Put around the underlay what the settings ask for; the taps inside, so that they see what is on the network."""
        state = self._state
        ends = {4: state.external.ipv4, 6: state.external.ipv6}
        hosts = {family: str(ends[family]) for family in sorted(state.underlay.families)}
        port = state.config.backend.port
        header_length = HEADER_LENGTH if state.framing == FRAMING_VXLAN else 0
        if state.recorder is not None:
            from dataplane.capture import CapturingUnderlay  # noqa: PLC0415 - only with --capture

            state.underlay = CapturingUnderlay(
                state.underlay, state.recorder, hosts=hosts, port=port, header_length=header_length
            )
        if state.tracer is not None:
            from dataplane.trace import TracingUnderlay  # noqa: PLC0415 - only with --trace

            state.underlay = TracingUnderlay(
                state.underlay, state.tracer, hosts=hosts, port=port, header_length=header_length
            )
        if self._settings.faults is not None:
            from dataplane.faults import FaultyUnderlay  # noqa: PLC0415 - only with --faults
            from dataplane.underlay.link import describe_link  # noqa: PLC0415 - as above

            log.warning("faults are injected on purpose: %s", describe_link(self._settings.faults))
            state.underlay = FaultyUnderlay(state.underlay, self._settings.faults, self._rng, header_length=header_length)

    def _wrap_device(self, device: Device) -> Device:
        """As for the underlay."""
        state = self._state
        if state.recorder is not None:
            from dataplane.capture import CapturingDevice  # noqa: PLC0415 - only with --capture

            device = CapturingDevice(device, state.recorder)
        if state.tracer is not None:
            from dataplane.trace import TracingDevice  # noqa: PLC0415 - only with --trace

            device = TracingDevice(device, state.tracer)
        return device

    def _port_holder(self, port: int) -> str:
        holders = [interface.name for interface in self._host.interfaces() if interface.udp_port == port]
        if holders:
            return (
                f"the kernel VXLAN device {holders[0]} holds it; remove that device (ip link del {holders[0]}) or choose "
                "another port"
            )
        return f"another process holds it (see: ss -ulpn sport = :{port}); stop it, or choose another port"

    def _attributes(self) -> LeaseAttributes:
        """What our lease says of us; the VTEP MACs follow from the addresses, so that they outlive a restart."""
        state = self._state
        families = state.underlay.families
        public_ip = state.external.public_ip if 4 in families else None
        public_ipv6 = state.external.public_ipv6 if 6 in families else None
        if state.framing == FRAMING_VXLAN:
            chosen = self._settings.vtep_mac
            state.vtep_mac = (chosen or derive_vtep_mac(public_ip)) if public_ip else None
            chosen = None if public_ip else chosen
            state.vtep_mac_v6 = (chosen or derive_vtep_mac(public_ipv6)) if public_ipv6 else None
        vni = state.config.backend.vni
        return LeaseAttributes(
            public_ip,
            public_ipv6,
            route.BACKEND_OF_FRAMING[state.framing],
            VtepData(state.vtep_mac, vni) if state.vtep_mac else None,
            VtepData(state.vtep_mac_v6, vni) if state.vtep_mac_v6 else None,
        )

    def _table(self) -> Table:
        """The table of the peers that are known now; a peer that cannot be reached is reported when it becomes so."""
        state = self._state
        routes, unreachable = route.plan(state.peers.peers, state.framing, state.underlay.families)
        for one in unreachable:
            if one not in state.unreachable:
                log.warning("no route to %s: %s", one.lease.key, one.reason)
        state.unreachable = unreachable
        network = state.config.ipv4.network if state.config.ipv4 else None
        assert network is None or network.version == 4
        identity = Identity(
            framing=state.framing,
            subnet=state.lease.subnet,
            ipv6_subnet=state.lease.ipv6_subnet,
            port=state.config.backend.port,
            vni=state.config.backend.vni,
            vtep_mac=state.vtep_mac,
            vtep_mac_v6=state.vtep_mac_v6,
            check_sources=self._settings.check_sources,
            network=network,
        )
        return routing.table.build(identity, routes)

    async def _open_engine(self, undo: contextlib.AsyncExitStack) -> None:
        state = self._state
        state.device = self._wrap_device(self._open_device(state.device_name, state.mtu, state.offloads))
        undo.callback(state.device.close)
        await self._set_up_families(state.device.name)
        state.engine = Engine(state.device, state.underlay, state.table, offloads=state.offloads, failed=self._fail)
        undo.callback(state.engine.stop)
        state.engine.start()

    def _device_name(self) -> str:
        """As chosen, else flannel's name. Raises NodeError if that is too long for an interface."""
        state = self._state
        default = f"flannel.{state.config.backend.vni}" if state.framing == FRAMING_VXLAN else "flannel0"
        name = self._settings.device or default
        if len(name) > _LONGEST_INTERFACE_NAME:
            raise NodeError(f"{name} is too long for an interface: name the device with --device")
        return name

    async def _require_device_name_free(self) -> None:
        """We take over a device that carries our mark, and nobody else's."""
        name = self._state.device_name
        for interface in await asyncio.to_thread(self._host.interfaces):
            if interface.name == name and interface.alias != ALIAS:
                raise NodeError(
                    f"an interface {name} exists already and is not ours (see: ip -d link show {name}); remove it, or "
                    "choose another name with --device"
                )

    async def _set_up_families(self, device: str) -> None:
        """Addresses and routes, family by family. Raises HostError if none works."""
        state = self._state
        failures: dict[int, HostError] = {}
        for pool in state.config.pools:
            try:
                await asyncio.to_thread(self._set_up_family, device, pool)
            except HostError as error:
                failures[pool.network.version] = error
        if len(failures) == len(state.config.pools):
            raise next(iter(failures.values()))
        for failure in failures.values():
            log.error("one family is left out: %s", failure)
        state.failures = {family: str(failure) for family, failure in failures.items()}

    def _set_up_family(self, device: str, pool: Pool) -> None:
        """The address and the route of one family; blocks. What is there already stays."""
        state = self._state
        subnet = state.lease.subnet if pool.network.version == 4 else state.lease.ipv6_subnet
        assert subnet is not None
        limit = superpacket_limit(state.mtu, state.table.header_length)
        self._host.configure_device(device, [subnet.network_address], state.mtu, limit)
        self._host.add_route(pool.network, device)

    async def _keep_host(self) -> None:
        """Put our device and routes back where somebody took them down: without its route the overlay's traffic would
        leave by the default route, in the clear."""
        state = self._state
        pools = [pool for pool in state.config.pools if pool.network.version not in state.failures]
        while True:
            await self._sleep(_CHECK_SECONDS)
            try:
                if not await asyncio.to_thread(self._host_is_as_we_left_it, pools):
                    log.warning("the device %s or its routes were changed; setting them up again", state.device_name)
                    for pool in pools:
                        await asyncio.to_thread(self._set_up_family, state.device_name, pool)
                state.trouble = None
            except HostError as error:
                if state.trouble is None:
                    log.error("%s", error)
                state.trouble = str(error)

    def _host_is_as_we_left_it(self, pools: Sequence[Pool]) -> bool:
        wanted = {(pool.network, self._state.device_name) for pool in pools}
        device = next((one for one in self._host.interfaces() if one.name == self._state.device_name), None)
        return device is None or (device.is_up and wanted <= set(self._host.routes()))

    async def _announce(self) -> None:
        """Write subnet.env, after noting that we are about to."""
        state = self._state
        networks = {
            pool.network.version: pool.network for pool in state.config.pools if pool.network.version not in state.failures
        }
        content = subnetfile.SubnetFile(
            networks.get(4), state.lease.subnet, networks.get(6), state.lease.ipv6_subnet, state.mtu
        )
        path = self._settings.subnet_file
        try:
            footprint.note(self._settings.run_dir, path, content.render())
            await asyncio.to_thread(subnetfile.write, path, content)
        except OSError as error:
            raise NodeError(
                f"cannot write the subnet file {path} (or the note of it in the run folder): {error}"
            ) from error
        log.info(
            "ready: %s on %s, MTU %d = %d of %s less the overhead, %d peers",
            state.device.name, state.external.name, state.mtu, state.config.backend.mtu or state.external.mtu,
            state.external.name, len(state.table.routes),
        )  # fmt: skip

    async def _serve(self, stop: asyncio.Event, leases: AsyncIterator[Sequence[Lease]]) -> None:
        """Until `stop`, or until something fails; the failure is raised."""
        assert self._failure is not None
        tasks: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(stop.wait()),
            asyncio.ensure_future(self._follow(leases)),
            asyncio.ensure_future(self._renew()),
            asyncio.ensure_future(self._keep_host()),
            self._failure,
        ]
        if self._state.recorder is not None:
            tasks.append(asyncio.ensure_future(self._keep_flushing(self._state.recorder)))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    async def _keep_flushing(self, recorder: "Recorder") -> None:
        """Bring what was captured to the file, for those who look at it meanwhile, and for the case that we are killed."""
        from dataplane.capture import FLUSH_SECONDS  # noqa: PLC0415 - only with --capture

        while True:
            await self._sleep(FLUSH_SECONDS)
            recorder.flush()

    def _fail(self, error: Exception) -> None:
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(NodeError(str(error) or repr(error)))

    async def _follow(self, leases: AsyncIterator[Sequence[Lease]]) -> None:
        """Swap in a new table after each change in the store."""
        state = self._state
        async for snapshot in leases:
            self._require_own_lease(snapshot)
            changes = state.peers.replace(snapshot)
            if changes:
                for verb, leases_of in (
                    ("added", changes.added),
                    ("removed", changes.removed),
                    ("changed", changes.changed),
                ):
                    for lease in leases_of:
                        log.debug("peer %s: %s at %s", verb, lease.key, lease.attributes.public_ip)
                state.table = self._table()
                state.engine.table = state.table
                log.info(
                    "peers: %d added, %d removed, %d changed; %d in all",
                    len(changes.added), len(changes.removed), len(changes.changed), len(state.table.routes),
                )  # fmt: skip

    def _require_own_lease(self, snapshot: Sequence[Lease]) -> None:
        """Raises LeaseLostError if the store does not hold our lease for us: two nodes must not announce one subnet."""
        own = self._state.lease
        found = next((lease for lease in snapshot if lease.key == own.key), None)
        if found is None:
            raise LeaseLostError(f"the lease {own.key} is gone from the store, or has ended")
        if not found.held_by(own.attributes):
            owner = found.attributes.public_ip or found.attributes.public_ipv6
            raise LeaseLostError(f"the lease {own.key} belongs to {owner} now")

    async def _renew(self) -> None:
        """Renew the lease `renew_margin` before its end; while the store fails, again every few seconds."""
        state = self._state
        while state.lease.expiration is not None:
            remaining = state.lease.expiration - self._settings.renew_margin - self._now()
            if remaining > 0:
                await self._sleep(min(remaining, _LONGEST_SLEEP_SECONDS))  # in parts: the wall clock may be set meanwhile
                continue
            try:
                state.lease = await self._store.renew(state.lease)
                log.info("lease %s renewed until %s", state.lease.key, _date(state.lease.expiration))
            except LeaseLostError:
                raise
            except StoreError as error:
                log.error("the lease could not be renewed: %s", error)
                await self._sleep(_RETRY_SECONDS)
        await asyncio.Event().wait()

    def status(self) -> dict[str, Any]:
        """Everything about the running node, as plain data for JSON."""
        from importlib import metadata  # noqa: PLC0415 - a mebibyte that only this needs

        return self._state.report() | {
            "pid": os.getpid(),
            "version": metadata.version("pyflannel-dp"),
            "uptime_seconds": round(self._now() - self._started, 1),
            "check_sources": self._settings.check_sources,
            "compiled": is_compiled(routing.table),
        }


async def unless_stopped(stop: asyncio.Event, task: "asyncio.Future[_T]") -> _T | None:
    """What `task` gives, or None, with the task ended, if `stop` is set first. Raises what the task raises."""
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        log.info("stopped while starting")
        return None
    finally:
        for one in (task, stopping):
            one.cancel()
        await asyncio.gather(task, stopping, return_exceptions=True)


async def _close_iterator(iterator: AsyncIterator[Any]) -> None:
    close = getattr(iterator, "aclose", None)
    if close is not None:
        await close()


def device_mtu(interface_mtu: int, config: NetworkConfig, framing: str, families: frozenset[int]) -> int:
    """The device's MTU: the underlay's less the overhead of its most expensive family. Raises NodeError if too small.

    A configured Backend.MTU is the underlay's, as flannel means it.
    """
    underlay_mtu = min(config.backend.mtu or interface_mtu, _LONGEST_IP_PACKET)
    lost = max(overhead(HEADER_LENGTH if framing == FRAMING_VXLAN else 0, family) for family in families)
    mtu = underlay_mtu - lost
    least = MINIMUM_IPV6_MTU if config.ipv6 else MINIMUM_IPV4_MTU
    if mtu < least:
        raise NodeError(
            f"the underlay's MTU of {underlay_mtu} less the overhead of {lost} leaves {mtu} bytes, but "
            f"IPv{6 if config.ipv6 else 4} needs {least}: raise the interface's MTU"
        )
    return mtu


def _date(expiration: float | None) -> str:
    if expiration is None:
        return "for ever"
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(expiration))


class _State:
    """What a node has come to have; the attributes are set one after the other while it starts."""

    external: External
    config: NetworkConfig
    underlay: Underlay
    mtu: int
    device_name: str
    lease: Lease
    peers: LeaseSet
    table: Table
    device: Device
    engine: Engine

    def __init__(self, offloads: Offloads) -> None:
        self.offloads = offloads
        self.vtep_mac: bytes | None = None
        self.vtep_mac_v6: bytes | None = None
        self.unreachable: list[route.Unreachable] = []
        self.failures: dict[int, str] = {}
        self.trouble: str | None = None
        self.recorder: Recorder | None = None
        self.tracer: Tracer | None = None

    @property
    def framing(self) -> str:
        """By the configuration's backend type."""
        return _FRAMING_OF_BACKEND[self.config.backend.type]

    def report(self) -> dict[str, Any]:
        """The parts of `Node.status` that are known so far."""
        if not hasattr(self, "engine"):
            return {"state": "starting"}
        engine = self.engine
        return {
            "state": "running",
            "framing": self.framing,
            "vni": self.config.backend.vni if self.framing == FRAMING_VXLAN else None,
            "port": self.config.backend.port,
            "device": {"name": self.device.name, "mtu": self.mtu, "queue_drops": _queue_drops(self.device.name)},
            "external": {
                "interface": self.external.name,
                "ipv4": str(self.external.ipv4) if 4 in self.underlay.families else None,
                "ipv6": str(self.external.ipv6) if 6 in self.underlay.families else None,
            },
            "lease": {
                "key": self.lease.key,
                "subnet": str(self.lease.subnet) if self.lease.subnet else None,
                "ipv6_subnet": str(self.lease.ipv6_subnet) if self.lease.ipv6_subnet else None,
                "expiration": self.lease.expiration,
                "vtep_mac": format_mac(self.vtep_mac) if self.vtep_mac else None,
                "vtep_mac_v6": format_mac(self.vtep_mac_v6) if self.vtep_mac_v6 else None,
            },
            "peers": [
                {"subnet": str(one.subnet), "address": str(one.address), "mac": format_mac(one.mac) or None}
                for one in self.table.routes
            ],
            "unreachable": [{"key": one.lease.key, "reason": one.reason} for one in self.unreachable],
            "failures": [*self.failures.values(), *([self.trouble] if self.trouble else [])],
            "outbound": _report_direction(engine.outbound),
            "inbound": _report_direction(engine.inbound),
            "offloads": self.offloads.report(),
            "icmp_errors": {"sent": engine.icmp_sent, "suppressed": engine.icmp_suppressed},
            "capture": self.recorder.report() if self.recorder is not None else None,
            **self.underlay.report(),
        }


def _report_direction(direction: Direction) -> dict[str, Any]:
    return {
        "received": direction.received,
        "forwarded_bytes": direction.forwarded_bytes,
        "verdicts": by_name(direction.verdicts),
    }


def _queue_drops(device: str) -> int | None:
    """Packets that the kernel dropped because we did not read the device fast enough."""
    try:
        return int(Path(f"/sys/class/net/{device}/statistics/tx_dropped").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
