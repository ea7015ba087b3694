"""The run folder's lock and the control socket, where disks are full and answers fail."""

import asyncio
import errno
import json
import logging
import os
import threading
from pathlib import Path

import pytest

from dataplane.control import ControlError, ControlServer, RunLock, ask

STATUS = {"state": "running"}


def no_space(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


class TestRunLock:
    def test_one_at_a_time_and_the_holder_is_named(self, tmp_path):
        first, second = RunLock(tmp_path), RunLock(tmp_path)
        first.take()
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
        with pytest.raises(ControlError, match=f"process {os.getpid()} holds {tmp_path}/lock"):
            second.take()
        first.release()
        second.take()
        second.release()
        second.release()

    @pytest.mark.parametrize("call", ["pwrite", "ftruncate"])
    def test_a_full_disk_does_not_matter(self, tmp_path, monkeypatch, call):
        """The number in the file is for people."""
        (tmp_path / "lock").write_text("1234\n")
        first, second = RunLock(tmp_path), RunLock(tmp_path)
        with monkeypatch.context() as full:
            full.setattr(os, call, no_space)
            first.take()
        with pytest.raises(ControlError, match="a node is running here"):
            second.take()
        first.release()

    def test_a_folder_that_cannot_be_used_is_named(self, tmp_path, monkeypatch):
        with monkeypatch.context() as full:
            full.setattr(os, "open", no_space)
            with pytest.raises(ControlError, match=f"cannot use the run folder {tmp_path}: No space left on device"):
                RunLock(tmp_path).take()

    @pytest.mark.parametrize("content", [b"", b"\xff\xfe"])
    def test_a_holder_that_the_file_does_not_tell(self, tmp_path, content):
        first = RunLock(tmp_path)
        first.take()
        (tmp_path / "lock").write_bytes(content)
        with pytest.raises(ControlError, match="a node is running here"):
            RunLock(tmp_path).take()
        first.release()


@pytest.fixture
async def serving(tmp_path):
    """Makes a server in `tmp_path` that answers by a function."""
    made = []

    async def serve(status) -> ControlServer:
        server = ControlServer(tmp_path, status)
        await server.start()
        made.append(server)
        return server

    yield serve
    for server in made:
        await server.close()


async def asked(run_dir: Path) -> dict:
    return await asyncio.to_thread(ask, run_dir, "status")


async def test_an_answer(serving, tmp_path):
    await serving(lambda: STATUS)
    assert await asked(tmp_path) == STATUS


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        (lambda: {}["lease"], "KeyError('lease')"),
        (no_space, "No space left on device"),
        (lambda: {"state": object()}, "TypeError"),
    ],
)
async def test_a_status_that_fails_is_an_answer_and_logged_once(serving, tmp_path, caplog, fails, said):
    await serving(fails)
    for _ in range(3):
        with pytest.raises(ControlError, match="the node cannot tell its status: ") as caught:
            await asked(tmp_path)
        assert said in str(caught.value)
    assert [(record.levelno, said in record.message) for record in caplog.records] == [(logging.ERROR, True)]
    assert caplog.records[0].exc_info is not None


async def test_another_failure_is_logged_too(serving, tmp_path, caplog):
    failures = iter([KeyError("a"), KeyError("a"), KeyError("b")])

    def fail() -> dict:
        raise next(failures)

    await serving(fail)
    for _ in range(3):
        with pytest.raises(ControlError):
            await asked(tmp_path)
    assert [record.message[-3:-1] for record in caplog.records] == ["a'", "b'"]


async def test_who_asks_while_it_ends_is_told(serving, tmp_path):
    asked_for, ended = threading.Event(), threading.Event()

    def status() -> dict:
        asked_for.set()
        assert ended.wait(5)
        return STATUS

    server = await serving(status)
    asking = asyncio.ensure_future(asked(tmp_path))
    await asyncio.to_thread(asked_for.wait, 5)
    await server.close()
    with pytest.raises(ControlError, match="the node is stopping"):
        await asking
    ended.set()


async def test_nothing_at_all_is_told_as_that(tmp_path):
    """A node that is killed while it answers."""

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_unix_server(hang_up, tmp_path / "control.sock"):
        with pytest.raises(ControlError, match="has ended before it answered"):
            await asked(tmp_path)


async def test_nonsense_is_answered(serving, tmp_path):
    await serving(lambda: STATUS)
    for line in (b"[" * 50_000 + b"\n", b"{}\n", b"7\n", b"\xff\n"):
        reader, writer = await asyncio.open_unix_connection(tmp_path / "control.sock")
        writer.write(line)
        assert "not a question" in json.loads(await reader.read())["error"]
        writer.close()
        await writer.wait_closed()
