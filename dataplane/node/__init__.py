"""One node from start to stop: store + host + engine.

Contract: a `Node` is made from `Settings`, a store and a host, and does everything in `run`. Inside, `State` holds what the
node has come to have, and everybody reads it there; each part of it is changed by one keeper only, `LeaseKeeper` what
follows from the store, `HostKeeper` what follows from the machine. `Taps` stand around the device and the underlay.
"""

from dataplane.node.node import Node, unless_stopped
from dataplane.node.settings import LOST_LEASE_POLICIES, NodeError, Settings
from dataplane.node.state import device_mtu

__all__ = ["LOST_LEASE_POLICIES", "Node", "NodeError", "Settings", "device_mtu", "unless_stopped"]
