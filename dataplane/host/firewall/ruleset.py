"""The rules, as libnftables takes them in JSON (libnftables-json(5)). Pure: nothing here touches the kernel.

Theory of operation: flannel's rules in flannel's order, as its iptables mode has them
(pkg/trafficmngr/iptables/iptables.go, masqRules, masqIP6Rules and forwardRules at flannel cdf76059). Only new connections
see a nat chain, and a rule judges their first packet. The kernel limits a rule with an IP address to its family by itself,
so both families share the chains.

flannel's nftables mode (pkg/trafficmngr/nftables/nftables.go, addMasqRules) differs twice, and we do not follow it. Its
fourth rule is "not our subnet → network: return" where the iptables mode has "not network → our subnet", which leaves
nothing for its last rule: what enters at a host other than the pod's is not masqueraded and cannot be answered. And it
compares the whole mark with kube-proxy's, where the iptables mode looks at that one bit, as kube-proxy does.

Every rule has a comment. It tells a reader of ``nft list table`` what the rule is for, and us whether the rules that are
there are those that we sent.
"""

from collections.abc import Iterator
from typing import Any

from dataplane.host.firewall.rules import Rules
from routing.config import Network

FAMILY = "inet"
"""One table for IPv4 and IPv6; the kernel knows NAT in it since Linux 5.2."""

Object = dict[str, Any]
"""A table, chain or rule in nftables' JSON: its kind, and under that its properties."""

POSTROUTING = "postrouting"
FORWARD = "forward"

_KUBE_PROXY_MARK = 0x4000
"""Masquerade this, says kube-proxy to itself: pkg/trafficmngr/trafficmngr.go, KubeProxyMark."""

_SRCNAT, _FILTER = 100, 0  # priorities: include/uapi/linux/netfilter_ipv4.h, NF_IP_PRI_*
_PROTOCOL = {4: "ip", 6: "ip6"}
_MULTICAST = {4: ("224.0.0.0", 4), 6: ("ff00::", 8)}
_RETURN: Object = {"return": None}
_ACCEPT: Object = {"accept": None}


def transaction(table: str, wanted: list[Object]) -> list[Object]:
    """The commands that replace `table` by what is `wanted`: it is made if need be, so that it can be deleted, and made
    anew."""
    make = {"table": {"family": FAMILY, "name": table}}
    return [{"add": make}, {"delete": make}, {"add": make}, *({"add": one} for one in wanted)]


def contents(table: str, rules: Rules) -> list[Object]:
    """The chains and rules of `table`, in order."""
    made: list[Object] = []
    if rules.masquerade:
        made.append(_chain(table, POSTROUTING, "nat", _SRCNAT))
        made += (_rule(table, POSTROUTING, *one) for one in _masquerade(rules))
    if rules.forward:
        made.append(_chain(table, FORWARD, "filter", _FILTER))
        made += (_rule(table, FORWARD, *one) for one in _forward(rules))
    return made


def outline(objects: list[Object]) -> list[tuple[str, ...]]:
    """What tells our chains and rules from others: their kind, place and comment, in order; tables are left out."""
    found = []
    for one in objects:
        for kind, properties in one.items():
            if kind != "table":
                keys = ("chain", "comment") if kind == "rule" else ("name",)
                found.append((kind, *(str(properties.get(key)) for key in keys)))
    return sorted(found, key=lambda place: place[0])  # chains before rules; nft may list them so or chain by chain


def _masquerade(rules: Rules) -> Iterator[tuple[str, list[Object]]]:
    """Comment and expressions of each rule of the nat chain."""
    mark = {"&": [{"meta": {"key": "mark"}}, _KUBE_PROXY_MARK]}
    masquerade: Object = {"masquerade": {"flags": "fully-random"} if rules.fully_random else None}
    yield "kube-proxy masquerades these", [{"match": {"op": "==", "left": mark, "right": _KUBE_PROXY_MARK}}, _RETURN]
    for network, subnet in zip(rules.networks, rules.subnets, strict=True):
        yield "our pods to the network", [_from(subnet), _to(network), _RETURN]
        yield "the network to our pods", [_from(network), _to(subnet), _RETURN]
        yield "outside to our pods", [_from(network, "!="), _to(subnet), _RETURN]
        for excluded in rules.exclude:  # not in flannel
            if excluded.version == network.version:
                yield "excluded", [_from(network), _to(excluded), _RETURN]
        yield "the network to outside", [_from(network), _to_unicast(network.version), masquerade]
        yield "outside to other hosts' pods", [_from(network, "!="), _to(network), masquerade]


def _forward(rules: Rules) -> Iterator[tuple[str, list[Object]]]:
    for network in rules.networks:
        yield "from the network", [_from(network), _ACCEPT]
        yield "to the network", [_to(network), _ACCEPT]


def _from(network: Network, op: str = "==") -> Object:
    return _match(network.version, "saddr", op, str(network.network_address), network.prefixlen)


def _to(network: Network) -> Object:
    return _match(network.version, "daddr", "==", str(network.network_address), network.prefixlen)


def _to_unicast(version: int) -> Object:
    return _match(version, "daddr", "!=", *_MULTICAST[version])


def _match(version: int, field: str, op: str, address: str, length: int) -> Object:
    left = {"payload": {"protocol": _PROTOCOL[version], "field": field}}
    return {"match": {"op": op, "left": left, "right": {"prefix": {"addr": address, "len": length}}}}


def _chain(table: str, name: str, kind: str, priority: int) -> Object:
    """A base chain on the hook of its own name; who reaches its end goes on to the chains of others."""
    place = {"family": FAMILY, "table": table, "name": name}
    return {"chain": {**place, "type": kind, "hook": name, "prio": priority, "policy": "accept"}}


def _rule(table: str, chain: str, comment: str, expressions: list[Object]) -> Object:
    return {"rule": {"family": FAMILY, "table": table, "chain": chain, "comment": comment, "expr": expressions}}
