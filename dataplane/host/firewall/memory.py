"""A firewall in memory: the twin of ``nft``, for tests of everything above it."""

from copy import deepcopy
from dataclasses import dataclass, field

from dataplane.host import HostError
from dataplane.host.firewall import ruleset
from dataplane.host.firewall.rules import Rules
from dataplane.host.firewall.ruleset import Object


@dataclass
class MemoryFirewall:
    """A `Firewall` whose tables are lists that a test may change.

    `tables` holds the chains and rules by table and may be shared, as hosts share a kernel's. While `trouble` is set, every
    call raises it and changes nothing. `in_the_way` is what `obstacles` reports.
    """

    table: str
    tables: dict[str, list[Object]] = field(default_factory=dict)
    trouble: HostError | None = None
    in_the_way: list[str] = field(default_factory=list)
    _applied: Rules | None = None

    def apply(self, rules: Rules) -> None:
        """Sets the list of our table."""
        self._fail()
        self.tables[self.table] = deepcopy(ruleset.contents(self.table, rules))
        self._applied = rules

    def is_intact(self, rules: Rules) -> bool:
        """Compares it."""
        self._fail()
        return self._applied == rules and self.tables.get(self.table) == ruleset.contents(self.table, rules)

    def remove(self) -> bool:
        """Takes it out."""
        self._fail()
        self._applied = None
        return self.tables.pop(self.table, None) is not None

    def obstacles(self) -> list[str]:
        """As filled in."""
        self._fail()
        return list(self.in_the_way)

    def _fail(self) -> None:
        if self.trouble is not None:
            raise self.trouble
