"""The node as a process: its logs, privileges and signals, what watches it, and its end.

Privileges go first, before any other thread exists, since on Linux a thread can only give up its own (capabilities(7)).
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from dataplane import logs, privileges, systemd
from dataplane.cli.options import Options
from dataplane.cli.stores import ETCD, LOCAL, identity_of
from dataplane.host import mark_of
from dataplane.host.external import choose
from dataplane.host.firewall import NftFirewall
from dataplane.host.netlink import NetlinkHost
from dataplane.loopmonitor import LoopMonitor
from dataplane.node import Node, NodeError, Settings, unless_stopped
from routing.stores import SubnetStore

log = logging.getLogger(__name__)


def run(options: Options, warnings: Sequence[str] = ()) -> None:
    """Run the node that `options` describe until a signal ends it; the log begins with `warnings`.

    Raises what makes it fail.
    """
    logs.configure(options.v, options.log_json)
    for warning in warnings:
        log.warning("%s", warning)
    settings = options.settings()
    if options.drop_capabilities:
        _drop_privileges(options, settings)
    _run_loop(_serve(options, settings))


def _drop_privileges(options: Options, settings: Settings) -> None:
    store = options.store
    files = (store.etcd_cafile, store.etcd_certfile, store.etcd_keyfile)  # read again when etcd is reached anew
    folders = [settings.run_dir, settings.subnet_file.parent]
    if store.kind == LOCAL:
        folders.append(store.store_dir)
    if settings.capture is not None:
        folders.append(settings.capture.parent)
    keep = privileges.needed(
        ports=(options.port, options.healthz_port),  # no --port: the network configuration, not read yet, has it
        readable=[file for file in (*files, options.net_config_path) if file is not None],
        writable=folders,
    )
    for step in privileges.drop(keep):
        log.debug("privileges: %s", step)


def _run_loop(main: Coroutine[Any, Any, None]) -> None:
    try:
        import uvloop  # noqa: PLC0415 - the node runs without it, too
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


async def _serve(options: Options, settings: Settings) -> None:
    notifier = systemd.Notifier.from_environment()
    stop = _stop_on_signals(notifier)
    host = NetlinkHost(mark_of(settings.run_dir))
    await asyncio.to_thread(choose, host, settings.choice)  # before anything is written for others to read
    store = await unless_stopped(stop, asyncio.ensure_future(_open_store(options)))
    if store is not None:
        try:
            monitor = LoopMonitor()
            node = Node(
                settings,
                store,
                host,
                open_firewall=NftFirewall,
                check_config=options.config_check(),
                reports=[lambda: {"loop": monitor.report()}],
            )
            await _run_node(options, node, monitor, stop, notifier)
        finally:
            await store.close()
    log.info("stopped")


def _stop_on_signals(notifier: systemd.Notifier) -> asyncio.Event:
    """What is set by the first signal that ends us; systemd is told at once, since undoing everything takes its time."""
    stop = asyncio.Event()

    def end() -> None:
        if not stop.is_set():
            stop.set()
            notifier.stopping()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end)
    return stop


async def _open_store(options: Options) -> SubnetStore:
    if options.store.kind != ETCD:
        return await options.open_store("")
    try:
        identity = await asyncio.to_thread(identity_of, options.run_dir)
    except OSError as error:
        raise NodeError(f"cannot use the run folder {options.run_dir}: {error}") from None
    return await options.open_store(identity)


async def _run_node(
    options: Options, node: Node, monitor: LoopMonitor, stop: asyncio.Event, notifier: systemd.Notifier
) -> None:
    monitor.add_beat(notifier.beat)
    async with contextlib.AsyncExitStack() as undo:
        if options.healthz_port:
            undo.callback(_start_health(options, node, monitor))
        watching = asyncio.ensure_future(monitor.run())
        undo.push_async_callback(_cancel, watching)
        await node.run(stop, lambda: notifier.ready(node.summary()))


def _start_health(options: Options, node: Node, monitor: LoopMonitor) -> Callable[[], None]:
    """Answer on the health port; returns what ends that. Raises NodeError."""
    from dataplane.health import HealthError, HealthServer  # noqa: PLC0415 - ten milliseconds of a start, if it is asked for

    health = HealthServer(
        str(options.healthz_ip),
        options.healthz_port,
        is_ready=lambda: node.is_ready,
        metrics=lambda: _render_metrics(node),
    )
    try:
        health.start()
    except HealthError as error:
        raise NodeError(str(error)) from None
    monitor.add_beat(health.beat)
    return health.close


def _render_metrics(node: Node) -> bytes:
    from dataplane.metrics import render  # noqa: PLC0415 - some five mebibytes that only a scrape needs

    return render(node.status())


async def _cancel(task: "asyncio.Future[Any]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
