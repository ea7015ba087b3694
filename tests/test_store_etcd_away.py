"""The store while etcd is away: what is known stays, `report` says since when, and all is well once it is back."""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from ipaddress import IPv4Address, IPv4Network

import etcd_server
import pytest
from etcd_server import until
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from routing.allocator import Subnets
from routing.config import parse_config
from routing.lease import Lease, LeaseAttributes
from routing.stores import LeaseLostError, StoreAwayError, StoreError
from routing.stores.etcd import EtcdStore
from routing.stores.etcd.claims import HELD
from routing.stores.etcd.following import FIRST_DELAY, LONGEST_DELAY, Delays, Follower
from routing.stores.etcd.keyspace import new_lease_id

CONFIG_TEXT = '{"Network":"10.5.0.0/16","Backend":{"Type":"udp"}}'
CONFIG = parse_config(CONFIG_TEXT)
PREFIX = "/coreos.com/network"


def host(number: int) -> LeaseAttributes:
    return LeaseAttributes(IPv4Address(f"192.0.2.{number}"), None, "udp")


def net(number: int) -> Subnets:
    return Subnets(IPv4Network(f"10.5.{number}.0/24"))


def key(number: int) -> str:
    return f"{PREFIX}/subnets/10.5.{number}.0-24"


class Following:
    """A store's `watch`, consumed all the time. `keys` are those of the last snapshot."""

    def __init__(self, store: EtcdStore) -> None:
        self.store = store
        self.snapshots: list[Sequence[Lease]] = []
        self._watch = store.watch()
        self._task: asyncio.Task[None] | None = None

    @property
    def keys(self) -> list[str]:
        return [lease.key for lease in self.snapshots[-1]]

    @property
    def numbers(self) -> list[int]:
        """The third bytes of the subnets."""
        return sorted(int(key.split(".")[2]) for key in self.keys)

    @property
    def away_since(self) -> float | None:
        return self.store.report()["away_since"]

    async def start(self) -> None:
        self.snapshots.append(await anext(self._watch))
        self._task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        async for leases in self._watch:
            self.snapshots.append(leases)

    async def close(self) -> None:
        if self._task is not None:
            assert not self._task.done(), "a watch never ends by itself"
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._watch.aclose()
        await self.store.close()


@contextlib.asynccontextmanager
async def following(etcd: etcd_server.Etcd | etcd_server.Proxy, **details: object) -> AsyncIterator[Following]:
    following = Following(EtcdStore(etcd.endpoints, PREFIX, **{"identity": "watcher", **details}))
    try:
        await following.start()
        yield following
    finally:
        await following.close()


BOTH = pytest.mark.parametrize("etcd", etcd_server.PROGRAMS, indirect=True)


@pytest.fixture
def etcd(request, tmp_path) -> Iterator[etcd_server.Etcd]:
    with etcd_server.running(tmp_path / "etcd", getattr(request, "param", etcd_server.DEBIAN)) as etcd:
        yield etcd


@pytest.fixture
async def proxy(etcd) -> AsyncIterator[etcd_server.Proxy]:
    async with etcd_server.proxy_to(etcd) as proxy:
        yield proxy


@pytest.fixture
def cluster(tmp_path) -> Iterator[etcd_server.Etcd]:
    with etcd_server.running(tmp_path / "etcd", members=3) as etcd:
        yield etcd


@pytest.fixture
async def other(etcd) -> AsyncIterator[etcd_server.Other]:
    async with etcd_server.other_client(etcd) as other:
        await other.put(f"{PREFIX}/config", CONFIG_TEXT)
        yield other


def lines(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.endswith("following")]


# one server


