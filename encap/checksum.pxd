# The functions of checksum.py for the compiled modules, inline as those of fields.pxd.

from encap cimport fields


cdef inline int fold(unsigned long long total) noexcept:
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return <int>total

cdef inline long long internet_checksum(
    const unsigned char[::1] buf, Py_ssize_t at, Py_ssize_t length, unsigned long long total=0
) except -1:
    return fold(total + fields.sum_words(buf, at, length)) ^ 0xFFFF

cdef inline long long pseudo_sum(
    const unsigned char[::1] buf, Py_ssize_t addresses_at, Py_ssize_t addresses_length, int protocol, Py_ssize_t length
) except -1:
    return fold(<unsigned long long>(protocol + length) + fields.sum_words(buf, addresses_at, addresses_length))

cdef inline int finish(unsigned char[::1] buf, Py_ssize_t start, Py_ssize_t end, Py_ssize_t field) except -1:
    cdef long long value = internet_checksum(buf, start, end - start)
    return fields.store16(buf, field, value if value else 0xFFFF)

cdef inline int replace_word(int checksum, int old, int new) noexcept:
    return fold((checksum ^ 0xFFFF) + (old ^ 0xFFFF) + new) ^ 0xFFFF

cdef inline int write_ipv4_header_checksum(unsigned char[::1] buf, Py_ssize_t at, Py_ssize_t header_length) except -1:
    fields.store16(buf, at + 10, 0)
    return fields.store16(buf, at + 10, internet_checksum(buf, at, header_length))
