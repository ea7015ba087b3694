"""The running node's control socket: a Unix stream socket on which it answers questions about itself.

One question a connection: the client sends one line of JSON, ``{"command": "status"}``, and reads the answer, JSON, until
the end of the stream. The socket is also what keeps two nodes from running over one another: it lies in the run folder,
and who finds it answered does not start. A socket file that nobody answers on is the leftover of a killed node.
"""

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

SOCKET_NAME = "control.sock"
_TIMEOUT_SECONDS = 5.0
_LONGEST_PATH = 107  # sun_path of unix(7), less the final zero


class ControlError(Exception):
    """The node cannot be asked, or one is running where another wants to; the text says which."""


def ask(run_dir: Path, command: str) -> dict[str, Any]:
    """The answer of the node whose run folder is `run_dir`. Raises ControlError if none is running there."""
    path = run_dir / SOCKET_NAME
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_TIMEOUT_SECONDS)
            connection.connect(str(path))
            connection.sendall(json.dumps({"command": command}).encode() + b"\n")
            with connection.makefile("rb") as stream:
                answer: dict[str, Any] = json.loads(stream.read())
    except (FileNotFoundError, ConnectionRefusedError):
        raise ControlError(f"no node is running here (nobody answers on {path}; another folder: --run-dir)") from None
    except (OSError, ValueError) as error:
        raise ControlError(f"the node on {path} does not answer: {error}") from None
    if "error" in answer:
        raise ControlError(str(answer["error"]))
    return answer


class ControlServer:
    """Answers on the socket in `run_dir`; `status` makes the answer to the question of that name."""

    def __init__(self, run_dir: Path, status: Callable[[], dict[str, Any]]) -> None:
        self._path = run_dir / SOCKET_NAME
        self._status = status
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Take the socket. Raises ControlError if another node holds it or the folder cannot be used."""
        if len(os.fsencode(self._path)) > _LONGEST_PATH:
            raise ControlError(f"{self._path} is too long for a Unix socket: choose a shorter --run-dir")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            await self._require_free()
            self._server = await asyncio.start_unix_server(self._answer, str(self._path))
            self._path.chmod(0o600)
        except OSError as error:
            raise ControlError(f"cannot use the run folder {self._path.parent}: {error.strerror or error}") from None

    async def _require_free(self) -> None:
        if not self._path.exists():
            return
        try:
            running = await asyncio.to_thread(ask, self._path.parent, "status")
        except ControlError:
            self._path.unlink(missing_ok=True)
            return
        raise ControlError(
            f"a node is running here already (process {running.get('pid')}, {self._path}); stop it, or give this one "
            "another --run-dir"
        )

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                line = await reader.readline()
                writer.write(json.dumps(self._reply(line)).encode())
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
        except ValueError:
            command = None
        return self._status() if command == "status" else {"error": f"not a question: {line[:80]!r}"}

    async def close(self) -> None:
        """Give the socket back."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self._server = None
            self._path.unlink(missing_ok=True)
