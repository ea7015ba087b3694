cimport cython
from encap cimport checksum, fields
from encap.ip cimport check, decrement_ttl, flow_hash, ttl
from encap.segment cimport check as check_superpacket, count as count_segments, segment
from encap.vnet cimport load_native16
from dataplane.batch cimport Batch
from routing.table cimport Table

cdef int _FORWARDED, _NO_ROUTE, _TTL_EXPIRED, _MULTICAST, _BAD_OFFLOAD
cdef unsigned long long _LIMITED_BROADCAST
cdef int IPV4_DESTINATION, IPV6_DESTINATION, FLAG_NEEDS_CSUM
cdef Py_ssize_t _VNET_LENGTH, _VNET_GSO_SIZE, _VNET_CSUM_START, _VNET_CSUM_OFFSET, _MAX_TRAIN_LENGTH

@cython.locals(fault=int, destination="unsigned long long", high="unsigned long long", row="long long")
cpdef long long judge(const unsigned char[::1] data, Py_ssize_t at, Py_ssize_t length, Table table) except? -1000

@cython.locals(start=Py_ssize_t, size=Py_ssize_t)
cpdef int judge_offload(
    const unsigned char[::1] vnet, Py_ssize_t vnet_at, const unsigned char[::1] data, Py_ssize_t at, Py_ssize_t length
) except -1

@cython.locals(
    data="unsigned char[::1]", vnet="unsigned char[::1]", offset="int[::1]", length="int[::1]", peer="int[::1]",
    flow="int[::1]", verdict="int[::1]", forwarded=Py_ssize_t, i=Py_ssize_t, at=Py_ssize_t, row="long long", refusal=int,
)
cpdef Py_ssize_t judge_batch(Batch batch, Table table) except -1

cdef class Outbound:
    cdef readonly Batch trains
    cdef readonly Py_ssize_t lanes, max_segments
    cdef Py_ssize_t _packet, _segment, _train, _position, _segments
    cdef bint _is_open

    @cython.locals(
        data="unsigned char[::1]", vnet="unsigned char[::1]", offset="int[::1]", length="int[::1]", verdict="int[::1]",
        peer="int[::1]", flow="int[::1]", arena="unsigned char[::1]", limit=Py_ssize_t, count=Py_ssize_t, i=Py_ssize_t,
        finished=bint, trains=Batch,
    )
    cpdef bint lay_out(self, Batch batch, Table table) except -1

    @cython.locals(
        gso_type=int, start=Py_ssize_t, size=Py_ssize_t, header_length=Py_ssize_t, segments=Py_ssize_t,
        tunnel=Py_ssize_t, target=Py_ssize_t, written=Py_ssize_t, field=Py_ssize_t,
    )
    cdef bint _lay_out_packet(
        self, const unsigned char[::1] data, Py_ssize_t at, Py_ssize_t length, const unsigned char[::1] vnet,
        Py_ssize_t vnet_at, Py_ssize_t row, Py_ssize_t flow, Table table, unsigned char[::1] arena, Py_ssize_t limit
    ) except -1

    @cython.locals(train=Py_ssize_t)
    cdef bint _board(self, Py_ssize_t row, Py_ssize_t lane, Py_ssize_t length) except -1
