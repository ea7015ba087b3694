# The functions of syscalls.py for the compiled modules: inline C, each with one check that the whole access lies inside
# the buffer. The kernel's interrupted calls are tried again, as Python does (PEP 475).

cdef extern from *:
    """
    #include <errno.h>
    #include <netinet/in.h>
    #include <stdint.h>
    #include <string.h>
    #include <sys/socket.h>
    #include <sys/uio.h>

    #ifndef UDP_SEGMENT
    #define UDP_SEGMENT 103 /* include/uapi/linux/udp.h */
    #endif
    #ifndef UDP_GRO
    #define UDP_GRO 104
    #endif

    static inline int pfdp_result(ssize_t moved) { return moved < 0 ? -errno : (int)moved; }

    static inline int pfdp_readv(int fd, void *head, size_t head_length, void *body, size_t body_length) {
        struct iovec parts[2] = {{head, head_length}, {body, body_length}};
        ssize_t moved;
        do moved = readv(fd, parts, 2); while (moved < 0 && errno == EINTR);
        return pfdp_result(moved);
    }

    static inline int pfdp_writev(int fd, const void *head, size_t head_length, const void *body, size_t body_length) {
        struct iovec parts[2] = {{(void *)head, head_length}, {(void *)body, body_length}};
        ssize_t moved;
        do moved = writev(fd, parts, 2); while (moved < 0 && errno == EINTR);
        return pfdp_result(moved);
    }

    typedef union { struct cmsghdr header; unsigned char bytes[CMSG_SPACE(sizeof(int))]; } pfdp_ancillary;

    static inline void pfdp_tell(const struct msghdr *message, const struct sockaddr_in6 *source, unsigned char *told) {
        struct cmsghdr *one;
        uint16_t stride = 0;
        for (one = CMSG_FIRSTHDR(message); one; one = CMSG_NXTHDR((struct msghdr *)message, one)) {
            if (one->cmsg_level == IPPROTO_UDP && one->cmsg_type == UDP_GRO) {
                int size;
                memcpy(&size, CMSG_DATA(one), sizeof size);
                stride = (uint16_t)size;
            }
        }
        memcpy(told, &stride, sizeof stride);
        if (source->sin6_family == AF_INET6) memcpy(told + 8, &source->sin6_addr, 16);
        else memcpy(told + 8, &((const struct sockaddr_in *)source)->sin_addr, 4);
    }

    /* struct mmsghdr (recvmmsg(2)), which the headers hide without _GNU_SOURCE, and Python's headers come first. */
    struct pfdp_message { struct msghdr header; unsigned int length; };
    int recvmmsg(int, struct mmsghdr *, unsigned int, int, struct timespec *);

    static inline int pfdp_receive_many(
        int fd, unsigned char *data, size_t apart, size_t room, unsigned int count, unsigned char *told
    ) {
        struct pfdp_message messages[32];
        struct iovec parts[32];
        struct sockaddr_in6 sources[32];
        pfdp_ancillary ancillary[32];
        int received;
        memset(messages, 0, count * sizeof *messages);
        for (unsigned int k = 0; k < count; k++) {
            struct msghdr *header = &messages[k].header;
            parts[k].iov_base = data + k * apart;
            parts[k].iov_len = room;
            sources[k].sin6_family = 0;
            header->msg_name = &sources[k];
            header->msg_namelen = sizeof sources[k];
            header->msg_iov = &parts[k];
            header->msg_iovlen = 1;
            header->msg_control = &ancillary[k];
            header->msg_controllen = sizeof ancillary[k];
        }
        do received = recvmmsg(fd, (struct mmsghdr *)messages, count, 0, NULL); while (received < 0 && errno == EINTR);
        if (received < 0) return -errno;
        for (int k = 0; k < received; k++, told += 24) {
            pfdp_tell(&messages[k].header, &sources[k], told);
            memcpy(told + 4, &messages[k].length, 4);
        }
        return received;
    }

    /* One sendmsg of what lies in `count` parts, cut into datagrams of `stride` bytes, or whole if that is 0. */
    static inline int pfdp_send_parts(
        int fd, struct iovec *parts, size_t count, size_t stride, const void *to, size_t to_length
    ) {
        pfdp_ancillary ancillary;
        struct msghdr message;
        const uint16_t size = (uint16_t)stride;
        ssize_t moved;
        memset(&message, 0, sizeof message);
        message.msg_name = (void *)to;
        message.msg_namelen = to_length;
        message.msg_iov = parts;
        message.msg_iovlen = count;
        if (stride) {
            memset(&ancillary, 0, sizeof ancillary);
            ancillary.header.cmsg_level = IPPROTO_UDP;
            ancillary.header.cmsg_type = UDP_SEGMENT;
            ancillary.header.cmsg_len = CMSG_LEN(sizeof size);
            memcpy(CMSG_DATA(&ancillary.header), &size, sizeof size);
            message.msg_control = &ancillary;
            message.msg_controllen = CMSG_SPACE(sizeof size);
        }
        do moved = sendmsg(fd, &message, 0); while (moved < 0 && errno == EINTR);
        return pfdp_result(moved);
    }

    static inline int pfdp_send(int fd, const void *data, size_t length, size_t stride, const void *to, size_t to_length) {
        struct iovec part = {(void *)data, length};
        return pfdp_send_parts(fd, &part, 1, stride == length ? 0 : stride, to, to_length);
    }

    /* Trains in several places as one: count parts, at offsets[order[k]] and of lengths[order[k]] bytes behind data. */
    static inline int pfdp_send_group(
        int fd, const unsigned char *data, const int *offsets, const int *lengths, const int *order, size_t count,
        size_t stride, const void *to, size_t to_length
    ) {
        struct iovec parts[64];
        for (size_t k = 0; k < count; k++) {
            parts[k].iov_base = (void *)(data + offsets[order[k]]);
            parts[k].iov_len = lengths[order[k]];
        }
        return pfdp_send_parts(fd, parts, count, stride, to, to_length);
    }
    """
    int pfdp_send_group(
        int fd, const unsigned char *data, const int *offsets, const int *lengths, const int *order, size_t count,
        size_t stride, const void *to, size_t to_length
    ) noexcept
    int pfdp_readv(int fd, void *head, size_t head_length, void *body, size_t body_length) noexcept
    int pfdp_receive_many(
        int fd, unsigned char *data, size_t apart, size_t room, unsigned int count, unsigned char *told
    ) noexcept
    int pfdp_writev(int fd, const void *head, size_t head_length, const void *body, size_t body_length) noexcept
    int pfdp_send(int fd, const void *data, size_t length, size_t stride, const void *to, size_t to_length) noexcept

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.errno cimport EMSGSIZE
from encap.fields cimport require

