"""Which chains of others are reported: from listings, and in a namespace where such a chain really drops."""

import shutil
from ipaddress import ip_network

import pytest

from dataplane.host.firewall import NftFirewall, Rules
from dataplane.host.firewall.obstacles import Chain, describe, dropping_chains
from dataplane.lab import Lab, Namespace, inside

NETWORK, SUBNET = ip_network("10.244.0.0/16"), ip_network("10.244.3.0/24")
NETWORK6, SUBNET6 = ip_network("fd00:10:244::/48"), ip_network("fd00:10:244:3::/64")
FORWARD = Chain("ip", "filter", "FORWARD")
ACCEPT, COUNTER = {"accept": None}, {"counter": {"packets": 3, "bytes": 9}}
COMMENT = {"xt": {"type": "match", "name": "comment"}}  # as nft 1.0.6 lists those of iptables


def chain(family: str, table: str, name: str, hook: str = "forward", policy: str = "drop") -> dict:
    return {"chain": {"family": family, "table": table, "name": name, "hook": hook, "policy": policy}}


def rule(*expressions: dict, into: str = "FORWARD") -> dict:
    return {"rule": {"chain": into, "expr": list(expressions)}}


def is_in(field: str, right: object, op: str = "==", protocol: str = "ip") -> dict:
    return {"match": {"op": op, "left": {"payload": {"protocol": protocol, "field": field}}, "right": right}}


def prefix(address: str, length: int) -> dict:
    return {"prefix": {"addr": address, "len": length}}


FROM, TO = is_in("saddr", prefix("10.244.0.0", 16)), is_in("daddr", prefix("10.244.0.0", 16))


def test_only_what_drops_on_the_forward_hook_elsewhere_is_looked_at():
    listed = [
        {"table": {"family": "ip", "name": "filter"}},
        chain("ip", "filter", "FORWARD"),
        chain("ip", "filter", "INPUT", hook="input"),
        chain("ip6", "filter", "FORWARD", policy="accept"),
        chain("inet", "ours", "forward"),
        chain("ip", "ours", "forward"),
        chain("inet", "firewall", "fwd"),
        chain("bridge", "b", "forward"),
        {"chain": {"family": "ip", "table": "filter", "name": "DOCKER-USER"}},
    ]
    found = dropping_chains(listed, "ours")
    assert found == [FORWARD, Chain("ip", "ours", "forward"), Chain("inet", "firewall", "fwd")]


def test_a_chain_without_accepts_is_an_obstacle_with_a_remedy():
    [told] = describe(FORWARD, [chain("ip", "filter", "FORWARD")], [NETWORK, NETWORK6])
    assert "the nftables chain FORWARD of the table ip filter drops forwarded packets from and to 10.244.0.0/16" in told
    assert told.endswith("iptables -I FORWARD -s 10.244.0.0/16 -j ACCEPT; iptables -I FORWARD -d 10.244.0.0/16 -j ACCEPT")


def test_the_remedy_goes_where_docker_leaves_room_for_it():
    docker = {"chain": {"family": "ip", "table": "filter", "name": "DOCKER-USER"}}
    [told] = describe(FORWARD, [docker], [NETWORK])
    assert "iptables -I DOCKER-USER -s 10.244.0.0/16 -j ACCEPT" in told


def test_each_family_by_itself():
    six = Chain("ip6", "filter", "FORWARD")
    assert "ip6tables -I FORWARD -s fd00:10:244::/48" in describe(six, [], [NETWORK, NETWORK6])[0]
    both = describe(Chain("inet", "fw", "fwd"), [], [NETWORK, NETWORK6])
    assert [one.split("Accept them there: ")[1] for one in both] == [
        f"nft insert rule inet fw fwd {protocol} saddr {network} accept; "
        f"nft insert rule inet fw fwd {protocol} daddr {network} accept"
        for protocol, network in (("ip", NETWORK), ("ip6", NETWORK6))
    ]


JUMP = rule(COUNTER, {"jump": {"target": "USER"}})


@pytest.mark.parametrize(
    "listed",
    [
        [rule(FROM, COMMENT, COUNTER, ACCEPT), rule(TO, COUNTER, ACCEPT)],
        [rule(is_in("saddr", prefix("10.0.0.0", 8)), ACCEPT), rule(is_in("daddr", prefix("0.0.0.0", 0)), ACCEPT)],
        [rule(ACCEPT)],
        [JUMP, rule(FROM, ACCEPT, into="USER"), rule(TO, ACCEPT, into="USER")],
        [rule({"goto": {"target": "A"}}), rule({"jump": {"target": "FORWARD"}}, into="A"), rule(ACCEPT, into="A")],
        [JUMP, rule(FROM, ACCEPT, into="USER"), rule(TO, ACCEPT)],
    ],
)
def test_what_accepts_the_network_is_no_obstacle(listed):
    assert describe(FORWARD, listed, [NETWORK]) == []


