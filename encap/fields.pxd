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
       time into 64, and swapped once. 65 535 bytes cannot overflow the accumulators. Each of the two functions sums whole
       blocks, and leaves the rest in *left; on x86 the processor at hand decides which one. */
    static inline uint64_t pfdp_blocks(const unsigned char *p, Py_ssize_t n, Py_ssize_t *left) {
        uint64_t a = 0, b = 0, c = 0, d = 0;
        for (; n >= 32; p += 32, n -= 32) {
            uint32_t w[8];
            memcpy(w, p, 32);
            a += (uint64_t)w[0] + w[4];
            b += (uint64_t)w[1] + w[5];
            c += (uint64_t)w[2] + w[6];
            d += (uint64_t)w[3] + w[7];
        }
        *left = n;
        return a + b + c + d;
    }

    #if defined(__x86_64__) && defined(__GNUC__)
    #include <immintrin.h>
    __attribute__((target("avx2"), unused))
    static uint64_t pfdp_blocks_avx2(const unsigned char *p, Py_ssize_t n, Py_ssize_t *left) {
        const __m256i low = _mm256_set1_epi64x(0xFFFFFFFF);
        __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
        uint64_t sums[4];
        for (; n >= 64; p += 64, n -= 64) {
            const __m256i v = _mm256_loadu_si256((const __m256i *)p), w = _mm256_loadu_si256((const __m256i *)(p + 32));
            a = _mm256_add_epi64(a, _mm256_and_si256(v, low));
            b = _mm256_add_epi64(b, _mm256_srli_epi64(v, 32));
            c = _mm256_add_epi64(c, _mm256_and_si256(w, low));
            d = _mm256_add_epi64(d, _mm256_srli_epi64(w, 32));
        }
        _mm256_storeu_si256((__m256i *)sums, _mm256_add_epi64(_mm256_add_epi64(a, b), _mm256_add_epi64(c, d)));
        *left = n;
        return sums[0] + sums[1] + sums[2] + sums[3];
    }
    #define PFDP_BLOCKS(p, n, left) \
        (__builtin_cpu_supports("avx2") ? pfdp_blocks_avx2(p, n, left) : pfdp_blocks(p, n, left))
    #else
    #define PFDP_BLOCKS(p, n, left) pfdp_blocks(p, n, left)
    #endif

    static inline unsigned int pfdp_sum(const unsigned char *p, Py_ssize_t n) {
        Py_ssize_t left = n;
        uint64_t total = n >= 64 ? PFDP_BLOCKS(p, n, &left) : 0;
        p += n - left;
        n = left;
        total += pfdp_blocks(p, n, &left);
        p += n - left;
        for (; left >= 2; p += 2, left -= 2) {
            uint16_t half;
            memcpy(&half, p, 2);
            total += half;
        }
        if (left) {
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
