"""A whole node without root: memory host, memory device, fake underlay, local store. And two of them talking."""

import asyncio
import contextlib
import json
import logging
import socket
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from ipaddress import ip_address, ip_interface, ip_network
from pathlib import Path

import pytest
from packets import octets
from scapy.layers.inet import IP, UDP

from dataplane import footprint
from dataplane.control import ControlError, ask
from dataplane.device import DeviceLostError
from dataplane.device.memory import MemoryDevice
from dataplane.host import HostError, Interface, mark_of
from dataplane.host.external import Choice
from dataplane.host.firewall.memory import MemoryFirewall
from dataplane.host.memory import MemoryHost, Route
from dataplane.node import Node, NodeError, Settings, device_mtu
from dataplane.underlay.fake import FakeNetwork
from dataplane.underlay.udp import UnderlayError
from routing.config import ConfigError, parse_config
from routing.stores import LeaseLostError, StoreAwayError, StoreError
from routing.stores.local import LocalStore

CONFIG = '{"Network":"10.244.0.0/16","Backend":{"Type":"vxlan"}}'
DUAL = '{"Network":"10.244.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:10:244::/48","Backend":{"Type":"vxlan"}}'
UDP_BACKEND = '{"Network":"10.244.0.0/16","Backend":{"Type":"udp"}}'


class World:
    """One machine per node on one fake network, one store, one clock that stands still until it is moved."""

    def __init__(self, folder: Path, config: str = CONFIG) -> None:
        self.folder = folder
        self.network = FakeNetwork()
        self.time = 1_000_000.0
        self.sleepers: list[tuple[float, asyncio.Event]] = []
        (folder / "store").mkdir()
        (folder / "store" / "config").write_text(config)

    async def sleep(self, seconds: float) -> None:
        event = asyncio.Event()
        self.sleepers.append((self.time + seconds, event))
        await event.wait()

    def advance(self, seconds: float) -> None:
        self.time += seconds
        due = [event for at, event in self.sleepers if at <= self.time]
        self.sleepers = [(at, event) for at, event in self.sleepers if at > self.time]
        for event in due:
            event.set()

    def store(self, **options) -> LocalStore:
        return LocalStore(self.folder / "store", now=lambda: self.time, sleep=self.sleep, **options)


class Machine:
    """A machine of the world: its host, and the node that runs on it."""

    def __init__(self, world: World, number: int, *, ipv6: bool = True, mtu: int = 1500, **settings) -> None:
        self.world = world
        addresses = [f"192.0.2.{number}/24"] + ([f"2001:db8::{number}/64"] if ipv6 else [])
        run_dir = world.folder / f"run{number}"
        self.host = MemoryHost(
            [Interface("eth0", 2, mtu, tuple(map(ip_interface, addresses)))],
            [Route(ip_network("0.0.0.0/0"), "eth0")],
            mark=mark_of(run_dir),
        )
        self.settings = Settings(subnet_file=world.folder / f"subnet{number}.env", run_dir=run_dir, **settings)
        self.firewall = MemoryFirewall("unused")
        self.device: MemoryDevice | None = None
        self.underlay_error: UnderlayError | None = None
        self.node = Node(
            self.settings,
            world.store(),
            self.host,
            open_device=self.open_device,
            open_underlay=self.open_underlay,
            open_firewall=self.open_firewall,
            sleep=world.sleep,
            now=lambda: world.time,
            monotonic=lambda: world.time,
        )
        self.stop = asyncio.Event()
        self.ready = asyncio.Event()

    def open_firewall(self, table: str) -> MemoryFirewall:
        self.firewall.table = table
        return self.firewall

    def open_device(self, name: str, mtu: int, offloads) -> MemoryDevice:
        if not any(link.name == name for link in self.host.links):
            self.host.links.append(Interface(name, 9, 1500, kind="tun", is_up=False))
        self.device = MemoryDevice(name, mtu)
        return self.device

    def open_underlay(self, addresses, port, pool, offloads):
        if self.underlay_error:
            raise self.underlay_error
        self.pool = pool
        self.underlay = self.world.network.attach(port, *map(str, addresses))
        return self.underlay

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Machine"]:
        task = asyncio.create_task(self.node.run(self.stop, self.ready.set))
        waiting = asyncio.create_task(self.ready.wait())
        try:
            await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            self.task = task
            yield self
        finally:
            waiting.cancel()
            self.stop.set()
            with contextlib.suppress(Exception):
                await task

    def alter_interface(self, **changes) -> None:
        """Change eth0, as an operator does; the host tells of it."""
        self.host.links = [replace(link, **changes) if link.name == "eth0" else link for link in self.host.links]
        self.host.notify()

    def lease_files(self) -> list[Path]:
        name = str(self.subnet).replace("/", "-")
        return [self.world.folder / "store" / kind / name for kind in ("subnets", "expiry")]

    @property
    def subnet(self):
        return ip_network(self.node.status()["lease"]["subnet"])


