"""The embedded store: many processes, the end of leases, reservations, and what others leave in its folder."""

import asyncio
import contextlib
import errno
import logging
import os
import random
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from pathlib import Path

import pytest

from routing.allocator import NoFreeSubnetError, Subnets
from routing.config import ConfigError, NetworkConfig, parse_config
from routing.lease import Lease, LeaseAttributes, VtepData, derive_vtep_mac, parse_key
from routing.stores import LeaseLostError, StoreError
from routing.stores.local import LEASE_SECONDS, POLL_SECONDS, LocalStore

CONFIG_TEXT = '{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}'
CONFIG = parse_config(CONFIG_TEXT)
EIGHT = '{"Network":"10.5.0.0/20","SubnetLen":23,"SubnetMin":"10.5.0.0","Backend":{"Type":"vxlan"}}'
"""A network of exactly eight subnets."""


class Clock:
    """Seconds since the epoch, moved by hand."""

    def __init__(self, seconds: float = 1000.0) -> None:
        self.seconds = seconds

    def __call__(self) -> float:
        return self.seconds


class Polls:
    """The sleep between two looks, which ends when the test says so."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self._asleep = asyncio.Event()
        self._wake = asyncio.Semaphore(0)

    async def sleep(self, seconds: float) -> None:
        self.asked.append(seconds)
        self._asleep.set()
        await self._wake.acquire()

    async def _look_ends(self, coming: asyncio.Task) -> None:
        asleep = asyncio.create_task(self._asleep.wait())
        await asyncio.wait({coming, asleep}, return_when=asyncio.FIRST_COMPLETED)
        asleep.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asleep

    async def look(self, coming: asyncio.Task) -> bool:
        """One more look; whether it gave `coming` a snapshot."""
        await self._look_ends(coming)
        assert not coming.done()
        self._asleep.clear()
        self._wake.release()
        await self._look_ends(coming)
        return coming.done()


class Watch:
    """A store's `watch` and the polls behind it. `snapshot` is the last one."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.polls = Polls()
        self.store = LocalStore(folder, now=clock, sleep=self.polls.sleep)
        self._watch = self.store.watch()
        self._coming: asyncio.Task | None = None
        self.snapshot: Sequence[Lease] = ()

    async def start(self) -> None:
        self.snapshot = await anext(self._watch)

    async def look(self) -> bool:
        """Whether the next look finds a change."""
        if self._coming is None:
            self._coming = asyncio.create_task(anext(self._watch))
        if not await self.polls.look(self._coming):
            return False
        coming, self._coming = self._coming, None
        self.snapshot = await coming
        return True

    async def close(self) -> None:
        if self._coming is not None:
            self._coming.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._coming
        await self._watch.aclose()


def host(number: int, backend: str = "vxlan") -> LeaseAttributes:
    address = IPv4Address(f"192.0.2.{number}")
    return LeaseAttributes(address, None, backend, VtepData(derive_vtep_mac(address), 1))


def net(number: int) -> Subnets:
    return Subnets(IPv4Network(f"10.5.{number}.0/24"))


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(folder, clock) -> LocalStore:
    return LocalStore(folder, lease_seconds=100.0, now=clock, rng=random.Random(1))


@pytest.fixture
async def watch(folder, clock) -> AsyncIterator[Watch]:
    one = Watch(folder, clock)
    await one.start()
    yield one
    await one.close()


def reserve(folder: Path, key: str, attributes: LeaseAttributes) -> Path:
    """What an operator does by hand."""
    (folder / "subnets").mkdir(parents=True, exist_ok=True)
    path = folder / "subnets" / key
    path.write_text(attributes.to_json())
    return path


async def snapshot(store: LocalStore) -> Sequence[Lease]:
    watch = store.watch()
    try:
        return await anext(watch)
    finally:
        await watch.aclose()