@pytest.mark.parametrize(
    "listed",
    [
        [rule(FROM, ACCEPT)],
        [rule(TO, ACCEPT)],
        [rule(FROM, {"drop": None}), rule(TO, ACCEPT)],
        [rule(FROM, TO, ACCEPT)],
        [rule(FROM, COUNTER), rule(TO, ACCEPT)],
        [rule(is_in("saddr", prefix("10.244.0.0", 17)), ACCEPT), rule(TO, ACCEPT)],
        [rule(is_in("saddr", prefix("10.245.0.0", 16)), ACCEPT), rule(TO, ACCEPT)],
        [rule(is_in("saddr", prefix("10.244.0.0", 16), "!="), ACCEPT), rule(TO, ACCEPT)],
        [rule(is_in("saddr", "10.244.0.0"), ACCEPT), rule(TO, ACCEPT)],
        [rule(is_in("saddr", "@set"), ACCEPT), rule(TO, ACCEPT)],
        [rule(is_in("saddr", {"range": ["10.0.0.0", "11.0.0.0"]}), ACCEPT), rule(TO, ACCEPT)],
        [rule(is_in("saddr", prefix("::", 0)), ACCEPT), rule(TO, ACCEPT)],
        [rule({"match": {"op": "==", "left": {"meta": {"key": "iifname"}}, "right": "docker0"}}, ACCEPT)],
        [rule({"match": {"op": "in", "left": 1, "right": 2}}, ACCEPT)],
        [rule({"xt": None}, ACCEPT)],
        [rule({"xt": {"type": "match", "name": "conntrack"}}, ACCEPT)],
        [rule(ACCEPT, into="USER")],
        [rule(FROM, {"jump": {"target": "USER"}}), rule(ACCEPT, into="USER")],
        [{"rule": {"chain": "FORWARD"}}],
    ],
)
def test_what_accepts_less_is_one(listed):
    assert len(describe(FORWARD, listed, [NETWORK])) == 1


@pytest.mark.netns
@pytest.mark.skipif(shutil.which("nft") is None, reason="the program nft is missing (Debian package nftables)")
def test_a_dropping_chain_drops_until_its_remedy_is_taken():
    rules = Rules((NETWORK, NETWORK6), (SUBNET, SUBNET6), masquerade=False, forward=True)
    with Lab("fwo") as lab:
        host = lab.add_host()
        pod = host.add_pod(SUBNET, SUBNET6)
        outside = Namespace(lab, lab.new_namespace("o"))
        host.ip(f"link add toout type veth peer name eth0 netns {outside.name}", "link set toout up")
        outside.ip("link set eth0 up", "addr add 198.51.100.2/24 dev eth0", "addr add 2001:db8:5::2/64 dev eth0 nodad",
                   "route add 10.244.0.0/16 via 198.51.100.1", "route add fd00:10:244::/48 via 2001:db8:5::1")  # fmt: skip
        host.ip("addr add 198.51.100.1/24 dev toout", "addr add 2001:db8:5::1/64 dev toout nodad")
        for one in (host, outside):
            one.settle()

        def reached() -> list[bool]:
            return [
                pod.run(f"ping -n -c 1 -W 0.3 {target}").returncode == 0 for target in ("198.51.100.2", "2001:db8:5::2")
            ]

        firewall = NftFirewall("t")
        with inside(host.name):
            firewall.apply(rules)
            assert firewall.obstacles() == []
        assert reached() == [True, True]
        their_chain = "add table inet fw; add chain inet fw drops { type filter hook forward priority 10; policy drop; }"
        assert host.run(["nft", their_chain]).returncode == 0
        assert reached() == [False, False]
        with inside(host.name):
            told = firewall.obstacles()
        assert ["from and to 10.244.0.0/16" in one for one in told] == [True, False]
        for message, wanted in zip(told, ([True, False], [True, True]), strict=True):
            for remedy in message.split("Accept them there: ")[1].split("; "):
                assert host.run(remedy).returncode == 0
            assert reached() == wanted
        with inside(host.name):
            assert firewall.obstacles() == []
            assert firewall.is_intact(rules)
