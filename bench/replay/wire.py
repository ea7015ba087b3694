"""Writes what a replay would send over the underlay, as pcapng: ``--write``.

Theory of operation: a pass of its own, which measures nothing. Each packet is judged and laid out as in a replay, and the
datagram recorded with outer headers and the time at which its packet was captured. What is not carried is left out.
"""

import errno
from collections.abc import Sequence
from pathlib import Path

from bench.replay.loading import Loader
from bench.replay.paths import BATCH, LANES, new_layout
from bench.replay.sides import Sides
from dataplane.batch import Batch
from dataplane.capture import Recorder
from dataplane.outbound import judge_batch
from routing.config import Address

_FIRST_SOURCE_PORT = 49152
_NO_LIMIT = 1 << 62  # whoever asks for it all gets it all; a full disk is an error


def write_underlay(path: Path, loader: Loader, sides: Sides, hosts: tuple[Address, Address]) -> int:
    """Write the datagrams of one time through the capture; returns how many. `hosts` are sender and receiver.

    Raises OSError, CaptureError.
    """
    layout = new_layout()
    with open(path, "wb") as file:
        recorder = Recorder(file, now_ns=lambda: 0, limit=_NO_LIMIT, name=str(path))
        for chunk in loader.chunks():
            batch = Batch(BATCH, memoryview(chunk.data))
            for first in range(0, len(chunk), BATCH):
                count = min(BATCH, len(chunk) - first)
                chunk.describe(batch, first, count)
                judge_batch(batch, sides.sending)
                layout.start(LANES, 1)  # a train for each datagram
                layout.lay_out(batch, sides.sending)
                _record(recorder, layout.trains, chunk.time_ns[first : first + count], sides, hosts)
        recorder.flush()
        why = recorder.stopped
        recorder.close()
    if why:
        raise OSError(errno.EIO, why, str(path))
    return recorder.packets


def _record(recorder: Recorder, trains: Batch, times: Sequence[int], sides: Sides, hosts: tuple[Address, Address]) -> None:
    for train in range(trains.count):
        endpoint = sides.sending.endpoints[trains.peer[train]]
        recorder.datagram(
            str(hosts[0]), _FIRST_SOURCE_PORT + trains.flow[train], endpoint[0], endpoint[1], trains.packet(train),
            time_ns=times[trains.head[train]],
        )  # fmt: skip
