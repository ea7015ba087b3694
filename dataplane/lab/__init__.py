"""Several hosts in network namespaces of one machine: real devices, real processes, nothing left behind.

Contract:

* A `Lab` is a context manager. It owns namespaces with names that nobody else uses, which hold its process number; what
  is started in one (`popen`) it kills, and what is made in one goes with it, when the context is left.
* A `Host` has ``eth0`` on the underlay, a `Pod` has ``eth0`` behind its host's bridge ``cni0``. Both are a `Namespace`:
  `run` and `popen` take a command as a list or as a line for ``shlex``, `ip` takes commands of iproute2.
* Host N is 192.0.2.N and 2001:db8::N (documentation prefixes, RFC 5737 and RFC 3849).
* The underlay is a bridge of the kernel. Once impairments are asked for (`Lab(link=...)`, `Lab.impair`,
  `Lab.partition`) a process of ours carries its frames instead, each ordered pair of hosts over a `Link` of its own; the
  hosts' offloads are off then, so that one frame is one packet and its checksum is complete.
* Trouble is a `LabError`, whose text holds the command that failed and what it said. `missing` tells beforehand why there
  can be no lab here.

``dataplane.lab.topology`` has whole labs as data, with nodes in them; ``dataplane.lab.topologyfile`` reads them from TOML.
"""

from dataplane.lab.hosts import UNDERLAY_MTU, Host, Lab, Pod
from dataplane.lab.namespace import LabError, Namespace, inside, missing

__all__ = ["UNDERLAY_MTU", "Host", "Lab", "LabError", "Namespace", "Pod", "inside", "missing"]
