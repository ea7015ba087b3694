"""Which rules there are and in which order: against flannel's own list, written down again and walked slowly."""

import json
import random
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dataplane.host.firewall import Rules, table_name
from dataplane.host.firewall.ruleset import contents, outline, transaction

NETWORK, SUBNET = ip_network("10.244.0.0/16"), ip_network("10.244.3.0/24")
NETWORK6, SUBNET6 = ip_network("fd00:10:244::/48"), ip_network("fd00:10:244:3::/64")
ADDRESS = {4: IPv4Address, 6: IPv6Address}
MULTICAST = {4: ip_network("224.0.0.0/4"), 6: ip_network("ff00::/8")}
BOTH = Rules((NETWORK, NETWORK6), (SUBNET, SUBNET6), masquerade=True, forward=True)


def walk(objects: list, chain: str, source, target, mark: int) -> dict:
    """The verdict of `chain`, as the kernel would reach it from the JSON that nft is given."""
    for rule in (one["rule"] for one in objects if "rule" in one):
        if rule["chain"] == chain:
            *matches, verdict = rule["expr"]
            if all(fits(one["match"], source, target, mark) for one in matches):
                return verdict
    return {"policy": None}


def fits(match: dict, source, target, mark: int) -> bool:
    left, right = match["left"], match["right"]
    if "&" in left:
        assert left["&"][0] == {"meta": {"key": "mark"}}
        return (mark & left["&"][1]) == right
    payload = left["payload"]
    if payload["protocol"] != {4: "ip", 6: "ip6"}[source.version]:
        return False
    address = {"saddr": source, "daddr": target}[payload["field"]]
    inside = address in ip_network((right["prefix"]["addr"], right["prefix"]["len"]))
    return inside if match["op"] == "==" else not inside


def flannel(network, subnet, exclude: list, source, target, mark: int) -> str:
    """masqRules of flannel's iptables mode, with its arguments and in its order; the exclude list is ours."""
    cluster_cidr, pod_cidr, multicast = network, subnet, MULTICAST[network.version]
    rules = [
        ({"--mark": (0x4000, 0x4000)}, "RETURN"),
        ({"-s": pod_cidr, "-d": cluster_cidr}, "RETURN"),
        ({"-s": cluster_cidr, "-d": pod_cidr}, "RETURN"),
        ({"! -s": cluster_cidr, "-d": pod_cidr}, "RETURN"),
        *(({"-s": cluster_cidr, "-d": one}, "RETURN") for one in exclude),
        ({"-s": cluster_cidr, "! -d": multicast}, "MASQUERADE"),
        ({"! -s": cluster_cidr, "-d": cluster_cidr}, "MASQUERADE"),
    ]
    holds = {
        "--mark": lambda value: mark & value[1] == value[0],
        "-s": lambda net: source in net,
        "! -s": lambda net: source not in net,
        "-d": lambda net: target in net,
        "! -d": lambda net: target not in net,
    }
    for arguments, verdict in rules:
        if all(holds[option](value) for option, value in arguments.items()):
            return verdict
    return "nothing"


@st.composite
def scenes(draw, version: int):
    bits = ADDRESS[version](0).max_prefixlen
    numbers = st.integers(0, 2**bits - 1)

    def net(at: int, size: int):
        return ip_network((ADDRESS[version](at), size), strict=False)

    length = draw(st.integers(1, bits - 1))
    network = net(draw(numbers), length)
    subnet = net(int(network[0]) | draw(numbers) >> length, draw(st.integers(length, bits)))
    exclude = draw(st.lists(st.builds(net, numbers, st.integers(0, bits)), max_size=3))
    inside = [network, subnet, MULTICAST[version], *exclude]

    def address():
        near = draw(st.sampled_from([*inside, None]))
        offset = draw(numbers)
        return ADDRESS[version](offset if near is None else int(near[0]) | offset & int(near.hostmask))

    mark = draw(st.sampled_from([0, 0x4000, 0x8000, 0xC001, 0x3FFF]))
    return network, subnet, exclude, address(), address(), mark


VERDICTS = {
    "RETURN": {"return": None},
    "MASQUERADE": {"masquerade": {"flags": "fully-random"}},
    "nothing": {"policy": None},
}


@pytest.mark.parametrize("version", [4, 6])
def test_every_packet_gets_flannels_verdict(version):
    @given(scenes(version))
    def check(scene):
        network, subnet, exclude, source, target, mark = scene
        both = [ip_network("fd12::/16"), ip_network("10.0.0.0/8")]
        other = both[0] if version == 4 else both[1]
        rules = Rules((other, network), (other, subnet), masquerade=True, forward=False, exclude=(other, *exclude))
        verdict = walk(contents("t", rules), "postrouting", source, target, mark)
        assert verdict == VERDICTS[flannel(network, subnet, exclude, source, target, mark)]

    check()


@pytest.mark.parametrize(
    ("target", "is_masqueraded"),
    [
        ("223.255.255.255", True), ("224.0.0.0", False), ("239.255.255.255", False), ("240.0.0.0", True),
        ("fe80::1", True), ("feff:ffff::1", True), ("ff00::", False), ("ff7f::1", False), ("ffff::1", False),
    ],
)  # fmt: skip
def test_multicast_is_the_whole_of_its_range(target, is_masqueraded):
    address = ip_address(target)
    source = (SUBNET if address.version == 4 else SUBNET6)[9]
    verdict = walk(contents("t", BOTH), "postrouting", source, address, 0)
    assert ("masquerade" in verdict) is is_masqueraded


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
@example(int(IPv4Address("10.244.0.0")), int(IPv4Address("192.0.2.1")))
@example(int(IPv4Address("192.0.2.1")), int(IPv4Address("10.244.255.255")))
def test_forwarding_is_accepted_from_and_to_the_network(source, target):
    source, target = IPv4Address(source), IPv4Address(target)
    concerned = source in NETWORK or target in NETWORK
    verdict = walk(contents("t", BOTH), "forward", source, target, 0)
    assert verdict == ({"accept": None} if concerned else {"policy": None})


