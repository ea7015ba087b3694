"""What every SubnetStore promises, whatever keeps its leases. A new store gets a harness here and no suite of its own for
that. What a Registry promises is below, for the stores that are both."""

import asyncio
import contextlib
import json
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

import etcd_server
import pytest

from routing.allocator import Subnets, fits
from routing.config import ConfigError, NetworkConfig, parse_config
from routing.lease import Lease, LeaseAttributes, VtepData, derive_vtep_mac
from routing.stores import UNKNOWN_EXPIRATION, LeaseLostError, Registry, StoreError, SubnetStore
from routing.stores.etcd import EtcdStore
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
    add_peer: Callable[[int], Awaitable[Lease]] | None
    """Makes another peer, or None if peers cannot change."""
    registry: Registry | None = None
    """The store again, where it is one."""
    opened: list[SubnetStore] = field(default_factory=list)
    """What is to be closed besides `store`."""

    @property
    def attributes(self) -> LeaseAttributes:
        return node(1, self.family)

    async def acquire(self) -> Lease:
        return await self.store.acquire(await self.store.config(), self.attributes, subnets(1, self.family))

    def reopen(self) -> SubnetStore:
        """`again`, closed at the end of the test."""
        self.opened.append(self.again())
        return self.opened[-1]

    async def close(self) -> None:
        for store in (self.store, *self.opened):
            await store.close()


def seen(leases: Iterable[Lease]) -> list[Lease]:
    """`leases` as a watch may show them: by key, and of their ends only whether there is one."""
    return sorted(
        (replace(one, expiration=None if one.expiration is None else UNKNOWN_EXPIRATION) for one in leases),
        key=lambda one: one.key,
    )


async def yielding(seconds: float) -> None:
    """Waits for nothing; the others get their turn."""
    await asyncio.sleep(0)


async def local(family: str, tmp_path, etcd) -> Harness:
    text = json.dumps(FAMILIES[family] | {"Backend": {"Type": "vxlan"}})

    def again() -> LocalStore:
        return LocalStore(tmp_path / "store", now=lambda: 1000.0, sleep=yielding, rng=random.Random(1))

    store = again()
    await store.create_config(text)

    async def add_peer(number: int) -> Lease:
        return await store.acquire(parse_config(text), node(number, family), subnets(number, family))

    await add_peer(2)
    return Harness(family, store, again, add_peer, store)


async def static(family: str, tmp_path, etcd) -> Harness:
    config = parse_config(json.dumps(FAMILIES[family] | {"Backend": {"Type": "vxlan"}}))
    peer, public = subnets(2, family), node(2, family)
    address = public.public_ip or public.public_ipv6
    peers = [Peer(net, address, derive_vtep_mac(address)) for net in (peer.ipv4, peer.ipv6) if net]

    def again() -> StaticStore:
        return StaticStore(config, subnets(1, family), peers)

    return Harness(family, again(), again, None)


async def memory(family: str, tmp_path, etcd) -> Harness:
    text = json.dumps(FAMILIES[family] | {"Backend": {"Type": "vxlan"}})
    book = LeaseBook(text, now=lambda: 1000.0, rng=random.Random(1))

    async def add_peer(number: int) -> Lease:
        return book.acquire(node(number, family), subnets(number, family))

    await add_peer(2)
    store = MemoryStore(book)
    return Harness(family, store, lambda: MemoryStore(book), add_peer, store)


async def in_etcd(family: str, tmp_path, etcd) -> Harness:
    prefix = f"/{uuid.uuid4()}"

    def again(identity: str = "node 1") -> EtcdStore:
        return EtcdStore(etcd.endpoints, prefix, identity=identity, now=lambda: 1000.0, rng=random.Random(1))

    store = again()
    await store.write_config(json.dumps(FAMILIES[family] | {"Backend": {"Type": "vxlan"}}))
    harness = Harness(family, store, again, None, store)

    async def add_peer(number: int) -> Lease:
        peer = again(f"node {number}")
        harness.opened.append(peer)
        return await peer.acquire(await peer.config(), node(number, family), subnets(number, family))

    harness.add_peer = add_peer
    await add_peer(2)
    return harness


STORES = {
    "local": local,
    "static": static,
    "memory": memory,
    "etcd-debian": in_etcd,
    "etcd-newer": in_etcd,
}


