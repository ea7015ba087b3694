"""One suite for every firewall: the contract of dataplane/host/firewall/__init__.py."""

import itertools
import json
import shutil
import sys
from collections.abc import Iterator
from ipaddress import ip_network

import pytest

from dataplane.host import HostError
from dataplane.host.firewall import Firewall, NftFirewall, Rules
from dataplane.host.firewall.memory import MemoryFirewall
from dataplane.lab import Lab, Namespace, inside

RULES = Rules(
    (ip_network("10.244.0.0/16"), ip_network("fd00:10:244::/48")),
    (ip_network("10.244.3.0/24"), ip_network("fd00:10:244:3::/64")),
    masquerade=True,
    forward=True,
    exclude=(ip_network("192.0.2.7/32"), ip_network("198.51.100.0/24"), ip_network("2001:db8::7/128")),
)
OTHERS = Rules(
    (ip_network("10.0.0.0/8"),), (ip_network("10.9.0.0/16"),), masquerade=False, forward=True, fully_random=False
)
TABLE = "pyflannel-dp-flannel.1"


class MemoryScene:
    def __init__(self) -> None:
        self.tables = {"foreign": [{"chain": {"name": "theirs"}}]}

    def firewall(self, table: str) -> Firewall:
        return MemoryFirewall(table, self.tables)

    def failing(self, table: str) -> Firewall:
        return MemoryFirewall(table, self.tables, trouble=HostError("no"))

    def everything(self) -> object:
        return json.loads(json.dumps(self.tables))

    def rule_count(self, table: str) -> int:
        return len(self._rules(table))

    def _rules(self, table: str) -> list[int]:
        return [at for at, one in enumerate(self.tables[table]) if "rule" in one]

    def delete_table(self, table: str) -> None:
        del self.tables[table]

    def flush(self, table: str) -> None:
        self.tables[table] = [one for one in self.tables[table] if "rule" not in one]

    def delete_rule(self, table: str, number: int) -> None:
        del self.tables[table][self._rules(table)[number]]

    def insert_rule(self, table: str, number: int) -> None:
        self.tables[table].insert(self._rules(table)[number], {"rule": {"chain": "postrouting", "expr": []}})

    def move_rule(self, table: str, number: int, before: int) -> None:
        rules, made = self._rules(table), self.tables[table]
        rule = made.pop(rules[number])
        made.insert(rules[before], rule)

    def add_chain(self, table: str) -> None:
        self.tables[table].append({"chain": {"name": "more"}})

    def close(self) -> None:
        pass


class NftScene:
    """A namespace with a table of somebody else's. What is done to our table here, others do with the text form of nft."""

    def __init__(self) -> None:
        self.lab = Lab("fw").__enter__()
        self.namespace = Namespace(self.lab, self.lab.new_namespace("a"))
        self.nft("add table ip foreign; add chain ip foreign c { type nat hook postrouting priority srcnat; }")
        self.nft("add rule ip foreign c ip saddr 172.17.0.0/16 counter masquerade")
        self.inside = inside(self.namespace.name)
        self.inside.__enter__()

    def nft(self, *words: str) -> str:
        done = self.namespace.run(["nft", *words])
        assert done.returncode == 0, done.stderr
        return done.stdout

    def firewall(self, table: str) -> Firewall:
        return NftFirewall(table)

    def failing(self, table: str) -> Firewall:
        """Its transactions have one command more, which the kernel refuses as the last."""
        add_bad = (
            "import json, subprocess, sys; sent = json.load(sys.stdin);"
            "rule = dict(family='inet', table=sys.argv[1], chain='nowhere', expr=[{'accept': None}]);"
            "is_new = 'add' in sent['nftables'][0]; sent['nftables'] += [{'add': {'rule': rule}}] * is_new;"
            "sys.exit(subprocess.run(['nft', *sys.argv[2:]], input=json.dumps(sent), text=True).returncode)"
        )
        return NftFirewall(table, [sys.executable, "-c", add_bad, table])

    def everything(self) -> object:
        listed = json.loads(self.nft("-j", "list", "ruleset"))["nftables"]
        return [one for one in listed if "metainfo" not in one]

    def _rules(self, table: str) -> list[dict]:
        return [one["rule"] for one in self.everything() if "rule" in one and one["rule"]["table"] == table]

    def rule_count(self, table: str) -> int:
        return len(self._rules(table))

    def delete_table(self, table: str) -> None:
        self.nft("delete", "table", "inet", table)

    def flush(self, table: str) -> None:
        self.nft("flush", "table", "inet", table)

    def delete_rule(self, table: str, number: int) -> None:
        rule = self._rules(table)[number]
        self.nft("delete", "rule", "inet", table, rule["chain"], "handle", str(rule["handle"]))

    def insert_rule(self, table: str, number: int) -> None:
        rule = self._rules(table)[number]
        self.nft("insert", "rule", "inet", table, rule["chain"], "position", str(rule["handle"]), "tcp dport 1 return")

    def move_rule(self, table: str, number: int, before: int) -> None:
        rules = self._rules(table)
        place = {name: rules[number][name] for name in ("family", "table", "chain")}
        new = {
            **place,
            "handle": rules[before]["handle"],
            "expr": rules[number]["expr"],
            "comment": rules[number]["comment"],
        }
        commands = [{"insert": {"rule": new}}, {"delete": {"rule": {**place, "handle": rules[number]["handle"]}}}]
        done = self.namespace.run(["nft", "-j", "-f", "-"], input=json.dumps({"nftables": commands}))
        assert done.returncode == 0, done.stderr

    def add_chain(self, table: str) -> None:
        self.nft("add", "chain", "inet", table, "more")

    def close(self) -> None:
        self.inside.__exit__(None, None, None)
        self.lab.close()


