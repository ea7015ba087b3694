"""What `cleanup` removes: each part for itself, and what is left stays noted."""

import errno
from pathlib import Path

import pytest

from dataplane import footprint
from dataplane.cli.cleanup import Cleanup
from dataplane.footprint import Footprint, WrittenFile
from dataplane.host import HostError, Interface
from dataplane.host.firewall import table_name
from dataplane.host.firewall.memory import MemoryFirewall
from dataplane.host.memory import MemoryHost

MARK = "pyflannel-dp:test"
OTHER = "pyflannel-dp:other"


class Scene:
    """A host with our device, another's and a table of each; a run folder with a note of ours and a subnet file."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "run"
        self.run_dir.mkdir()
        self.subnet_file = folder / "subnet.env"
        self.subnet_file.write_text("A=1\n")
        self.table, self.others = table_name("flannel.1"), table_name("flannel.2")
        self.host = MemoryHost(
            [
                Interface("flannel.1", 2, 1450, kind="tun", alias=MARK),
                Interface("flannel.2", 3, 1450, kind="tun", alias=OTHER),
                Interface("flannel.3", 4, 1450, kind="dummy", alias=MARK),
            ],
            mark=MARK,
        )
        self.tables: dict = {self.table: [], self.others: []}
        self.trouble: HostError | None = None
        (self.run_dir / "lock").touch()

    def note(self) -> None:
        footprint.note(self.run_dir, self.subnet_file, "A=1\n", device="flannel.1", firewall=self.table)

    def cleanup(self) -> Cleanup:
        made = Cleanup(
            self.run_dir, self.host, lambda table: MemoryFirewall(table, tables=self.tables, trouble=self.trouble)
        )
        made.run()
        return made

    @property
    def devices(self) -> list[str]:
        return [link.name for link in self.host.links]


@pytest.fixture
def scene(tmp_path) -> Scene:
    return Scene(tmp_path)


def test_everything_that_is_noted_goes_and_nothing_else(scene):
    scene.note()
    done = scene.cleanup()
    state = scene.run_dir / "state.json"
    assert done.failures == []
    assert done.removed == [f"nftables table {scene.table}", "device flannel.1", str(scene.subnet_file), str(state)]
    assert (scene.devices, list(scene.tables)) == (["flannel.2", "flannel.3"], [scene.others])
    assert not scene.run_dir.exists()
    again = scene.cleanup()
    assert (again.removed, again.failures) == ([], [])


@pytest.mark.parametrize("text", ["{", "", "[" * 100_000])
def test_an_unreadable_note_is_told_and_the_rules_go_by_the_device(scene, text):
    (scene.run_dir / "state.json").write_text(text)
    done = scene.cleanup()
    assert len(done.failures) == 1
    for part in ("state.json was unreadable", "subnet.env", "by hand"):
        assert part in done.failures[0]
    assert done.removed[:2] == [f"nftables table {scene.table}", "device flannel.1"]
    assert (scene.devices, list(scene.tables)) == (["flannel.2", "flannel.3"], [scene.others])
    assert not scene.run_dir.exists()
    assert scene.cleanup().failures == []


def test_without_a_note_the_rules_go_by_the_device_too(scene):
    done = scene.cleanup()
    assert done.failures == []
    assert done.removed == [f"nftables table {scene.table}", "device flannel.1"]


def test_a_node_without_rules_needs_no_nft(scene):
    footprint.note(scene.run_dir, device="flannel.1")
    scene.trouble = HostError("the program nft is missing")
    done = scene.cleanup()
    assert done.failures == []
    assert "device flannel.1" in done.removed


@pytest.mark.parametrize("is_broken", [False, True])
def test_rules_that_stay_keep_nothing_else_and_are_noted_for_the_next_time(scene, is_broken):
    scene.note()
    if is_broken:
        (scene.run_dir / "state.json").write_text("{")
    scene.trouble = HostError("the program nft is missing")
    done = scene.cleanup()
    assert done.failures[-1] == "the program nft is missing"
    assert "flannel.1" not in scene.devices
    assert scene.subnet_file.exists() == is_broken
    assert footprint.read(scene.run_dir) == Footprint(firewall=scene.table)
    scene.trouble = None
    again = scene.cleanup()
    assert again.failures == []
    assert again.removed[0] == f"nftables table {scene.table}"
    assert not scene.run_dir.exists()


def test_a_device_that_stays_keeps_nothing_else_and_is_noted(scene):
    scene.note()
    scene.host.attached.add("flannel.1")
    done = scene.cleanup()
    assert done.failures == ["a process is attached to flannel.1"]
    assert list(scene.tables) == [scene.others]
    assert not scene.subnet_file.exists()
    assert footprint.read(scene.run_dir) == Footprint(device="flannel.1")


def test_a_file_that_stays_keeps_nothing_else_and_is_noted(scene, monkeypatch):
    scene.note()
    other = scene.run_dir.parent / "other.env"
    footprint.note(scene.run_dir, other, "B=1\n")
    other.write_text("B=1\n")
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path == scene.subnet_file:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        unlink(path, missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        done = scene.cleanup()
    assert done.failures == [f"cannot remove {scene.subnet_file}: Read-only file system"]
    assert done.removed == [f"nftables table {scene.table}", "device flannel.1", str(other)]
    assert footprint.read(scene.run_dir) == Footprint(subnet_file=WrittenFile(scene.subnet_file, "A=1\n"))
    assert scene.cleanup().failures == []
    assert not scene.subnet_file.exists()
    assert not scene.run_dir.exists()


def test_a_note_that_cannot_be_read_stays(scene, monkeypatch):
    scene.note()
    read_text = Path.read_text

    def refuse(path: Path, **options: str) -> str:
        if path.name == "state.json":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read_text(path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", refuse)
        done = scene.cleanup()
    assert done.failures == [f"{scene.run_dir / 'state.json'}: Permission denied"]
    assert "device flannel.1" in done.removed
    noted = footprint.read(scene.run_dir)
    assert noted is not None
    assert noted.firewall == scene.table


def test_without_a_run_folder_what_carries_the_mark_goes(scene):
    (scene.run_dir / "lock").unlink()
    scene.run_dir.rmdir()
    scene.host.attached.add("flannel.1")
    scene.trouble = HostError("the program nft is missing")
    assert scene.cleanup().failures == ["the program nft is missing", "a process is attached to flannel.1"]
    scene.host.attached.clear()
    scene.trouble = None
    assert scene.cleanup().removed == [f"nftables table {scene.table}", "device flannel.1"]
