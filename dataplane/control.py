"""The running node's run folder: the lock that makes it the only one there, and the socket on which it answers.

The lock (``flock`` on ``lock``) is held for the life of the process and freed by the kernel whatever happens to it, so it
tells a running node, even one that is stopped or stuck, from the leftovers of a killed one. ``cleanup`` takes it, too.

The socket is a Unix stream socket, one question a connection: the client sends one line of JSON, ``{"command": "status"}``,
and reads the answer, JSON, until the end of the stream. Whoever asks gets an answer, if only ``{"error": "..."}``.
"""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

SOCKET_NAME = "control.sock"
LOCK_NAME = "lock"
IDENTITY_NAME = "identity"
_TIMEOUT_SECONDS = 5.0
_LONGEST_PATH = 107  # sun_path of unix(7), less the final zero
_STOPPING = b'{"error": "the node is stopping"}'


class ControlError(Exception):
    """The node cannot be asked, or one is running where another wants to; the text says which."""


class RunLock:
    """The lock of `run_dir`. `take` makes the folder if it is missing; the file holds the number of the process."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / LOCK_NAME
        self._descriptor: int | None = None

    def take(self) -> None:
        """Raises ControlError if another process holds it, or the folder cannot be used."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = self._holder()
            self.release()
            raise ControlError(
                f"a node is running here (process {holder} holds {self.path}): stop it first, or use another --run-dir"
            ) from None
        except OSError as error:
            self.release()
            raise ControlError(f"cannot use the run folder {self.path.parent}: {error.strerror or error}") from None
        with contextlib.suppress(OSError):  # a full disk: the number is for people, the lock holds without it
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def _holder(self) -> str:
        """Who holds it, as the file says."""
        assert self._descriptor is not None
        try:
            return os.pread(self._descriptor, 20, 0).decode("ascii", "replace").strip() or "unknown"
        except OSError:
            return "unknown"

    def release(self) -> None:
        """Let it go; the file stays, since removing it would let two processes lock two files of one name."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def ask(run_dir: Path, command: str) -> dict[str, Any]:
    """The answer of the node whose run folder is `run_dir`. Raises ControlError if none is running there."""
    path = run_dir / SOCKET_NAME
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_TIMEOUT_SECONDS)
            connection.connect(str(path))
            connection.sendall(json.dumps({"command": command}).encode() + b"\n")
            with connection.makefile("rb") as stream:
                text = stream.read()
        if not text:
            raise ControlError(f"the node on {path} has ended before it answered")
        answer = json.loads(text)
    except (FileNotFoundError, ConnectionRefusedError):
        raise ControlError(f"no node is running here (nobody answers on {path}; another folder: --run-dir)") from None
    except (OSError, ValueError) as error:
        raise ControlError(f"the node on {path} does not answer: {error}") from None
    if not isinstance(answer, dict) or not ({"error", "state"} & answer.keys()):
        raise ControlError(f"what answers on {path} is no node of this program")
    if "error" in answer:
        raise ControlError(str(answer["error"]))
    return answer


class ControlServer:
    """Answers on the socket in `run_dir`; `status` makes the answer to the question of that name,
    and is called in a thread."""

    def __init__(self, run_dir: Path, status: Callable[[], dict[str, Any]]) -> None:
        self._lock = RunLock(run_dir)
        self._path = run_dir / SOCKET_NAME
        self._status = status
        self._server: asyncio.Server | None = None
        self._answering: set[asyncio.Task[None]] = set()
        self._told: str | None = None

    async def start(self) -> None:
        """Take the folder. Raises ControlError if another node has it or it cannot be used."""
        if len(os.fsencode(self._path)) > _LONGEST_PATH:
            raise ControlError(f"{self._path} is too long for a Unix socket: choose a shorter --run-dir")
        self._lock.take()
        try:
            self._path.unlink(missing_ok=True)  # of a node that was killed: we hold the lock
            self._server = await self._listen()
        except OSError as error:
            raise ControlError(f"cannot use the run folder {self._path.parent}: {error.strerror or error}") from None

    async def _listen(self) -> asyncio.Server:
        """On a socket of our own making, so that a start that is cancelled here leaves none open."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.setblocking(False)
            listener.bind(str(self._path))
            self._path.chmod(0o600)
            return await asyncio.start_unix_server(self._accept, sock=listener)
        except BaseException:
            listener.close()
            raise

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._answer(reader, writer))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_answered = False
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                line = await reader.readline()
                # Thousands of peers take longer to put into words than packets should wait.
                answer = await asyncio.to_thread(self._reply, line)
                is_answered = True
                writer.write(answer)
                await writer.drain()
        except (OSError, TimeoutError, ValueError):  # it is gone, says nothing, or too much
            pass  # the client's loss
        except asyncio.CancelledError:  # by `close`
            if not is_answered:
                writer.write(_STOPPING)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _reply(self, line: bytes) -> bytes:
        try:
            question = json.loads(line)
            command = question.get("command") if isinstance(question, dict) else None
        except (ValueError, RecursionError):
            command = None
        if command != "status":
            return json.dumps({"error": f"not a question: {line[:80]!r}"}).encode()
        try:
            return json.dumps(self._status()).encode()
        except Exception as error:  # a mistake of ours, whichever: who asks is to hear of it, and the log
            return json.dumps({"error": self._failure(error)}).encode()

    def _failure(self, error: Exception) -> str:
        """What is said of it; the log has it once, since who asks will ask again."""
        said = f"the node cannot tell its status: {error!r}"
        if said != self._told:
            self._told = said
            log.error("%s", said, exc_info=error)
        return said

    async def close(self) -> None:
        """Give the socket and the folder back."""
        if self._server is not None:
            self._server.close()
            for task in list(self._answering):
                task.cancel()
            await asyncio.gather(*self._answering, return_exceptions=True)
            await self._server.wait_closed()
            self._server = None
            self._path.unlink(missing_ok=True)
        self._lock.release()
