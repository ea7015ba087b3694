cimport cython
from encap cimport checksum, fields

cdef int _BAD_OFFLOAD, _FIN_AND_PSH, _CWR
cdef int IPV4_HEADER_LENGTH, IPV4_IDENTIFICATION, IPV4_SOURCE, IPV4_TOTAL_LENGTH, IPV6_HEADER_LENGTH, IPV6_PAYLOAD_LENGTH, IPV6_SOURCE
cdef int PROTOCOL_TCP, PROTOCOL_UDP, TCP_CHECKSUM, TCP_DATA_OFFSET, TCP_FLAGS, TCP_HEADER_LENGTH, TCP_SEQUENCE
cdef int UDP_CHECKSUM, UDP_HEADER_LENGTH, UDP_LENGTH
cdef int GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4

@cython.locals(version=int, least=Py_ssize_t, transport=Py_ssize_t)
cpdef Py_ssize_t check(
    const unsigned char[::1] buf, Py_ssize_t at, Py_ssize_t length, int gso_type, Py_ssize_t gso_size, Py_ssize_t start
) except? -1000

cpdef Py_ssize_t count(Py_ssize_t length, Py_ssize_t header_length, Py_ssize_t gso_size) except -1

@cython.locals(
    done=Py_ssize_t, payload=Py_ssize_t, whole=Py_ssize_t, transport=Py_ssize_t, transport_length=Py_ssize_t,
    is_last=bint, protocol=int, field=Py_ssize_t, flags=int, pseudo="long long", value="long long",
)
cpdef Py_ssize_t segment(
    const unsigned char[::1] source, Py_ssize_t at, Py_ssize_t length, Py_ssize_t header_length, Py_ssize_t start,
    Py_ssize_t gso_size, Py_ssize_t index, unsigned char[::1] target, Py_ssize_t target_at
) except -1