@pytest.fixture(scope="module")
def etcds(tmp_path_factory) -> Iterator[Callable[[str], etcd_server.Etcd]]:
    """The servers, each started when it is asked for."""
    with contextlib.ExitStack() as stack:
        started: dict[str, etcd_server.Etcd] = {}

        def get(program: str) -> etcd_server.Etcd:
            if program not in started:
                started[program] = stack.enter_context(etcd_server.running(tmp_path_factory.mktemp("etcd"), program))
            return started[program]

        yield get


@pytest.fixture(
    params=[
        (store, family)
        for store in STORES
        for family in FAMILIES
        if (store, family) not in {("etcd-newer", "v4"), ("etcd-newer", "v6")}  # the server does not look into keys
    ],
    ids="-".join,
)
async def harness(request, tmp_path, etcds) -> AsyncIterator[Harness]:
    store, family = request.param
    _, _, program = store.partition("-")
    harness = await STORES[store](family, tmp_path, etcds(program) if program else None)
    yield harness
    await harness.close()


@pytest.fixture
def registry(harness) -> Registry:
    if harness.registry is None:
        pytest.skip("this store has no operator")
    return harness.registry


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
    assert await harness.reopen().config() == config


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
    assert await harness.reopen().acquire(config, harness.attributes, subnets(9, harness.family)) == first


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
    assert await now_in(harness.store) == await now_in(harness.store) == await now_in(harness.reopen())


async def test_peers_cover_all_families(harness):
    leases = await now_in(harness.store)
    expected = subnets(2, harness.family)
    assert {lease.subnet for lease in leases} - {None} == {expected.ipv4} - {None}
    assert {lease.ipv6_subnet for lease in leases} - {None} == {expected.ipv6} - {None}


async def test_the_own_lease_is_in_watch_where_the_store_holds_it(harness):
    before = await now_in(harness.store)
    lease = await harness.acquire()
    after = await now_in(harness.store)
    assert seen(after) == seen([*before, lease])


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
        assert seen(second) == seen([*first, added])


async def test_an_own_lease_comes_and_goes_in_a_watch(harness):
    if harness.add_peer is None:
        pytest.skip("this store never changes, so there is nothing to watch")
    async with watching(harness.reopen()) as watch:
        first = await following(watch)
        lease = await harness.acquire()
        assert seen(await following(watch)) == seen([*first, lease])
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


async def test_update_changes_what_the_node_says_of_itself_and_keeps_the_subnets(harness):
    lease = await harness.acquire()
    before = await now_in(harness.store)
    moved = node(9, harness.family)
    updated = await harness.store.update(lease, moved)
    assert replace(updated, expiration=None) == replace(lease, attributes=moved, expiration=None)
    assert (updated.expiration is None) == (lease.expiration is None)
    if lease.expiration is not None:
        assert updated.expiration >= lease.expiration
    others = [one for one in before if one.key != lease.key]
    assert seen(await now_in(harness.store)) == seen([*others, updated])
    renewed = await harness.store.renew(updated)
    assert renewed.attributes == moved
    await harness.store.release(renewed)
    assert seen(await now_in(harness.store)) == seen(others)


async def test_update_is_seen_by_others(harness):
    if harness.add_peer is None:
        pytest.skip("this store never changes, so there is nothing to watch")
    lease = await harness.acquire()
    async with watching(harness.reopen()) as watch:
        first = await following(watch)
        changed = replace(harness.attributes, backend_data=VtepData(b"\2\0\0\0\0\x63", 1))
        updated = await harness.store.update(lease, changed)
        assert seen(await following(watch)) == seen([*(one for one in first if one.key != lease.key), updated])


async def test_update_to_an_address_that_another_lease_has(harness):
    lease = await harness.acquire()
    before = await now_in(harness.store)
    taken = node(2, harness.family)
    with pytest.raises(StoreError, match=str(taken.public_ip or taken.public_ipv6)):
        await harness.store.update(lease, taken)
    assert await now_in(harness.store) == before
    assert (await harness.store.renew(lease)).attributes == harness.attributes


async def test_report_is_plain_data_and_says_that_all_is_well(harness):
    await harness.acquire()
    async with watching(harness.store) as watch:
        await following(watch)
        report = harness.store.report()
        assert json.loads(json.dumps(report)) == report
        assert report["away_since"] is None
        assert report["skipped"] == 0
        assert report["kind"]


async def test_close_may_be_repeated_and_keeps_the_lease(harness):
    lease = await harness.acquire()
    before = await now_in(harness.store)
    await harness.store.close()
    await harness.store.close()
    if harness.add_peer is not None:  # else the lease lives only in this object
        again = harness.reopen()
        assert await now_in(again) == before
        assert await again.renew(lease) == lease