def tree(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


# files


async def test_what_is_in_the_folder(store, folder):
    await store.create_config(CONFIG_TEXT)
    lease = await store.acquire(CONFIG, host(2), net(34))
    assert lease == Lease(IPv4Network("10.5.34.0/24"), None, host(2), 1100.0)
    assert tree(folder) == {
        "config": CONFIG_TEXT,
        "lock": "",
        "subnets/10.5.34.0-24": '{"PublicIP":"192.0.2.2","PublicIPv6":null,"BackendType":"vxlan",'
        '"BackendData":{"VNI":1,"VtepMAC":"02:fd:c0:00:02:02"}}',
        "expiry/10.5.34.0-24": "1100.0",
    }
    assert stat.S_IMODE((folder / "subnets/10.5.34.0-24").stat().st_mode) == 0o644
    await store.release(lease)
    assert tree(folder) == {"config": CONFIG_TEXT, "lock": ""}


@pytest.mark.parametrize(
    ("config", "attributes", "previous", "key"),
    [
        (
            '{"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fc00::/48"}',
            LeaseAttributes(IPv4Address("192.0.2.2"), IPv6Address("fd00::2"), "udp"),
            Subnets(IPv4Network("10.5.34.0/24"), IPv6Network("fc00:0:0:1::/64")),
            "10.5.34.0-24&fc00:0:0:1::-64",
        ),
        (
            '{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fc00::/48"}',
            LeaseAttributes(None, IPv6Address("fd00::2"), "udp"),
            Subnets(None, IPv6Network("fc00:0:0:1::/64")),
            "0.0.0.0-0&fc00:0:0:1::-64",
        ),
    ],
)
async def test_keys_of_other_families(store, folder, config, attributes, previous, key):
    lease = await store.acquire(parse_config(config), attributes, previous)
    assert [path.name for path in (folder / "subnets").iterdir()] == [key]
    assert await snapshot(store) == [lease]
    assert lease == Lease(*parse_key(key), attributes, 1100.0)


def test_lease_time_and_poll_are_flannels_and_documented():
    assert (LEASE_SECONDS, POLL_SECONDS) == (86400.0, 0.5)


async def test_the_default_clock_is_the_epoch(folder):
    before = time.time()
    lease = await LocalStore(folder).acquire(CONFIG, host(2), Subnets())
    assert before + 86400 <= lease.expiration <= time.time() + 86400


# configuration


async def test_create_config_does_not_overwrite(store, folder):
    await store.create_config(CONFIG_TEXT)
    await store.create_config(EIGHT)
    assert (folder / "config").read_text() == CONFIG_TEXT
    assert await store.config() == CONFIG


async def test_create_config_checks_first(store, folder):
    with pytest.raises(ConfigError, match="not JSON"):
        await store.create_config("{")
    with pytest.raises(ConfigError, match="Network"):
        await store.create_config("{}")
    assert not folder.exists()


async def test_no_configuration_says_what_to_do(store, folder):
    with pytest.raises(StoreError) as caught:
        await store.config()
    assert str(folder / "config") in str(caught.value)
    assert "--network" in str(caught.value)


async def test_a_configuration_that_cannot_be_used(store, folder):
    folder.mkdir()
    (folder / "config").write_text('{"Network":"10.5.0.0/29"}')
    with pytest.raises(ConfigError, match=r"10\.5\.0\.0/29"):
        await store.config()
    (folder / "config").write_bytes(b"\xff\xfe{")
    with pytest.raises(StoreError, match="config cannot be read"):
        await store.config()


# folders that cannot be used; tests run as root, whom permissions do not stop


async def test_a_file_in_the_place_of_the_folder(store, folder):
    folder.write_text("not a folder")
    lease = Lease(IPv4Network("10.5.34.0/24"), None, host(2), 1100.0)
    for attempt in (
        store.config(),
        store.create_config(CONFIG_TEXT),
        store.acquire(CONFIG, host(2), Subnets()),
        store.renew(lease),
        store.release(lease),
        snapshot(store),
    ):
        with pytest.raises(StoreError) as caught:
            await attempt
        assert str(folder) in str(caught.value)
        assert not isinstance(caught.value, LeaseLostError)


@pytest.mark.parametrize("name", ["subnets", "expiry"])
async def test_a_file_in_the_place_of_a_subfolder(store, folder, name):
    folder.mkdir()
    (folder / name).write_text("not a folder")
    with pytest.raises(StoreError, match=str(folder)):
        await store.acquire(CONFIG, host(2), Subnets())
    if name == "subnets":
        with pytest.raises(StoreError, match=str(folder)):
            await snapshot(store)


async def test_a_folder_in_the_place_of_the_lock(store, folder):
    (folder / "lock").mkdir(parents=True)
    with pytest.raises(StoreError, match=str(folder)):
        await store.acquire(CONFIG, host(2), Subnets())


async def test_a_full_disk(store, folder, monkeypatch):
    lease = await store.acquire(CONFIG, host(2), net(34))
    before = tree(folder)

    def fail(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    for attempt in (store.acquire(CONFIG, host(3), net(35)), store.renew(lease)):
        with pytest.raises(StoreError, match=f"{folder}.*No space left"):
            await attempt
    assert tree(folder) == before


async def test_a_store_that_is_not_there_yet_is_empty(folder, watch, store):
    assert watch.snapshot == []
    assert not folder.exists(), "looking makes nothing"
    assert not await watch.look()
    lease = await store.acquire(CONFIG, host(2), net(34))
    assert await watch.look()
    assert watch.snapshot == [lease]


# allocation


NODE = """
import asyncio, sys
from ipaddress import ip_address
from pathlib import Path
from routing.allocator import Subnets
from routing.lease import LeaseAttributes
from routing.stores.local import LocalStore

async def main():
    store = LocalStore(Path(sys.argv[1]))
    config = await store.config()
    print("ready", flush=True)
    sys.stdin.readline()
    lease = await store.acquire(config, LeaseAttributes(ip_address(sys.argv[2]), None, "udp"), Subnets())
    print(lease.key)

asyncio.run(main())
"""


def start(folder: Path, number: int) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", NODE, str(folder), f"192.0.2.{number}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    )


async def test_eight_processes_share_eight_subnets(folder):
    store = LocalStore(folder)
    await store.create_config(EIGHT)
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(start(folder, number)) for number in range(1, 9)]
        assert [process.stdout.readline() for process in processes] == ["ready\n"] * 8
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        answers = [process.communicate(timeout=60) for process in processes]
    assert [error for _, error in answers] == [""] * 8
    keys = [key.strip() for key, _ in answers]
    assert sorted(keys) == sorted(f"10.5.{third}.0-23" for third in range(0, 16, 2))
    held = {lease.key: str(lease.attributes.public_ip) for lease in await snapshot(store)}
    assert held == {key: f"192.0.2.{number}" for number, key in enumerate(keys, 1)}
    config = await store.config()
    with pytest.raises(NoFreeSubnetError, match=r"/23 between 10\.5\.0\.0 and 10\.5\.14\.0"):
        await store.acquire(config, host(9), Subnets())
    assert len(await snapshot(store)) == 8
    again = await store.acquire(config, LeaseAttributes(IPv4Address("192.0.2.3"), None, "udp"), Subnets())
    assert again.key == keys[2], "who has one keeps it in a full network"


