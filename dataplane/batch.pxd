cimport cython

cdef int _FORWARDED

cpdef list indices_of(const int[::1] verdicts, Py_ssize_t count, int verdict)

@cython.locals(i=Py_ssize_t, forwarded="long long")
cpdef long long tally(const int[::1] verdicts, const int[::1] lengths, Py_ssize_t count, long long[::1] counts) except -1

@cython.locals(i=Py_ssize_t)
cpdef int share_verdicts(int[::1] verdicts, const int[::1] heads, Py_ssize_t count) except -1
