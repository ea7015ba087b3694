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
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from dataplane import footprint
from dataplane.device import Device, DeviceLostError
from dataplane.device.tun import TunError
from dataplane.host import ALIAS, Host, HostError, Interface
from dataplane.host.external import External, choose
from dataplane.host.firewall import Firewall, Rules, table_name
from dataplane.host.reconcile import Wanted, differences, reconcile, remove_stale_devices, set_up
from dataplane.node.settings import NodeError
from dataplane.node.state import State, device_mtu
from dataplane.node.taps import Taps
from dataplane.node.waiting import first_of
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
        monotonic: Callable[[], float],
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
        self._monotonic = monotonic
        self._changed = asyncio.Event()
        self._is_device_lost = False
        self._announced: str | None = None
        self._lock = asyncio.Lock()

    # Start

    async def open_device(self) -> None:
        """Open the device and set up its families. Raises HostError if none works, and what opening raises."""
        state = self._state
        footprint.note(state.settings.run_dir, device=state.device_name)
        state.device = self._opened()
        await self._set_up_families()
        for name in await asyncio.to_thread(remove_stale_devices, self._host, state.device_name):
            log.warning("removed %s, the device of an earlier start with other options", name)

    def _opened(self) -> Device:
        state = self._state
        return self._taps.around_device(self._open_device(state.device_name, state.mtu, state.offloads))

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
        wanted = self._table if settings.ip_masq or settings.forward_rules else ""
        if noted is not None and noted.firewall is not None and noted.firewall != wanted:
            await asyncio.to_thread(self._open_firewall(noted.firewall).remove)  # before the note of it is replaced
            log.info("removed the nftables table %s of an earlier start", noted.firewall)
        footprint.note(settings.run_dir, firewall=wanted)
        if wanted:
            self._firewall = self._open_firewall(wanted)
            await asyncio.to_thread(self._firewall.apply, self._rules())
            for obstacle in await asyncio.to_thread(self._firewall.obstacles):
                log.warning("%s", obstacle)

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
            for interface in await asyncio.to_thread(self._host.interfaces, _BRIDGES)
            for own in interface.addresses
            if any(own.ip in network for network in networks) and not any(own.ip in subnet for subnet in subnets)
        ]
        state.troubles.note("pods", "; ".join(stale) or None)

    # Life

    async def keep(self) -> None:
        """Look after the host until cancelled."""
        watch = self._host.watch(self._changed.set)
        due = self._monotonic() + self._state.settings.resync
        try:
            while True:
                await first_of(self._sleep(max(0.0, due - self._monotonic())), self._changed)
                is_due = self._monotonic() >= due
                if is_due:
                    due = self._monotonic() + self._state.settings.resync
                async with self._lock:
                    await self._look(with_rules=is_due)
        finally:
            watch.close()

    def device_lost(self) -> None:
        """The engine has stopped since its device is gone: open another one soon."""
        self._is_device_lost = True
        self._changed.set()

    async def settle(self) -> None:
        """Bring the host in line at once, after another subnet was taken."""
        async with self._lock:
            await self._look(with_rules=True)

    async def _look(self, *, with_rules: bool) -> None:
        """Look at everything; at the firewall's rules only where `with_rules`, since no event tells of them and asking
        costs a process."""
        for concern, part in (
            ("underlay", self._follow_external),
            ("MTU", self._follow_mtu),
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
            except DeviceLostError:  # between our look and our touch
                self.device_lost()

    async def _follow_external(self) -> None:
        """Choose again, and take over what is new. The families stay those of the start, and each goes its own way."""
        state = self._state
        own = [state.subnet(pool.network.version) for pool in state.pools]  # not the networks: hosts may live in them, too
        found = await asyncio.to_thread(choose, self._host, state.settings.choice, avoid=own, current=state.external)
        missing = [family for family in state.underlay.families if _address(found, family) is None]
        if found != state.external:
            await self._take_over(_with_addresses_of(state.external, found, missing))
        if missing:
            names = " and ".join(f"IPv{family}" for family in sorted(missing))
            raise HostError(f"{found.name} has no {names} address any more")

    async def _take_over(self, external: External) -> None:
        state = self._state
        families = sorted(state.underlay.families)
        before, after = ([_address(one, family) for family in families] for one in (state.external, external))
        if before != after:
            state.underlay.rebind([address for address in after if address is not None])
        _log_external(state.external, external, families)
        state.external = external
        self._moved(state.describe_ourselves())

    async def _follow_mtu(self) -> None:
        state = self._state
        mtu = device_mtu(state.external.mtu, state.config, state.framing, state.underlay.families)
        if mtu != state.mtu:
            log.warning("the MTU of %s is %d now, and so the device's %d", state.external.name, state.external.mtu, mtu)
            state.mtu = mtu
            state.device.mtu = mtu

    async def _keep_device(self) -> None:
        """Put our device, its addresses and routes back where somebody took them away: without its route the overlay's
        traffic would leave by the default route, in the clear."""
        state = self._state
        name = state.device_name
        interfaces, routes = await asyncio.to_thread(lambda: (self._host.interfaces([name]), self._host.routes()))
        if not interfaces or self._is_device_lost:
            require_ours(interfaces, self._host.mark)
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
        state.device = self._opened()
        state.engine.replace_device(state.device)
        state.engine.start()
        self._is_device_lost = False

    async def _keep_rules(self) -> None:
        if self._firewall is None:
            return
        rules = self._rules()
        if not await asyncio.to_thread(self._firewall.is_intact, rules):
            await asyncio.to_thread(self._firewall.apply, rules)
            self._state.rules_restored += 1
            log.warning("the rules in the table %s were not as wanted; put right", self._table)

    async def _keep_announced(self) -> None:
        """subnet.env says what is so, unless somebody else has written there what we did not."""
        path, wanted = self._state.settings.subnet_file, self._subnet_file().render()
        found = await asyncio.to_thread(subnetfile.read_text, path)
        if found != wanted:
            if found not in {None, self._announced}:
                raise NodeError(f"{path} says something else than this node: remove it, if nobody needs it")
            await self.announce()
            log.warning("%s was written anew", path)
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


def require_ours(interfaces: Sequence[Interface], mark: str) -> None:
    """That `interfaces`, those of the device's name, are none or ours, whose mark is `mark`. Raises NodeError."""
    for interface in interfaces:
        if interface.alias == mark:
            continue
        name = interface.name
        if interface.alias.startswith(ALIAS):
            raise NodeError(
                f"{name} belongs to another node of this host, with another run folder ({interface.alias}): choose "
                "another name with --device, or if that node is no more, remove what it left (pyflannel-dp cleanup "
                "--run-dir …)"
            )
        raise NodeError(
            f"an interface {name} exists already and is not ours (see: ip -d link show {name}); remove it, or "
            "choose another name with --device"
        )


def _address(external: External, family: int) -> Address | None:
    return external.ipv4 if family == 4 else external.ipv6


def _with_addresses_of(before: External, external: External, families: Sequence[int]) -> External:
    """`external`, but with the addresses of `families` as they were: they may be back in a moment, and there are no
    better."""
    if 4 in families:
        external = replace(external, ipv4=before.ipv4, public_ip=before.public_ip)
    if 6 in families:
        external = replace(external, ipv6=before.ipv6, public_ipv6=before.public_ipv6)
    return external


def _log_external(before: External, after: External, families: Sequence[int]) -> None:
    if before.name != after.name:
        log.warning("the external interface is %s now, no longer %s", after.name, before.name)
    for family in families:
        old, new = _address(before, family), _address(after, family)
        if old != new:
            log.warning("the address of %s is %s now, no longer %s", after.name, new, old)
