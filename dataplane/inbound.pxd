cimport cython
from encap cimport fields
from encap.coalesce cimport Coalescer
from encap.ip cimport check, decrement_ttl, partial_checksum, stated_length, ttl
from encap.vnet cimport store as store_vnet
from encap.vxlan cimport check as check_vxlan
from dataplane.batch cimport Batch
from routing.table cimport Table

cdef int _FORWARDED, _TTL_EXPIRED, _MULTICAST, _UNKNOWN_VTEP, _SPOOFED_SOURCE, _NOT_FOR_US, _WRITTEN
cdef unsigned long long _LIMITED_BROADCAST
cdef int IPV4_DESTINATION, IPV4_SOURCE, IPV6_DESTINATION, IPV6_SOURCE, TCP_CHECKSUM, TCP_DATA_OFFSET
cdef int FLAG_NEEDS_CSUM, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, VNET_LENGTH
cdef int UDP_CHECKSUM, UDP_HEADER_LENGTH, MAX_PACKET_LENGTH

@cython.locals(fault=int)
cpdef Py_ssize_t strip(const unsigned char[::1] data, Py_ssize_t at, Py_ssize_t length, Table table) except? -1000

@cython.locals(destination="unsigned long long", high="unsigned long long", row="long long", ours=bint)
cpdef long long admit(const unsigned char[::1] data, Py_ssize_t at, int origin, Table table) except? -1000

@cython.locals(
    where=Py_ssize_t, start=Py_ssize_t, csum_offset=int, header_length=Py_ssize_t, gso_type=int, gso_size=Py_ssize_t,
    flags=int,
)
cpdef int write_vnet_header(
    unsigned char[::1] vnet, Py_ssize_t vnet_at, const unsigned char[::1] data, Py_ssize_t at, Py_ssize_t length,
    Py_ssize_t mtu, Py_ssize_t stride
) except -1

@cython.locals(
    data="unsigned char[::1]", offset="int[::1]", length="int[::1]", peer="int[::1]", stride="int[::1]",
    out_offset="int[::1]", out_length="int[::1]", out_peer="int[::1]", out_stride="int[::1]", out_last="int[::1]",
    tunnel=Py_ssize_t, capacity=Py_ssize_t, count=Py_ssize_t, i=Py_ssize_t, at=Py_ssize_t, end=Py_ssize_t,
    size=Py_ssize_t, inner_size=Py_ssize_t,
)
cpdef Py_ssize_t unpack(Batch batch, Batch pieces, Table table, Py_ssize_t first) except -1

@cython.locals(
    data="unsigned char[::1]", offset="int[::1]", length="int[::1]", peer="int[::1]", verdict="int[::1]", head="int[::1]",
    forwarded=Py_ssize_t, i=Py_ssize_t, at=Py_ssize_t, inner_length=Py_ssize_t, row="long long",
)
cpdef Py_ssize_t decapsulate(Batch pieces, Table table) except -1

@cython.locals(
    data="unsigned char[::1]", offset="int[::1]", length="int[::1]", stride="int[::1]", verdict="int[::1]",
    head="int[::1]", last="int[::1]", merged=Py_ssize_t, i=Py_ssize_t, item=Py_ssize_t, is_plain=bint,
)
cpdef Py_ssize_t coalesce(Batch pieces, Coalescer coalescer, Py_ssize_t mtu) except -1

cdef int _finish(Batch pieces, Coalescer coalescer, Py_ssize_t item) except -1

@cython.locals(i=Py_ssize_t)
cpdef int write_vnet_headers(Batch pieces, Py_ssize_t mtu) except -1
