"""A cluster in a lab whose nodes keep their leases in a real etcd, on hosts of its own; etcdctl is the second opinion."""

import base64
import contextlib
import json
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from cluster import NETWORK, NODE, Cluster, until

from dataplane.lab import Host, Lab

PREFIX = "/coreos.com/network"
CONFIG = {"Network": NETWORK, "Backend": {"Type": "vxlan"}}


class Member:
    """One etcd, on `host`."""

    def __init__(self, host: Host, folder: Path) -> None:
        self.host, self.data, self.log = host, folder / f"etcd{host.number}", folder / f"etcd{host.number}.log"
        self.process: subprocess.Popen[str] | None = None

    @property
    def client_url(self) -> str:
        return f"http://{self.host.ipv4}:2379"

    @property
    def peer_url(self) -> str:
        return f"http://{self.host.ipv4}:2380"

    def start(self, members: Sequence["Member"]) -> None:
        cluster = ",".join(f"m{one.host.number}={one.peer_url}" for one in members)
        with open(self.log, "a") as log:
            self.process = self.host.popen(
                [
                    "etcd", "--name", f"m{self.host.number}", "--data-dir", str(self.data),
                    "--listen-client-urls", self.client_url, "--advertise-client-urls", self.client_url,
                    "--listen-peer-urls", self.peer_url, "--initial-advertise-peer-urls", self.peer_url,
                    "--initial-cluster", cluster, "--heartbeat-interval", "50", "--election-timeout", "300",
                ],
                stdout=log, stderr=log,
            )  # fmt: skip

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def wipe(self) -> None:
        shutil.rmtree(self.data)


class EtcdCluster(Cluster):
    """A `Cluster` with `members`; nodes run on the other hosts."""

    def __init__(self, lab: Lab, folder: Path, members: int, *options: str) -> None:
        super().__init__(lab, folder, *options)
        self.members = [Member(lab.add_host(label=f"etcd{number}"), folder) for number in range(members)]
        for member in self.members:
            member.start(self.members)
        self.wait_for_etcd()

    @property
    def endpoints(self) -> str:
        return ",".join(member.client_url for member in self.members)

    def arguments(self, host: Host) -> list[str]:
        return [
            "--etcd-endpoints", self.endpoints,
            "--run-dir", str(self.run_dir(host)), "--subnet-file", str(self.subnet_file(host)),
            *self.options,
        ]  # fmt: skip

    def wait_for_etcd(self) -> None:
        until("etcd to answer", lambda: self.etcdctl("get", "x", check=False).returncode == 0)

    def etcdctl(self, *command: str, check: bool = True, **options) -> subprocess.CompletedProcess[str]:
        program = ["env", "ETCDCTL_API=3", "etcdctl", "--endpoints", self.endpoints, "--command-timeout", "2s"]
        done = self.members[0].host.run([*program, *command], **options)
        assert not check or done.returncode == 0, done.stderr
        return done

    def put(self, key: str, value: object) -> None:
        text = value if isinstance(value, str) else json.dumps(value)
        until("the put", lambda: self.etcdctl("put", f"{PREFIX}/{key}", text, check=False).returncode == 0)

    def delete(self, key: str) -> None:
        self.etcdctl("del", f"{PREFIX}/{key}")

    def stored(self, below: str = "subnets/", prefix: str = PREFIX) -> dict[str, dict]:
        """What etcd has there: value, lease and revisions by key, without the prefix."""
        found = json.loads(self.etcdctl("get", "--prefix", f"{prefix}/{below}", "-w", "json").stdout)
        texts = [(base64.b64decode(one["key"]).decode(), one) for one in found.get("kvs", [])]
        return {
            key.removeprefix(f"{prefix}/{below}"): one | {"value": base64.b64decode(one["value"]).decode()}
            for key, one in texts
        }

    def leases(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """``pyflannel-dp leases …`` from the first etcd's host."""
        return self.members[0].host.run([*NODE, "leases", *arguments, "--etcd-endpoints", self.endpoints])

    def key(self, host: Host) -> str:
        key: str = self.status(host)["lease"]["key"]
        return key


@contextlib.contextmanager
def etcd_cluster(
    folder: Path, *options: str, nodes: int = 2, members: int = 1, config: dict | None = None, pods: bool = True
) -> Iterator[EtcdCluster]:
    """`nodes` hosts with a running node each, and a pod with `pods`, all knowing one another."""
    with Lab("etc") as lab:
        made = EtcdCluster(lab, folder, members, *options)
        made.put("config", config or CONFIG)
        hosts = [lab.add_host() for _ in range(nodes)]
        for host in hosts:
            made.start(host)
            if pods:
                made.add_pod(host)
        for host in hosts:
            made.wait_for_peers(host, nodes - 1)
        made.nodes = hosts
        yield made