# Registry


async def test_leases_are_listed_with_their_ends(harness, registry):
    before = await registry.list_leases()
    lease = await harness.acquire()
    listed = {one.key: one for one in await registry.list_leases()}
    assert list(listed) == sorted(listed)
    assert seen(listed.values()) == seen([*before, lease])
    assert lease.expiration - 2 <= listed[lease.key].expiration <= lease.expiration  # etcd tells whole seconds


async def test_a_reservation_of_a_new_node(harness, registry):
    attributes = node(7, harness.family)
    reserved = await registry.reserve(subnets(7, harness.family), attributes)
    assert reserved == Lease(subnets(7, harness.family).ipv4, subnets(7, harness.family).ipv6, attributes, None)
    assert reserved in await registry.list_leases()
    assert reserved in await now_in(harness.store)
    again = await registry.reserve(subnets(7, harness.family), None)
    assert again == reserved
    assert await registry.reserve(subnets(7, harness.family), attributes) == reserved


async def test_a_reservation_is_taken_up_and_stays_one(harness, registry):
    reserved = await registry.reserve(subnets(7, harness.family), harness.attributes)
    lease = await harness.acquire()
    assert lease == reserved
    changed = replace(harness.attributes, backend_data=VtepData(b"\2\0\0\0\0\x63", 1))
    for _ in range(2):
        lease = await harness.store.renew(lease)
        lease = await harness.store.update(lease, changed)
        assert lease == replace(reserved, attributes=changed)
        await harness.store.release(lease)
        assert lease in await registry.list_leases()
        assert await harness.store.acquire(await harness.store.config(), changed, Subnets()) == lease


async def test_a_reservation_comes_before_the_lease_that_the_node_has(harness, registry):
    lease = await harness.acquire()
    reserved = await registry.reserve(subnets(7, harness.family), harness.attributes)
    assert await harness.acquire() == reserved
    assert lease.key not in [one.key for one in await registry.list_leases()]


async def test_a_running_nodes_lease_becomes_a_reservation(harness, registry):
    lease = await harness.acquire()
    found = Subnets(lease.subnet, lease.ipv6_subnet)
    reserved = await registry.reserve(found, None)
    assert reserved == replace(lease, expiration=None)
    assert await harness.store.renew(lease) == reserved
    await harness.store.release(lease)
    assert reserved in await registry.list_leases()


async def test_what_cannot_be_reserved(harness, registry):
    lease = await harness.acquire()
    before = await registry.list_leases()
    with pytest.raises(StoreError, match="public address"):
        await registry.reserve(subnets(8, harness.family), None)
    with pytest.raises(StoreError, match="held by"):
        await registry.reserve(Subnets(lease.subnet, lease.ipv6_subnet), node(8, harness.family))
    with pytest.raises(StoreError, match="does not fit"):
        await registry.reserve(subnets(0, harness.family), node(8, harness.family))
    with pytest.raises(StoreError, match="needs a subnet"):
        await registry.reserve(Subnets(), node(8, harness.family))
    if harness.family == "dual":
        with pytest.raises(StoreError, match="overlaps"):
            await registry.reserve(Subnets(lease.subnet, subnets(8, "dual").ipv6), node(8, "dual"))
    assert await registry.list_leases() == before


async def test_leases_and_reservations_are_removed(harness, registry):
    lease = await harness.acquire()
    await registry.reserve(subnets(7, harness.family), node(7, harness.family))
    removed = await registry.remove(Subnets(lease.subnet, lease.ipv6_subnet))
    assert seen([removed]) == seen([lease])
    assert await registry.remove(subnets(7, harness.family)) == Lease(
        subnets(7, harness.family).ipv4, subnets(7, harness.family).ipv6, node(7, harness.family), None
    )
    assert {lease.key, removed.key}.isdisjoint(one.key for one in await registry.list_leases())
    with pytest.raises(StoreError, match="there is no lease"):
        await registry.remove(subnets(7, harness.family))
    with pytest.raises(LeaseLostError):
        await harness.store.renew(lease)


async def test_the_configuration_is_read_and_written_as_it_is(harness, registry):
    text = '{ "Network": "10.9.0.0/16",\n "Backend": {"Type": "vxlan", "VNI": 7} }'
    await registry.write_config(text)
    assert await registry.config_text() == text
    assert (await harness.store.config()).backend.vni == 7
    with pytest.raises(ConfigError):
        await registry.write_config("{}")
    assert await registry.config_text() == text