@pytest.fixture(params=["memory", pytest.param("nft", marks=pytest.mark.netns)])
def scene(request) -> Iterator[MemoryScene | NftScene]:
    if request.param == "nft" and shutil.which("nft") is None:
        pytest.skip("the program nft is missing (Debian package nftables)")
    made = MemoryScene() if request.param == "memory" else NftScene()
    yield made
    made.close()


def test_rules_are_intact_after_they_were_applied(scene):
    firewall = scene.firewall(TABLE)
    assert firewall.table == TABLE
    assert not firewall.is_intact(RULES)
    firewall.apply(RULES)
    assert scene.rule_count(TABLE) == 18
    assert firewall.is_intact(RULES)
    assert firewall.is_intact(RULES)
    assert not firewall.is_intact(OTHERS)


def test_rules_replace_one_another_whole(scene):
    firewall = scene.firewall(TABLE)
    for rules, count in ((RULES, 18), (OTHERS, 2), (OTHERS, 2), (RULES, 18)):
        firewall.apply(rules)
        assert scene.rule_count(TABLE) == count
        assert firewall.is_intact(rules)


def test_no_rules_at_all_are_kept_like_others(scene):
    nothing = Rules((), (), masquerade=False, forward=False)
    firewall = scene.firewall(TABLE)
    firewall.apply(RULES)
    firewall.apply(nothing)
    assert scene.rule_count(TABLE) == 0
    assert firewall.is_intact(nothing)
    scene.delete_table(TABLE)
    assert not firewall.is_intact(nothing)


@pytest.mark.parametrize("rules", [RULES, OTHERS])
def test_whatever_is_done_to_the_table_is_found_and_mended(scene, rules):
    firewall = scene.firewall(TABLE)
    firewall.apply(rules)
    count = scene.rule_count(TABLE)
    damages = [
        lambda: scene.delete_table(TABLE),
        lambda: scene.flush(TABLE),
        lambda: scene.add_chain(TABLE),
        lambda: scene.move_rule(TABLE, count - 1, count - 2),
        *(lambda number=number: scene.delete_rule(TABLE, number) for number in range(count)),
        *(lambda number=number: scene.insert_rule(TABLE, number) for number in (0, count - 1)),
    ]
    for damage in damages:
        damage()
        assert not firewall.is_intact(rules)
        firewall.apply(rules)
        assert scene.rule_count(TABLE) == count
        assert firewall.is_intact(rules)


def test_the_order_of_the_rules_counts(scene):
    firewall = scene.firewall(TABLE)
    firewall.apply(RULES)
    for first, second in itertools.pairwise(range(5)):
        scene.move_rule(TABLE, second, first)
        assert not firewall.is_intact(RULES)
        scene.move_rule(TABLE, second, first)
        assert firewall.is_intact(RULES)