@BOTH
async def test_a_restart(etcd, other, caplog):
    caplog.set_level(logging.INFO)
    store = EtcdStore(etcd.endpoints, PREFIX, identity="one")
    lease = await store.acquire(CONFIG, host(1), net(1))
    async with following(etcd, now=lambda: 1234.5) as watcher:
        assert watcher.numbers == [1]
        etcd.kill()
        await until("the outage to be noticed", lambda: watcher.away_since == 1234.5)
        assert str(etcd.endpoints[0]) in watcher.store.report()["trouble"]
        with pytest.raises(StoreAwayError):
            await store.renew(lease)
        await asyncio.to_thread(etcd.start)
        await until("the end of the outage", lambda: watcher.away_since is None)
        report = watcher.store.report()
        assert (report["trouble"], report["relists"]) == (None, 1)
        assert len(watcher.snapshots) == 1, "nothing changed, so nothing is told"
        assert (await store.renew(lease)).key == lease.key
        await other.put(key(2), host(2).to_json())
        await until("what happens then", lambda: watcher.numbers == [1, 2])
    assert len(lines(caplog)) == 2, lines(caplog)
    assert "going on with the 1 leases known" in lines(caplog)[0]
    assert "answers again" in lines(caplog)[1]
    await store.close()


async def test_what_happened_during_an_outage_is_told_at_once(proxy, other):
    async with following(proxy) as watcher:
        await other.put(key(1), host(1).to_json())
        await other.put(key(2), host(2).to_json())
        await until("both", lambda: watcher.numbers == [1, 2])
        proxy.is_open = False
        proxy.cut()
        await until("the outage to be noticed", lambda: watcher.away_since is not None)
        await other.delete(key(1))
        await other.put(key(2), host(7).to_json())
        await other.put(key(3), host(3).to_json())
        count = len(watcher.snapshots)
        proxy.is_open = True
        await until("the difference", lambda: watcher.numbers == [2, 3])
        assert len(watcher.snapshots) == count + 1
        assert watcher.snapshots[-1][0].attributes == host(7)


async def test_a_frozen_server_is_noticed_by_pings(etcd, other):
    """SIGSTOP keeps the connection open: only the pings on the idle watch tell."""
    async with following(etcd) as watcher:
        await other.put(key(1), host(1).to_json())
        await until("the watch", lambda: watcher.numbers == [1])
        begun = time.monotonic()
        etcd.freeze()
        try:
            await until("the silence to be noticed", lambda: watcher.away_since is not None, 15)
        finally:
            etcd.thaw()
        assert 2.5 < time.monotonic() - begun < 12, "not by a call that had no answer"
        await until("the end of the outage", lambda: watcher.away_since is None)
        await etcd_server.again(lambda: other.put(key(2), host(2).to_json()))
        await until("what happens then", lambda: watcher.numbers == [1, 2])


async def test_calls_to_a_frozen_server_end_in_seconds(etcd, other):
    store = EtcdStore(etcd.endpoints, PREFIX, identity="one")
    lease = await store.acquire(CONFIG, host(1), net(1))
    etcd.freeze()
    try:
        begun = time.monotonic()
        with pytest.raises(StoreAwayError, match=r"no answer within 2\.0 s"):
            await store.renew(lease)
        assert time.monotonic() - begun < 3.5
        begun = time.monotonic()
        await store.close()
        assert time.monotonic() - begun < 5
    finally:
        etcd.thaw()


@BOTH
async def test_a_compaction_while_the_watch_is_down(etcd, other, caplog):
    """flannel-io/flannel#2470: a watch from a revision that is compacted away must not be tried for ever."""
    pause = asyncio.Event()
    asked: list[float] = []

    async def sleep(seconds: float) -> None:
        asked.append(seconds)
        await pause.wait()

    async with following(etcd, sleep=sleep) as watcher:
        await other.put(key(1), host(1).to_json())
        await until("the first", lambda: watcher.numbers == [1])
        etcd.restart()
        await until("the pause", lambda: asked)
        for number in range(2, 102):
            await etcd_server.again(lambda number=number: other.put(key(number), host(number).to_json()))
        await other.delete(key(1))
        await other.compact()
        pause.set()
        await until("all of it", lambda: watcher.numbers == list(range(2, 102)))
        assert len(watcher.snapshots) <= 4
        await other.put(key(1), host(1).to_json())
        await until("what happens then", lambda: watcher.numbers == list(range(1, 102)))
        assert watcher.store.report()["relists"] == 1


