cimport cython
from dataplane cimport syscalls
from dataplane.batch cimport Batch
from encap cimport fields
from encap.vnet cimport load_native16

cdef int _FORWARDED, _IN_RUN, _EAGAIN
cdef bint _LITTLE_ENDIAN
cdef Py_ssize_t _MAX_LENGTH, _VNET, _ADDRESS, _MAX_GROUP, _MAX_GROUP_LENGTH, _MAX_MESSAGES, _TOLD, _SLOT_SIZE

cdef Py_ssize_t _segments(Py_ssize_t length, Py_ssize_t stride) except -1

cdef class Kernel:
    cdef readonly int error
    cdef readonly object told
    cdef unsigned char[::1] told_c
    cdef object _order
    cdef int[::1] _order_c
    cdef Py_ssize_t _count, _segments, _length, _peer, _stride
    cdef bint _is_open

    @cython.locals(length=int)
    cpdef int read_packets(self, int fd, Batch batch) except? -9999

    @cython.locals(i=Py_ssize_t, written=int)
    cpdef Py_ssize_t write_packets(self, int fd, Batch batch, Py_ssize_t first, bint superpackets) except -1

    @cython.locals(asked=Py_ssize_t, found=int, k=Py_ssize_t)
    cpdef int receive_datagrams(self, object receiver, Batch batch, object origins, bint is_ipv4) except? -9999

    @cython.locals(high=object, source=object, low=int, upper=int, length=int)
    cdef int _take(self, Batch batch, Py_ssize_t at, object origins, bint is_ipv4) except -1

    @cython.locals(refused=Py_ssize_t, lane=Py_ssize_t, i=Py_ssize_t)
    cpdef Py_ssize_t send_trains(self, Batch batch, object roads, Py_ssize_t lanes, Py_ssize_t max_segments) except -1
    cdef int _begin(self) except -1
    @cython.locals(stride=Py_ssize_t)
    cdef bint _joins(self, Batch batch, Py_ssize_t i, Py_ssize_t max_segments) except -1
    cdef int _join(self, Batch batch, Py_ssize_t i) except -1
    @cython.locals(senders=object, to=bytes, sender=object, i=Py_ssize_t, k=Py_ssize_t, sent=int)
    cdef Py_ssize_t _flush(self, Batch batch, object roads, Py_ssize_t lane) except -1

    cpdef int read_packet(
        self, int fd, unsigned char[::1] vnet, Py_ssize_t vnet_at, unsigned char[::1] data, Py_ssize_t at, Py_ssize_t room
    ) except? -9999
    cpdef int write_packet(
        self, int fd, const unsigned char[::1] vnet, Py_ssize_t vnet_at, const unsigned char[::1] data, Py_ssize_t at,
        Py_ssize_t length
    ) except? -9999
    cpdef int receive_many(
        self, object receiver, unsigned char[::1] data, Py_ssize_t at, Py_ssize_t apart, Py_ssize_t room, Py_ssize_t count,
        unsigned char[::1] told
    ) except? -9999
    cpdef int send(
        self, object sender, const unsigned char[::1] data, Py_ssize_t at, Py_ssize_t length, Py_ssize_t stride, bytes to
    ) except? -9999
    cpdef int send_group(
        self, object sender, const unsigned char[::1] data, int[::1] offsets, int[::1] lengths, int[::1] order,
        Py_ssize_t count, Py_ssize_t stride, bytes to
    ) except? -9999