async def test_the_previous_subnet_is_a_hint(store):
    assert (await store.acquire(CONFIG, host(2), net(200))).key == "10.5.200.0-24"
    assert (await store.acquire(CONFIG, host(3), net(200))).key != "10.5.200.0-24"
    assert (await store.acquire(CONFIG, host(2), net(100))).key == "10.5.200.0-24", "the own lease comes first"


async def test_the_random_choice_is_the_rngs(folder, clock):
    first = await LocalStore(folder / "a", now=clock, rng=random.Random(5)).acquire(CONFIG, host(2), Subnets())
    second = await LocalStore(folder / "b", now=clock, rng=random.Random(5)).acquire(CONFIG, host(2), Subnets())
    assert first == second


async def test_another_configuration_moves_the_own_lease(store, folder):
    old = await store.acquire(CONFIG, host(2), net(34))
    other = parse_config('{"Network":"10.6.0.0/16"}')
    lease = await store.acquire(other, host(2), Subnets(old.subnet))
    assert lease.subnet.subnet_of(IPv4Network("10.6.0.0/16"))
    assert await snapshot(store) == [lease]
    assert [path.name for path in (folder / "expiry").iterdir()] == [lease.key]


async def test_acquire_renews_and_brings_new_data(store, clock):
    await store.acquire(CONFIG, host(2), net(34))
    clock.seconds = 1050.0
    lease = await store.acquire(CONFIG, host(2, "udp"), Subnets())
    assert lease == Lease(IPv4Network("10.5.34.0/24"), None, host(2, "udp"), 1150.0)
    assert await snapshot(store) == [lease]


