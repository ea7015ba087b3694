from encap cimport fields

cdef int IPV4_CHECKSUM

cpdef unsigned long long add(
    const unsigned char[::1] buf, Py_ssize_t at, Py_ssize_t length, unsigned long long total=*
) except? 0xFFFFFFFFFFFFFFFF
cpdef int fold(unsigned long long total) noexcept
cpdef int internet_checksum(
    const unsigned char[::1] buf, Py_ssize_t at, Py_ssize_t length, unsigned long long total=*
) except -1
cpdef int pseudo_sum(
    const unsigned char[::1] buf, Py_ssize_t addresses_at, Py_ssize_t addresses_length, int protocol, Py_ssize_t length
) except -1
cpdef int finish(unsigned char[::1] buf, Py_ssize_t start, Py_ssize_t end, Py_ssize_t field) except -1
cpdef int replace_word(int checksum, int old, int new) noexcept
cpdef int write_ipv4_header_checksum(unsigned char[::1] buf, Py_ssize_t at, Py_ssize_t header_length) except -1