@BOTH
async def test_a_watch_that_begins_before_a_compaction(etcd, other, monkeypatch):
    """Between the list and the watch: etcd accepts the watch, and ends it with the revision that it still has."""
    store = EtcdStore(etcd.endpoints, PREFIX, identity="one")
    for number in (1, 2):
        await other.put(key(number), host(number).to_json())
    list_leases = Follower.list

    async def list_and_lag(follower: Follower) -> None:
        await list_leases(follower)
        monkeypatch.undo()
        await other.put(key(3), host(3).to_json())
        await other.compact()

    monkeypatch.setattr(Follower, "list", list_and_lag)
    watch = store.watch()
    assert len(await anext(watch)) == 2
    assert len(await asyncio.wait_for(anext(watch), 20)) == 3
    await until("the watch", lambda: store.report()["away_since"] is None)
    assert store.report()["relists"] == 1
    await watch.aclose()
    await store.close()


@BOTH
async def test_data_that_is_wiped_under_live_nodes(etcd, other):
    """The revisions begin at 1 again; a watch from the old one would be silent until they have caught up."""
    first, second = (EtcdStore(etcd.endpoints, PREFIX, identity=str(number)) for number in (1, 2))
    leases = [await store.acquire(CONFIG, host(n), net(n)) for n, store in ((1, first), (2, second))]
    async with following(etcd) as watcher:
        assert watcher.numbers == [1, 2]
        etcd.kill()
        etcd.wipe()
        await asyncio.to_thread(etcd.start)
        await until("the empty etcd", lambda: watcher.numbers == [])
        with pytest.raises(LeaseLostError):
            await etcd_server.again(lambda: first.renew(leases[0]))
        await first.write_config(CONFIG_TEXT)
        for number, store, lease in ((1, first, leases[0]), (2, second, leases[1])):
            config = await etcd_server.again(store.config)
            again_theirs = await store.acquire(config, host(number), Subnets(lease.subnet))
            assert again_theirs.key == lease.key, "the previous subnet, which is free"
        await until("both again", lambda: watcher.numbers == [1, 2])
        assert {str(lease.attributes.public_ip) for lease in watcher.snapshots[-1]} == {"192.0.2.1", "192.0.2.2"}
    await first.close()
    await second.close()


async def test_the_claim_outlives_an_outage(etcd, other):
    store = EtcdStore(etcd.endpoints, PREFIX, identity="one", claim_seconds=2)
    await store.acquire(CONFIG, host(1), net(1))
    etcd.kill()
    etcd.wipe()
    await asyncio.to_thread(etcd.start)

    async def claimed() -> bytes | None:
        found = await etcd_server.again(lambda: other.get(f"{PREFIX}/pyflannel-dp/claims/192.0.2.1"))
        return found.value if found is not None else None

    end = time.monotonic() + etcd_server.DEADLINE
    while await claimed() is None:
        assert time.monotonic() < end
        await asyncio.sleep(0.02)
    assert await claimed() == b"one"
    assert store.report()["claim"]["state"] == HELD
    await store.close()


async def test_a_node_that_sleeps_past_the_end_of_its_lease(etcd, other):
    """As when it is stopped with SIGSTOP: its etcd lease ends, somebody else takes the subnet, and it wakes up."""
    config = parse_config('{"Network":"10.5.0.0/16","SubnetMin":"10.5.1.0","SubnetMax":"10.5.1.0"}')
    sleeper = EtcdStore(etcd.endpoints, PREFIX, identity="sleeper", lease_seconds=2)
    lease = await sleeper.acquire(config, host(1), Subnets())
    await until_gone(other, key(1))
    taker = EtcdStore(etcd.endpoints, PREFIX, identity="taker")
    assert (await taker.acquire(config, host(2), Subnets())).key == lease.key
    before = await other.get(key(1))
    with pytest.raises(LeaseLostError, match=r"belongs to 192\.0\.2\.2"):
        await sleeper.renew(lease)
    await sleeper.release(lease)
    assert await other.get(key(1)) == before
    await sleeper.close()
    await taker.close()


