"""The running node's run folder: the lock that makes it the only one there, and the socket on which it answers.

The lock (``flock`` on ``lock``) is held for the life of the process and freed by the kernel whatever happens to it, so it
tells a running node, even one that is stopped or stuck, from the leftovers of a killed one. ``cleanup`` takes it, too.

The socket is a Unix stream socket, one question a connection: the client sends one line of JSON, ``{"command": "status"}``,
and reads the answer, JSON, until the end of the stream.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

SOCKET_NAME = "control.sock"
LOCK_NAME = "lock"
IDENTITY_NAME = "identity"
_TIMEOUT_SECONDS = 5.0
_LONGEST_PATH = 107  # sun_path of unix(7), less the final zero


class ControlError(Exception):
    """The node cannot be asked, or one is running where another wants to; the text says which."""


class RunLock:
    """The lock of `run_dir`. `take` makes the folder if it is missing; the file holds the number of the process."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / LOCK_NAME
        self._file: TextIO | None = None

    def take(self) -> None:
        """Raises ControlError if another process holds it, or the folder cannot be used."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a+", encoding="ascii")  # noqa: SIM115 - held until `release`
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file.truncate(0)
            self._file.write(f"{os.getpid()}\n")
            self._file.flush()
        except BlockingIOError:
            assert self._file is not None
            self._file.seek(0)
            holder = self._file.read().strip() or "unknown"
            self.release()
            raise ControlError(
                f"a node is running here (process {holder} holds {self.path}): stop it first, or use another --run-dir"
            ) from None
        except OSError as error:
            self.release()
            raise ControlError(f"cannot use the run folder {self.path.parent}: {error.strerror or error}") from None

    def release(self) -> None:
        """Let it go; the file stays, since removing it would let two processes lock two files of one name."""
        if self._file is not None:
            self._file.close()
            self._file = None


def ask(run_dir: Path, command: str) -> dict[str, Any]:
    """The answer of the node whose run folder is `run_dir`. Raises ControlError if none is running there."""
    path = run_dir / SOCKET_NAME
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_TIMEOUT_SECONDS)
            connection.connect(str(path))
            connection.sendall(json.dumps({"command": command}).encode() + b"\n")
            with connection.makefile("rb") as stream:
                answer = json.loads(stream.read())
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
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                line = await reader.readline()
                # Thousands of peers take longer to put into words than packets should wait.
                writer.write(await asyncio.to_thread(lambda: json.dumps(self._reply(line)).encode()))
                await writer.drain()
        except (OSError, TimeoutError, ValueError):
            pass  # the client's loss
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _reply(self, line: bytes) -> dict[str, Any]:
        try:
            question = json.loads(line)
            command = question.get("command") if isinstance(question, dict) else None
        except (ValueError, RecursionError):
            command = None
        return self._status() if command == "status" else {"error": f"not a question: {line[:80]!r}"}

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
