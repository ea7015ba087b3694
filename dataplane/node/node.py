"""The life of a node.

Theory of operation. Start goes from what can fail without a trace to what others see: choose the interface, take the
control socket, read the configuration, bind the UDP port, take a lease, build the table, open and set up the device,
start the engine, put the firewall's rules in place, and last of all write subnet.env, which is what tells everybody
else that the node is ready. A store that does not answer is waited for. Then the keepers run beside the engine, until
the end is asked for or one of them fails. Stop undoes the start in the other order, but leaves what the next start
takes up: the device with its addresses and routes, the rules, subnet.env and the lease.

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
from typing import Any, TypeVar

import routing.table
from dataplane.control import ControlServer
from dataplane.device import DeviceLostError
from dataplane.device.tun import open_tun
from dataplane.engine import Engine
from dataplane.host import Host
from dataplane.host.external import choose
from dataplane.node.hosting import HostKeeper, OpenDevice, OpenFirewall, require_ours
from dataplane.node.leases import LeaseKeeper, close
from dataplane.node.settings import NodeError, Settings
from dataplane.node.state import State, device_mtu, underlay_addresses
from dataplane.node.taps import Taps
from dataplane.offload import Offloads
from dataplane.underlay import Underlay
from dataplane.underlay.udp import UnderlayError, open_udp
from encap.pure import is_compiled
from routing import subnetfile
from routing.config import Address, NetworkConfig
from routing.lease import Lease
from routing.route import FRAMING_VXLAN
from routing.stores import StoreAwayError, SubnetStore

log = logging.getLogger(__name__)
_T = TypeVar("_T")

_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS = 0.5, 5.0
_LONGEST_INTERFACE_NAME = 15  # IFNAMSIZ, less the final zero

OpenUnderlay = Callable[[Sequence[Address], int, int, Offloads], Underlay]


class Node:
    """A node of the overlay.

    `open_device`, `open_underlay`, `open_firewall`, `sleep`, `now` and `monotonic` are the kernel and the clocks; without
    `open_firewall` there are no rules. `now_ns` is the clock of captures and traces, `rng` decides which packets meet
    the faults that the settings ask for. `check_config` may refuse the network configuration by
    raising ConfigError; `reports` tell more for `status`.
    """

    def __init__(
        self,
        settings: Settings,
        store: SubnetStore,
        host: Host,
        *,
        open_device: OpenDevice = open_tun,
        open_underlay: OpenUnderlay = open_udp,
        open_firewall: OpenFirewall | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        now_ns: Callable[[], int] = time.time_ns,
        rng: random.Random | None = None,
        check_config: Callable[[NetworkConfig], None] = lambda _: None,
        reports: Sequence[Callable[[], dict[str, Any]]] = (),
    ) -> None:
        self._settings = settings
        self._store = store
        self._host = host
        self._open_device = open_device
        self._open_underlay = open_underlay
        self._open_firewall = open_firewall
        self._sleep = sleep
        self._now = now
        self._monotonic = monotonic
        self._rng = rng or random.Random()
        self._check_config = check_config
        self._reports = tuple(reports)
        self._started = now()
        self._failure: asyncio.Future[None] | None = None
        self._state = State(settings)
        self._taps = Taps(settings, now_ns, self._rng)
        self._leases = LeaseKeeper(self._state, store, moved=self._subnet_moved, sleep=sleep, now=now, monotonic=monotonic)
        self._keeper: HostKeeper | None = None

    async def run(self, stop: asyncio.Event, ready: Callable[[], None] = lambda: None) -> None:
        """Run until `stop` is set; `ready` is called once packets are carried. Raises what made it fail."""
        self._failure = asyncio.get_running_loop().create_future()
        async with contextlib.AsyncExitStack() as undo:
            try:
                starting = asyncio.ensure_future(self._start(undo))
                leases = await unless_stopped(stop, starting)
                if leases is not None:
                    self._state.is_serving = True
                    ready()
                    await self._serve(stop, leases)
            except (UnderlayError, DeviceLostError, OSError) as error:
                raise NodeError(str(error)) from error
            finally:
                self._state.is_ending = True
                self._state.is_serving = False

    @property
    def is_ready(self) -> bool:
        """Whether it carries packets for a lease of its own, with everything on the host in place."""
        return self._state.is_ready

    def summary(self) -> str:
        """A ready node in a few words."""
        state = self._state
        return f"lease {state.lease.key}, {state.device.name} on {state.external.name}, {len(state.table.routes)} peers"

    async def _start(self, undo: contextlib.AsyncExitStack) -> AsyncIterator[Sequence[Lease]]:
        state = self._state
        state.external = await asyncio.to_thread(choose, self._host, self._settings.choice)
        control = ControlServer(self._settings.run_dir, self.status)
        undo.push_async_callback(control.close)
        await control.start()
        state.config = await self._patiently(self._store.config)
        self._check_config(state.config)
        state.device_name = self._device_name()
        require_ours(await asyncio.to_thread(self._host.interfaces, [state.device_name]), self._host.mark)
        for warning in state.config.warnings:
            log.warning("%s", warning)
        self._taps.open(undo, state.external.name)
        await self._open_the_underlay(undo)
        state.mtu = device_mtu(state.external.mtu, state.config, state.framing, state.underlay.families)
        state.wanted = state.describe_ourselves()
        previous = subnetfile.read_previous(self._settings.subnet_file)
        await self._patiently(lambda: self._leases.acquire(previous))
        leases = await self._patiently(self._leases.watch)
        undo.push_async_callback(close, leases)
        self._keeper = HostKeeper(
            state,
            self._host,
            self._taps,
            open_device=self._open_device,
            open_firewall=self._open_firewall,
            moved=self._leases.want,
            sleep=self._sleep,
            monotonic=self._monotonic,
        )
        await self._start_engine(undo, self._keeper)
        await self._keeper.open_firewall()
        await self._keeper.announce()
        state.device.keep()  # from here on there is something to come back to
        log.info(
            "ready: %s on %s, MTU %d = %d of %s less the overhead, %d peers",
            state.device.name, state.external.name, state.mtu, state.config.backend.mtu or state.external.mtu,
            state.external.name, len(state.table.routes),
        )  # fmt: skip
        return leases

    async def _patiently(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """What `call` gives, once the store answers."""
        wait = _FIRST_RETRY_SECONDS
        while True:
            try:
                result = await call()
            except StoreAwayError as error:
                self._state.troubles.note("store", f"waiting for the store: {error}")
                await self._sleep(wait * self._rng.uniform(0.5, 1.0))
                wait = min(2 * wait, _LAST_RETRY_SECONDS)
            else:
                self._state.troubles.note("store", None)
                return result

    async def _open_the_underlay(self, undo: contextlib.AsyncExitStack) -> None:
        state = self._state
        port = state.config.backend.port
        pool = self._settings.source_ports if state.framing == FRAMING_VXLAN else 0
        addresses = underlay_addresses(state.external, state.config, ipv6_underlay=self._settings.ipv6_underlay)
        try:
            underlay = self._open_underlay(addresses, port, pool, state.offloads)
        except UnderlayError as error:
            if not error.port_taken:
                raise NodeError(str(error)) from error
            raise NodeError(f"{error}: {await asyncio.to_thread(self._port_holder, port)}") from error
        ends = {4: state.external.ipv4, 6: state.external.ipv6}
        hosts = {family: str(ends[family]) for family in sorted(underlay.families)}
        state.underlay = self._taps.around_underlay(underlay, hosts, port, state.header_length)
        undo.callback(state.underlay.close)

    def _port_holder(self, port: int) -> str:
        holders = [interface.name for interface in self._host.interfaces() if interface.udp_port == port]
        if holders:
            return (
                f"the kernel VXLAN device {holders[0]} holds it; remove that device (ip link del {holders[0]}) or choose "
                "another port"
            )
        return f"another process holds it (see: ss -ulpn sport = :{port}); stop it, or choose another port"

    def _device_name(self) -> str:
        """As chosen, else flannel's name. Raises NodeError if that is too long for an interface."""
        state = self._state
        default = f"flannel.{state.config.backend.vni}" if state.framing == FRAMING_VXLAN else "flannel0"
        name = self._settings.device or default
        if len(name) > _LONGEST_INTERFACE_NAME:
            raise NodeError(f"{name} is too long for an interface: name the device with --device")
        return name

    async def _start_engine(self, undo: contextlib.AsyncExitStack, keeper: HostKeeper) -> None:
        state = self._state
        undo.callback(self._close_device)
        await keeper.open_device()
        state.engine = Engine(
            state.device, state.underlay, state.table, offloads=state.offloads, failed=self._fail, by_peer=True
        )
        undo.callback(state.engine.stop)
        state.engine.start()

    def _close_device(self) -> None:
        if hasattr(self._state, "device"):
            self._state.device.close()

    async def _serve(self, stop: asyncio.Event, leases: AsyncIterator[Sequence[Lease]]) -> None:
        """Until `stop`, or until something fails; the failure is raised."""
        assert self._failure is not None
        assert self._keeper is not None
        tasks: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(stop.wait()),
            asyncio.ensure_future(self._leases.follow(leases)),
            asyncio.ensure_future(self._leases.keep()),
            asyncio.ensure_future(self._leases.forget_former_addresses()),
            asyncio.ensure_future(self._keeper.keep()),
            asyncio.ensure_future(self._taps.keep_flushing(self._sleep)),
            self._failure,
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    def _fail(self, error: Exception) -> None:
        """The engine has stopped. A device that is gone is opened anew; anything else is the end."""
        if isinstance(error, DeviceLostError) and self._keeper is not None:
            self._keeper.device_lost()
        elif self._failure is not None and not self._failure.done():
            self._failure.set_exception(NodeError(str(error) or repr(error)))

    async def _subnet_moved(self, former: Lease) -> None:
        """Another subnet had to be taken."""
        assert self._keeper is not None
        log.error(
            "this node's subnet is %s now, no longer %s: pods with addresses of the former subnet are unreachable until "
            "they are started again",
            self._state.lease.key,
            former.key,
        )
        await self._keeper.settle()

    def status(self) -> dict[str, Any]:
        """Everything about the running node, as plain data for JSON."""
        from importlib import metadata  # noqa: PLC0415 - a mebibyte that only this needs

        report = self._state.report(self._now()) | {
            "pid": os.getpid(),
            "version": metadata.version("pyflannel-dp"),
            "started": self._started,
            "uptime_seconds": round(self._now() - self._started, 1),
            "check_sources": self._settings.check_sources,
            "compiled": is_compiled(routing.table),
            "store": self._store.report(),
            **self._taps.report(),
        }
        if self._keeper is not None:
            report |= self._keeper.report()
        for more in self._reports:
            report |= more()
        return report


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