async def until_gone(other: etcd_server.Other, name: str) -> None:
    end = time.monotonic() + etcd_server.DEADLINE
    while await other.get(name) is not None:
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


async def test_the_first_look_raises_and_later_trouble_does_not(etcd, other):
    etcd.kill()
    store = EtcdStore(etcd.endpoints, PREFIX, identity="one")
    with pytest.raises(StoreAwayError):
        await anext(store.watch())
    await store.close()


# how often it is tried


def test_delays_grow_to_a_limit_and_are_spread():
    delays = Delays(random.Random(1))
    drawn = [delays.next() for _ in range(12)]
    for attempt, delay in enumerate(drawn):
        whole = min(FIRST_DELAY * 2**attempt, LONGEST_DELAY)
        assert whole / 2 <= delay <= whole
    assert LONGEST_DELAY == 5.0
    assert len(set(drawn)) == len(drawn)
    delays.reset()
    assert delays.next() <= FIRST_DELAY


async def test_an_outage_is_no_busy_loop(etcd, other):
    """Each round asks for the leases once, and waits as long as `Delays` says."""
    asked: list[float] = []
    go_on = asyncio.Semaphore(0)

    async def sleep(seconds: float) -> None:
        asked.append(seconds)
        await go_on.acquire()

    async with following(etcd, sleep=sleep) as watcher:
        calls = 0
        call = watcher.store._client.call

        async def counted(method, request):
            nonlocal calls
            calls += 1
            return await call(method, request)

        watcher.store._client.call = counted
        etcd.kill()
        for rounds in range(1, 12):
            await until("a pause", lambda rounds=rounds: len(asked) == rounds)
            go_on.release()
        await until("the last pause", lambda: len(asked) == 12)
        assert calls == 11
        assert sum(asked[-4:]) >= 4 * LONGEST_DELAY / 2
        watcher.store._client.call = call


async def test_a_watch_that_is_refused_again_and_again_is_no_busy_loop(proxy, other, monkeypatch):
    asked: list[float] = []

    async def sleep(seconds: float) -> None:
        asked.append(seconds)
        await asyncio.sleep(0)

    async with following(proxy, sleep=sleep) as watcher:

        def refuse(response: object) -> None:
            raise StoreError("refused")

        monkeypatch.setattr(watcher.store._follower, "_require_watch", refuse)
        await other.put(key(1), host(1).to_json())
        await until("twenty rounds", lambda: len(asked) >= 20)
        assert min(asked[8:20]) >= LONGEST_DELAY / 2, "a list that succeeds does not shorten the waiting"
        assert watcher.away_since is not None
        assert watcher.store.report()["trouble"] == "refused"


# three members


async def test_one_of_three_members_is_killed_then_two(cluster):
    async with etcd_server.other_client(cluster) as other, following(cluster) as watcher:
        await etcd_server.again(lambda: other.put(f"{PREFIX}/config", CONFIG_TEXT))
        store = EtcdStore(cluster.endpoints, PREFIX, identity="one")
        lease = await etcd_server.again(lambda: store.acquire(CONFIG, host(1), net(1)))
        await until("the lease", lambda: watcher.numbers == [1])
        in_use = cluster.endpoints.index(watcher.store._client.endpoint)
        cluster.kill(in_use)  # the one that the watch is at
        await etcd_server.again(lambda: other.put(key(2), host(2).to_json()))
        await until("the change on another member", lambda: watcher.numbers == [1, 2])
        await until("the watch to be back", lambda: watcher.away_since is None)
        assert (await etcd_server.again(lambda: store.renew(lease))).key == lease.key
        second = cluster.endpoints.index(watcher.store._client.endpoint)
        cluster.kill(next(number for number in range(3) if number not in {in_use, second}))
        # The member of the watch lives and is alone: it has no leader, and ends the watch.
        await until("the loss of the leader", lambda: watcher.away_since is not None)
        assert watcher.numbers == [1, 2]
        with pytest.raises(StoreAwayError) as caught:
            await store.renew(lease)
        assert "no leader" in str(caught.value) or "no answer" in str(caught.value)
        await asyncio.to_thread(cluster.start, *(number for number in range(3) if number != second))
        await until("the end of the outage", lambda: watcher.away_since is None)
        assert watcher.numbers == [1, 2]
        assert (await etcd_server.again(lambda: store.renew(lease))).key == lease.key
        await etcd_server.again(lambda: other.put(key(3), host(3).to_json()))
        await until("what happens then", lambda: watcher.numbers == [1, 2, 3])
        await store.close()


