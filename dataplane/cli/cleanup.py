"""What ``cleanup`` removes, part by part: the firewall's table, the device with its routes, subnet file, run folder.

Theory of operation: a part that cannot be removed keeps none of the others on the host. It is told at the end, and what is
left of it stays in the note, so that the next cleanup finds it. The table is noted; where there is no note, or it cannot
be understood, it goes by the name of each device that carries our mark, so tables come before devices. A subnet file is
known by the note alone: which one was ours, and whether it still is, cannot be told without.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from dataplane import footprint
from dataplane.footprint import Footprint
from dataplane.host import Host, HostError
from dataplane.host.firewall import Firewall, table_name


class Cleanup:
    """Of the node of `run_dir`, whose lock the caller holds. `removed` and `failures` say what became of it."""

    def __init__(self, run_dir: Path, host: Host, open_firewall: Callable[[str], Firewall]) -> None:
        self._run_dir = run_dir
        self._host = host
        self._open_firewall = open_firewall
        self.removed: list[str] = []
        self.failures: list[str] = []

    def run(self) -> None:
        """Remove all that can be removed."""
        noted = self._read_note()
        left_table = self._remove_tables(noted)
        left_device = self._remove_devices()
        self._remove_files(left_device, left_table)
        if self._run_dir.is_dir():
            self._attempt(lambda: footprint.remove_run_dir(self._run_dir))

    def _attempt(self, step: Callable[[], list[str]]) -> bool:
        """Do it; whether it went well."""
        try:
            self.removed += step()
        except HostError as error:
            self.failures.append(str(error))
        except OSError as error:
            place = f"{error.filename}: " if error.filename is not None else ""
            self.failures.append(f"{place}{error.strerror or error}")
        else:
            return True
        return False

    def _read_note(self) -> Footprint | None:
        try:
            if footprint.is_broken(self._run_dir):
                self.failures.append(
                    f"the note {self._run_dir / footprint.STATE_NAME} was unreadable: the nftables table was looked for "
                    "by the device's name; a subnet file (subnet.env) that the node wrote is to be removed by hand"
                )
            return footprint.read(self._run_dir)
        except OSError:
            return None  # told when it is to be removed

    def _remove_tables(self, noted: Footprint | None) -> str | None:
        """Returns one that is left."""
        if noted is None:
            names = [table_name(device) for device in self._devices()]
        else:
            names = [noted.firewall] if noted.firewall is not None else []
        left = [name for name in names if not self._attempt(partial(self._remove_table, name))]
        return next(iter(left), None)

    def _remove_table(self, name: str) -> list[str]:
        return [f"nftables table {name}"] if self._open_firewall(name).remove() else []

    def _devices(self) -> list[str]:
        """Those with our mark; nothing if the host does not tell, which is told when they are to be removed."""
        try:
            return [one.name for one in self._host.interfaces() if one.alias == self._host.mark and one.kind == "tun"]
        except (HostError, OSError):
            return []

    def _remove_devices(self) -> str | None:
        """Returns one that is left."""
        return None if self._attempt(self._host.remove_ours) else next(iter(self._devices()), None)

    def _remove_files(self, left_device: str | None, left_table: str | None) -> None:
        self._attempt(
            lambda: footprint.remove(self._run_dir, device=left_device, firewall=left_table, failures=self.failures)
        )
