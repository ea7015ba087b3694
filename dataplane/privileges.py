"""Give up what the node does not need.

Theory of operation: capabilities(7). What the node does for a living (TUN devices, addresses, routes, nftables, its
sysctls, socket buffers beyond the limit) needs CAP_NET_ADMIN and nothing else. So all other capabilities go, before
anything is read from the network: from the bounding set, so that no program that we start gets them back, and from this
process. What stays is made inheritable and ambient: ``nft`` needs it, and gets it whether we are root (whose programs get
what is inheritable or in the bounding set) or not (whose programs get what is ambient). With no_new_privs neither
set-user-ID nor file capabilities count any more; root's programs keep what root had.

Root without CAP_DAC_OVERRIDE is a user like others where files are concerned. `needed` finds out, by trying, whether that
would hide a file or a folder that the node is to use, and asks for the capability then.

Linux keeps capabilities by thread: only the calling thread loses them, and those that it starts later.
"""

import contextlib
import ctypes
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from enum import IntEnum
from pathlib import Path

_PR_CAPBSET_READ, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 23, 24, 38, 47  # linux/prctl.h
_PR_CAP_AMBIENT_RAISE, _PR_CAP_AMBIENT_CLEAR_ALL = 2, 4
_CAPABILITY_VERSION_3 = 0x20080522  # linux/capability.h: 64 bits in two halves
_FIRST_UNPRIVILEGED_PORT = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")
_LAST_CAPABILITY = Path("/proc/sys/kernel/cap_last_cap")


class Capability(IntEnum):
    """Those that a node may need; the numbers are linux/capability.h's."""

    DAC_OVERRIDE = 1
    DAC_READ_SEARCH = 2
    NET_BIND_SERVICE = 10
    NET_ADMIN = 12


_FILES = (1 << Capability.DAC_OVERRIDE) | (1 << Capability.DAC_READ_SEARCH)


def needed(
    *, ports: Iterable[int | None] = (), readable: Iterable[Path] = (), writable: Iterable[Path] = ()
) -> frozenset[Capability]:
    """What a node needs that binds `ports` (None: one that is not known yet), reads the files `readable` again and again,
    and writes in the folders `writable`, which need not exist yet."""
    wanted = {Capability.NET_ADMIN}
    first = _first_unprivileged_port()
    if any(port is None or 0 < port < first for port in ports):
        wanted.add(Capability.NET_BIND_SERVICE)
    if _needs_override(readable, os.R_OK):
        wanted.add(Capability.DAC_READ_SEARCH)
    if _needs_override(map(_existing, writable), os.W_OK | os.X_OK):
        wanted.add(Capability.DAC_OVERRIDE)
    return frozenset(wanted)


def drop(keep: Collection[Capability]) -> list[str]:
    """Reduce this process, and what it starts, to `keep`, or to what it has of that. Returns what was done and what was
    not, a phrase each: without privileges, or in a user namespace, some of it is refused, which is no failure.

    Must be called before there are other threads, which would keep everything: raises RuntimeError if there are any.
    """
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("privileges are dropped for one thread only: drop them before starting others")
    effective, permitted, _ = _get()
    kept = sum(1 << one for one in keep) & permitted
    steps: list[tuple[str, Callable[[], object]]] = [
        ("bounding set reduced", lambda: _reduce_bounding_set(kept)),
        (f"capabilities: {describe(kept)}", lambda: _set(effective & kept, kept, kept)),
        ("inherited by programs that it starts", lambda: _set_ambient(kept)),
        ("no new privileges", lambda: _prctl(_PR_SET_NO_NEW_PRIVS, 1)),
    ]
    done = []
    for phrase, step in steps:
        try:
            step()
            done.append(phrase)
        except OSError as error:
            done.append(f"not {phrase} ({error.strerror})")
    return done


def describe(mask: int) -> str:
    """The capabilities in `mask` by name; those that are not in `Capability` by number."""
    names = {int(one): one.name.lower() for one in Capability}
    return ", ".join(names.get(bit, str(bit)) for bit in range(64) if mask >> bit & 1) or "none"


def _reduce_bounding_set(kept: int) -> None:
    for capability in range(_last_capability() + 1):
        if not kept >> capability & 1 and _prctl(_PR_CAPBSET_READ, capability) == 1:
            _prctl(_PR_CAPBSET_DROP, capability)


def _set_ambient(kept: int) -> None:
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    for capability in range(64):
        if kept >> capability & 1:
            _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, capability)


def _first_unprivileged_port() -> int:
    try:
        return int(_FIRST_UNPRIVILEGED_PORT.read_text(encoding="ascii"))
    except (OSError, ValueError):  # Linux before 4.11, or no /proc
        return 1024


def _last_capability() -> int:
    try:
        return int(_LAST_CAPABILITY.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 40  # CAP_CHECKPOINT_RESTORE, the last one of Linux 6


def _existing(path: Path) -> Path:
    """`path`, or the folder that it would be made in."""
    path = path.absolute()
    while not os.path.exists(path) and path != path.parent:  # Path.exists raises where we may not look
        path = path.parent
    return path


def _needs_override(paths: Iterable[Path], mode: int) -> bool:
    """Whether one of `paths` can be accessed now, but not without the capabilities that override the modes of files."""
    accessible = [path for path in paths if os.access(path, mode, effective_ids=True)]
    with _without(_FILES):
        return not all(os.access(path, mode, effective_ids=True) for path in accessible)


@contextlib.contextmanager
def _without(mask: int) -> Iterator[None]:
    """The body runs without the capabilities in `mask`, this thread only."""
    effective, permitted, inheritable = _get()
    _set(effective & ~mask, permitted, inheritable)
    try:
        yield
    finally:
        _set(effective, permitted, inheritable)


_Words = ctypes.c_uint32 * 6
"""Two of struct __user_cap_data_struct {effective, permitted, inheritable}: the low halves, then the high ones."""


class _Header(ctypes.Structure):
    """struct __user_cap_header_struct; pid 0 is the calling thread."""

    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


def _get() -> tuple[int, int, int]:
    """The effective, permitted and inheritable set of this thread."""
    words = _Words()
    _call("capget", ctypes.byref(_Header(_CAPABILITY_VERSION_3, 0)), words)
    return (words[0] | words[3] << 32, words[1] | words[4] << 32, words[2] | words[5] << 32)


def _set(effective: int, permitted: int, inheritable: int) -> None:
    sets = (effective, permitted, inheritable)
    words = _Words(*(one & 0xFFFFFFFF for one in sets), *(one >> 32 for one in sets))
    _call("capset", ctypes.byref(_Header(_CAPABILITY_VERSION_3, 0)), words)


def _prctl(option: int, *arguments: int) -> int:
    padded = [*arguments, 0, 0, 0, 0][:4]
    return _call("prctl", option, *(ctypes.c_ulong(one) for one in padded))


def _call(name: str, *arguments: object) -> int:
    """A function of the C library that returns -1 on failure. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    result: int = getattr(libc, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
