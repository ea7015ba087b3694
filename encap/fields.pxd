# The functions of fields.py for the compiled modules: inline C, each with one check that the whole access lies inside the
# buffer. tests/test_hot_twins.py compares both.

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>

    static inline uint64_t pfdp_load(const unsigned char *p, int octets) {
        uint64_t value = 0;
        for (int i = 0; i < octets; i++) value = value << 8 | p[i];  /* compilers make this a load and a byte swap */
        return value;
    }

    /* RFC 1071 section 2(B): the sum does not depend on the byte order, so it is taken in the machine's own, 32 bits at a
       time into 64, and swapped once. 65 535 bytes cannot overflow the accumulators. */
    static inline unsigned int pfdp_sum(const unsigned char *p, Py_ssize_t n) {
        uint64_t a = 0, b = 0, c = 0, d = 0, total;
        uint32_t w[8];
        while (n >= 32) {
            memcpy(w, p, 32);
            a += (uint64_t)w[0] + w[4];
            b += (uint64_t)w[1] + w[5];
            c += (uint64_t)w[2] + w[6];
            d += (uint64_t)w[3] + w[7];
            p += 32;
            n -= 32;
        }
        total = a + b + c + d;
        while (n >= 2) {
            uint16_t half;
            memcpy(&half, p, 2);
            total += half;
            p += 2;
            n -= 2;
        }
        if (n) {
            unsigned char last[2] = {*p, 0};
            uint16_t half;
            memcpy(&half, last, 2);
            total += half;
        }
        while (total >> 16) total = (total & 0xFFFF) + (total >> 16);
        {
            const uint16_t one = 1;
            if (*(const unsigned char *)&one) total = (total >> 8 | total << 8) & 0xFFFF;
        }
        return (unsigned int)total;
    }
    """
    unsigned long long pfdp_load(const unsigned char *p, int octets) noexcept
    unsigned int pfdp_sum(const unsigned char *p, Py_ssize_t n) noexcept

from libc.string cimport memcmp, memmove


cdef inline int require(Py_ssize_t at, Py_ssize_t length, Py_ssize_t size) except -1:
    if at < 0 or length < 0 or at > size - length:
        raise IndexError("access beyond the buffer")
    return 0

cdef inline long long load16(const unsigned char[::1] buf, Py_ssize_t at) except -1:
    require(at, 2, buf.shape[0])
    return pfdp_load(&buf[at], 2)

cdef inline long long load32(const unsigned char[::1] buf, Py_ssize_t at) except -1:
    require(at, 4, buf.shape[0])
    return pfdp_load(&buf[at], 4)

cdef inline unsigned long long load64(const unsigned char[::1] buf, Py_ssize_t at) except? 0xFFFFFFFFFFFFFFFF:
    require(at, 8, buf.shape[0])
    return pfdp_load(&buf[at], 8)

cdef inline int store16(unsigned char[::1] buf, Py_ssize_t at, long long value) except -1:
    require(at, 2, buf.shape[0])
    buf[at] = (value >> 8) & 0xFF
    buf[at + 1] = value & 0xFF
    return 0

cdef inline int store32(unsigned char[::1] buf, Py_ssize_t at, long long value) except -1:
    store16(buf, at, value >> 16)
    return store16(buf, at + 2, value)

cdef inline int move(
    unsigned char[::1] target, Py_ssize_t target_at, const unsigned char[::1] source, Py_ssize_t source_at, Py_ssize_t length
) except -1:
    require(target_at, length, target.shape[0])
    require(source_at, length, source.shape[0])
    if length:
        memmove(&target[target_at], &source[source_at], length)
    return 0

cdef inline int equal(
    const unsigned char[::1] a, Py_ssize_t a_at, const unsigned char[::1] b, Py_ssize_t b_at, Py_ssize_t length
) except -1:
    require(a_at, length, a.shape[0])
    require(b_at, length, b.shape[0])
    return not length or memcmp(&a[a_at], &b[b_at], length) == 0

cdef inline long long sum_words(const unsigned char[::1] buf, Py_ssize_t at, Py_ssize_t length) except -1:
    require(at, length, buf.shape[0])
    return pfdp_sum(&buf[at], length) if length else 0