cdef enum:
    VNET_LENGTH = 10
    TOLD_LENGTH = 24
    MAX_GROUP = 64
    MAX_MESSAGES = 32

cdef inline int read_packet(
    int fd, unsigned char[::1] vnet, Py_ssize_t vnet_at, unsigned char[::1] data, Py_ssize_t at, Py_ssize_t room
) except? -9999:
    require(vnet_at, VNET_LENGTH, vnet.shape[0])
    require(at, room, data.shape[0])
    return pfdp_readv(fd, &vnet[vnet_at], VNET_LENGTH, &data[at] if room else NULL, room)

cdef inline int write_packet(
    int fd, const unsigned char[::1] vnet, Py_ssize_t vnet_at, const unsigned char[::1] data, Py_ssize_t at, Py_ssize_t length
) except? -9999:
    require(vnet_at, VNET_LENGTH, vnet.shape[0])
    require(at, length, data.shape[0])
    return pfdp_writev(fd, &vnet[vnet_at], VNET_LENGTH, &data[at] if length else NULL, length)

cdef inline int receive_many(
    object receiver, unsigned char[::1] data, Py_ssize_t at, Py_ssize_t apart, Py_ssize_t room, Py_ssize_t count,
    unsigned char[::1] told
) except? -9999:
    if not 0 < count <= MAX_MESSAGES:
        raise IndexError("no such number of messages")
    require(at, 0, data.shape[0])
    require(at + (count - 1) * apart, room, data.shape[0])
    require(0, count * TOLD_LENGTH, told.shape[0])
    return pfdp_receive_many(receiver.fileno(), &data[at], apart, room, count, &told[0])

cdef inline int send(
    object sender, const unsigned char[::1] data, Py_ssize_t at, Py_ssize_t length, Py_ssize_t stride, bytes to
) except? -9999:
    require(at, length, data.shape[0])
    if stride != length and not 0 < stride <= 65535:
        return -EMSGSIZE
    return pfdp_send(
        sender.fileno(), &data[at] if length else NULL, length, stride,
        <const void *>PyBytes_AS_STRING(to), PyBytes_GET_SIZE(to),
    )

cdef inline int send_group(
    object sender, const unsigned char[::1] data, int[::1] offsets, int[::1] lengths, int[::1] order, Py_ssize_t count,
    Py_ssize_t stride, bytes to
) except? -9999:
    cdef Py_ssize_t k
    if not 0 < count <= MAX_GROUP:
        raise IndexError("no group of that size")
    for k in range(count):
        require(offsets[order[k]], lengths[order[k]], data.shape[0])
    if not 0 < stride <= 65535:
        return -EMSGSIZE
    return pfdp_send_group(
        sender.fileno(), &data[0], &offsets[0], &lengths[0], &order[0], count, stride,
        <const void *>PyBytes_AS_STRING(to), PyBytes_GET_SIZE(to),
    )