# whatever happens, in whatever order


_NUMBERS = st.integers(1, 6)
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), _NUMBERS, st.integers(1, 3)),
        st.tuples(st.just("reserve"), _NUMBERS, st.integers(1, 3)),
        st.tuples(st.just("delete"), _NUMBERS),
        st.tuples(st.just("junk value"), _NUMBERS),
        st.tuples(st.just("junk key"), _NUMBERS),
        st.tuples(st.just("clear junk")),
        st.tuples(st.just("compact")),
        st.tuples(st.just("cut")),
        st.tuples(st.just("settle")),
    ),
    max_size=25,
)


class Story:
    """What happens in etcd, and the model of what a watch must end up with."""

    def __init__(self, other: etcd_server.Other, proxy: etcd_server.Proxy, watcher: Following, lease_id: int) -> None:
        self.other, self.proxy, self.watcher, self.lease_id = other, proxy, watcher, lease_id
        self.model: dict[int, tuple[int, bool]] = {}
        self.junk: set[str] = set()

    async def tell(self, step: tuple) -> None:
        await getattr(self, step[0].replace(" ", "_"))(*step[1:])

    async def put(self, number: int, address: int) -> None:
        await self._write(number, address, self.lease_id)

    async def reserve(self, number: int, address: int) -> None:
        await self._write(number, address, 0)

    async def _write(self, number: int, address: int, lease_id: int) -> None:
        await self.other.put(key(number), host(address).to_json(), lease_id)
        self.model[number] = (address, lease_id == 0)
        self.junk.discard(key(number))

    async def delete(self, number: int) -> None:
        await self.other.delete(key(number))
        self.model.pop(number, None)
        self.junk.discard(key(number))

    async def junk_value(self, number: int) -> None:
        await self.other.put(key(number), "{")
        self.model.pop(number, None)
        self.junk.add(key(number))

    async def junk_key(self, number: int) -> None:
        await self.other.put(f"{PREFIX}/subnets/junk{number}", host(1).to_json())
        self.junk.add(f"{PREFIX}/subnets/junk{number}")

    async def clear_junk(self) -> None:
        for name in self.junk:
            await self.other.delete(name)
        self.junk.clear()

    async def compact(self) -> None:
        await self.other.compact()

    async def cut(self) -> None:
        self.proxy.cut()

    async def settle(self) -> None:
        """The watch has caught up: it shows the model."""
        expected = [
            Lease(IPv4Network(f"10.5.{number}.0/24"), None, host(address), None if is_reserved else float("inf"))
            for number, (address, is_reserved) in sorted(self.model.items())
        ]
        await until("the model", lambda: self.watcher.snapshots[-1] == expected)
        await until("the junk", lambda: self.watcher.store.report()["skipped"] == len(self.junk))


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Iterator[etcd_server.Etcd]:
    with etcd_server.running(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd


@settings(max_examples=30, phases=[Phase.explicit, Phase.generate])  # each step takes real time: shrinking takes minutes
@given(_STEPS)
def test_the_snapshot_always_becomes_what_is_in_etcd(shared, steps):
    async def run() -> None:
        async with etcd_server.other_client(shared) as other, etcd_server.proxy_to(shared) as proxy:
            await other.delete(f"{PREFIX}/subnets/", prefix=True)
            lease_id = new_lease_id()
            await other.keyspace.grant(lease_id, 3600)
            async with following(proxy, sleep=lambda seconds: asyncio.sleep(seconds / 20)) as watcher:
                story = Story(other, proxy, watcher, lease_id)
                for step in (*steps, ("settle",)):
                    await story.tell(step)
            await other.keyspace.revoke(lease_id)

    asyncio.run(run())