async def test_a_cancelled_acquire_leaves_a_whole_store(store):
    task = asyncio.create_task(store.acquire(CONFIG, host(2), net(34)))
    await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    lease = await store.acquire(CONFIG, host(2), net(34))
    assert await snapshot(store) == [lease]


async def test_acquire_among_thousands_costs_little_more_than_reading_them(folder, clock, store):
    count = 2000
    (folder / "subnets").mkdir(parents=True)
    (folder / "expiry").mkdir()
    for number in range(1, count + 1):
        key = f"10.{number >> 8}.{number & 255}.0-24"
        attributes = LeaseAttributes(IPv4Address(0xC6120000 + number), None, "udp")
        (folder / "subnets" / key).write_text(attributes.to_json())
        (folder / "expiry" / key).write_text("2000.0")
    started = time.process_time()
    assert len(await snapshot(LocalStore(folder, now=clock))) == count
    reading = time.process_time() - started
    started = time.process_time()
    await store.acquire(parse_config('{"Network":"10.0.0.0/8"}'), host(2), Subnets())
    assert time.process_time() - started < 4 * reading


# the end of leases


async def test_a_lease_ends(store, folder, clock, watch):
    lease = await store.acquire(CONFIG, host(2), net(34))
    assert await watch.look()
    clock.seconds = 1099.9
    assert not await watch.look()
    assert watch.snapshot == [lease]
    clock.seconds = 1100.0
    assert await watch.look()
    assert watch.snapshot == []
    with pytest.raises(LeaseLostError, match=r"10\.5\.34\.0-24"):
        await store.renew(lease)
    assert "subnets/10.5.34.0-24" in tree(folder), "who only looks removes nothing"


async def test_an_ended_lease_is_free_and_swept(store, folder, clock):
    await store.acquire(CONFIG, host(2), net(34))
    await store.acquire(CONFIG, host(3), net(35))
    clock.seconds = 1100.0
    lease = await store.acquire(CONFIG, host(4), net(34))
    assert lease == Lease(IPv4Network("10.5.34.0/24"), None, host(4), 1200.0)
    assert set(tree(folder)) == {"lock", "subnets/10.5.34.0-24", "expiry/10.5.34.0-24"}
    assert await snapshot(store) == [lease]


async def test_renewal_moves_the_end(store, folder, clock, watch):
    lease = await store.acquire(CONFIG, host(2), net(34))
    before = (folder / "subnets/10.5.34.0-24").stat()
    clock.seconds = 1050.0
    renewed = await store.renew(lease)
    assert renewed == Lease(lease.subnet, None, host(2), 1150.0)
    assert (folder / "expiry/10.5.34.0-24").read_text() == "1150.0"
    assert (folder / "subnets/10.5.34.0-24").stat().st_ino == before.st_ino
    await watch.look()
    clock.seconds = 1149.9
    assert not await watch.look()
    assert watch.snapshot == [renewed]
    clock.seconds = 1150.0
    assert await watch.look()
    assert watch.snapshot == []


async def test_release_removes_both_files(store, folder, watch):
    lease = await store.acquire(CONFIG, host(2), net(34))
    other = await store.acquire(CONFIG, host(3), net(35))
    await store.release(lease)
    assert set(tree(folder)) == {"lock", "subnets/10.5.35.0-24", "expiry/10.5.35.0-24"}
    await store.release(lease)
    assert await watch.look()
    assert watch.snapshot == [other]


# leases that are lost


async def test_a_lease_that_somebody_else_took(store, folder):
    lease = await store.acquire(CONFIG, host(2), net(34))
    (folder / "subnets/10.5.34.0-24").write_text(host(7).to_json())
    with pytest.raises(LeaseLostError) as caught:
        await store.renew(lease)
    assert "10.5.34.0-24" in str(caught.value)
    assert "192.0.2.7" in str(caught.value)
    before = tree(folder)
    await store.release(lease)
    assert tree(folder) == before, "what is not ours is not removed"


