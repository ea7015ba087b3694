"""Files that are whole or not there."""

import errno
import os
import stat
import threading

import pytest

from routing.durable import sync_folder, write_whole


@pytest.fixture
def umask():
    """Sets the umask for a test."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def content(folder) -> dict[str, str]:
    return {path.name: path.read_text("utf-8") for path in folder.iterdir()}


def test_a_new_file_and_its_replacement(tmp_path):
    path = tmp_path / "file"
    write_whole(path, "one\n")
    assert content(tmp_path) == {"file": "one\n"}
    write_whole(path, "zwei: ä€\n")
    assert content(tmp_path) == {"file": "zwei: ä€\n"}
    assert path.read_bytes() == b"zwei: \xc3\xa4\xe2\x82\xac\n"
    write_whole(path, "")
    assert content(tmp_path) == {"file": ""}


@pytest.mark.parametrize("mask", [0, 0o022, 0o077, 0o777])
@pytest.mark.parametrize("mode", [0o644, 0o600, 0o640])
def test_the_mode_is_as_asked_whatever_the_umask(tmp_path, umask, mask, mode):
    path = tmp_path / "file"
    umask(mask)
    write_whole(path, "x", mode=mode)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    write_whole(path, "y", mode=mode)
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_the_default_mode_lets_all_read(tmp_path, umask):
    umask(0o077)
    write_whole(tmp_path / "file", "x")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o644


@pytest.mark.parametrize("call", ["fsync", "fchmod", "replace"])
@pytest.mark.parametrize("existing", [None, "old"])
def test_a_failing_write_leaves_all_as_it_was(tmp_path, monkeypatch, call, existing):
    if existing is not None:
        (tmp_path / "file").write_text(existing)
    before = content(tmp_path)

    def fail(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "file", "new")
    assert content(tmp_path) == before


@pytest.mark.parametrize("call", ["fsync", "fchmod", "replace"])
def test_an_error_names_the_file_and_reads_the_same_each_time(tmp_path, monkeypatch, call):
    """The temporary file has another name each time, and would make each of them news."""

    def fail(*args):
        raise OSError(errno.ENOSPC, "No space left on device", *(str(one) for one in args if isinstance(one, str)))

    monkeypatch.setattr(os, call, fail)
    path = tmp_path / "file"
    said = set()
    for _ in range(3):
        with pytest.raises(OSError, match="No space left") as caught:
            write_whole(path, "new")
        said.add(str(caught.value))
    assert said == {f"[Errno 28] No space left on device: '{path}'"}


def test_an_error_in_making_the_temporary_file_names_the_file(tmp_path):
    path = tmp_path / "missing" / "file"
    with pytest.raises(FileNotFoundError) as caught:
        write_whole(path, "x")
    assert caught.value.filename == str(path)


def test_a_folder_that_cannot_be_flushed_is_named(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output") as caught:
        sync_folder(tmp_path)
    assert caught.value.filename == str(tmp_path)


def test_text_that_cannot_be_written_leaves_all_as_it_was(tmp_path):
    (tmp_path / "file").write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(tmp_path / "file", "\ud800")
    assert content(tmp_path) == {"file": "old"}


def test_a_folder_in_the_place(tmp_path):
    (tmp_path / "file").mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path / "file", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_no_folder(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "missing" / "file", "x")
    with pytest.raises(FileNotFoundError):
        sync_folder(tmp_path / "missing")
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError):
        sync_folder(tmp_path / "file")


def test_the_file_is_flushed_before_the_rename_and_the_folder_after(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace

    def spy_fsync(descriptor):
        calls.append("fsync folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "fsync file")
        fsync(descriptor)

    def spy_replace(source, target):
        calls.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "replace", spy_replace)
    write_whole(tmp_path / "file", "x")
    assert calls == ["fsync file", "replace", "fsync folder"]


def test_a_reader_never_sees_a_part(tmp_path):
    path = tmp_path / "file"
    texts = ["a" * 70_000, "b" * 3, "c" * 9000]
    write_whole(path, texts[0])
    done = threading.Event()
    seen: list[str] = []

    def read():
        while not done.is_set():
            seen.append(path.read_text())

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for count in range(200):
            write_whole(path, texts[count % 3])
    finally:
        done.set()
        reader.join()
    assert seen
    assert set(seen) <= set(texts)
