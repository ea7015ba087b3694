cimport cython

cdef int _FORWARDED
cdef Py_ssize_t _SLOT_SIZE, _HEADROOM, _PEER_NUMBERS

cdef class Batch:
    cdef readonly Py_ssize_t capacity
    cdef public Py_ssize_t count
    cdef readonly Py_ssize_t limit
    cdef readonly object data, vnet, slots, vnet_slots
    cdef readonly object offset, length, verdict, peer, stride, flow, head, last
    cdef unsigned char[::1] data_c, vnet_c
    cdef int[::1] offset_c, length_c, verdict_c, peer_c, stride_c, flow_c, head_c, last_c

    cpdef int clear(self, Py_ssize_t limit=*) noexcept

    cpdef Py_ssize_t free_slot(self) noexcept

    @cython.locals(index=Py_ssize_t)
    cpdef int add(self, int length, int peer=*, int stride=*) except -1

    cpdef list indices(self, int verdict)

    @cython.locals(i=Py_ssize_t, found=Py_ssize_t)
    cpdef Py_ssize_t count_of(self, int verdict) except -1

    @cython.locals(i=Py_ssize_t, forwarded="long long", verdict=int, length=int, at=Py_ssize_t)
    cpdef long long tally(self, long long[::1] counts, long long[::1] peers=*, long long now=*) except -1

    @cython.locals(i=Py_ssize_t)
    cpdef int share_verdicts(self) except -1
