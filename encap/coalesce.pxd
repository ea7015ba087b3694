cimport cython
from encap cimport checksum, fields
from encap.vnet cimport store as store_vnet

cdef int _NO_ITEM, _NOT_A_CANDIDATE, _OTHER_FLOW, _OTHER_HEADERS, _NOT_NEXT, _ITEM_ENDED, _TOO_LARGE, _BAD_CHECKSUM
cdef int _MAX_LENGTH, _MAX_UDP_SEGMENTS, _ACK, _ACK_AND_PSH, _PSH
cdef int IPV4_DONT_FRAGMENT, IPV4_FRAGMENT, IPV4_HEADER_LENGTH, IPV4_IDENTIFICATION, IPV4_PROTOCOL, IPV4_SOURCE
cdef int IPV4_TOTAL_LENGTH, IPV6_HEADER_LENGTH, IPV6_NEXT_HEADER, IPV6_PAYLOAD_LENGTH, IPV6_SOURCE
cdef int PROTOCOL_TCP, PROTOCOL_UDP, TCP_ACKNOWLEDGMENT, TCP_CHECKSUM, TCP_DATA_OFFSET, TCP_FLAGS, TCP_HEADER_LENGTH
cdef int TCP_SEQUENCE, TCP_URGENT_POINTER, TCP_WINDOW, UDP_CHECKSUM, UDP_HEADER_LENGTH, UDP_LENGTH
cdef int FLAG_NEEDS_CSUM, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4

@cython.locals(protocol=int, start=Py_ssize_t, header_length=Py_ssize_t, flags=int)
cpdef Py_ssize_t candidate(const unsigned char[::1] buf, Py_ssize_t at, Py_ssize_t length) except -1

@cython.locals(protocol=int, start=Py_ssize_t, field="long long", pseudo="long long")
cpdef bint has_good_checksum(const unsigned char[::1] buf, Py_ssize_t at, Py_ssize_t length) except -1

cdef class Coalescer:
    cdef readonly Py_ssize_t item, length, segments
    cdef Py_ssize_t _at, _limit, _header_length, _start, _size
    cdef bint _is_tcp, _is_ipv4, _is_verified, _has_ended

    cpdef int reset(self) noexcept

    @cython.locals(header_length=Py_ssize_t, protocol=int)
    cpdef bint begin(
        self, Py_ssize_t item, const unsigned char[::1] buf, Py_ssize_t at, Py_ssize_t length, Py_ssize_t limit
    ) except -1

    @cython.locals(header_length=Py_ssize_t, start=Py_ssize_t, payload=Py_ssize_t, expected="long long")
    cpdef int decide(self, const unsigned char[::1] buf, Py_ssize_t at, Py_ssize_t length) except -1

    @cython.locals(outcome=int, payload=Py_ssize_t)
    cpdef int append(self, unsigned char[::1] buf, Py_ssize_t at, Py_ssize_t length) except -1

    @cython.locals(
        at=Py_ssize_t, transport_length=Py_ssize_t, protocol=int, pseudo="long long", gso_type=int, offset=Py_ssize_t
    )
    cpdef int finish(self, unsigned char[::1] buf, unsigned char[::1] vnet, Py_ssize_t vnet_at) except -1

    @cython.locals(start=Py_ssize_t, mine=Py_ssize_t, protocol=Py_ssize_t, addresses=Py_ssize_t)
    cdef bint _is_same_flow(self, const unsigned char[::1] buf, Py_ssize_t at) except -1

    @cython.locals(
        start=Py_ssize_t, mine=Py_ssize_t, fragment="long long", first="long long", identification="long long",
        rest=Py_ssize_t,
    )
    cdef bint _has_same_headers(self, const unsigned char[::1] buf, Py_ssize_t at) except -1
