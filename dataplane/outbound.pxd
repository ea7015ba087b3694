cimport cython
from encap.fields cimport load32, load64
from encap.ip cimport check, decrement_ttl, flow_hash, ttl
from routing.table cimport Table

cdef int _FORWARDED, _NO_ROUTE, _TTL_EXPIRED, _MULTICAST
cdef unsigned long long _LIMITED_BROADCAST
cdef int IPV4_DESTINATION, IPV6_DESTINATION

@cython.locals(fault=int, destination="unsigned long long", high="unsigned long long", row="long long")
cpdef long long judge(const unsigned char[::1] data, Py_ssize_t at, Py_ssize_t length, Table table) except? -1000

@cython.locals(
    data="unsigned char[::1]", offset="int[::1]", length="int[::1]", peer="int[::1]", flow="int[::1]",
    verdict="int[::1]", headers="unsigned char[::1]", header_length=Py_ssize_t, forwarded=Py_ssize_t,
    count=Py_ssize_t, i=Py_ssize_t, k=Py_ssize_t, at=Py_ssize_t, row="long long",
)
cpdef Py_ssize_t encapsulate(object batch, Table table) except -1