def test_removing_leaves_what_was_before(scene):
    before = scene.everything()
    firewall = scene.firewall(TABLE)
    assert not firewall.remove()
    firewall.apply(RULES)
    assert scene.everything() != before
    assert firewall.remove()
    assert scene.everything() == before
    assert not firewall.is_intact(RULES)
    assert not firewall.remove()


def test_what_another_process_left_is_taken_over_and_removed(scene):
    scene.firewall(TABLE).apply(OTHERS)
    heir = scene.firewall(TABLE)
    assert not heir.is_intact(OTHERS)
    heir.apply(RULES)
    assert heir.is_intact(RULES)
    assert scene.firewall(TABLE).remove()


def test_two_tables_do_not_know_each_other(scene):
    one, two = scene.firewall(TABLE), scene.firewall("pyflannel-dp-flannel.2")
    one.apply(RULES)
    two.apply(OTHERS)
    one.apply(RULES)
    assert one.is_intact(RULES)
    assert two.is_intact(OTHERS)
    assert one.remove()
    assert two.is_intact(OTHERS)
    assert two.remove()


def test_what_others_do_in_their_tables_is_not_our_affair(scene):
    firewall = scene.firewall(TABLE)
    firewall.apply(RULES)
    if isinstance(scene, NftScene):
        scene.nft("add table inet another; add chain inet another postrouting; flush table ip foreign")
    else:
        scene.tables["another"] = []
    assert firewall.is_intact(RULES)


def test_a_failure_leaves_the_old_table_and_is_explained(scene):
    failing = scene.failing(TABLE)
    before = scene.everything()
    with pytest.raises(HostError):
        failing.apply(RULES)
    assert scene.everything() == before
    firewall = scene.firewall(TABLE)
    firewall.apply(OTHERS)
    before = scene.everything()
    with pytest.raises(HostError):
        failing.apply(RULES)
    assert scene.everything() == before
    assert firewall.is_intact(OTHERS)


@pytest.mark.parametrize("name", ["with space", 'quote"and;}', "tünnel", "-j", "x" * 100])
def test_any_name_will_do(scene, name):
    firewall = scene.firewall(name)
    firewall.apply(RULES)
    assert firewall.is_intact(RULES)
    assert scene.rule_count(name) == 18
    assert firewall.remove()


def test_obstacles_need_rules_that_they_stand_in_the_way_of(scene):
    firewall = scene.firewall(TABLE)
    assert firewall.obstacles() == []
    firewall.apply(RULES)
    assert firewall.obstacles() == []


# nft alone


@pytest.fixture
def nft() -> Iterator[NftScene]:
    if shutil.which("nft") is None:
        pytest.skip("the program nft is missing (Debian package nftables)")
    made = NftScene()
    yield made
    made.close()


def test_a_missing_program_is_named_with_its_package():
    firewall = NftFirewall("t", ["no-such-nft"])
    for call in (lambda: firewall.apply(RULES), firewall.remove, firewall.obstacles):
        with pytest.raises(HostError, match=r"no-such-nft is missing.*Debian package nftables"):
            call()


def test_a_program_that_cannot_be_run_is_named(tmp_path):
    with pytest.raises(HostError, match=r"cannot be run: .*Permission denied"):
        NftFirewall("t", [str(tmp_path)]).apply(RULES)


@pytest.mark.netns
def test_without_the_capability_it_is_named(nft):
    NftFirewall(TABLE).apply(RULES)
    firewall = NftFirewall(TABLE, ["setpriv", "--bounding-set", "-net_admin", "nft"])
    for call in (lambda: firewall.apply(RULES), firewall.remove, firewall.obstacles):
        with pytest.raises(HostError, match=r"Operation not permitted.*CAP_NET_ADMIN") as raised:
            call()
        assert "\n" not in str(raised.value)


@pytest.mark.netns
def test_what_the_kernel_refuses_is_said_in_one_line(nft):
    with pytest.raises(
        HostError, match=r"cannot set up the nftables table inet t\b.*No such file or directory.*Linux 5\.2"
    ) as raised:
        nft.failing("t").apply(RULES)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("output", ["not JSON", "[]", '{"other": 1}'])
def test_a_listing_that_is_not_understood_is_an_error(output):
    firewall = NftFirewall("t", ["sh", "-c", f"echo '{output}'"])
    with pytest.raises(HostError, match=r"not understood.*" + output[:3].replace("[", r"\[")):
        firewall.apply(RULES)


