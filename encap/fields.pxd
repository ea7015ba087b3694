# C types of fields.py. Loads return wider types than they load, so that nothing turns negative; -1 tells of an
# exception, and is also the value of a load64 of all ones, which is why that one asks Python whether there was one.
cpdef long long load16(const unsigned char[::1] buf, Py_ssize_t at) except -1
cpdef long long load32(const unsigned char[::1] buf, Py_ssize_t at) except -1
cpdef unsigned long long load64(const unsigned char[::1] buf, Py_ssize_t at) except? 0xFFFFFFFFFFFFFFFF
cpdef int store16(unsigned char[::1] buf, Py_ssize_t at, int value) except -1
