from dataplane.batch cimport Batch
from dataplane.kernel cimport Kernel

cdef class UdpUnderlay:
    cdef readonly Py_ssize_t lanes, max_segments
    cdef readonly dict last_errors
    cdef readonly dict _families
    cdef object _offloads, _origins, _receivers, _endpoints, _roads
    cdef Kernel _kernel
    cdef object _ready
    cdef int _doubts

    cpdef receive(self, Batch batch, object origins)
    cpdef Py_ssize_t transmit(self, Batch batch, object endpoints) except -1