@pytest.mark.parametrize("both", [True, False])
async def test_a_lease_that_was_deleted(store, folder, both):
    lease = await store.acquire(CONFIG, host(2), net(34))
    (folder / "subnets/10.5.34.0-24").unlink()
    if both:
        (folder / "expiry/10.5.34.0-24").unlink()
    with pytest.raises(LeaseLostError, match=r"10\.5\.34\.0-24 is gone"):
        await store.renew(lease)
    assert not (folder / "subnets/10.5.34.0-24").exists()
    await store.release(lease)
    assert await store.acquire(CONFIG, host(2), net(34)) == lease


async def test_a_lease_of_which_only_the_data_changed_is_still_ours(store, folder, clock):
    lease = await store.acquire(CONFIG, host(2), net(34))
    (folder / "subnets/10.5.34.0-24").write_text(host(2, "udp").to_json())
    clock.seconds = 1010.0
    assert (await store.renew(lease)).expiration == 1110.0


# reservations


async def test_a_reservation_is_kept_for_ever(store, folder, clock, watch):
    path = reserve(folder, "10.5.34.0-24", host(2))
    expected = Lease(IPv4Network("10.5.34.0/24"), None, host(2), None)
    assert await watch.look()
    assert watch.snapshot == [expected]
    assert (await store.acquire(CONFIG, host(3), net(34))).key != "10.5.34.0-24"
    clock.seconds = 1e12
    await watch.look()
    assert watch.snapshot == [expected]
    await store.acquire(CONFIG, host(4), net(34))
    assert path.exists()


async def test_a_reservation_stays_one_after_acquire_and_renew_and_release(store, folder, clock):
    reserve(folder, "10.5.34.0-24", host(2))
    lease = await store.acquire(CONFIG, host(2, "udp"), net(99))
    assert lease == Lease(IPv4Network("10.5.34.0/24"), None, host(2, "udp"), None)
    clock.seconds = 1e9
    assert await store.renew(lease) == lease
    await store.release(lease)
    assert set(tree(folder)) == {"lock", "subnets/10.5.34.0-24"}
    assert await snapshot(store) == [lease]


async def test_a_lease_that_the_operator_made_a_reservation_stays_one(store, folder, clock):
    """flannel's way to reserve a subnet is to take the end off the lease that a running node holds."""
    lease = await store.acquire(CONFIG, host(2), net(34))
    (folder / "expiry/10.5.34.0-24").unlink()
    await store.renew(lease)
    assert not (folder / "expiry/10.5.34.0-24").exists()
    await store.release(lease)
    clock.seconds = 1e9
    assert [one.key for one in await snapshot(store)] == ["10.5.34.0-24"]


async def test_an_own_reservation_that_does_not_fit_is_replaced(store, folder):
    reserve(folder, "10.9.34.0-24", host(2))
    lease = await store.acquire(CONFIG, host(2), net(34))
    assert lease == Lease(IPv4Network("10.5.34.0/24"), None, host(2), 1100.0)
    assert await snapshot(store) == [lease]


async def test_a_reservation_made_during_an_allocation_is_not_swept(folder, clock):
    """Whoever writes one by hand does not take the lock."""

    class Meanwhile(random.Random):
        def choice(self, seq):
            reserve(folder, "10.5.200.0-24", host(9))
            return super().choice(seq)

    store = LocalStore(folder, now=clock, rng=Meanwhile(1))
    lease = await store.acquire(CONFIG, host(2), Subnets())
    assert (folder / "subnets/10.5.200.0-24").exists()
    assert [one.key for one in await snapshot(store)] == sorted([lease.key, "10.5.200.0-24"])


# what others leave in the folder