def test_a_program_that_fails_without_a_word_is_an_error():
    with pytest.raises(HostError, match="exit code 3"):
        NftFirewall("t", ["sh", "-c", "exit 3"]).apply(RULES)


@pytest.mark.netns
def test_a_table_put_to_sleep_is_found(nft):
    firewall = NftFirewall(TABLE)
    firewall.apply(RULES)
    nft.nft(f"add table inet {TABLE} {{ flags dormant; }}")
    assert not firewall.is_intact(RULES)
    firewall.apply(RULES)
    assert "dormant" not in nft.nft("list", "table", "inet", TABLE)


@pytest.mark.netns
def test_whoever_changes_the_table_while_it_is_applied_is_found(nft):
    """The first check after it says so, though a listing was taken that has the change in it."""
    meddle = f"nft -j -f - && nft insert rule inet {TABLE} postrouting tcp dport 1 return"
    firewall = NftFirewall(TABLE, ["sh", "-c", f'input=$(cat); echo "$input" | {{ {meddle}; }}', "sh"])
    firewall.apply(RULES)
    firewall._command = ["nft"]
    assert not firewall.is_intact(RULES)
    firewall.apply(RULES)
    assert firewall.is_intact(RULES)


@pytest.mark.netns
def test_what_is_listed_reads_as_it_was_meant(nft):
    NftFirewall(TABLE).apply(RULES)
    text = nft.nft("list", "table", "inet", TABLE)
    assert [line.strip() for line in text.splitlines() if "comment" in line or "hook" in line] == [
        "type nat hook postrouting priority srcnat; policy accept;",
        'meta mark & 0x00004000 == 0x00004000 return comment "kube-proxy masquerades these"',
        'ip saddr 10.244.3.0/24 ip daddr 10.244.0.0/16 return comment "our pods to the network"',
        'ip saddr 10.244.0.0/16 ip daddr 10.244.3.0/24 return comment "the network to our pods"',
        'ip saddr != 10.244.0.0/16 ip daddr 10.244.3.0/24 return comment "outside to our pods"',
        'ip saddr 10.244.0.0/16 ip daddr 192.0.2.7 return comment "excluded"',
        'ip saddr 10.244.0.0/16 ip daddr 198.51.100.0/24 return comment "excluded"',
        'ip saddr 10.244.0.0/16 ip daddr != 224.0.0.0/4 masquerade fully-random comment "the network to outside"',
        'ip saddr != 10.244.0.0/16 ip daddr 10.244.0.0/16 masquerade fully-random comment "outside to other hosts\' pods"',
        'ip6 saddr fd00:10:244:3::/64 ip6 daddr fd00:10:244::/48 return comment "our pods to the network"',
        'ip6 saddr fd00:10:244::/48 ip6 daddr fd00:10:244:3::/64 return comment "the network to our pods"',
        'ip6 saddr != fd00:10:244::/48 ip6 daddr fd00:10:244:3::/64 return comment "outside to our pods"',
        'ip6 saddr fd00:10:244::/48 ip6 daddr 2001:db8::7 return comment "excluded"',
        'ip6 saddr fd00:10:244::/48 ip6 daddr != ff00::/8 masquerade fully-random comment "the network to outside"',
        (
            "ip6 saddr != fd00:10:244::/48 ip6 daddr fd00:10:244::/48 masquerade fully-random "
            'comment "outside to other hosts\' pods"'
        ),
        "type filter hook forward priority filter; policy accept;",
        'ip saddr 10.244.0.0/16 accept comment "from the network"',
        'ip daddr 10.244.0.0/16 accept comment "to the network"',
        'ip6 saddr fd00:10:244::/48 accept comment "from the network"',
        'ip6 daddr fd00:10:244::/48 accept comment "to the network"',
    ]  # fmt: skip


@pytest.mark.netns
def test_a_process_that_kept_only_the_capability_may_do_it_all(nft):
    """As under systemd with User= and AmbientCapabilities=CAP_NET_ADMIN."""
    privileges = ["--reuid", "65534", "--clear-groups", "--inh-caps", "+net_admin", "--ambient-caps", "+net_admin"]
    # nft opens its input anew (/dev/stdin), so the pipe must be made by who runs it.
    command = ["setpriv", *privileges, "sh", "-c", 'cat | nft "$@"', "sh"]
    firewall = NftFirewall(TABLE, command)
    firewall.apply(RULES)
    assert firewall.is_intact(RULES)
    assert firewall.remove()
