cimport cython
from dataplane.batch cimport Batch
from dataplane.inbound cimport coalesce, decapsulate, unpack, write_vnet_headers
from dataplane.outbound cimport Outbound, judge_batch
from encap.coalesce cimport Coalescer
from routing.table cimport Table

cdef int _LAST_BOUND
cdef long long NANOSECONDS

cdef class Direction:
    cdef public long long received, forwarded_bytes
    cdef readonly object verdicts, batches
    cdef readonly long long batched
    cdef long long[::1] _verdicts_c, _batches_c

    cpdef int count(self, Batch batch, long long[::1] peers=*, long long now=*) except -1

    @cython.locals(bound=int)
    cpdef int count_batch(self, Py_ssize_t size) except -1

cdef class Engine:
    cdef Table _table
    cdef object _traffic
    cdef long long[::1] _sent, _received
    cdef readonly Direction outbound, inbound
    cdef readonly long long icmp_sent, icmp_suppressed
    cdef object _device, _underlay, _failed, _now, _icmp_limit, _mtu_limit, _offloads
    cdef Outbound _layout, _own_layout
    cdef int _budget, _out_limit, _in_limit
    cdef bint _is_running
    cdef Coalescer _coalescer
    cdef Batch _out_batch, _in_batch, _pieces, _own_batch

    @cython.locals(limit=int, received=int, _=int)
    cpdef pump_outbound(self)

    @cython.locals(limit=int, received=int, _=int)
    cpdef pump_inbound(self)

    @cython.locals(batch=Batch, peers="long long[::1]")
    cdef int _move_outbound(self, int limit) except -1

    @cython.locals(batch=Batch)
    cdef int _move_inbound(self, int limit) except -1

    @cython.locals(to_send=Py_ssize_t)
    cdef _send(self, Batch batch)

    @cython.locals(layout=Outbound, trains=Batch, more=bint, sent=Py_ssize_t)
    cdef _send_trains(self, Batch batch, Table table)

    @cython.locals(
        pieces=Batch, table=Table, mtu=Py_ssize_t, following=Py_ssize_t, forwarded=Py_ssize_t, merged=Py_ssize_t,
        peers="long long[::1]", moment=double, now="long long",
    )
    cdef _deliver(self, Batch batch)
