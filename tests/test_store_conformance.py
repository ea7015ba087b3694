"""What every SubnetStore promises, whatever keeps its leases. A new store gets a harness here and no suite of its own."""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

import pytest

from routing.allocator import Subnets, fits
from routing.config import NetworkConfig, parse_config
from routing.lease import Lease, LeaseAttributes, VtepData, derive_vtep_mac
from routing.stores import SubnetStore
from routing.stores.local import LocalStore
from routing.stores.memory import LeaseBook, MemoryStore
from routing.stores.static import Peer, StaticStore

FAMILIES = {
    "v4": {"Network": "10.5.0.0/16"},
    "dual": {"Network": "10.5.0.0/16", "EnableIPv6": True, "IPv6Network": "fc00::/48"},
    "v6": {"EnableIPv4": False, "EnableIPv6": True, "IPv6Network": "fc00::/48"},
}


def node(number: int, family: str) -> LeaseAttributes:
    ipv4 = IPv4Address(f"192.0.2.{number}") if family != "v6" else None
    ipv6 = IPv6Address(f"2001:db8::{number}") if family != "v4" else None
    return LeaseAttributes(
        ipv4,
        ipv6,
        "vxlan",
        VtepData(derive_vtep_mac(ipv4), 1) if ipv4 else None,
        VtepData(derive_vtep_mac(ipv6), 1) if ipv6 else None,
    )


def subnets(number: int, family: str) -> Subnets:
    return Subnets(
        IPv4Network(f"10.5.{number}.0/24") if family != "v6" else None,
        IPv6Network(f"fc00:0:0:{number}::/64") if family != "v4" else None,
    )


@dataclass
class Harness:
    """A store with one node of its own, 1, and one peer, 2; `again` opens it anew, as a restarted program does."""

    family: str
    store: SubnetStore
    again: Callable[[], SubnetStore]
    add_peer: Callable[[int], Awaitable[object]] | None
    """Makes another peer, or None if peers cannot change."""

    @property
    def attributes(self) -> LeaseAttributes:
        return node(1, self.family)

    async def acquire(self) -> Lease:
        return await self.store.acquire(await self.store.config(), self.attributes, subnets(1, self.family))


async def yielding(seconds: float) -> None:
    """Waits for nothing; the others get their turn."""
    await asyncio.sleep(0)


async def local(family: str, tmp_path) -> Harness:
    text = json.dumps(FAMILIES[family] | {"Backend": {"Type": "vxlan"}})

    def again() -> LocalStore:
        return LocalStore(tmp_path / "store", now=lambda: 1000.0, sleep=yielding, rng=random.Random(1))

    store = again()
    await store.create_config(text)

    async def add_peer(number: int) -> object:
        return await store.acquire(parse_config(text), node(number, family), subnets(number, family))

    await add_peer(2)
    return Harness(family, store, again, add_peer)


async def static(family: str, tmp_path) -> Harness:
    config = parse_config(json.dumps(FAMILIES[family] | {"Backend": {"Type": "vxlan"}}))
    peer, public = subnets(2, family), node(2, family)
    address = public.public_ip or public.public_ipv6
    peers = [Peer(net, address, derive_vtep_mac(address)) for net in (peer.ipv4, peer.ipv6) if net]

    def again() -> StaticStore:
        return StaticStore(config, subnets(1, family), peers)

    return Harness(family, again(), again, None)


async def memory(family: str, tmp_path) -> Harness:
    text = json.dumps(FAMILIES[family] | {"Backend": {"Type": "vxlan"}})
    book = LeaseBook(text, now=lambda: 1000.0, rng=random.Random(1))

    async def add_peer(number: int) -> object:
        return book.acquire(node(number, family), subnets(number, family))

    await add_peer(2)
    return Harness(family, MemoryStore(book), lambda: MemoryStore(book), add_peer)


@pytest.fixture(params=list(FAMILIES))
def family(request) -> str:
    return request.param


@pytest.fixture(params=[local, static, memory], ids=["local", "static", "memory"])
async def harness(request, family, tmp_path) -> Harness:
    return await request.param(family, tmp_path)


@contextlib.asynccontextmanager
async def watching(store: SubnetStore) -> AsyncIterator[AsyncIterator[Sequence[Lease]]]:
    watch = store.watch()
    try:
        yield watch
    finally:
        await watch.aclose()


async def following(watch) -> Sequence[Lease]:
    return await asyncio.wait_for(anext(watch), 20)


async def now_in(store: SubnetStore) -> Sequence[Lease]:
    async with watching(store) as watch:
        return await following(watch)


