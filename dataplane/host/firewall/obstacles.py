"""Chains of others that an accept of ours cannot overrule.

Theory of operation: a packet that is forwarded passes every base chain on the hook, of all tables. An accept ends only the
chain that it is in, a drop ends the packet (nft(8), VERDICT STATEMENTS). So where another table's chain has the policy
drop, as iptables' FORWARD has once Docker has started, the accept must be in there. flannel's iptables mode puts it there;
its nftables mode cannot, nor can we, who change only our own table. What is left is to say so.

A chain is no obstacle to a network if it, or a chain that it jumps to unconditionally, accepts everything from that network
and everything to it. Rules that stand before are not weighed, and rules that accept in another way are not understood: this
is a hint, not a proof. Pure: it reads listings in nftables' JSON.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Any

from dataplane.host.firewall.ruleset import FAMILY, Object
from routing.config import Network

_FAMILIES = {"ip": (4,), "ip6": (6,), "inet": (4, 6)}
_PROTOCOL = {4: "ip", 6: "ip6"}
_IPTABLES = {"ip": "iptables", "ip6": "ip6tables"}
_DOCKER_USER = "DOCKER-USER"  # the chain that Docker leaves to the administrator, and jumps to first


@dataclass(frozen=True)
class Chain:
    """A chain of a table."""

    family: str
    table: str
    name: str


def dropping_chains(objects: Sequence[Object], own_table: str) -> list[Chain]:
    """Of all chains, those on the forward hook whose policy is drop, but for those of our own table."""
    return [
        Chain(chain["family"], chain["table"], chain["name"])
        for chain in (one["chain"] for one in objects if "chain" in one)
        if chain.get("hook") == "forward" and chain.get("policy") == "drop" and chain["family"] in _FAMILIES
        if (chain["family"], chain["table"]) != (FAMILY, own_table)
    ]


def describe(chain: Chain, objects: Sequence[Object], networks: Sequence[Network]) -> list[str]:
    """Of each network that `chain` may drop packets of, that, and what to do. `objects` is the listing of its table."""
    rules: dict[str, list[list[Object]]] = {}
    for one in objects:
        if "rule" in one:
            rules.setdefault(one["rule"]["chain"], []).append(one["rule"].get("expr", []))
    reached = _reached(chain.name, rules)
    has_docker_user = any(one.get("chain", {}).get("name") == _DOCKER_USER for one in objects)
    return [
        f"the nftables chain {chain.name} of the table {chain.family} {chain.table} drops forwarded packets from and to "
        f"{network} that no rule there accepts; an accept of ours cannot overrule it. Accept them there: "
        + _remedy(chain, network, has_docker_user)
        for network in networks
        if network.version in _FAMILIES[chain.family]
        and not all(_accepts(reached, network, field) for field in ("saddr", "daddr"))
    ]


def _reached(chain: str, rules: dict[str, list[list[Object]]]) -> list[list[Object]]:
    """The rules of `chain` and of those that it leads to without a condition."""
    seen, found = [chain], []
    for name in seen:  # grows on the way
        for expressions in rules.get(name, ()):
            found.append(expressions)
            verdict = _without_conditions(expressions)
            target = (verdict.get("jump") or verdict.get("goto") or {}).get("target") if verdict else None
            if target is not None and target not in seen:
                seen.append(target)
    return found


def _accepts(rules: Sequence[list[Object]], network: Network, field: str) -> bool:
    """Whether a rule accepts whatever has its `field` in `network`."""
    for expressions in rules:
        verdict = _without_conditions(expressions)
        if verdict is None:
            matches = [one for one in _telling(expressions) if "match" in one]
            rest = [one for one in expressions if "match" not in one]
            if len(matches) != 1 or not _holds(matches[0]["match"], network, field):
                continue
            verdict = _without_conditions(rest)
        if verdict is not None and "accept" in verdict:
            return True
    return False


def _without_conditions(expressions: Sequence[Object]) -> Object | None:
    """The verdict of a rule that has one for every packet."""
    told = list(_telling(expressions))
    is_verdict = len(told) == 1 and told[0].keys() & {"accept", "jump", "goto"}
    return told[0] if is_verdict else None


def _telling(expressions: Sequence[Object]) -> Iterator[Object]:
    """Without counters and iptables' comments, which every packet passes."""
    for one in expressions:
        is_comment = isinstance(one.get("xt"), dict) and one["xt"].get("name") == "comment"
        if "counter" not in one and not is_comment:
            yield one


def _holds(match: dict[str, Any], network: Network, field: str) -> bool:
    """Whether the condition `match` is true of all whose `field` is in `network`."""
    payload = match["left"].get("payload") if isinstance(match["left"], dict) else None
    if match["op"] != "==" or payload != {"protocol": _PROTOCOL[network.version], "field": field}:
        return False
    right: Any = match["right"]
    try:
        prefix = right["prefix"] if isinstance(right, dict) else {"addr": right, "len": network.max_prefixlen}
        matched = ip_network((prefix["addr"], prefix["len"]))
    except (TypeError, KeyError, ValueError):
        return False  # a set, or a range
    return matched.prefixlen <= network.prefixlen and network.network_address in matched


def _remedy(chain: Chain, network: Network, has_docker_user: bool) -> str:
    program = _IPTABLES.get(chain.family) if chain.table == "filter" and chain.name == "FORWARD" else None
    if program is not None:
        into = _DOCKER_USER if has_docker_user else chain.name
        return f"{program} -I {into} -s {network} -j ACCEPT; {program} -I {into} -d {network} -j ACCEPT"
    insert = f"nft insert rule {chain.family} {chain.table} {chain.name} {_PROTOCOL[network.version]}"
    return f"{insert} saddr {network} accept; {insert} daddr {network} accept"
