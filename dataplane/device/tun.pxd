from dataplane.batch cimport Batch
from dataplane.kernel cimport Kernel

cdef class TunDevice:
    cdef readonly str name
    cdef public int mtu
    cdef readonly object _tun
    cdef object _offloads, _segment
    cdef Kernel _kernel
    cdef readonly int _fd
    cdef bint _watching

    cpdef receive(self, Batch batch)
    cpdef transmit(self, Batch batch)
