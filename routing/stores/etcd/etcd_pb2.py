"""The messages of ``etcd.proto``, made when this is imported.

protoc's own Python output refuses to run with a runtime that is older than it, or newer by two major versions. A descriptor
is only data: classes made of it work with every runtime that has `message_factory.GetMessageClass`, tried from protobuf
4.25 to 7. They live in a pool of their own, so that another client of etcd in the process may have messages of the same
names.
``etcd_pb2.pyi`` has their types.
"""

from importlib import resources

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_pool = descriptor_pool.DescriptorPool()
for _file in descriptor_pb2.FileDescriptorSet.FromString(
    resources.files(__package__).joinpath("etcd.desc").read_bytes()
).file:
    _pool.AddSerializedFile(_file.SerializeToString())
DESCRIPTOR = _pool.FindFileByName("etcd.proto")
for _name, _descriptor in DESCRIPTOR.message_types_by_name.items():
    globals()[_name] = message_factory.GetMessageClass(_descriptor)
