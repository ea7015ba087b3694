cdef int _LITTLE_ENDIAN

cpdef int load_native16(const unsigned char[::1] buf, Py_ssize_t at) except -1
cdef int _store_native16(unsigned char[::1] buf, Py_ssize_t at, int value) except -1
cpdef int store(
    unsigned char[::1] buf, Py_ssize_t at, int flags, int gso_type, int hdr_len, int gso_size, int csum_start, int csum_offset
) except -1
