"""The store in etcd: flannel's schema, who gets which lease, and what becomes of those that others changed."""

import asyncio
import contextlib
import json
import logging
import random
import re
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

import etcd_server
import pytest

from routing.allocator import NoFreeSubnetError, Subnets
from routing.config import ConfigError, parse_config
from routing.lease import Lease, LeaseAttributes, VtepData, derive_vtep_mac
from routing.stores import LEASE_SECONDS, UNKNOWN_EXPIRATION, LeaseLostError, StoreAwayError, StoreError
from routing.stores.etcd import EtcdStore
from routing.stores.etcd import etcd_pb2 as pb
from routing.stores.etcd.claims import HELD, LOST
from routing.stores.etcd.client import GRANT
from routing.stores.etcd.keyspace import new_lease_id

CONFIG_TEXT = '{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}'
CONFIG = parse_config(CONFIG_TEXT)
FIFTY = '{"Network":"10.5.0.0/16","SubnetMin":"10.5.1.0","SubnetMax":"10.5.50.0","Backend":{"Type":"vxlan"}}'


def host(number: int, backend: str = "vxlan") -> LeaseAttributes:
    address = IPv4Address(f"192.0.2.{number}")
    return LeaseAttributes(address, None, backend, VtepData(derive_vtep_mac(address), 1))


def net(number: int) -> Subnets:
    return Subnets(IPv4Network(f"10.5.{number}.0/24"))


class Network:
    """A prefix of its own in `etcd`, with a configuration, and stores on it that are closed at the end."""

    def __init__(self, etcd: etcd_server.Etcd, other: etcd_server.Other) -> None:
        self.etcd, self.other = etcd, other
        self.prefix = f"/{uuid.uuid4()}/network"
        self.opened: list[EtcdStore] = []

    def store(self, identity: str = "one", **details) -> EtcdStore:
        store = EtcdStore(self.etcd.endpoints, self.prefix, identity=identity, **details)
        self.opened.append(store)
        return store

    def key(self, name: str) -> str:
        return f"{self.prefix}/subnets/{name}"

    async def leases(self) -> dict[str, pb.KeyValue]:
        """What is below subnets/, by the last part of the key."""
        prefix = self.key("")
        return {key.removeprefix(prefix): found for key, found in (await self.other.below(prefix)).items()}

    async def grant(self, seconds: int = 3600) -> int:
        lease_id = new_lease_id()
        await self.other.client.call(GRANT, pb.LeaseGrantRequest(ID=lease_id, TTL=seconds))
        return lease_id


