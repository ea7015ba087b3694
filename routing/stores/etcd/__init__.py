"""Leases in etcd, version 3, where flannel keeps them too.

Contract: everything that is sent to etcd goes through ``client``, which knows endpoints, certificates, tokens and
deadlines and nothing of leases. ``keyspace`` has the few operations on keys and etcd leases that are needed, ``schema`` the
keys; ``following`` keeps a copy of the leases, ``claims`` keeps two nodes from having one public address, and ``store`` is
the `SubnetStore` and `Registry` made of these. ``endpoints`` and ``credentials`` parse what the operator gave.

``etcd.proto`` says which part of etcd's API is used; what protoc made of it are ``etcd.desc`` and ``etcd_pb2.pyi``.

This imports gRPC, some 15 MiB: import it where etcd is used.
"""

from routing.stores.etcd.credentials import Credentials
from routing.stores.etcd.endpoints import Endpoint, parse_endpoints
from routing.stores.etcd.schema import DEFAULT_PREFIX
from routing.stores.etcd.store import EtcdStore

__all__ = ["DEFAULT_PREFIX", "Credentials", "Endpoint", "EtcdStore", "parse_endpoints"]
