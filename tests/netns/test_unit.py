"""deploy/pyflannel-dp.service as it is, under a real systemd; only what tests/underunit.py overrides differs."""

import json
import os
import shutil
import urllib.request
from ipaddress import IPv4Network

import pytest
from cluster import NETWORK, NODE, pings, until
from prometheus_client.parser import text_string_to_metric_families
from underunit import UNIT, missing, systemd

from dataplane.lab import Lab, inside
from dataplane.privileges import Capability

pytestmark = [pytest.mark.netns, pytest.mark.skipif(missing() is not None, reason=str(missing()))]
SHARES_A_LAB = True
PORT = 9807
OPTIONS = {"FLANNELD_NETWORK": NETWORK, "FLANNELD_IP_MASQ": "true", "FLANNELD_HEALTHZ_PORT": PORT}


@pytest.fixture(scope="module")
def lab():
    with Lab("unit") as lab:
        lab.add_host()
        lab.add_host()
        yield lab


@pytest.fixture(scope="module")
def host(lab):
    return lab.hosts[0]


@pytest.fixture(scope="module")
def unit(host, tmp_path_factory):
    with systemd(host, tmp_path_factory.mktemp("unit"), OPTIONS) as unit:
        yield unit


def status(unit):
    done = unit.run("/usr/local/bin/pyflannel-dp", "status", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def get(host, path):
    with inside(host.name), urllib.request.urlopen(f"http://127.0.0.1:{PORT}{path}", timeout=5) as answer:
        return answer.status, answer.read().decode()


def test_it_is_ready_and_has_no_more_than_it_needs(unit):
    assert status(unit)["state"] == "running"
    lines = unit.run("cat", f"/proc/{unit.show('MainPID')}/status").stdout.splitlines()
    found = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    user = unit.run("id", "-u", "pyflannel-dp").stdout.strip()
    assert user != "0"
    assert found["Uid"].split() == [user] * 4
    only = 1 << Capability.NET_ADMIN
    assert {int(found[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {only}
    assert (found["NoNewPrivs"], found["Seccomp"]) == ("1", "2")
    assert unit.show("NRestarts") == "0"


def test_what_needs_privileges_was_done(unit, host):
    log = unit.log()
    assert " WARNING " not in log
    assert " ERROR " not in log
    device = status(unit)["device"]["name"]
    assert host.run(["cat", f"/proc/sys/net/ipv4/conf/{device}/accept_local"]).stdout == "1\n"
    assert "pyflannel-dp" in host.run("nft list tables").stdout
    routes = json.loads(host.run("ip -j route show").stdout)
    assert any(route["dst"] == NETWORK and route["dev"] == device for route in routes)


def test_subnet_env_is_for_everybody(unit):
    assert unit.run("stat", "-c", "%a %U", "/run/flannel/subnet.env").stdout == "644 pyflannel-dp\n"
    assert f"FLANNEL_NETWORK={NETWORK}\n" in unit.run("cat", "/run/flannel/subnet.env").stdout


def test_health_and_metrics(unit, host):
    assert get(host, "/healthz") == (200, "ok\n")
    assert get(host, "/readyz") == (200, "ok\n")
    families = {family.name: family for family in text_string_to_metric_families(get(host, "/metrics")[1])}
    assert families["pyflannel_dp_ready"].samples[0].value == 1
    assert families["pyflannel_dp_lease_expiration_timestamp_seconds"].samples[0].value == pytest.approx(
        status(unit)["lease"]["expiration"]
    )


def test_pods_reach_each_other(unit, lab, tmp_path):
    """The other node is an ordinary process; it is known here by a reservation that root writes into the store."""
    a, b = lab.hosts
    lease = status(unit)["lease"]
    subnet = "10.244.250.0/24"
    value = {"PublicIP": str(b.ipv4), "BackendType": "vxlan", "BackendData": {"VNI": 1, "VtepMAC": "02:fd:c0:00:02:02"}}
    key = "/var/lib/pyflannel-dp/subnets/" + subnet.replace("/", "-")
    unit.run("sh", "-c", f"echo '{json.dumps(value)}' >{key}")
    b.popen([
        *NODE, "--store", "static", "--network", NETWORK, "--subnet", subnet, "--run-dir", str(tmp_path / "run"),
        "--peer", f"{lease['subnet']}={a.ipv4}",
    ])  # fmt: skip
    until("the other node", (tmp_path / "run" / "subnet.env").exists)
    until("the peer", lambda: len(status(unit)["peers"]) == 1)
    here, there = a.add_pod(IPv4Network(lease["subnet"])), b.add_pod(IPv4Network(subnet))
    assert pings(here, there.ipv4)
    assert pings(there, here.ipv4)


def test_the_watchdog_restarts_a_node_that_hangs(unit):
    before, subnet, restarts = unit.show("MainPID"), status(unit)["lease"]["subnet"], int(unit.show("NRestarts"))
    unit.run("kill", "-STOP", before)
    until("the watchdog's restart", lambda: unit.show("MainPID") not in {before, "0"})
    unit.wait_until_active()
    assert status(unit)["lease"]["subnet"] == subnet
    assert int(unit.show("NRestarts")) == restarts + 1


def test_a_restart_keeps_the_subnet_and_says_stopping(unit):
    subnet = status(unit)["lease"]["subnet"]
    assert unit.run("systemctl", "restart", UNIT).returncode == 0
    assert unit.show("ActiveState") == "active", unit.log()
    assert status(unit)["lease"]["subnet"] == subnet


def test_stopping_leaves_what_the_next_start_needs(unit):
    assert unit.run("systemctl", "stop", UNIT).returncode == 0
    assert (unit.show("ActiveState"), unit.show("Result"), unit.show("ExecMainStatus")) == ("inactive", "success", "0")
    assert unit.run("test", "-e", "/run/flannel/subnet.env").returncode == 0
    assert unit.run("test", "-e", "/run/pyflannel-dp/state.json").returncode == 0
    assert unit.run("systemctl", "start", UNIT).returncode == 0


def test_options_that_make_no_sense_are_not_tried_again(unit):
    unit.run("systemctl", "stop", UNIT)
    unit.run("sh", "-c", "echo FLANNELD_PORT=many >>/etc/default/pyflannel-dp")
    assert unit.run("systemctl", "start", UNIT).returncode == 1
    assert (unit.show("ActiveState"), unit.show("ExecMainStatus")) == ("failed", "2")
    assert "FLANNELD_PORT" in unit.log() or "--port" in unit.log()


@pytest.mark.skipif(shutil.which("etcd") is None, reason="no etcd: apt-get install etcd-server")
def test_leases_in_etcd(lab, tmp_path):
    """gRPC works behind the unit's restrictions, too. Afterwards nothing is left of systemd."""
    host = lab.add_host()
    with open(tmp_path / "etcd.log", "w") as log:
        host.popen(["etcd", "--data-dir", str(tmp_path / "etcd")], stdout=log, stderr=log)
    config = [*NODE, "leases", "config", "--store", "etcd", "--set", "-"]
    text = json.dumps({"Network": NETWORK, "Backend": {"Type": "vxlan"}})
    until("etcd", lambda: host.run(config, input=text).returncode == 0)
    with systemd(host, tmp_path, {"FLANNELD_ETCD_ENDPOINTS": "http://127.0.0.1:2379"}) as unit:
        assert status(unit)["store"]["kind"] == "etcd"
        assert status(unit)["lease"]["subnet"] in host.run([*NODE, "leases", "list", "--store", "etcd"]).stdout
        assert " ERROR " not in unit.log()
    assert not any(os.path.exists(f"/sys/fs/cgroup/{place}unit-{host.name}") for place in ("", "unified/"))
