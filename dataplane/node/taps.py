"""What ``--capture``, ``--trace`` and ``--faults`` put around the device and the underlay of a node.

The taps stand inside, the faults outside: a tap sees what is on the network. What is not asked for is not imported.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from dataplane.device import Device
from dataplane.node.settings import NodeError, Settings
from dataplane.underlay import Underlay

if TYPE_CHECKING:
    from dataplane.capture import Recorder
    from dataplane.trace import Tracer

log = logging.getLogger(__name__)


class Taps:
    """The wrappers that `settings` ask for; `open` comes first. `now_ns` is the clock of captures and traces, `rng` decides
    which packets meet faults."""

    def __init__(self, settings: Settings, now_ns: Callable[[], int], rng: random.Random) -> None:
        self._settings = settings
        self._now_ns = now_ns
        self._rng = rng
        self._recorder: Recorder | None = None
        self._tracer: Tracer | None = None

    def open(self, undo: contextlib.AsyncExitStack, underlay_name: str) -> None:
        """Open what is asked for: only a node that runs here empties the capture file. Raises NodeError."""
        path = self._settings.capture
        if path is not None:
            from dataplane.capture import open_recorder  # noqa: PLC0415 - only then

            try:
                self._recorder = open_recorder(path, now_ns=self._now_ns, underlay=underlay_name)
            except OSError as error:
                raise NodeError(f"cannot write the capture file {path}: {error.strerror}") from error
            undo.callback(self._recorder.close)
        if self._settings.trace:
            from dataplane.trace import Tracer  # noqa: PLC0415 - as above

            self._tracer = Tracer(now_ns=self._now_ns)

    def around_underlay(self, underlay: Underlay, hosts: dict[int, str], port: int, header_length: int) -> Underlay:
        """`underlay` with what is asked for around it. `hosts` are our addresses by family, for the packets' headers."""
        if self._recorder is not None:
            from dataplane.capture import CapturingUnderlay  # noqa: PLC0415 - only with --capture

            underlay = CapturingUnderlay(underlay, self._recorder, hosts=hosts, port=port, header_length=header_length)
        if self._tracer is not None:
            from dataplane.trace import TracingUnderlay  # noqa: PLC0415 - only with --trace

            underlay = TracingUnderlay(underlay, self._tracer, hosts=hosts, port=port, header_length=header_length)
        if self._settings.faults is not None:
            from dataplane.faults import FaultyUnderlay  # noqa: PLC0415 - only with --faults
            from dataplane.underlay.link import describe_link  # noqa: PLC0415 - as above

            log.warning("faults are injected on purpose: %s", describe_link(self._settings.faults))
            underlay = FaultyUnderlay(underlay, self._settings.faults, self._rng, header_length=header_length)
        return underlay

    def around_device(self, device: Device) -> Device:
        """As for the underlay."""
        if self._recorder is not None:
            from dataplane.capture import CapturingDevice  # noqa: PLC0415 - only with --capture

            device = CapturingDevice(device, self._recorder)
        if self._tracer is not None:
            from dataplane.trace import TracingDevice  # noqa: PLC0415 - only with --trace

            device = TracingDevice(device, self._tracer)
        return device

    async def keep_flushing(self, sleep: Callable[[float], Awaitable[None]]) -> None:
        """Bring what was captured to the file, for those who look at it meanwhile, and for the case that we are killed.

        Never ends by itself.
        """
        if self._recorder is None:
            await asyncio.Event().wait()
            return
        from dataplane.capture import FLUSH_SECONDS  # noqa: PLC0415 - only with --capture

        while True:
            await sleep(FLUSH_SECONDS)
            self._recorder.flush()

    def report(self) -> dict[str, Any]:
        """What there is to say in `status`."""
        return {"capture": self._recorder.report() if self._recorder is not None else None}