async def test_the_configuration_is_whole(harness):
    config = await harness.store.config()
    assert isinstance(config, NetworkConfig)
    assert [str(pool.network) for pool in config.pools] == {
        "v4": ["10.5.0.0/16"],
        "dual": ["10.5.0.0/16", "fc00::/48"],
        "v6": ["fc00::/48"],
    }[harness.family]
    assert (config.backend.type, config.backend.port) == ("vxlan", 8472)
    assert await harness.again().config() == config


async def test_acquire_gives_a_lease_that_fits_and_says_who_holds_it(harness):
    lease = await harness.acquire()
    assert fits(await harness.store.config(), lease.subnet, lease.ipv6_subnet)
    assert (lease.subnet, lease.ipv6_subnet) == (subnets(1, harness.family).ipv4, subnets(1, harness.family).ipv6)
    assert lease.attributes == harness.attributes
    assert lease.held_by(harness.attributes)
    assert lease.key


async def test_acquire_is_idempotent(harness):
    first = await harness.acquire()
    assert await harness.acquire() == first
    config = await harness.store.config()
    assert await harness.store.acquire(config, harness.attributes, Subnets()) == first
    assert await harness.again().acquire(config, harness.attributes, subnets(9, harness.family)) == first


async def test_acquire_again_with_other_data_keeps_the_subnets(harness):
    first = await harness.acquire()
    changed = replace(harness.attributes, backend_data=VtepData(b"\2\0\0\0\0\x63", 1))
    second = await harness.store.acquire(await harness.store.config(), changed, Subnets())
    assert second == replace(first, attributes=changed)


async def test_watch_yields_at_once(harness):
    leases = await now_in(harness.store)
    assert {lease.subnet or lease.ipv6_subnet for lease in leases} >= {
        subnets(2, harness.family).ipv4 or subnets(2, harness.family).ipv6
    }
    assert all(not lease.held_by(harness.attributes) for lease in leases)
    peer = node(2, harness.family)
    address = peer.public_ip or peer.public_ipv6
    assert {lease.attributes.public_ip or lease.attributes.public_ipv6 for lease in leases} == {address}
    data = {lease.attributes.backend_data or lease.attributes.backend_v6_data for lease in leases}
    assert {one.vtep_mac for one in data} == {derive_vtep_mac(address)}


async def test_every_watch_begins_with_all_there_is(harness):
    assert await now_in(harness.store) == await now_in(harness.store) == await now_in(harness.again())


async def test_peers_cover_all_families(harness):
    leases = await now_in(harness.store)
    expected = subnets(2, harness.family)
    assert {lease.subnet for lease in leases} - {None} == {expected.ipv4} - {None}
    assert {lease.ipv6_subnet for lease in leases} - {None} == {expected.ipv6} - {None}


async def test_the_own_lease_is_in_watch_where_the_store_holds_it(harness):
    before = await now_in(harness.store)
    lease = await harness.acquire()
    after = await now_in(harness.store)
    expected = [*before, lease]
    assert sorted(after, key=lambda one: one.key) == sorted(expected, key=lambda one: one.key)


async def test_watch_yields_after_changes(harness):
    async with watching(harness.store) as watch:
        first = await following(watch)
        if harness.add_peer is None:
            following_task = asyncio.create_task(anext(watch))
            await harness.acquire()
            await harness.store.renew(await harness.acquire())
            for _ in range(20):
                await yielding(0)
            assert not following_task.done(), "nothing can change, so nothing follows"
            following_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following_task
            return
        added = await harness.add_peer(3)
        second = await following(watch)
        assert sorted(second, key=lambda one: one.key) == sorted([*first, added], key=lambda one: one.key)


async def test_an_own_lease_comes_and_goes_in_a_watch(harness):
    if harness.add_peer is None:
        pytest.skip("this store never changes, so there is nothing to watch")
    async with watching(harness.again()) as watch:
        first = await following(watch)
        lease = await harness.acquire()
        assert lease in await following(watch)
        await harness.store.release(lease)
        assert await following(watch) == first


async def test_renew_keeps_all_but_the_end(harness):
    lease = await harness.acquire()
    renewed = await harness.store.renew(lease)
    assert replace(renewed, expiration=None) == replace(lease, expiration=None)
    assert (renewed.expiration is None) == (lease.expiration is None)
    if lease.expiration is not None:
        assert renewed.expiration >= lease.expiration
    assert await harness.store.renew(renewed) == renewed


async def test_release_frees_and_may_be_repeated(harness):
    before = await now_in(harness.store)
    lease = await harness.acquire()
    await harness.store.release(lease)
    await harness.store.release(lease)
    assert await now_in(harness.store) == before
    assert await harness.acquire() == lease


async def test_all_of_it_by_several_at_once(harness):
    leases = await asyncio.gather(*(harness.acquire() for _ in range(5)))
    assert leases == [leases[0]] * 5
    renewed = await asyncio.gather(*(harness.store.renew(leases[0]) for _ in range(5)))
    assert {one.key for one in renewed} == {leases[0].key}