@pytest.fixture(scope="module")
def etcd(tmp_path_factory) -> Iterator[etcd_server.Etcd]:
    with etcd_server.running(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd


@pytest.fixture
async def network(etcd) -> AsyncIterator[Network]:
    async with etcd_server.other_client(etcd) as other:
        network = Network(etcd, other)
        await other.put(f"{network.prefix}/config", CONFIG_TEXT)
        yield network
        for store in network.opened:
            await store.close()


@contextlib.asynccontextmanager
async def snapshots(store: EtcdStore):
    watch = store.watch()
    try:
        yield lambda: asyncio.wait_for(anext(watch), 20)
    finally:
        await watch.aclose()


async def snapshot(store: EtcdStore) -> list[Lease]:
    async with snapshots(store) as following:
        return await following()


def messages(caplog, level: int = logging.WARNING) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


# flannel's format, after flannel-facts alone


def parse_as_flannel(key: str, value: str) -> dict[str, object]:
    """What flannel reads: ParseSubnetKey and the JSON of LeaseAttrs, with Go's types."""
    matched = re.fullmatch(r"(\d+\.\d+\.\d+\.\d+-\d+)(?:&([a-f\d:]+-\d+))?", key)
    assert matched is not None, key
    first, second = (part.replace("-", "/") if part else None for part in matched.groups())
    attributes = json.loads(value)
    assert list(attributes)[:3] == ["PublicIP", "PublicIPv6", "BackendType"]
    assert set(attributes) <= {"PublicIP", "PublicIPv6", "BackendType", "BackendData", "BackendV6Data"}
    for name in ("BackendData", "BackendV6Data"):
        if name in attributes:
            assert set(attributes[name]) == {"VNI", "VtepMAC"}
            assert isinstance(attributes[name]["VNI"], int)
            assert re.fullmatch(r"([0-9a-f]{2}:){5}[0-9a-f]{2}", attributes[name]["VtepMAC"])
    return {"subnet": IPv4Network(first), "ipv6": IPv6Network(second) if second else None, **attributes}


DUAL_TEXT = '{"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fc00::/48","Backend":{"Type":"vxlan","VNI":1}}'
DATA, V6_DATA = '{"VNI":1,"VtepMAC":"02:00:00:00:00:01"}', '{"VNI":1,"VtepMAC":"02:00:00:00:00:02"}'
V4, V6 = IPv4Address("192.168.1.2"), IPv6Address("2001:db8::2")


@pytest.mark.parametrize(
    ("config_text", "attributes", "wanted", "key", "value"),
    [
        (
            CONFIG_TEXT,
            LeaseAttributes(V4, None, "vxlan", VtepData(b"\2\0\0\0\0\1", 1)),
            Subnets(IPv4Network("10.5.34.0/24")),
            "10.5.34.0-24",
            '{"PublicIP":"192.168.1.2","PublicIPv6":null,"BackendType":"vxlan",' + f'"BackendData":{DATA}}}',
        ),
        (
            DUAL_TEXT,
            LeaseAttributes(V4, V6, "vxlan", VtepData(b"\2\0\0\0\0\1", 1), VtepData(b"\2\0\0\0\0\2", 1)),
            Subnets(IPv4Network("10.5.34.0/24"), IPv6Network("fc00:0:0:1::/64")),
            "10.5.34.0-24&fc00:0:0:1::-64",
            f'{{"PublicIP":"{V4}","PublicIPv6":"{V6}","BackendType":"vxlan","BackendData":{DATA},"BackendV6Data":{V6_DATA}}}',
        ),
        (
            '{"Network":"10.5.0.0/16"}',
            LeaseAttributes(V4, None, "udp"),
            Subnets(IPv4Network("10.5.34.0/24")),
            "10.5.34.0-24",
            '{"PublicIP":"192.168.1.2","PublicIPv6":null,"BackendType":"udp"}',
        ),
    ],
    ids=["v4", "dual", "udp"],
)
async def test_keys_and_values_are_flannels_to_the_byte(network, config_text, attributes, wanted, key, value):
    store = network.store()
    await store.acquire(parse_config(config_text), attributes, wanted)
    found = await network.leases()
    assert {name: one.value.decode() for name, one in found.items()} == {key: value}
    assert found[key].lease != 0
    read = parse_as_flannel(key, value)
    assert (read["subnet"], read["ipv6"], read["PublicIP"]) == (wanted.ipv4, wanted.ipv6, str(V4))


async def test_what_flannel_wrote_is_understood(network):
    data = '{"VNI":1,"VtepMAC":"5a:e6:0:1:2:3"}'
    one = f'{{"PublicIP":"192.168.1.3","PublicIPv6":null,"BackendType":"vxlan","BackendData":{data}}}'
    old = '{"PublicIP":"192.168.1.4","BackendType":"vxlan","BackendData":{"VtepMAC":"4e:67:d1:d6:a9:0b"}}'
    udp = '{"PublicIP":"192.168.1.5","PublicIPv6":null,"BackendType":"udp","BackendData":null}'
    lease_id = await network.grant()
    await network.other.put(network.key("10.5.3.0-24"), one, lease_id)
    await network.other.put(network.key("10.5.4.0-24"), old)
    await network.other.put(network.key("10.5.5.0-24&fc00:0:0:5::-64"), udp, lease_id)
    vxlan = VtepData(bytes.fromhex("5ae600010203"), 1)
    assert await snapshot(network.store()) == [
        Lease(
            IPv4Network("10.5.3.0/24"),
            None,
            LeaseAttributes(IPv4Address("192.168.1.3"), None, "vxlan", vxlan),
            UNKNOWN_EXPIRATION,
        ),
        Lease(
            IPv4Network("10.5.4.0/24"),
            None,
            LeaseAttributes(IPv4Address("192.168.1.4"), None, "vxlan", VtepData(bytes.fromhex("4e67d1d6a90b"))),
            None,
        ),
        Lease(
            IPv4Network("10.5.5.0/24"),
            IPv6Network("fc00:0:0:5::/64"),
            LeaseAttributes(IPv4Address("192.168.1.5"), None, "udp"),
            UNKNOWN_EXPIRATION,
        ),
    ]


async def test_a_lease_of_flannels_with_our_address_is_taken_up(network):
    lease_id = await network.grant()
    await network.other.put(network.key("10.5.77.0-24"), host(1).to_json(), lease_id)
    lease = await network.store().acquire(CONFIG, host(1), net(9))
    assert lease.key == "10.5.77.0-24"
    found = (await network.leases())["10.5.77.0-24"]
    assert found.lease not in {0, lease_id}
    assert await network.other.keyspace.time_to_live(lease_id) == -1, "the old etcd lease is given back"


async def test_a_lease_lasts_a_day_and_says_when_it_ends(network):
    store = network.store(now=lambda: 1000.0)
    lease = await store.acquire(CONFIG, host(1), net(34))
    assert lease.expiration == 1000.0 + LEASE_SECONDS
    found = (await network.leases())["10.5.34.0-24"]
    assert LEASE_SECONDS - 5 <= await network.other.keyspace.time_to_live(found.lease) <= LEASE_SECONDS


@pytest.mark.parametrize(
    ("prefix", "key"),
    [
        ("/coreos.com/network", b"/coreos.com/network/config"),
        ("/coreos.com/network/", b"/coreos.com/network/config"),
        (" /coreos.com//network ", b"/coreos.com/network/config"),
        ("//a/../b/", b"/b/config"),
        ("a/b", b"a/b/config"),
    ],
)
def test_prefixes_are_cleaned_as_flannel_does(network, prefix, key):
    assert EtcdStore(network.etcd.endpoints, prefix, identity="one")._schema.config == key


@pytest.mark.parametrize("prefix", ["", "/", " ", ".", "//"])
def test_what_is_no_prefix(etcd, prefix):
    with pytest.raises(ValueError, match="prefix"):
        EtcdStore(etcd.endpoints, prefix, identity="one")


@pytest.mark.parametrize(
    "details", [{"lease_seconds": 0}, {"lease_seconds": 0.5}, {"lease_seconds": float("nan")}, {"identity": ""}]
)
def test_what_makes_no_sense_is_refused(etcd, details):
    with pytest.raises(ValueError, match="makes no sense"):
        EtcdStore(etcd.endpoints, **{"identity": "one", **details})


# configuration


async def test_no_configuration_yet_is_a_reason_to_wait(network):
    await network.other.delete(f"{network.prefix}/config")
    with pytest.raises(StoreAwayError) as caught:
        await network.store().config()
    assert f"etcdctl put {network.prefix}/config" in str(caught.value)
    assert "pyflannel-dp leases config --set" in str(caught.value)


async def test_a_configuration_that_cannot_be_used(network):
    await network.other.put(f"{network.prefix}/config", '{"Network":"10.5.0.0/29"}')
    with pytest.raises(ConfigError, match=f"{network.prefix}/config.*10\\.5\\.0\\.0/29"):
        await network.store().config()
    await network.other.put(f"{network.prefix}/config", b"\xff\xfe")
    with pytest.raises(StoreError, match="no text"):
        await network.store().config()


# allocation


async def test_fifty_nodes_at_once_for_fifty_subnets(network):
    config = parse_config(FIFTY)
    stores = [network.store(f"node {number}", rng=random.Random(number)) for number in range(51)]
    leases = await asyncio.gather(
        *(store.acquire(config, host(number + 1), Subnets()) for number, store in enumerate(stores[:50]))
    )
    assert {lease.key for lease in leases} == {f"10.5.{third}.0-24" for third in range(1, 51)}
    found = await network.leases()
    assert {key: json.loads(one.value)["PublicIP"] for key, one in found.items()} == {
        lease.key: str(lease.attributes.public_ip) for lease in leases
    }
    with pytest.raises(NoFreeSubnetError, match="taken"):
        await stores[50].acquire(config, host(51), Subnets())
    assert {key: one.mod_revision for key, one in (await network.leases()).items()} == {
        key: one.mod_revision for key, one in found.items()
    }
    again = await stores[7].acquire(config, host(8), Subnets())
    assert again.key == leases[7].key, "who has one keeps it in a full network"


async def test_the_previous_subnet_is_a_hint(network):
    assert (await network.store("a").acquire(CONFIG, host(2), net(200))).key == "10.5.200.0-24"
    assert (await network.store("b").acquire(CONFIG, host(3), net(200))).key != "10.5.200.0-24"


async def test_another_configuration_moves_the_own_lease(network):
    store = network.store()
    await store.acquire(CONFIG, host(1), net(34))
    old = (await network.leases())["10.5.34.0-24"].lease
    lease = await store.acquire(parse_config('{"Network":"10.6.0.0/16"}'), host(1), net(34))
    assert lease.subnet.subnet_of(IPv4Network("10.6.0.0/16"))
    assert list(await network.leases()) == [lease.key]
    assert await network.other.keyspace.time_to_live(old) == -1


async def test_junk_under_the_key_of_a_lease_is_not_allocated_and_not_touched(network, caplog):
    config = parse_config('{"Network":"10.5.0.0/24","SubnetLen":30,"SubnetMin":"10.5.0.4","SubnetMax":"10.5.0.8"}')
    await network.other.put(network.key("10.5.0.4-30"), "{")
    lease = await network.store("a").acquire(config, host(1), Subnets(IPv4Network("10.5.0.4/30")))
    assert lease.key == "10.5.0.8-30"
    with pytest.raises(NoFreeSubnetError):
        await network.store("b").acquire(config, host(2), Subnets())
    assert (await network.leases())["10.5.0.4-30"].value == b"{"


async def test_an_etcd_lease_that_is_not_needed_is_given_back(network, monkeypatch):
    config = parse_config('{"Network":"10.5.0.0/24","SubnetLen":30,"SubnetMin":"10.5.0.4","SubnetMax":"10.5.0.4"}')
    granted: list[int] = []
    store = network.store()
    grant = store._keyspace.grant

    async def recorded(lease_id: int, seconds: int) -> int:
        granted.append(lease_id)
        if seconds > 1000:  # and not the claim's: somebody is faster from here on
            await network.other.put(network.key("10.5.0.4-30"), host(9).to_json())
        return await grant(lease_id, seconds)

    monkeypatch.setattr(store._keyspace, "grant", recorded)
    with pytest.raises(NoFreeSubnetError):
        await store.acquire(config, host(1), Subnets())
    assert [await network.other.keyspace.time_to_live(one) for one in granted[1:]] == [-1]


async def test_an_answer_that_is_lost_makes_no_second_lease(network, monkeypatch):
    store = network.store()
    swap = store._keyspace.swap

    async def lost(*arguments: object) -> int:
        await swap(*arguments)
        raise StoreAwayError("the answer is lost")

    config = await store.config()
    await store._claims.take("192.0.2.1")
    monkeypatch.setattr(store._keyspace, "swap", lost)
    with pytest.raises(StoreAwayError):
        await store.acquire(config, host(1), Subnets())
    (first,) = (await network.leases()).items()
    monkeypatch.undo()
    lease = await store.acquire(config, host(1), Subnets())
    (second,) = (await network.leases()).items()
    assert first[0] == second[0] == lease.key
    assert second[1].lease == first[1].lease, "the etcd lease of the first attempt is in use"
    assert await network.other.keyspace.time_to_live(second[1].lease) > LEASE_SECONDS - 60


async def test_a_repeated_write_is_recognised(network):
    """As when one endpoint carried it out but did not answer, and the call went to the next."""
    store = network.store()
    await store.acquire(CONFIG, host(1), net(34))
    found = (await network.leases())["10.5.34.0-24"]
    assert await store._keyspace.swap(found.key, 0, found.value, found.lease) == found.mod_revision
    assert (await network.leases())["10.5.34.0-24"] == found


# renewal


async def test_renewal_attaches_the_key_to_a_new_etcd_lease(network):
    store = network.store(now=lambda: 5000.0)
    lease = await store.acquire(CONFIG, host(1), net(34))
    before = (await network.leases())["10.5.34.0-24"]
    renewed = await store.renew(replace(lease, expiration=1.0))
    assert renewed == replace(lease, expiration=5000.0 + LEASE_SECONDS)
    after = (await network.leases())["10.5.34.0-24"]
    assert after.value == before.value
    assert after.lease not in {0, before.lease}
    assert await network.other.keyspace.time_to_live(before.lease) == -1


async def test_an_etcd_lease_with_somebody_elses_key_on_it_stays(network):
    store = network.store()
    lease = await store.acquire(CONFIG, host(1), net(34))
    lease_id = (await network.leases())["10.5.34.0-24"].lease
    await network.other.put(f"{network.prefix}/notes", "mine", lease_id)
    await store.renew(lease)
    await store.release(lease)
    assert (await network.other.get(f"{network.prefix}/notes")).value == b"mine"


async def test_a_stolen_subnet_is_left_to_the_thief(network):
    store = network.store()
    lease = await store.acquire(CONFIG, host(1), net(34))
    await network.other.put(network.key("10.5.34.0-24"), host(7).to_json(), await network.grant())
    before = await network.leases()
    for attempt in (store.renew(lease), store.update(lease, host(1, "udp")), store.renew(lease)):
        with pytest.raises(LeaseLostError) as caught:
            await attempt
        assert network.key("10.5.34.0-24") in str(caught.value)
        assert "192.0.2.7" in str(caught.value)
    await store.release(lease)
    assert await network.leases() == before


async def test_a_lease_that_is_gone_is_not_made_again(network):
    store = network.store()
    lease = await store.acquire(CONFIG, host(1), net(34))
    await network.other.delete(network.key("10.5.34.0-24"))
    for attempt in (store.renew(lease), store.update(lease, host(1, "udp"))):
        with pytest.raises(LeaseLostError, match="gone"):
            await attempt
    await store.release(lease)
    assert await network.leases() == {}


async def test_a_lease_that_was_overwritten_with_junk_is_lost(network):
    store = network.store()
    lease = await store.acquire(CONFIG, host(1), net(34))
    await network.other.put(network.key("10.5.34.0-24"), "{")
    with pytest.raises(LeaseLostError, match="no lease"):
        await store.renew(lease)
    assert (await network.leases())["10.5.34.0-24"].value == b"{"


async def test_a_value_that_somebody_rewrote_is_still_ours_and_is_put_right(network):
    store = network.store()
    lease = await store.acquire(CONFIG, host(1), net(34))
    await network.other.put(network.key("10.5.34.0-24"), host(1, "udp").to_json(), await network.grant())
    renewed = await store.renew(lease)
    assert renewed.attributes == host(1)
    assert (await network.leases())["10.5.34.0-24"].value.decode() == host(1).to_json()
    await store.release(renewed)
    assert await network.leases() == {}


async def test_an_update_whose_answer_is_lost_does_not_lose_the_lease(network, monkeypatch):
    store = network.store()
    lease = await store.acquire(CONFIG, host(1), net(34))
    await store._claims.take("192.0.2.9")
    swap = store._keyspace.swap

    async def lost(*arguments: object) -> int:
        await swap(*arguments)
        raise StoreAwayError("the answer is lost")

    monkeypatch.setattr(store._keyspace, "swap", lost)
    with pytest.raises(StoreAwayError):
        await store.update(lease, host(9))
    monkeypatch.undo()
    renewed = await store.renew(lease)
    assert renewed.attributes == host(1)
    assert (await network.leases())["10.5.34.0-24"].value.decode() == host(1).to_json()
    assert (await store.update(renewed, host(9))).attributes == host(9)


async def test_a_program_that_is_started_again_renews(network):
    lease = await network.store("one").acquire(CONFIG, host(1), net(34))
    before = (await network.leases())["10.5.34.0-24"]
    await network.store("one").renew(lease)
    assert (await network.leases())["10.5.34.0-24"].lease not in {0, before.lease}


async def test_a_lease_ends_with_its_node(network):
    store = network.store(lease_seconds=2)
    async with snapshots(network.store("two")) as following:
        assert await following() == []
        lease = await store.acquire(CONFIG, host(1), net(34))
        assert [one.key for one in await following()] == [lease.key]
        assert await following() == []
    with pytest.raises(LeaseLostError):
        await store.renew(lease)


# update


async def test_update_keeps_the_etcd_lease(network):
    store = network.store()
    lease = await store.acquire(CONFIG, host(1), net(34))
    before = (await network.leases())["10.5.34.0-24"]
    updated = await store.update(lease, host(9))
    assert updated == replace(lease, attributes=host(9))
    after = (await network.leases())["10.5.34.0-24"]
    assert (after.lease, after.value.decode()) == (before.lease, host(9).to_json())


async def test_update_moves_the_claim(network):
    store = network.store()
    lease = await store.acquire(CONFIG, host(1), net(34))
    await store.update(lease, host(9))
    claims = await network.other.below(f"{network.prefix}/pyflannel-dp/claims/")
    assert {key.rpartition("/")[2]: one.value for key, one in claims.items()} == {"192.0.2.9": b"one"}
    assert store.report()["claim"] == {"address": "192.0.2.9", "state": HELD, "holder": None}


# reservations


async def test_a_reservation_never_gets_an_etcd_lease(network):
    """flannel-io/flannel#1329: with etcd v3 flannel makes an ordinary lease of it at the node's next start."""
    revision = await network.other.put(network.key("10.5.34.0-24"), host(1).to_json())
    for _ in range(2):
        store = network.store()
        lease = await store.acquire(CONFIG, host(1), net(9))
        assert lease == Lease(IPv4Network("10.5.34.0/24"), None, host(1), None)
        assert await store.renew(lease) == lease
        assert await snapshot(store) == [lease]
        await store.release(lease)
        await store.close()
    found = await network.leases()
    assert (found["10.5.34.0-24"].lease, found["10.5.34.0-24"].mod_revision) == (0, revision), "nothing was written"


async def test_a_reservation_gets_the_nodes_data_and_nothing_else(network):
    await network.other.put(network.key("10.5.34.0-24"), '{"PublicIP":"192.0.2.1"}')
    store = network.store()
    lease = await store.acquire(CONFIG, host(1), net(9))
    found = (await network.leases())["10.5.34.0-24"]
    assert (found.lease, found.value.decode()) == (0, host(1).to_json())
    await store.renew(lease)
    assert (await network.leases())["10.5.34.0-24"] == found


async def test_a_lease_that_the_operator_made_a_reservation_stays_one(network):
    store = network.store()
    lease = await store.acquire(CONFIG, host(1), net(34))
    await network.other.put(network.key("10.5.34.0-24"), host(1).to_json())
    before = (await network.leases())["10.5.34.0-24"]
    renewed = await store.renew(lease)
    assert renewed == replace(lease, expiration=None)
    await store.release(renewed)
    assert (await network.leases())["10.5.34.0-24"] == before


async def test_no_lease_of_no_seconds_is_ever_asked_for(network):
    with pytest.raises(StoreError, match="no time for a lease"):
        await network.store()._keyspace.grant(new_lease_id(), 0)


# claims


async def test_a_second_node_with_the_same_address_is_refused(network, caplog):
    first = network.store("first", claim_seconds=3)
    lease = await first.acquire(CONFIG, host(1), net(34))
    before = await network.leases()
    second = network.store("second", claim_seconds=3)
    with pytest.raises(StoreError) as caught:
        await second.acquire(CONFIG, host(1), net(35))
    assert not isinstance(caught.value, StoreAwayError)
    for part in ("first", "192.0.2.1", "--public-ip", "--iface"):
        assert part in str(caught.value)
    assert await network.leases() == before
    assert await first.renew(lease)
    assert second.report()["claim"] is None
    (message,) = messages(caplog)
    assert message.startswith("192.0.2.1 is claimed")


async def test_a_claim_of_a_node_that_is_gone_ends(network):
    gone = network.store("gone", claim_seconds=2)
    await gone.acquire(CONFIG, host(1), net(34))
    await gone._client.close()  # as when it is killed: the claim stays behind
    lease = await network.store("new", claim_seconds=2).acquire(CONFIG, host(1), net(35))
    assert lease.key == "10.5.34.0-24"


async def test_a_node_that_is_started_again_finds_its_own_claim(network):
    killed = network.store("one", claim_seconds=60)
    await killed.acquire(CONFIG, host(1), net(34))
    await killed._client.close()
    again = network.store("one", claim_seconds=60)
    await asyncio.wait_for(again.acquire(CONFIG, host(1), Subnets()), 5)
    assert again.report()["claim"]["state"] == HELD


async def test_a_claim_for_ever_is_named(network):
    await network.other.put(f"{network.prefix}/pyflannel-dp/claims/192.0.2.1", "somebody")
    with pytest.raises(StoreError, match="for ever: remove that key"):
        await network.store().acquire(CONFIG, host(1), net(34))


async def test_a_stopped_node_leaves_no_claim(network):
    store = network.store()
    await store.acquire(CONFIG, host(1), net(34))
    await store.close()
    assert await network.other.below(f"{network.prefix}/pyflannel-dp/") == {}
    assert list(await network.leases()) == ["10.5.34.0-24"], "the lease stays"


class Pace:
    """A `sleep` that ends when the test says so."""

    def __init__(self) -> None:
        self.turns = asyncio.Semaphore(0)
        self.asked: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.asked.append(seconds)
        await self.turns.acquire()


async def test_a_claim_is_kept_alive_and_made_again_when_it_is_gone(network, caplog):
    pace = Pace()
    store = network.store("one", claim_seconds=30, sleep=pace.sleep)
    await store.acquire(CONFIG, host(1), net(34))
    key = f"{network.prefix}/pyflannel-dp/claims/192.0.2.1"
    first = await network.other.get(key)
    await etcd_server.until("the keeper to wait", lambda: len(pace.asked) == 1)
    pace.turns.release()
    await etcd_server.until("one round", lambda: len(pace.asked) == 2)
    assert await network.other.get(key) == first
    await network.other.keyspace.revoke(first.lease)  # as after an outage
    assert await network.other.get(key) is None
    pace.turns.release()
    await etcd_server.until("another round", lambda: len(pace.asked) == 3)
    again = await network.other.get(key)
    assert (again.value, again.lease == first.lease) == (b"one", False)
    assert set(pace.asked) == {10.0}
    assert messages(caplog) == []


async def test_a_claim_that_somebody_else_has_made_meanwhile_is_told(network, caplog):
    pace = Pace()
    store = network.store("one", claim_seconds=30, sleep=pace.sleep)
    await store.acquire(CONFIG, host(1), net(34))
    key = f"{network.prefix}/pyflannel-dp/claims/192.0.2.1"
    await network.other.keyspace.revoke((await network.other.get(key)).lease)
    theirs = await network.grant(30)
    await network.other.put(key, "two", theirs)
    for rounds in (2, 3):
        pace.turns.release()
        await etcd_server.until("a round", lambda rounds=rounds: len(pace.asked) == rounds)
    claim = store.report()["claim"]
    assert (claim["state"], "two" in claim["holder"]) == (LOST, True)
    (message,) = messages(caplog, logging.ERROR)
    assert "192.0.2.1" in message
    assert "two" in message
    await network.other.keyspace.revoke(theirs)
    pace.turns.release()
    await etcd_server.until("one more", lambda: len(pace.asked) == 4)
    assert store.report()["claim"]["state"] == HELD
    assert (await network.other.get(key)).value == b"one"


async def test_flannel_sees_no_claims(network):
    await network.store().acquire(CONFIG, host(1), net(34))
    below = await network.other.below(f"{network.prefix}/")
    assert sorted(key.removeprefix(network.prefix) for key in below) == [
        "/config",
        "/pyflannel-dp/claims/192.0.2.1",
        "/subnets/10.5.34.0-24",
    ]


# watch


async def test_nothing_is_lost_between_the_list_and_the_watch(network):
    store = network.store()
    async with snapshots(store) as following:
        assert await following() == []
        written = [network.key(f"10.5.{number}.0-24") for number in range(100)]
        for number, key in enumerate(written):
            await network.other.put(key, host(number).to_json())
        found: list[Lease] = []
        while len(found) < 100:
            found = await following()
    assert [f"{network.prefix}/subnets/{lease.key}" for lease in found] == sorted(written)


async def test_a_change_during_the_list_is_not_lost(network, monkeypatch):
    """A put after the first page was read, and before the watch begins, must be seen."""
    import routing.stores.etcd.keyspace as keyspace_module

    monkeypatch.setattr(keyspace_module, "PAGE", 2)
    for number in (1, 3, 5, 7):
        await network.other.put(network.key(f"10.5.{number}.0-24"), host(number).to_json())
    store = network.store()
    call, calls = store._client.call, []

    async def interrupted(method, request):
        answer = await call(method, request)
        calls.append(method.name)
        if calls == ["Range"]:
            await network.other.put(network.key("10.5.2.0-24"), host(2).to_json())
            await network.other.delete(network.key("10.5.7.0-24"))
        return answer

    monkeypatch.setattr(store._client, "call", interrupted)
    async with snapshots(store) as following:
        first = [lease.key for lease in await following()]
        assert first == ["10.5.1.0-24", "10.5.3.0-24", "10.5.5.0-24", "10.5.7.0-24"], "one revision for all pages"
        last = first
        while last != ["10.5.1.0-24", "10.5.2.0-24", "10.5.3.0-24", "10.5.5.0-24"]:
            last = [lease.key for lease in await following()]
    assert calls == ["Range", "Range"]


async def test_pages_are_read_again_when_their_revision_is_compacted_away(network, monkeypatch):
    import routing.stores.etcd.keyspace as keyspace_module

    monkeypatch.setattr(keyspace_module, "PAGE", 2)
    for number in (1, 3, 5):
        await network.other.put(network.key(f"10.5.{number}.0-24"), host(number).to_json())
    store = network.store()
    call, calls = store._client.call, []

    async def interrupted(method, request):
        calls.append(method.name)
        if len(calls) == 2:
            await network.other.put(network.key("10.5.2.0-24"), host(2).to_json())
            await network.other.compact()
        return await call(method, request)

    monkeypatch.setattr(store._client, "call", interrupted)
    assert [lease.key for lease in await snapshot(store)] == [f"10.5.{number}.0-24" for number in (1, 2, 3, 5)]
    assert len(calls) == 4


async def test_a_changed_address_or_mac_is_a_change_and_a_renewal_is_none(network):
    peer = network.store("peer")
    lease = await peer.acquire(CONFIG, host(1), net(34))
    async with snapshots(network.store()) as following:
        assert [one.attributes for one in await following()] == [host(1)]
        await peer.renew(lease)
        moved = replace(host(1), backend_data=VtepData(b"\2\0\0\0\0\x63", 1))
        lease = await peer.update(lease, moved)
        assert [one.attributes for one in await following()] == [moved], "and not a snapshot for the renewal"
        await peer.update(lease, host(9))
        assert [one.attributes for one in await following()] == [host(9)]


async def test_snapshots_are_coalesced_while_nobody_looks(network):
    store = network.store()
    async with snapshots(store) as following:
        assert await following() == []
        for number in range(1, 51):
            revision = await network.other.put(network.key("10.5.34.0-24"), host(number).to_json())
        await etcd_server.until("the last change", lambda: store.report()["revision"] >= revision)
        (lease,) = await following()
        assert lease.attributes == host(50)


JUNK = {
    "10.5.7.0-24": b'{"PublicIP":"192.0.2.7","Backe',
    "10.5.8.0-24": b"",
    "10.5.9.0-24": bytes(range(256)),
    "10.5.10.0-24": b'{"PublicIP":null}',
    "10.5.11.0-24": b"[" * 200_000,
    "10.5.12.1-24": host(7).to_json().encode(),
    "10.5.13.0-24/more": host(7).to_json().encode(),
    "README": b"hello",
    "": host(7).to_json().encode(),
}


async def test_junk_is_skipped_counted_and_told_once(network, caplog):
    await network.other.put(network.key("10.5.34.0-24"), host(1).to_json())
    for name, content in list(JUNK.items())[:4]:
        await network.other.put(network.key(name), content)
    store = network.store()
    async with snapshots(store) as following:
        (good,) = await following()
        assert store.report()["skipped"] == 4
        for name, content in list(JUNK.items())[4:]:
            await network.other.put(network.key(name), content)
        await network.other.put(network.key("10.5.35.0-24"), host(2).to_json())
        assert [lease.attributes for lease in await following()] == [good.attributes, host(2)]
        assert store.report()["skipped"] == len(JUNK)
        await network.other.put(network.key("10.5.7.0-24"), host(7).to_json())
        assert [lease.attributes for lease in await following()] == [good.attributes, host(2), host(7)]
        assert store.report()["skipped"] == len(JUNK) - 1
        await network.other.delete(network.key("10.5.8.0-24"))
        await network.other.delete(network.key("10.5.35.0-24"))
        assert [lease.attributes for lease in await following()] == [good.attributes, host(7)]
        assert store.report()["skipped"] == len(JUNK) - 2
    told = messages(caplog)
    assert len(told) == len(JUNK)
    assert all(message.startswith(f"skipped {network.key('')}") for message in told)


async def test_a_lease_that_becomes_junk_is_gone_and_may_come_back(network):
    async with snapshots(network.store()) as following:
        await following()
        await network.other.put(network.key("10.5.34.0-24"), host(1).to_json())
        assert len(await following()) == 1
        await network.other.put(network.key("10.5.34.0-24"), "{")
        assert await following() == []
        await network.other.put(network.key("10.5.34.0-24"), host(1).to_json())
        assert len(await following()) == 1


async def test_other_prefixes_do_not_concern_us(network):
    async with snapshots(network.store()) as following:
        assert await following() == []
        for key in (f"{network.prefix}/subnets", f"{network.prefix}/subnets0/10.5.7.0-24", f"{network.prefix}/config"):
            await network.other.put(key, host(7).to_json())
        await network.other.put(network.key("10.5.34.0-24"), host(1).to_json())
        assert [lease.attributes for lease in await following()] == [host(1)]


async def test_closing_a_watch_ends_its_task_and_its_stream(network):
    store = network.store()
    before = asyncio.all_tasks()
    watch = store.watch()
    await anext(watch)
    await watch.aclose()
    await etcd_server.until("the end of the tasks", lambda: asyncio.all_tasks() <= before)


async def test_a_watch_that_is_cancelled_while_it_waits_leaves_nothing(network):
    store = network.store()
    before = asyncio.all_tasks()
    watch = store.watch()
    await anext(watch)
    waiting = asyncio.create_task(anext(watch))
    await asyncio.sleep(0)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    await watch.aclose()
    await etcd_server.until("the end of the tasks", lambda: asyncio.all_tasks() <= before)


# the operator


async def test_a_reservation_of_a_running_nodes_lease_takes_the_end_off_its_key(network):
    node = network.store("node")
    lease = await node.acquire(CONFIG, host(1), net(34))
    old = (await network.leases())["10.5.34.0-24"]
    await network.store("operator").reserve(net(34), None)
    found = (await network.leases())["10.5.34.0-24"]
    assert (found.lease, found.value) == (0, old.value)
    assert await network.other.keyspace.time_to_live(old.lease) == -1
    assert (await node.renew(lease)).expiration is None


async def test_what_holds_no_lease_is_not_removed(network):
    await network.other.put(network.key("10.5.34.0-24"), "{")
    with pytest.raises(StoreError, match="etcdctl del"):
        await network.store().remove(net(34))
    assert (await network.leases())["10.5.34.0-24"].value == b"{"


async def test_leases_are_listed_with_the_time_that_etcd_says(network):
    await network.other.put(network.key("10.5.1.0-24"), host(1).to_json(), await network.grant(100))
    await network.other.put(network.key("10.5.2.0-24"), host(2).to_json(), await network.grant(50_000))
    await network.other.put(network.key("10.5.3.0-24"), host(3).to_json())
    await network.other.put(network.key("10.5.4.0-24"), "{")
    leases = await network.store(now=lambda: 1000.0).list_leases()
    assert [lease.attributes.public_ip for lease in leases] == [host(number).public_ip for number in (1, 2, 3)]
    ends = [lease.expiration for lease in leases]
    assert 1090 < ends[0] <= 1100
    assert 50_990 < ends[1] <= 51_000
    assert ends[2] is None


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_under_both_event_loops(etcd, loop):
    import uvloop

    async def main() -> None:
        store = EtcdStore(etcd.endpoints, f"/{uuid.uuid4()}", identity="one")
        try:
            await store.write_config(CONFIG_TEXT)
            lease = await store.acquire(await store.config(), host(1), net(34))
            async with snapshots(store) as following:
                assert [one.key for one in await following()] == [lease.key]
                await store.release(lease)
                assert await following() == []
        finally:
            await store.close()

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop if loop == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())