JUNK = {
    "torn": ("10.5.7.0-24", b'{"PublicIP":"192.0.2.7","Backe'),
    "empty": ("10.5.7.0-24", b""),
    "binary": ("10.5.7.0-24", bytes(range(256))),
    "nul": ("10.5.7.0-24", b"\0" * 100),
    "no address": ("10.5.7.0-24", b'{"PublicIP":null}'),
    "bad mac": ("10.5.7.0-24", b'{"PublicIP":"192.0.2.7","BackendData":{"VtepMAC":"x"}}'),
    "list": ("10.5.7.0-24", b"[]"),
    "nested": ("10.5.7.0-24", b"[" * 200_000),
    "foreign name": ("README", host(7).to_json().encode()),
    "host bits": ("10.5.7.1-24", host(7).to_json().encode()),
    "spelling": ("10.5.7.0-024", host(7).to_json().encode()),
    "backup": ("10.5.7.0-24~", host(7).to_json().encode()),
    "not UTF-8": (os.fsdecode(b"\xff\xfe"), host(7).to_json().encode()),
}


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("what", list(JUNK))
async def test_junk_is_skipped_with_one_warning(store, folder, watch, caplog, what):
    name, content = JUNK[what]
    good = await store.acquire(CONFIG, host(2), net(34))
    assert await watch.look()
    (folder / "subnets" / name).write_bytes(content)
    for _ in range(10):
        assert not await watch.look()
    assert watch.snapshot == [good]
    (message,) = warnings(caplog)
    assert message.startswith(f"skipped {folder / 'subnets' / name}: ")
    assert (folder / "subnets" / name).read_bytes() == content


async def test_junk_does_not_stop_an_allocation(store, folder, caplog):
    (folder / "subnets").mkdir(parents=True)
    for number, (name, content) in enumerate(JUNK.values()):
        (folder / "subnets" / name.replace("10.5.7.", f"10.5.{number}.")).write_bytes(content)
    lease = await store.acquire(CONFIG, host(2), net(34))
    assert await store.renew(lease) == lease
    assert await snapshot(store) == [lease]


@pytest.mark.parametrize("what", ["folder", "folder with a key", "loop"])
async def test_what_is_no_file_is_skipped_with_one_warning(store, folder, watch, caplog, what):
    good = await store.acquire(CONFIG, host(2), net(34))
    assert await watch.look()
    if what == "loop":
        (folder / "subnets" / "10.5.7.0-24").symlink_to("10.5.7.0-24")
    else:
        (folder / "subnets" / ("old" if what == "folder" else "10.5.7.0-24")).mkdir()
    for _ in range(10):
        assert not await watch.look()
    assert watch.snapshot == [good]
    assert len(warnings(caplog)) == 1


async def test_files_being_written_are_skipped_in_silence(store, folder, watch, caplog):
    good = await store.acquire(CONFIG, host(2), net(34))
    assert await watch.look()
    (folder / "subnets" / ".10.5.7.0-24.abc.tmp").write_text("{")
    (folder / "subnets" / "10.5.8.0-24").symlink_to("nowhere")
    assert not await watch.look()
    assert watch.snapshot == [good]
    assert warnings(caplog) == []


async def test_a_repaired_file_counts_and_a_new_fault_is_told(store, folder, watch, caplog):
    path = reserve(folder, "10.5.7.0-24", host(7))
    path.write_text("{")
    assert not await watch.look()
    path.write_text(host(7).to_json())
    assert await watch.look()
    assert [lease.attributes for lease in watch.snapshot] == [host(7)]
    path.write_text("{{")
    assert await watch.look()
    assert watch.snapshot == []
    assert len(warnings(caplog)) == 2


@pytest.mark.parametrize("content", [b"", b"11", b"soon", b"\xff\x00", b"1100.0 1100.0", b"[1100.0]", b"nan"])
async def test_a_torn_expiry_is_the_end_and_no_reservation(store, folder, watch, caplog, content):
    await store.acquire(CONFIG, host(2), net(34))
    good = await store.acquire(CONFIG, host(3), net(35))
    assert await watch.look()
    (folder / "expiry/10.5.34.0-24").write_bytes(content)
    assert await watch.look()
    for _ in range(10):
        assert not await watch.look()
    assert watch.snapshot == [good]
    if content not in (b"11", b"nan"):  # half of a time is a time, and so is nan
        (message,) = warnings(caplog)
        assert message.startswith("skipped 10.5.34.0-24: ")
        assert str(folder / "expiry/10.5.34.0-24") in message
    taken = await store.acquire(CONFIG, host(4), net(34))
    assert taken.key == "10.5.34.0-24"


@pytest.mark.parametrize("text", ["1100", "1100.0\n", " 1.1e3 "])
async def test_times_that_others_write(store, folder, text):
    await store.acquire(CONFIG, host(2), net(34))
    (folder / "expiry/10.5.34.0-24").write_text(text)
    assert [lease.expiration for lease in await snapshot(store)] == [1100.0]


# watch