async def until(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in other tasks and threads, each its own way
            await asyncio.sleep(0)


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


async def test_start_sets_up_everything_and_writes_the_subnet_file_last(world):
    async with Machine(world, 1).running() as a:
        status = a.node.status()
        tun = next(link for link in a.host.links if link.name == "flannel.1")
        assert tun.addresses == (ip_interface(f"{a.subnet.network_address}/32"),)
        assert (tun.mtu, tun.alias, tun.is_up) == (1450, a.host.mark, True)
        assert a.device.kept, "it outlives us"
        assert a.host.routes() == [(ip_network("10.244.0.0/16"), "flannel.1")]
        first = a.subnet.network_address + 1
        expected = f"FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_SUBNET={first}/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=false\n"
        assert a.settings.subnet_file.read_text() == expected
        lease = world.folder / "store" / "subnets" / str(a.subnet).replace("/", "-")
        assert json.loads(lease.read_text()) == {
            "PublicIP": "192.0.2.1",
            "PublicIPv6": None,
            "BackendType": "vxlan",
            "BackendData": {"VNI": 1, "VtepMAC": "02:fd:c0:00:02:01"},
        }
        assert (status["state"], status["framing"], status["port"], status["vni"]) == ("running", "vxlan", 8472, 1)
        assert a.pool == 8


async def test_two_nodes_hear_of_each_other_and_talk(world):
    async with Machine(world, 1).running() as a, Machine(world, 2).running() as b:
        world.advance(1)
        await until(lambda: len(a.node.status()["peers"]) == 1)
        packet = octets(IP(src=str(a.subnet[10]), dst=str(b.subnet[10])) / UDP())
        back = octets(IP(src=str(b.subnet[10]), dst=str(a.subnet[10])) / UDP())
        a.device.inject(packet)
        await until(lambda: b.device.delivered == [packet])
        b.device.inject(back)
        await until(lambda: a.device.delivered == [back])
        status = a.node.status()
        (peer,) = status["peers"]
        assert (peer["subnet"], peer["address"], peer["mac"]) == (str(b.subnet), "192.0.2.2", "02:fd:c0:00:02:02")
        for direction in ("outbound", "inbound"):
            assert status[direction]["received"] == sum(status[direction]["verdicts"].values()) == 1


async def test_a_released_peer_is_forgotten_within_one_look(world):
    async with Machine(world, 1).running() as a:
        async with Machine(world, 2).running() as b:
            world.advance(1)
            await until(lambda: len(a.node.status()["peers"]) == 1)
            gone = world.folder / "store" / "subnets" / str(b.subnet).replace("/", "-")
        gone.unlink()
        world.advance(1)
        await until(lambda: a.node.status()["peers"] == [])


async def test_dual_stack_goes_over_both_underlays(tmp_path):
    world = World(tmp_path, DUAL)
    async with Machine(world, 1).running() as a, Machine(world, 2).running() as b:
        world.advance(1)
        await until(lambda: len(a.node.status()["peers"]) == 2)
        by_version = {ip_network(peer["subnet"]).version: peer for peer in a.node.status()["peers"]}
        assert by_version[4]["address"] == "192.0.2.2"
        assert by_version[6]["address"] == "2001:db8::2"
        assert by_version[4]["mac"] != by_version[6]["mac"] == b.node.status()["lease"]["vtep_mac_v6"]
        assert a.device.mtu == 1430
        own6 = ip_network(a.node.status()["lease"]["ipv6_subnet"])
        tun = next(link for link in a.host.links if link.name == "flannel.1")
        assert ip_interface(f"{own6.network_address}/128") in tun.addresses
        assert (ip_network("fd00:10:244::/48"), "flannel.1") in a.host.routes()
        assert f"FLANNEL_IPV6_SUBNET={own6.network_address + 1}/64\n" in a.settings.subnet_file.read_text()


async def test_ipv6_packets_go_over_ipv4_where_one_end_has_no_ipv6(tmp_path):
    world = World(tmp_path, DUAL)
    async with Machine(world, 1).running() as a, Machine(world, 2, ipv6=False).running():
        world.advance(1)
        await until(lambda: len(a.node.status()["peers"]) == 2)
        assert {peer["address"] for peer in a.node.status()["peers"]} == {"192.0.2.2"}


async def test_ipv6_only(tmp_path):
    config = '{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd00:10:244::/48","Backend":{"Type":"vxlan"}}'
    world = World(tmp_path, config)
    async with Machine(world, 1).running() as a:
        assert a.node.status()["lease"]["subnet"] is None
        text = a.settings.subnet_file.read_text()
        assert "FLANNEL_NETWORK" not in text
        assert "FLANNEL_IPV6_NETWORK=fd00:10:244::/48\n" in text


async def test_the_udp_backend_means_the_ip_framing(tmp_path):
    world = World(tmp_path, UDP_BACKEND)
    async with Machine(world, 1).running() as a:
        assert (a.device.name, a.device.mtu) == ("flannel0", 1472)
        assert a.node.status()["port"] == 8285
        assert a.pool == 0
        lease = world.folder / "store" / "subnets" / str(a.subnet).replace("/", "-")
        assert json.loads(lease.read_text()) == {"PublicIP": "192.0.2.1", "PublicIPv6": None, "BackendType": "udp"}


async def test_one_family_failing_does_not_stop_the_other(tmp_path, caplog):
    world = World(tmp_path, DUAL)
    a = Machine(world, 1)
    a.host.table.append(Route(ip_network("fd00:10:244::/48"), "eth0"))
    async with a.running():
        assert a.node.status()["failures"] == [
            "a route to fd00:10:244::/48 exists that is not ours; remove it, or use another network"
        ]
        assert (ip_network("10.244.0.0/16"), "flannel.1") in a.host.routes()
    assert "one family is left out" in caplog.text


async def test_every_family_failing_stops_the_start_and_leaves_no_subnet_file(world):
    a = Machine(world, 1)
    a.host.table.append(Route(ip_network("10.244.0.0/16"), "eth0"))
    with pytest.raises(HostError, match="not ours"):
        async with a.running():
            pass
    assert not a.settings.subnet_file.exists()
    with pytest.raises(ControlError):
        await asyncio.to_thread(ask, a.settings.run_dir, "status")


async def test_restart_takes_the_same_subnet_and_mac(world):
    async with Machine(world, 1).running() as a:
        before = a.node.status()["lease"]
    async with Machine(world, 1).running() as again:
        after = again.node.status()["lease"]
    assert (after["subnet"], after["vtep_mac"]) == (before["subnet"], before["vtep_mac"])


async def test_the_subnet_file_is_a_hint_when_the_lease_is_gone(world):
    async with Machine(world, 1).running() as a:
        subnet = a.subnet
    for name in ("subnets", "expiry"):
        for path in (world.folder / "store" / name).iterdir():
            path.unlink()
    async with Machine(world, 1).running() as again:
        assert again.subnet == subnet


async def test_the_lease_is_renewed_before_its_end(world):
    async with Machine(world, 1).running() as a:
        before = a.node.status()["lease"]["expiration"]
        assert before == world.time + 24 * 3600
        await until(lambda: any(at == world.time + 60 for at, _ in world.sleepers))
        world.advance(23 * 3600)
        await until(lambda: a.node.status()["lease"]["expiration"] != before)
        assert a.node.status()["lease"]["expiration"] == world.time + 24 * 3600


async def test_a_store_that_is_away_at_renewal_is_tried_again_while_packets_flow(world, caplog, monkeypatch):
    async with Machine(world, 1).running() as a:
        before = a.node.status()["lease"]["expiration"]
        renew, failures = a.node._store.renew, [StoreError("the store is away")]

        async def failing(lease):
            if failures:
                raise failures.pop()
            return await renew(lease)

        monkeypatch.setattr(a.node._store, "renew", failing)
        await until(lambda: any(at == world.time + 60 for at, _ in world.sleepers))
        world.advance(23 * 3600)
        await until(lambda: "the store is away" in caplog.text)
        await until(lambda: any(at == world.time + 5 for at, _ in world.sleepers))
        world.advance(5)
        await until(lambda: len(world.sleepers) and not a.task.done())
        world.advance(1)
        await until(lambda: a.node.status()["lease"]["expiration"] > before)


async def test_a_lease_that_is_gone_ends_the_node_if_the_policy_says_so(world):
    async with Machine(world, 1, lost_lease="stop").running() as a:
        a.lease_files()[0].unlink()
        world.advance(1)
        with pytest.raises(LeaseLostError, match="is gone"):
            await asyncio.wait_for(asyncio.shield(a.task), 5)


async def test_a_lease_that_is_gone_is_taken_anew(world, caplog):
    """As after somebody wiped the store."""
    async with Machine(world, 1).running() as a:
        subnet, (lease, _) = a.subnet, a.lease_files()
        lease.unlink()

        def is_back() -> bool:
            world.advance(1)
            return lease.exists() and a.node.is_ready

        await until(is_back)
        assert a.subnet == subnet
        assert json.loads(lease.read_text())["PublicIP"] == "192.0.2.1"
    assert "is this node's again" in caplog.text


async def test_a_subnet_that_somebody_else_took_is_given_up_for_another(world, caplog):
    async with Machine(world, 1).running() as a:
        former, (lease, expiry) = a.subnet, a.lease_files()
        expiry.unlink()
        lease.write_text('{"PublicIP":"192.0.2.99","BackendType":"vxlan","BackendData":{"VtepMAC":"02:00:00:00:00:63"}}')

        def has_moved() -> bool:
            world.advance(1)
            return a.subnet != former and a.node.is_ready and len(a.node.status()["peers"]) == 1

        await until(has_moved)
        assert "192.0.2.99" in lease.read_text(), "the other one's lease is as it wrote it"
        (peer,) = a.node.status()["peers"]
        assert (peer["subnet"], peer["address"]) == (str(former), "192.0.2.99")
        tun = next(link for link in a.host.links if link.name == "flannel.1")
        assert tun.addresses == (ip_interface(f"{a.subnet.network_address}/32"),)
        assert f"FLANNEL_SUBNET={a.subnet.network_address + 1}/24" in a.settings.subnet_file.read_text()
        a.device.inject(octets(IP(src=str(a.subnet[10]), dst=str(former[9])) / UDP()))
        await until(lambda: a.node.status()["outbound"]["verdicts"]["forwarded"] == 1)
    assert f"no longer {str(former).replace('/', '-')}" in caplog.text


async def test_a_snapshot_older_than_our_own_write_costs_nothing(world, monkeypatch):
    a = Machine(world, 1)
    watch = a.node._store.watch
    snapshots: list = []

    async def late():
        async for snapshot in watch():
            yield snapshot
            while True:
                await until(lambda: snapshots)
                yield snapshots.pop()

    monkeypatch.setattr(a.node._store, "watch", late)
    async with a.running():
        subnet = a.subnet
        snapshots.append([])
        await until(lambda: not snapshots and a.node.status()["lease"]["renewed"] == 1)
        assert a.subnet == subnet
        assert a.node.is_ready


async def test_while_the_store_is_away_a_lost_lease_is_asked_for_again_and_again(world, monkeypatch):
    async with Machine(world, 1).running() as a:
        store, acquire = a.node._store, a.node._store.acquire
        failures = [StoreAwayError("no endpoint answers")] * 2

        async def failing(*arguments):
            if failures:
                raise failures.pop()
            return await acquire(*arguments)

        monkeypatch.setattr(store, "acquire", failing)
        a.lease_files()[0].unlink()
        world.advance(1)
        await until(
            lambda: "the lease is lost, and none could be taken: no endpoint answers" in a.node.status()["failures"]
        )
        assert not a.node.is_ready

        def is_back() -> bool:
            world.advance(1)
            return a.node.is_ready

        await until(is_back)
        assert a.node.status()["failures"] == []


async def test_a_node_without_a_free_subnet_goes_on_trying(tmp_path):
    world = World(
        tmp_path, '{"Network":"10.5.0.0/28","SubnetMin":"10.5.0.4","SubnetMax":"10.5.0.4","Backend":{"Type":"vxlan"}}'
    )
    async with Machine(world, 1).running() as a:
        lease, expiry = a.lease_files()
        expiry.unlink()
        lease.write_text('{"PublicIP":"192.0.2.99","BackendType":"vxlan","BackendData":{"VtepMAC":"02:00:00:00:00:63"}}')

        def is_told() -> bool:
            world.advance(1)
            return any("all subnets of /30" in one for one in a.node.status()["failures"])

        await until(is_told)
        assert not a.node.is_ready
        assert [peer["address"] for peer in a.node.status()["peers"]] == ["192.0.2.99"], "peers are followed meanwhile"
        lease.unlink()

        def is_back() -> bool:
            world.advance(1)
            return a.node.is_ready

        await until(is_back)
        assert a.node.status()["failures"] == []


async def test_an_address_that_another_lease_has_does_not_stop_the_renewal(world):
    async with Machine(world, 1, ipv6=False).running() as a:
        (world.folder / "store" / "subnets" / "10.244.250.0-24").write_text(
            '{"PublicIP":"192.0.2.77","BackendType":"vxlan","BackendData":{"VtepMAC":"02:00:00:00:00:4d"}}'
        )
        key = a.node.status()["lease"]["key"]
        a.alter_interface(addresses=(ip_interface("192.0.2.77/24"),))
        await until(lambda: any("already has the public address" in one for one in a.node.status()["failures"]))
        before = a.node.status()["lease"]["expiration"]
        await until(lambda: any(at == world.time + 5 for at, _ in world.sleepers))
        world.advance(23 * 3600)
        await until(lambda: a.node.status()["lease"]["expiration"] > before)
        assert a.node.status()["lease"]["key"] == key


async def test_a_wall_clock_that_is_set_back_does_not_put_off_the_renewal(tmp_path):
    world = World(tmp_path)
    wall = [0.0]
    a = Machine(world, 1)
    a.node._leases._now = a.node._now = lambda: world.time + wall[0]
    async with a.running():
        wall[0] = -7200.0
        await until(lambda: any(at == world.time + 60 for at, _ in world.sleepers))
        world.advance(23 * 3600)
        await until(lambda: a.node.status()["lease"]["renewed"] == 1)


async def test_a_deleted_device_is_opened_anew(world, caplog):
    async with Machine(world, 1).running() as a, Machine(world, 2).running() as b:
        world.advance(1)
        await until(lambda: len(a.node.status()["peers"]) == len(b.node.status()["peers"]) == 1)
        packet = octets(IP(src=str(a.subnet[10]), dst=str(b.subnet[10])) / UDP())
        a.device.inject(packet)
        await until(lambda: b.device.delivered == [packet])
        old = a.device

        def gone(batch):
            raise DeviceLostError("the device flannel.1 is gone")

        old.receive = gone
        a.host.links = [link for link in a.host.links if link.name != "flannel.1"]
        a.host.table = [route for route in a.host.table if route.device != "flannel.1"]
        old.inject(b"x")
        await until(lambda: a.device is not old and (ip_network("10.244.0.0/16"), "flannel.1") in a.host.routes())
        await until(lambda: a.device.kept)
        a.device.inject(packet)
        await until(lambda: b.device.delivered == [packet, packet])
        assert a.node.status()["outbound"]["verdicts"]["forwarded"] == 2, "the counters go on"
    assert "the device flannel.1 is gone; opening it anew" in caplog.text


async def test_a_device_that_somebody_put_in_the_place_of_ours_is_not_taken(world):
    async with Machine(world, 1).running() as a:
        old = a.device

        def gone(batch):
            raise DeviceLostError("the device flannel.1 is gone")

        old.receive = gone
        a.host.links = [replace(link, alias="") if link.name == "flannel.1" else link for link in a.host.links]
        old.inject(b"x")
        await until(lambda: any("flannel.1 exists already and is not ours" in one for one in a.node.status()["failures"]))
        assert not a.node.is_ready
        assert a.device is old
        a.host.links = [link for link in a.host.links if link.name != "flannel.1"]
        a.host.notify()
        await until(lambda: a.device is not old and a.node.is_ready)


async def test_a_device_that_vanishes_between_two_looks_at_it_is_opened_anew(world):
    async with Machine(world, 1).running() as a:
        old = a.device

        def gone() -> None:
            raise DeviceLostError("the device flannel.1 is gone")

        old.keep = gone
        a.host.notify()
        await until(lambda: a.device is not old and a.device.kept)
        assert not a.task.done()


async def test_our_own_device_is_never_the_underlay(tmp_path):
    world = World(tmp_path, '{"Network":"192.0.0.0/22","Backend":{"Type":"vxlan"}}')
    a = Machine(world, 1, ipv6=False, choice=Choice(iface_regex=(r"^192\.0\.",)))
    async with a.running():
        assert a.node.status()["external"]["interface"] == "eth0"
        a.alter_interface(addresses=())
        await until(lambda: any("no interface matches" in one for one in a.node.status()["failures"]))
        assert a.node.status()["external"] == {"interface": "eth0", "ipv4": "192.0.2.1", "ipv6": None}
        assert a.device.mtu == 1450


async def test_the_bridge_of_our_pods_is_never_the_underlay_and_hosts_may_live_in_the_network(tmp_path):
    world = World(tmp_path, '{"Network":"192.0.0.0/22","SubnetMax":"192.0.1.0","Backend":{"Type":"vxlan"}}')
    a = Machine(world, 1, ipv6=False, choice=Choice(iface_regex=(r"^192\.0\.",)))
    async with a.running():
        assert a.node.status()["external"]["ipv4"] == "192.0.2.1"
        bridge = Interface("cni0", 1, 1450, (ip_interface(f"{a.subnet.network_address + 1}/24"),), kind="bridge")
        a.host.links.insert(0, bridge)
        a.alter_interface(mtu=1400)
        await until(lambda: a.device.mtu == 1350)
        assert a.node.status()["external"] == {"interface": "eth0", "ipv4": "192.0.2.1", "ipv6": None}


async def test_another_address_beside_ours_moves_nothing(world):
    async with Machine(world, 1).running() as a:
        before = a.node.status()["external"]
        more = (ip_interface("192.0.2.200/24"), ip_interface("2001:db8::200/64"))
        own = next(link for link in a.host.links if link.name == "eth0").addresses
        a.alter_interface(addresses=(*more, *own), mtu=1400)
        await until(lambda: a.device.mtu == 1350)
        assert a.node.status()["external"] == before


async def test_one_family_may_move_while_the_other_is_missing(tmp_path):
    world = World(tmp_path, DUAL)
    async with Machine(world, 1).running() as a:
        a.alter_interface(addresses=(ip_interface("192.0.2.77/24"),))
        await until(lambda: a.node.status()["external"]["ipv4"] == "192.0.2.77")
        assert a.node.status()["external"]["ipv6"] == "2001:db8::1"
        assert any("eth0 has no IPv6 address any more" in one for one in a.node.status()["failures"])
        a.alter_interface(addresses=(ip_interface("192.0.2.77/24"), ip_interface("2001:db8::77/64")))
        await until(lambda: a.node.status()["external"]["ipv6"] == "2001:db8::77")
        await until(lambda: a.node.status()["failures"] == [])


async def test_rules_come_back_on_a_host_where_something_changes_all_the_time(world):
    async with Machine(world, 1, ip_masq=True, resync=5.0).running() as a:
        (name,) = a.firewall.tables
        whole = list(a.firewall.tables[name])
        await until(lambda: any(at == world.time + 5 for at, _ in world.sleepers))
        a.firewall.tables[name] = []
        for _ in range(5):
            world.advance(1)
            looks = len(world.sleepers)
            a.host.notify()
            await until(lambda looks=looks: a.firewall.tables[name] == whole or len(world.sleepers) != looks)
        await until(lambda: a.firewall.tables[name] == whole)


async def test_a_subnet_file_that_is_removed_comes_back_and_one_of_somebody_else_stays(world):
    async with Machine(world, 1).running() as a:
        path = a.settings.subnet_file
        whole = path.read_text()
        path.unlink()
        a.host.notify()
        await until(path.exists)
        assert path.read_text() == whole
        path.write_text("FLANNEL_MTU=1\n")
        a.host.notify()
        await until(lambda: any("says something else than this node" in one for one in a.node.status()["failures"]))
        assert path.read_text() == "FLANNEL_MTU=1\n"
        assert not a.node.is_ready
        path.unlink()
        a.host.notify()
        await until(lambda: a.node.is_ready and path.read_text() == whole)


async def test_a_table_of_another_name_is_gone_before_the_note_of_it(world, monkeypatch):
    a = Machine(world, 1, ip_masq=True, device="x1")
    async with a.running():
        (first,) = a.firewall.tables
    b = Machine(world, 1, ip_masq=True, device="x2")
    b.host, b.firewall = a.host, MemoryFirewall("unused", a.firewall.tables)
    b.node._host = a.host
    b.firewall.trouble = HostError("nft is not installed")
    with pytest.raises(HostError, match="nft is not installed"):
        async with b.running():
            pass
    assert footprint.read(a.settings.run_dir).firewall == first


async def test_a_start_that_fails_leaves_no_device(world):
    a = Machine(world, 1, ip_masq=True)
    a.firewall.trouble = HostError("nft is not installed")
    with pytest.raises(HostError, match="nft is not installed"):
        async with a.running():
            pass
    assert not a.device.kept


async def test_what_is_no_lost_device_ends_the_node_with_a_reason(world):
    async with Machine(world, 1).running() as a:

        def broken(batch):
            raise ValueError("something unforeseen")

        a.device.receive = broken
        a.device.inject(b"x")
        with pytest.raises(NodeError, match="something unforeseen"):
            await asyncio.wait_for(asyncio.shield(a.task), 5)


async def test_an_address_that_changes_is_followed_by_all(world):
    async with Machine(world, 1, ipv6=False).running() as a, Machine(world, 2, ipv6=False).running() as b:
        world.advance(1)
        await until(lambda: len(a.node.status()["peers"]) == len(b.node.status()["peers"]) == 1)
        before, (lease, _) = a.node.status()["lease"], a.lease_files()
        said = json.loads(lease.read_text())
        a.alter_interface(addresses=(ip_interface("192.0.2.77/24"),))
        await until(lambda: a.node.status()["external"]["ipv4"] == "192.0.2.77")
        await until(lambda: json.loads(lease.read_text()) == said | {"PublicIP": "192.0.2.77"})

        def is_known() -> bool:
            world.advance(1)
            return [peer["address"] for peer in b.node.status()["peers"]] == ["192.0.2.77"]

        await until(is_known)
        packet = octets(IP(src=str(b.subnet[10]), dst=str(a.subnet[10])) / UDP())
        b.device.inject(packet)
        await until(lambda: a.device.delivered == [packet])
        after = a.node.status()["lease"]
        assert (after["subnet"], after["vtep_mac"]) == (before["subnet"], before["vtep_mac"])


async def test_a_new_address_is_told_to_the_store_once_it_is_back(world, monkeypatch):
    async with Machine(world, 1, ipv6=False).running() as a:
        store, update = a.node._store, a.node._store.update
        failures = [StoreAwayError("no endpoint answers")] * 2

        async def failing(*arguments):
            if failures:
                raise failures.pop()
            return await update(*arguments)

        monkeypatch.setattr(store, "update", failing)
        (lease, _) = a.lease_files()
        a.alter_interface(addresses=(ip_interface("192.0.2.77/24"),))
        await until(lambda: any("no endpoint answers" in one for one in a.node.status()["failures"]))

        def is_told() -> bool:
            world.advance(1)
            return json.loads(lease.read_text())["PublicIP"] == "192.0.2.77"

        await until(is_told)
        await until(lambda: a.node.status()["failures"] == [])


async def test_an_interface_that_is_gone_for_a_while_is_waited_for(world):
    async with Machine(world, 1).running() as a, Machine(world, 2).running() as b:
        world.advance(1)
        await until(lambda: len(a.node.status()["peers"]) == 1)
        a.alter_interface(is_up=False)
        await until(lambda: any("eth0 is down" in one for one in a.node.status()["failures"]))
        assert len(a.node.status()["peers"]) == 1
        assert a.node.is_ready
        a.alter_interface(is_up=True)
        await until(lambda: a.node.status()["failures"] == [])
        packet = octets(IP(src=str(a.subnet[10]), dst=str(b.subnet[10])) / UDP())
        a.device.inject(packet)
        await until(lambda: b.device.delivered == [packet])


async def test_an_mtu_that_changes_is_followed(world):
    async with Machine(world, 1, ipv6=False).running() as a:
        a.alter_interface(mtu=1420)
        await until(lambda: "FLANNEL_MTU=1370" in a.settings.subnet_file.read_text())
        tun = next(link for link in a.host.links if link.name == "flannel.1")
        assert (tun.mtu, a.device.mtu, a.node.status()["device"]["mtu"]) == (1370, 1370, 1370)
        a.alter_interface(mtu=500)
        await until(lambda: any("raise the interface's MTU" in one for one in a.node.status()["failures"]))
        assert a.device.mtu == 1370


async def test_rules_are_there_before_the_node_is_ready_and_come_back_when_flushed(world, caplog):
    a = Machine(world, 1, ip_masq=True, resync=5.0)
    async with a.running():
        (name,) = a.firewall.tables
        table = list(a.firewall.tables[name])
        assert table
        assert "FLANNEL_IPMASQ=true" in a.settings.subnet_file.read_text()
        a.firewall.tables[name] = []
        await until(lambda: any(at == world.time + 5 for at, _ in world.sleepers))
        world.advance(5)
        await until(lambda: a.firewall.tables[name] == table)
        await until(lambda: a.node.status()["firewall"]["restored"] == 1)
    assert "were not as wanted" in caplog.text
    assert a.firewall.tables[name] == table, "a stop leaves them for the next start"
    assert footprint.read(a.settings.run_dir).firewall == name


async def test_rules_that_cannot_be_had_stop_the_start(world):
    a = Machine(world, 1, ip_masq=True)
    a.firewall.trouble = HostError("nft is not installed")
    with pytest.raises(HostError, match="nft is not installed"):
        async with a.running():
            pass
    assert not a.settings.subnet_file.exists()


async def test_a_bridge_of_pods_with_another_subnet_is_told_of_until_it_is_gone(world, caplog):
    a = Machine(world, 1)
    a.host.links.append(Interface("cni0", 12, 1450, (ip_interface("10.244.250.1/24"),), kind="bridge"))
    async with a.running():
        assert a.subnet != ip_network("10.244.250.0/24")
        (told,) = a.node.status()["failures"]
        assert "cni0 has the address 10.244.250.1/24" in told
        assert str(a.subnet) in told
        a.host.links = [link for link in a.host.links if link.name != "cni0"]
        a.host.notify()
        await until(lambda: a.node.status()["failures"] == [])
    assert "the pods on it are unreachable" in caplog.text


async def test_a_start_waits_for_a_store_that_is_away(world, monkeypatch):
    a = Machine(world, 1)
    config, failures = a.node._store.config, [StoreAwayError("no endpoint answers")] * 3

    async def failing():
        if failures:
            raise failures.pop()
        return await config()

    monkeypatch.setattr(a.node._store, "config", failing)
    task = asyncio.create_task(a.node.run(a.stop, a.ready.set))
    await until(lambda: "waiting for the store: no endpoint answers" in a.node.status()["failures"])
    assert a.node.status()["ready"] is False

    def is_ready() -> bool:
        world.advance(1)
        return a.ready.is_set()

    await until(is_ready)
    assert a.node.status()["ready"] is True
    a.stop.set()
    await task
    assert not a.node.is_ready


async def test_the_lease_is_renewed_at_half_of_a_short_life(tmp_path):
    world = World(tmp_path)
    a = Machine(world, 1)
    a.node._store._lease_seconds = 100.0
    async with a.running():
        assert a.node.status()["lease"]["expiration"] == world.time + 100
        await until(lambda: any(at == world.time + 50 for at, _ in world.sleepers))
        world.advance(50)
        await until(lambda: a.node.status()["lease"]["expiration"] == world.time + 100)


async def test_a_port_that_a_kernel_vxlan_device_holds_is_said_to_be(world):
    a = Machine(world, 1)
    a.underlay_error = UnderlayError("cannot bind UDP port 8472 of 192.0.2.1: Address already in use", port_taken=True)
    a.host.links.append(Interface("vx7", 5, 1450, kind="vxlan", udp_port=8472))
    with pytest.raises(NodeError, match="kernel VXLAN device vx7 holds it; remove that device"):
        async with a.running():
            pass


async def test_a_port_that_a_process_holds(world):
    a = Machine(world, 1)
    a.underlay_error = UnderlayError("cannot bind UDP port 8472 of 192.0.2.1: Address already in use", port_taken=True)
    with pytest.raises(NodeError, match="another process holds it"):
        async with a.running():
            pass


async def test_a_second_node_in_the_same_run_folder_does_not_start_and_harms_nobody(world):
    async with Machine(world, 1).running() as a:
        with pytest.raises(ControlError, match="a node is running here"):
            async with Machine(world, 1).running():
                pass
        answer = await asyncio.to_thread(ask, a.settings.run_dir, "status")
        assert answer["state"] == "running"


async def test_a_dead_control_socket_is_taken_over(world):
    a = Machine(world, 1)
    a.settings.run_dir.mkdir()
    server = await asyncio.start_unix_server(lambda r, w: None, str(a.settings.run_dir / "control.sock"))
    server.close()
    await server.wait_closed()
    (a.settings.run_dir / "control.sock").touch()
    async with a.running():
        assert (await asyncio.to_thread(ask, a.settings.run_dir, "status"))["state"] == "running"


async def test_the_control_socket_answers_nonsense_with_an_error(world):
    async with Machine(world, 1).running() as a:
        with pytest.raises(ControlError, match="not a question"):
            await asyncio.to_thread(ask, a.settings.run_dir, "dance")


async def test_stop_leaves_the_subnet_file_and_cleanup_takes_it_away(world):
    async with Machine(world, 1).running() as a:
        pass
    assert a.settings.subnet_file.exists()
    assert not (a.settings.run_dir / "control.sock").exists()
    removed = footprint.remove(a.settings.run_dir)
    assert removed == [str(a.settings.subnet_file), str(a.settings.run_dir / "state.json")]
    assert footprint.remove(a.settings.run_dir) == []


async def test_cleanup_leaves_a_subnet_file_that_somebody_else_wrote(world):
    async with Machine(world, 1).running() as a:
        pass
    a.settings.subnet_file.write_text("FLANNEL_MTU=1\n")
    assert footprint.remove(a.settings.run_dir) == [str(a.settings.run_dir / "state.json")]
    assert a.settings.subnet_file.read_text() == "FLANNEL_MTU=1\n"


async def test_a_peer_of_another_backend_is_reported_once(world, caplog):
    caplog.set_level(logging.WARNING)
    (world.folder / "store" / "subnets").mkdir()
    foreign = world.folder / "store" / "subnets" / "10.244.9.0-24"
    foreign.write_text('{"PublicIP":"192.0.2.9","BackendType":"host-gw"}')
    async with Machine(world, 1).running() as a:
        assert a.node.status()["unreachable"] == [
            {"key": "10.244.9.0-24", "reason": "its BackendType is 'host-gw', ours is 'vxlan'"}
        ]
        (world.folder / "store" / "subnets" / "10.244.10.0-24").write_text(
            '{"PublicIP":"192.0.2.10","BackendType":"vxlan","BackendData":{"VtepMAC":"02:00:00:00:00:0a"}}'
        )
        world.advance(1)
        await until(lambda: len(a.node.status()["peers"]) == 1)
    assert caplog.text.count("10.244.9.0-24") == 1


async def test_warnings_of_the_configuration_are_logged(tmp_path, caplog):
    world = World(tmp_path, '{"Network":"10.244.0.0/16","Directnetwork":1,"Backend":{"Type":"vxlan"}}')
    async with Machine(world, 1).running():
        assert "unknown key 'Directnetwork'" in caplog.text


async def test_no_configuration_is_an_error_that_says_where(tmp_path):
    world = World(tmp_path)
    (tmp_path / "store" / "config").unlink()
    with pytest.raises(StoreError, match=r"store/config does not exist: .*--network"):
        async with Machine(world, 1).running():
            pass


async def test_a_broken_configuration_is_an_error(tmp_path):
    world = World(tmp_path, "{")
    with pytest.raises(ConfigError, match="not JSON"):
        async with Machine(world, 1).running():
            pass


@pytest.mark.parametrize(
    ("interface", "config", "framing", "families", "mtu"),
    [
        (1500, CONFIG, "vxlan", {4}, 1450),
        (1500, DUAL, "vxlan", {4, 6}, 1430),
        (1500, CONFIG, "vxlan", {6}, 1430),
        (1500, UDP_BACKEND, "ip", {4}, 1472),
        (1500, UDP_BACKEND, "ip", {6}, 1452),
        (9001, CONFIG, "vxlan", {4}, 8951),
        (1420, CONFIG, "vxlan", {4}, 1370),
        (1460, CONFIG, "vxlan", {4}, 1410),
        (1500, '{"Network":"10.244.0.0/16","Backend":{"Type":"vxlan","MTU":1400}}', "vxlan", {4}, 1350),
    ],
)
def test_device_mtu(interface, config, framing, families, mtu):
    assert device_mtu(interface, parse_config(config), framing, frozenset(families)) == mtu


@pytest.mark.parametrize(("interface", "config", "least"), [(625, CONFIG, 576), (1349, DUAL, 1280)])
def test_an_mtu_too_small_is_refused_with_the_sum(interface, config, least):
    families = frozenset({4, 6} if config == DUAL else {4})
    with pytest.raises(NodeError, match=f"{interface} less the overhead of .* needs {least}"):
        device_mtu(interface, parse_config(config), "vxlan", families)


async def test_a_chosen_vtep_mac_is_used(world):
    async with Machine(world, 1, vtep_mac=bytes.fromhex("02aabbccddee")).running() as a:
        assert a.node.status()["lease"]["vtep_mac"] == "02:aa:bb:cc:dd:ee"
        assert ip_address("192.0.2.1") == ip_address(a.node.status()["external"]["ipv4"])


async def test_somebody_elses_interface_is_not_taken_over(world):
    a = Machine(world, 1)
    a.host.links.append(Interface("flannel.1", 7, 1500, kind="tun", alias="operators"))
    with pytest.raises(NodeError, match=r"flannel\.1 exists already and is not ours"):
        async with a.running():
            pass
    assert not (world.folder / "store" / "subnets").exists()


async def test_a_vni_too_long_for_a_name_is_said_before_a_lease_is_taken(tmp_path):
    world = World(tmp_path, '{"Network":"10.244.0.0/16","Backend":{"Type":"vxlan","VNI":16777215}}')
    with pytest.raises(NodeError, match=r"flannel\.16777215 is too long for an interface: name the device with --device"):
        async with Machine(world, 1).running():
            pass
    async with Machine(world, 1, device="wide").running() as a:
        assert a.device.name == "wide"


@pytest.mark.parametrize("damage", ["route", "link"])
async def test_what_somebody_takes_down_is_set_up_again(world, caplog, damage):
    async with Machine(world, 1).running() as a:
        if damage == "route":
            a.host.table = [route for route in a.host.table if route.network.prefixlen == 0]
        else:
            index = next(i for i, link in enumerate(a.host.links) if link.name == "flannel.1")
            a.host.links[index] = replace(a.host.links[index], is_up=False)
        await until(lambda: any(at == world.time + 5 for at, _ in world.sleepers))
        world.advance(5)
        await until(lambda: "; put right" in caplog.text)
        await until(lambda: (ip_network("10.244.0.0/16"), "flannel.1") in a.host.routes())
        await until(lambda: next(link for link in a.host.links if link.name == "flannel.1").is_up)


async def test_a_reservation_that_is_given_to_somebody_else_ends_the_node_if_the_policy_says_so(world):
    async with Machine(world, 1, lost_lease="stop").running() as a:
        name = str(a.subnet).replace("/", "-")
        (world.folder / "store" / "expiry" / name).unlink()
        (world.folder / "store" / "subnets" / name).write_text('{"PublicIP":"192.0.2.99","BackendType":"vxlan"}')
        world.advance(1)
        with pytest.raises(LeaseLostError, match=r"belongs to 192\.0\.2\.99 now"):
            await asyncio.wait_for(asyncio.shield(a.task), 5)


async def test_a_store_that_cannot_be_read_for_a_while_stops_nothing(world, caplog):
    async with Machine(world, 1).running() as a:
        subnets = world.folder / "store" / "subnets"
        subnets.rename(world.folder / "away")
        subnets.touch()
        world.advance(1)
        await until(lambda: "going on with what is known" in caplog.text)
        subnets.unlink()
        (world.folder / "away").rename(subnets)
        world.advance(1)
        assert not a.task.done()
        (subnets / "10.244.240.0-24").write_text(
            '{"PublicIP":"192.0.2.77","BackendType":"vxlan","BackendData":{"VtepMAC":"02:00:00:00:00:07"}}'
        )

        def seen() -> bool:
            world.advance(1)
            return len(a.node.status()["peers"]) == 1

        await until(seen)


async def test_stop_while_starting_ends_the_start(world, monkeypatch):
    a = Machine(world, 1)

    async def never():
        await asyncio.Event().wait()

    monkeypatch.setattr(a.node._store, "config", never)
    task = asyncio.create_task(a.node.run(a.stop))
    await asyncio.sleep(0)
    a.stop.set()
    await asyncio.wait_for(task, 5)
    assert not a.settings.subnet_file.exists()


async def test_a_family_that_failed_is_not_announced(tmp_path):
    world = World(tmp_path, DUAL)
    a = Machine(world, 1)
    a.host.table.append(Route(ip_network("fd00:10:244::/48"), "eth0"))
    async with a.running():
        assert "IPV6" not in a.settings.subnet_file.read_text()


async def test_a_client_that_asks_nothing_does_not_disturb_the_stop(world, caplog):
    async with Machine(world, 1).running() as a:
        reader, writer = await asyncio.open_unix_connection(str(a.settings.run_dir / "control.sock"))
        await asyncio.sleep(0)
        a.stop.set()
        await asyncio.wait_for(a.task, 5)
    assert await reader.read() in {b"", b'{"error": "the node is stopping"}'}, "accepted late, or in time to be told"
    writer.close()
    await writer.wait_closed()
    assert "Traceback" not in caplog.text


def test_something_else_on_the_socket_is_said_to_be_no_node(tmp_path):
    for answer in (b"5", b"[]", b"{}"):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / "control.sock"))
            listener.listen()
            thread = threading.Thread(target=_answer_once, args=(listener, answer))
            thread.start()
            with pytest.raises(ControlError, match="is no node of this program"):
                ask(tmp_path, "status")
            thread.join()
        (tmp_path / "control.sock").unlink()


def _answer_once(listener: socket.socket, answer: bytes) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(100)
        connection.sendall(answer)
