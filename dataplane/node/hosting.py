"""What follows from the machine: the external interface, our device and routes, the firewall's rules.

Theory of operation. Everything is looked at when the host says that something changed, and every few seconds besides, since
nobody tells of a flushed firewall. A look compares what is wanted with what is there, and mends the difference; what is in
order costs a look and no more. A trouble in one part does not keep the others from being mended, and is told until it ends.

* The external interface is chosen again as at start. A new address moves the underlay's sockets and, through the lease, our
  peers; a new MTU changes the device's. While there is none (down, gone, without an address) all stays as it is, for its
  return.
* A device that was deleted is opened anew, with the engine's counters going on. One that somebody changed is set right.
* Routes of ours that are gone are added, stale ones of ours removed; those of others are never touched.
* subnet.env is written anew when what it says has changed, and a bridge of pods that still has another subnet is told of.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from dataplane import footprint
from dataplane.device import Device
from dataplane.device.tun import TunError
from dataplane.host import Host, HostError
from dataplane.host.external import External, choose
from dataplane.host.firewall import Firewall, Rules, table_name
from dataplane.host.reconcile import Wanted, differences, reconcile, remove_stale_devices, set_up
from dataplane.node.settings import NodeError
from dataplane.node.state import State, device_mtu
from dataplane.node.taps import Taps
from dataplane.offload import Offloads
from dataplane.underlay.udp import UnderlayError
from encap.overhead import superpacket_limit
from routing import subnetfile
from routing.config import Address
from routing.lease import LeaseAttributes

log = logging.getLogger(__name__)

OpenDevice = Callable[[str, int, Offloads], Device]
OpenFirewall = Callable[[str], Firewall]
_BRIDGES = ("cni0", "docker0")
"""The bridges of pods that are given a node's subnet: flannel's CNI plugin's, and Docker's with mk-docker-opts.sh."""


class HostKeeper:
    """Keeps `state.external`, `state.device` and `state.mtu` in line with the host, and the host with the state.

    `firewall`, if there is one, keeps the nftables table `table`. `moved` is called when what our lease should say of
    us has changed.
    """

    def __init__(
        self,
        state: State,
        host: Host,
        taps: Taps,
        *,
        open_device: OpenDevice,
        open_firewall: OpenFirewall | None,
        moved: Callable[[LeaseAttributes], None],
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._state = state
        self._host = host
        self._firewall: Firewall | None = None
        self._table = table_name(state.device_name)
        self._taps = taps
        self._open_device = open_device
        self._open_firewall = open_firewall
        self._moved = moved
        self._sleep = sleep
        self._changed = asyncio.Event()
        self._announced: str | None = None
        self._lock = asyncio.Lock()

    # Start

    async def open_device(self) -> None:
        """Open the device and set up its families. Raises HostError if none works, and what opening raises."""
        state = self._state
        footprint.note(state.settings.run_dir, device=state.device_name)
        state.device = self._taps.around_device(self._open_device(state.device_name, state.mtu, state.offloads))
        await self._set_up_families()
        state.device.keep()
        for name in await asyncio.to_thread(remove_stale_devices, self._host, state.device_name):
            log.warning("removed %s, the device of an earlier start with other options", name)

    async def _set_up_families(self) -> None:
        """Addresses and routes, family by family: the first failures leave a family out. Raises HostError if all fail."""
        state = self._state
        failures: dict[int, HostError] = {}
        for pool in state.config.pools:
            try:
                await asyncio.to_thread(set_up, self._host, self._wanted(pool.network.version))
            except HostError as error:
                failures[pool.network.version] = error
        if len(failures) == len(state.config.pools):
            raise next(iter(failures.values()))
        for failure in failures.values():
            log.error("one family is left out: %s", failure)
        state.family_failures = {family: str(failure) for family, failure in failures.items()}

    def _wanted(self, family: int) -> Wanted:
        state = self._state
        network = next(pool.network for pool in state.config.pools if pool.network.version == family)
        limit = superpacket_limit(state.mtu, state.header_length)
        return Wanted(state.device_name, state.mtu, (state.subnet(family).network_address,), (network,), limit)

    async def open_firewall(self) -> None:
        """Put the rules in place, and away what an earlier start put there under another name or wanted alone. Raises
        HostError if that cannot be done."""
        if self._open_firewall is None:
            return
        settings = self._state.settings
        noted = footprint.read(settings.run_dir)
        stale = noted.firewall if noted is not None else None
        if settings.ip_masq or settings.forward_rules:
            self._firewall = self._open_firewall(self._table)
            footprint.note(settings.run_dir, firewall=self._table)
            rules = self._rules()
            await asyncio.to_thread(self._firewall.apply, rules)
            for obstacle in await asyncio.to_thread(self._firewall.obstacles):
                log.warning("%s", obstacle)
            stale = None if stale == self._table else stale
        if stale is not None:
            await asyncio.to_thread(self._open_firewall(stale).remove)
            log.info("removed the nftables table %s of an earlier start", stale)
        if self._firewall is None and stale is not None:
            footprint.note(settings.run_dir, firewall="")

    def _rules(self) -> Rules:
        state, settings = self._state, self._state.settings
        pools = state.pools
        return Rules(
            networks=tuple(pool.network for pool in pools),
            subnets=tuple(state.subnet(pool.network.version) for pool in pools),
            masquerade=settings.ip_masq,
            fully_random=settings.masq_fully_random,
            forward=settings.forward_rules,
            exclude=settings.masq_exclude,
        )

    async def announce(self) -> None:
        """Write subnet.env, which tells everybody else that the node is ready. Raises NodeError."""
        state = self._state
        content = self._subnet_file()
        text = content.render()
        path = state.settings.subnet_file
        try:
            footprint.note(state.settings.run_dir, path, text)
            await asyncio.to_thread(subnetfile.write, path, content)
        except OSError as error:
            raise NodeError(
                f"cannot write the subnet file {path} (or the note of it in the run folder): {error}"
            ) from error
        self._announced = text
        await self._tell_of_bridges()

    def _subnet_file(self) -> subnetfile.SubnetFile:
        state = self._state
        networks = {pool.network.version: pool.network for pool in state.pools}
        return subnetfile.SubnetFile(
            networks.get(4), state.lease.subnet, networks.get(6), state.lease.ipv6_subnet, state.mtu, state.settings.ip_masq
        )

    async def _tell_of_bridges(self) -> None:
        """Pods on a bridge with a subnet that is not ours (any more) are reached by nobody: say so, loudly."""
        state = self._state
        subnets = [state.subnet(pool.network.version) for pool in state.pools]
        networks = [pool.network for pool in state.pools]
        stale = [
            f"{interface.name} has the address {own}, which lies outside this node's subnet "
            f"{' and '.join(map(str, subnets))}: the pods on it are unreachable; remove the bridge (ip link del "
            f"{interface.name}) and start them again"
            for interface in await asyncio.to_thread(self._host.interfaces)
            for own in interface.addresses
            if interface.name in _BRIDGES
            and any(own.ip in network for network in networks)
            and not any(own.ip in subnet for subnet in subnets)
        ]
        state.troubles.note("pods", "; ".join(stale) or None)

    # Life

    async def keep(self) -> None:
        """Look after the host until cancelled."""
        watch = self._host.watch(self._changed.set)
        try:
            while True:
                is_due = await self._wait()
                async with self._lock:
                    await self._look(with_rules=is_due)
        finally:
            watch.close()

    def look_soon(self) -> None:
        """Something changed that the host does not tell."""
        self._changed.set()

    async def _wait(self) -> bool:
        """For a change, or the next look; says whether it is that."""
        sleeping = asyncio.ensure_future(self._sleep(self._state.settings.resync))
        changing = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait((sleeping, changing), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in (sleeping, changing):
                one.cancel()
            results = await asyncio.gather(sleeping, changing, return_exceptions=True)
        self._changed.clear()
        return results[0] is None

    async def settle(self) -> None:
        """Bring the host in line at once, after another subnet was taken."""
        async with self._lock:
            await self._look(with_rules=True)

    async def _look(self, *, with_rules: bool) -> None:
        """Look at everything; at the firewall's rules only where `with_rules`, since no event tells of them and asking
        costs a process."""
        for concern, part in (
            ("underlay", self._follow_external),
            ("device", self._keep_device),
            ("firewall", self._keep_rules if with_rules else None),
            ("subnet file", self._keep_announced),
        ):
            if part is None:
                continue
            try:
                await part()
                self._state.troubles.note(concern, None)
            except (HostError, TunError, NodeError, UnderlayError, OSError) as error:
                self._state.troubles.note(concern, str(error))

    async def _follow_external(self) -> None:
        """Choose again, and take over what is new. The families stay those of the start."""
        state = self._state
        external = await asyncio.to_thread(choose, self._host, state.settings.choice)
        if external == state.external:
            return
        families = state.underlay.families
        addresses = _addresses(external, families)
        mtu = device_mtu(external.mtu, state.config, state.framing, families)
        if addresses != _addresses(state.external, families):
            state.underlay.rebind(addresses)
        _log_external(state.external, external, families)
        state.external = external
        if mtu != state.mtu:
            log.warning("the MTU of %s is %d now, and so the device's %d", external.name, external.mtu, mtu)
            state.mtu = mtu
            state.device.mtu = mtu
        self._moved(state.describe_ourselves())

    async def _keep_device(self) -> None:
        """Put our device, its addresses and routes back where somebody took them away: without its route the overlay's
        traffic would leave by the default route, in the clear."""
        state = self._state
        interfaces, routes = await asyncio.to_thread(lambda: (self._host.interfaces(), self._host.routes()))
        if not any(interface.name == state.device_name for interface in interfaces):
            self._reopen_device()
        for pool in state.pools:
            wanted = self._wanted(pool.network.version)
            if not differences(wanted, interfaces, routes):
                continue
            for mended in await asyncio.to_thread(reconcile, self._host, wanted):
                state.restored += 1
                log.warning("%s; put right", mended)
        state.device.keep()

    def _reopen_device(self) -> None:
        state = self._state
        log.warning("the device %s is gone; opening it anew", state.device_name)
        state.engine.stop()
        state.device.close()
        state.device = self._taps.around_device(self._open_device(state.device_name, state.mtu, state.offloads))
        state.engine.replace_device(state.device)
        state.engine.start()

    async def _keep_rules(self) -> None:
        if self._firewall is None:
            return
        rules = self._rules()
        if not await asyncio.to_thread(self._firewall.is_intact, rules):
            await asyncio.to_thread(self._firewall.apply, rules)
            self._state.rules_restored += 1
            log.warning("the rules in the table %s were not as wanted; put right", self._table)

    async def _keep_announced(self) -> None:
        if self._announced is not None and self._subnet_file().render() != self._announced:
            await self.announce()
            log.warning("%s was written anew", self._state.settings.subnet_file)
        await self._tell_of_bridges()

    def report(self) -> dict[str, object]:
        """What there is to say in `status`."""
        if self._firewall is None:
            return {"firewall": None}
        settings = self._state.settings
        return {
            "firewall": {
                "table": self._table,
                "masquerade": settings.ip_masq,
                "forward": settings.forward_rules,
                "restored": self._state.rules_restored,
            }
        }


def _addresses(external: External, families: frozenset[int]) -> list[Address]:
    """The address of each family. Raises HostError if one is missing: it may be back in a moment, and until then we have no
    better one."""
    found: list[Address] = []
    for family, address in ((4, external.ipv4), (6, external.ipv6)):
        if family in families:
            if address is None:
                raise HostError(f"{external.name} has no IPv{family} address any more")
            found.append(address)
    return found


def _log_external(before: External, after: External, families: frozenset[int]) -> None:
    if before.name != after.name:
        log.warning("the external interface is %s now, no longer %s", after.name, before.name)
    for old, new in zip(_addresses(before, families), _addresses(after, families), strict=True):
        if old != new:
            log.warning("the address of %s is %s now, no longer %s", after.name, new, old)
