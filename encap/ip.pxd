cimport cython
from encap cimport checksum, fields

cdef int _NOT_IP, _TRUNCATED, _BAD_LENGTH
cdef int _HOP_BY_HOP, _DESTINATION_OPTIONS
cdef unsigned long long _LOW_32_BITS, _MIX_1, _MIX_2
cdef int IPV4_CHECKSUM, IPV4_DESTINATION, IPV4_FRAGMENT, IPV4_FRAGMENT_OFFSET, IPV4_HEADER_LENGTH, IPV4_MORE_FRAGMENTS
cdef int IPV4_PROTOCOL, IPV4_SOURCE, IPV4_TOTAL_LENGTH, IPV4_TTL
cdef int IPV6_DESTINATION, IPV6_HEADER_LENGTH, IPV6_HOP_LIMIT, IPV6_NEXT_HEADER, IPV6_PAYLOAD_LENGTH, IPV6_SOURCE
cdef int PROTOCOL_TCP, PROTOCOL_UDP, TCP_CHECKSUM, TCP_HEADER_LENGTH, UDP_CHECKSUM, UDP_HEADER_LENGTH

@cython.locals(version=int, header_length=int, total=Py_ssize_t)
cpdef int check(const unsigned char[::1] buf, Py_ssize_t at, Py_ssize_t length) except -1

cpdef Py_ssize_t stated_length(const unsigned char[::1] buf, Py_ssize_t at, Py_ssize_t length) except -1
cpdef bint is_fragment(const unsigned char[::1] buf, Py_ssize_t at) except -1
cpdef int ttl(const unsigned char[::1] buf, Py_ssize_t at) except -1

@cython.locals(old=int)
cpdef int decrement_ttl(unsigned char[::1] buf, Py_ssize_t at) except -1

cdef unsigned long long _mix(unsigned long long value) noexcept

@cython.locals(
    protocol=int, transport=Py_ssize_t, word=int, addresses="unsigned long long", ports="unsigned long long",
    source="unsigned long long", destination="unsigned long long",
)
cpdef long long flow_hash(const unsigned char[::1] buf, Py_ssize_t at, Py_ssize_t length) except -1

@cython.locals(
    protocol=int, start=Py_ssize_t, addresses_at=Py_ssize_t, addresses_length=Py_ssize_t, field=Py_ssize_t,
    expected=int,
)
cpdef Py_ssize_t partial_checksum(const unsigned char[::1] buf, Py_ssize_t at, Py_ssize_t length) except -1