async def test_the_first_snapshot_comes_without_a_wait(store, watch):
    assert watch.snapshot == []
    assert watch.polls.asked == []
    assert not await watch.look()
    assert not await watch.look()
    assert watch.polls.asked == [POLL_SECONDS] * 3


async def test_changes_are_noticed_at_the_next_look(store, folder, watch):
    lease = await store.acquire(CONFIG, host(3), net(34))
    assert await watch.look()
    assert watch.snapshot == [lease]
    assert not await watch.look()
    path = reserve(folder, "10.5.7.0-24", host(7))
    reserved = Lease(IPv4Network("10.5.7.0/24"), None, host(7), None)
    assert await watch.look()
    assert set(watch.snapshot) == {reserved, lease}
    path.write_text(host(8, "udp").to_json())
    assert await watch.look()
    assert {one.attributes for one in watch.snapshot} == {host(8, "udp"), host(3)}
    path.unlink()
    assert await watch.look()
    assert watch.snapshot == [lease]
    assert not await watch.look()


async def test_a_replacement_of_equal_size_is_noticed(store, folder, watch):
    path = reserve(folder, "10.5.7.0-24", host(7))
    assert await watch.look()
    status = path.stat()
    other = path.with_name(".other")
    other.write_text(host(8).to_json())
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.rename(path)
    assert path.stat().st_size == status.st_size
    assert await watch.look()
    assert [lease.attributes for lease in watch.snapshot] == [host(8)]


async def test_snapshots_are_sorted_by_key(store):
    for number, third in enumerate((9, 34, 100, 2), 1):
        await store.acquire(CONFIG, host(number), net(third))
    keys = [lease.key for lease in await snapshot(store)]
    assert keys == ["10.5.100.0-24", "10.5.2.0-24", "10.5.34.0-24", "10.5.9.0-24"]


async def test_a_folder_that_vanishes_is_empty_and_may_come_back(store, folder, watch):
    lease = await store.acquire(CONFIG, host(2), net(34))
    assert await watch.look()
    for path in (folder / "subnets/10.5.34.0-24", folder / "expiry/10.5.34.0-24"):
        path.unlink()
    (folder / "subnets").rmdir()
    assert await watch.look()
    assert watch.snapshot == []
    assert await store.acquire(CONFIG, host(2), net(34)) == lease
    assert await watch.look()
    assert watch.snapshot == [lease]


async def test_the_configuration_is_a_network_config(store):
    await store.create_config(EIGHT)
    config = await store.config()
    assert isinstance(config, NetworkConfig)
    assert (config.ipv4.subnet_length, str(config.ipv4.minimum), str(config.ipv4.maximum)) == (23, "10.5.0.0", "10.5.14.0")


# report


async def test_report_says_since_when_the_folder_cannot_be_read(store, folder, clock, caplog):
    caplog.set_level(logging.INFO)
    lease = await store.acquire(CONFIG, host(2), net(34))
    watched = Watch(folder, clock)
    await watched.start()
    assert watched.store.report()["away_since"] is None
    clock.seconds = 1010.0
    folder.rename(folder.with_name("aside"))
    folder.write_text("not a folder")
    assert not await watched.look()
    clock.seconds = 1020.0
    assert not await watched.look()
    report = watched.store.report()
    assert report["away_since"] == 1010.0
    assert str(folder) in report["trouble"]
    folder.unlink()
    folder.with_name("aside").rename(folder)
    assert not await watched.look()
    report = watched.store.report()
    assert (report["away_since"], report["trouble"]) == (None, None)
    assert watched.snapshot == [lease]
    await watched.close()
    told = [record.getMessage() for record in caplog.records if record.name.endswith("local")]
    assert len(told) == 2, "one line when it goes, one when it is back"


async def test_report_counts_what_is_skipped_now(store, folder):
    await store.acquire(CONFIG, host(2), net(34))
    await store.acquire(CONFIG, host(3), net(35))
    path = reserve(folder, "10.5.7.0-24", host(7))
    path.write_text("{")
    (folder / "expiry/10.5.34.0-24").write_text("soon")
    await snapshot(store)
    assert store.report()["skipped"] == 2
    (folder / "expiry/10.5.34.0-24").unlink()
    path.unlink()
    await snapshot(store)
    assert store.report()["skipped"] == 0
