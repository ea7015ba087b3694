cimport cython
from dataplane.batch cimport Batch
from encap cimport fields

cdef int _FORWARDED, _TTL_EXPIRED, _HOPS
cdef Py_ssize_t IPV4_CHECKSUM, IPV4_TTL, IPV6_HOP_LIMIT

@cython.locals(wrong=Py_ssize_t, i=Py_ssize_t, j=Py_ssize_t)
cpdef Py_ssize_t count_differences(Batch sent, Batch pieces, bint is_vxlan) except -1

@cython.locals(at=Py_ssize_t)
cpdef bint has_crossed(Batch sent, Py_ssize_t i, Batch pieces, Py_ssize_t j, bint is_vxlan) except -1

@cython.locals(header_length=Py_ssize_t, behind=Py_ssize_t)
cpdef bint is_same(
    const unsigned char[::1] a, Py_ssize_t a_at, Py_ssize_t a_length, const unsigned char[::1] b, Py_ssize_t b_at,
    Py_ssize_t b_length, bint is_vxlan
) except -1

cdef class Recogniser:
    cdef readonly Py_ssize_t lanes, missing, strange, reordered
    cdef int[::1] _latest

    @cython.locals(i=Py_ssize_t, j=Py_ssize_t, lane=Py_ssize_t, found=Py_ssize_t)
    cpdef int recognise(self, Batch sent, Batch pieces, bint is_vxlan) except -1

    @cython.locals(i=Py_ssize_t)
    cdef Py_ssize_t _find(
        self, Batch sent, Py_ssize_t first, Py_ssize_t lane, Batch pieces, Py_ssize_t j, bint is_vxlan
    ) except -2