def test_the_rules_of_both_families_in_order():
    made = contents("t", BOTH)
    masquerading = ["our pods to the network", "the network to our pods", "outside to our pods", "the network to outside",
                    "outside to other hosts' pods"]  # fmt: skip
    assert [one["rule"]["comment"] for one in made if "rule" in one] == [
        "kube-proxy masquerades these", *masquerading, *masquerading,
        "from the network", "to the network", "from the network", "to the network",
    ]  # fmt: skip
    chains = [one["chain"] for one in made if "chain" in one]
    assert [(c["name"], c["type"], c["hook"], c["prio"], c["policy"]) for c in chains] == [
        ("postrouting", "nat", "postrouting", 100, "accept"),
        ("forward", "filter", "forward", 0, "accept"),
    ]
    assert {properties["family"] for one in made for properties in one.values()} == {"inet"}


@pytest.mark.parametrize(("masquerade", "forward"), [(True, False), (False, True), (False, False)])
def test_what_is_off_has_no_chain(masquerade, forward):
    made = contents("t", Rules((NETWORK,), (SUBNET,), masquerade=masquerade, forward=forward))
    chains = [one["chain"]["name"] for one in made if "chain" in one]
    assert chains == ["postrouting"] * masquerade + ["forward"] * forward
    assert {one["rule"]["chain"] for one in made if "rule" in one} == set(chains)


def test_a_family_that_is_off_is_in_no_rule():
    exclude = (ip_network("2001:db8::/32"), ip_network("198.51.100.0/24"))
    text = json.dumps(contents("t", Rules((NETWORK,), (SUBNET,), masquerade=True, forward=True, exclude=exclude)))
    assert "ip6" not in text
    assert "2001:db8" not in text
    assert "198.51.100.0" in text


def test_ports_are_chosen_at_random_unless_that_is_off():
    for fully_random, wanted in ((True, {"flags": "fully-random"}), (False, None)):
        rules = Rules((NETWORK,), (SUBNET,), masquerade=True, forward=False, fully_random=fully_random)
        last = [one["rule"]["expr"][-1] for one in contents("t", rules) if "rule" in one]
        assert [one["masquerade"] for one in last if "masquerade" in one] == [wanted, wanted]


def test_a_transaction_makes_the_table_before_it_deletes_it():
    made = transaction("t", contents("t", BOTH))
    assert [next(iter(one)) for one in made[:3]] == ["add", "delete", "add"]
    assert all(one[next(iter(one))] == {"table": {"family": "inet", "name": "t"}} for one in made[:3])
    assert [one["add"] for one in made[3:]] == contents("t", BOTH)


def test_the_outline_tells_order_place_and_number():
    made = contents("t", BOTH)
    listed_by_chain = sorted(made, key=lambda one: "chain" in one and one["chain"]["name"] == "forward")
    assert outline([{"table": {"name": "t"}}, *listed_by_chain]) == outline(made)
    foreign = {"rule": {"chain": "postrouting", "expr": [{"accept": None}]}}
    for at in (2, len(made)):
        assert outline([*made[:at], foreign, *made[at:]]) != outline(made)
    for at in range(len(made)):
        assert outline(made[:at] + made[at + 1 :]) != outline(made)
    swapped = [made[0], made[2], made[1], *made[3:]]
    assert outline(swapped) != outline(made)
    assert outline([*made, {"set": {"name": "s"}}]) != outline(made)


@pytest.mark.parametrize(
    ("networks", "subnets"),
    [((NETWORK, NETWORK6), (SUBNET,)), ((NETWORK, NETWORK6), (SUBNET6, SUBNET)), ((NETWORK, NETWORK), (SUBNET, SUBNET))],
)
def test_families_that_do_not_pair_up_are_refused(networks, subnets):
    with pytest.raises(ValueError, match="one network and one subnet a family"):
        Rules(networks, subnets, masquerade=True, forward=True)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("flannel.1", "pyflannel-dp-flannel.1"),
        ("flannel_2-b", "pyflannel-dp-flannel_2-b"),
        ('x"; }', "pyflannel-dp-x/22/3b/20/7d"),
        ("tünnel", "pyflannel-dp-t/c3/bcnnel"),
        ("\udcff", "pyflannel-dp-/ff"),  # no UTF-8, as a device's name may be
        ("", "pyflannel-dp-"),
    ],
)
def test_tables_have_names_that_need_no_quotes(device, name):
    assert table_name(device) == name


def test_other_devices_have_other_tables():
    rng = random.Random(1)
    devices = {"".join(rng.choice('ab1._-é"$:') for _ in range(rng.randint(1, 3))) for _ in range(400)}
    assert len({table_name(device) for device in devices}) == len(devices)


def test_addresses_of_every_length_stay_what_they_are():
    rules = Rules((NETWORK,), (SUBNET,), masquerade=True, forward=False, exclude=(ip_network("192.0.2.7/32"),))
    texts = [json.dumps(one) for one in contents("t", rules)]
    assert any('{"addr": "192.0.2.7", "len": 32}' in text for text in texts)
    assert walk(contents("t", rules), "postrouting", ip_address("10.244.9.9"), ip_address("192.0.2.7"), 0) == {
        "return": None
    }
