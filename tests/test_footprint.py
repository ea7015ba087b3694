"""What a node notes of what it makes, and what is removed by that note."""

import json
from pathlib import Path

import pytest

from dataplane import footprint
from dataplane.footprint import Footprint, WrittenFile


@pytest.fixture
def run_dir(tmp_path) -> Path:
    made = tmp_path / "run"
    made.mkdir()
    return made


def test_nothing_is_noted_at_first(run_dir):
    assert footprint.read(run_dir) is None
    assert footprint.read(run_dir / "missing") is None
    assert footprint.remove(run_dir) == footprint.remove(run_dir / "missing") == []


def test_notes_add_up(run_dir):
    subnet_file = run_dir / "subnet.env"
    footprint.note(run_dir, device="flannel.1")
    assert footprint.read(run_dir) == Footprint(device="flannel.1")
    footprint.note(run_dir, firewall="pyflannel-dp")
    footprint.note(run_dir, subnet_file, "A=1\n")
    assert footprint.read(run_dir) == Footprint("flannel.1", "pyflannel-dp", WrittenFile(subnet_file, "A=1\n"))
    footprint.note(run_dir, device="flannel.2", firewall="")
    assert footprint.read(run_dir) == Footprint("flannel.2", None, WrittenFile(subnet_file, "A=1\n"))


def test_the_file_is_as_documented(run_dir):
    footprint.note(run_dir, Path("/run/flannel/subnet.env"), "A=1\n", device="flannel.1")
    assert json.loads((run_dir / "state.json").read_text()) == {
        "subnet_file": "/run/flannel/subnet.env",
        "content": "A=1\n",
        "device": "flannel.1",
        "firewall": None,
        "earlier": [],
    }


def test_a_note_of_an_older_version_is_understood(run_dir):
    subnet_file = run_dir.parent / "subnet.env"
    subnet_file.write_text("A=1\n")
    (run_dir / "state.json").write_text(json.dumps({"subnet_file": str(subnet_file), "content": "A=1\n"}))
    assert footprint.read(run_dir) == Footprint(subnet_file=WrittenFile(subnet_file, "A=1\n"))
    assert footprint.remove(run_dir) == [str(subnet_file), str(run_dir / "state.json")]


NONSENSE = [
    "[" * 100_000,
    "",
    "{",
    "[]",
    "null",
    "{}",
    '{"subnet_file": 7, "content": "x"}',
    '{"subnet_file": "/x"}',
    '{"subnet_file": "/x", "content": 7}',
    '{"subnet_file": null, "device": 7}',
    '{"subnet_file": null, "earlier": [7]}',
    '{"subnet_file": null, "earlier": 7}',
    "\udcff",
]


@pytest.mark.parametrize("text", NONSENSE)
def test_nonsense_is_no_note_and_is_removed_and_written_over(run_dir, text):
    state = run_dir / "state.json"
    state.write_bytes(text.encode(errors="surrogateescape"))
    assert footprint.read(run_dir) is None
    assert footprint.is_broken(run_dir)
    footprint.note(run_dir, device="flannel.1")
    assert footprint.read(run_dir) == Footprint("flannel.1")
    assert not footprint.is_broken(run_dir)
    state.write_bytes(text.encode(errors="surrogateescape"))
    assert footprint.remove(run_dir) == [str(state)]


def test_a_file_that_somebody_else_wrote_since_stays(run_dir):
    subnet_file = run_dir.parent / "subnet.env"
    footprint.note(run_dir, subnet_file, "A=1\n")
    subnet_file.write_text("A=2\n")
    assert footprint.remove(run_dir) == [str(run_dir / "state.json")]
    assert subnet_file.read_text() == "A=2\n"


def test_a_node_that_is_killed_between_note_and_file_leaves_nothing_unnoted(run_dir):
    """At every moment of three starts, with another content and then another place, what lies there is removed."""
    places = [run_dir.parent / name for name in ("a.env", "b.env")]
    steps = [(places[0], "A=1\n"), (places[0], "A=2\n"), (places[1], "A=2\n"), (places[0], "A=3\n")]
    for killed_at in range(2 * len(steps)):
        for number, (place, content) in enumerate(steps):
            if killed_at >= 2 * number:
                footprint.note(run_dir, place, content)
            if killed_at > 2 * number:
                place.write_text(content)
        existing = [str(place) for place in places if place.exists()]
        assert sorted(footprint.remove(run_dir)) == sorted([*existing, str(run_dir / "state.json")])
        assert [place for place in places if place.exists()] == []


def test_what_is_there_no_more_is_forgotten(run_dir):
    subnet_file = run_dir.parent / "subnet.env"
    for number in range(10):
        footprint.note(run_dir, subnet_file, f"A={number}\n")
        subnet_file.write_text(f"A={number}\n")
    noted = footprint.read(run_dir)
    assert noted == Footprint(subnet_file=WrittenFile(subnet_file, "A=9\n"), earlier=(WrittenFile(subnet_file, "A=8\n"),))
    footprint.note(run_dir, subnet_file, "A=9\n")
    assert footprint.read(run_dir) == Footprint(subnet_file=WrittenFile(subnet_file, "A=9\n"))


def test_what_cannot_be_removed_stays_noted(run_dir):
    subnet_file = run_dir.parent / "subnet.env"
    footprint.note(run_dir, subnet_file, "A=1\n", device="flannel.1", firewall="pyflannel-dp")
    subnet_file.write_text("A=1\n")
    assert footprint.remove(run_dir, firewall="pyflannel-dp") == [str(subnet_file)]
    assert footprint.read(run_dir) == Footprint(firewall="pyflannel-dp")
    assert footprint.remove(run_dir) == [str(run_dir / "state.json")]


def test_the_run_folder_goes_with_what_a_killed_writer_left(run_dir):
    left = [run_dir / ".state.json.abc123.tmp", run_dir / ".identity.abc123.tmp"]
    for path in left:
        path.write_text("{")
    (run_dir / "lock").touch()
    assert footprint.remove_run_dir(run_dir) == [str(path) for path in left]
    assert not run_dir.exists()


def test_a_run_folder_with_other_things_stays(run_dir):
    (run_dir / "mine").touch()
    (run_dir / "lock").touch()
    assert footprint.remove_run_dir(run_dir) == []
    assert [path.name for path in run_dir.iterdir()] == ["mine"]
