cimport cython
from dataplane cimport syscalls
from dataplane.batch cimport Batch
from encap cimport fields
from encap.vnet cimport load_native16

cdef int _FORWARDED
cdef Py_ssize_t _MAX_LENGTH, _VNET, _ADDRESS

cdef class Kernel:
    cdef readonly int error
    cdef readonly object told
    cdef unsigned char[::1] told_c

    @cython.locals(length=int)
    cpdef int read_packets(self, int fd, Batch batch) except? -9999

    @cython.locals(i=Py_ssize_t, written=int)
    cpdef Py_ssize_t write_packets(self, int fd, Batch batch, Py_ssize_t first, bint superpackets) except -1

    @cython.locals(length=int, high=object, source=object)
    cpdef int receive_datagrams(self, object receiver, Batch batch, object origins, bint is_ipv4) except? -9999

    @cython.locals(i=Py_ssize_t, sent=int, senders=object, to=bytes)
    cpdef Py_ssize_t send_trains(self, Batch batch, Py_ssize_t first, object roads) except -1

    cpdef int read_packet(
        self, int fd, unsigned char[::1] vnet, Py_ssize_t vnet_at, unsigned char[::1] data, Py_ssize_t at, Py_ssize_t room
    ) except? -9999
    cpdef int write_packet(
        self, int fd, const unsigned char[::1] vnet, Py_ssize_t vnet_at, const unsigned char[::1] data, Py_ssize_t at,
        Py_ssize_t length
    ) except? -9999
    cpdef int receive(
        self, object receiver, unsigned char[::1] data, Py_ssize_t at, Py_ssize_t room, unsigned char[::1] told
    ) except? -9999
    cpdef int send(
        self, object sender, const unsigned char[::1] data, Py_ssize_t at, Py_ssize_t length, Py_ssize_t stride, bytes to
    ) except? -9999
