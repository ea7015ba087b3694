cimport cython
from encap cimport fields

cdef int _BAD_FLAGS, _WRONG_VNI, _WRONG_MAC, _NOT_IP, _TRUNCATED, _HEADER_LENGTH, _IPV4, _IPV6, _FLAG_VNI_VALID

@cython.locals(destination="long long", ethertype=int, version=int)
cpdef int check(
    const unsigned char[::1] buf, Py_ssize_t at, Py_ssize_t length, long long vni, long long mac_a, long long mac_b
) except -1
