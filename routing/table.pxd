cimport cython

cdef unsigned long long _WORD, _GOLDEN, _ROW_MASK

cdef unsigned long long _spread(unsigned long long value) noexcept

cdef class Table:
    cdef readonly object identity
    cdef readonly tuple routes
    cdef readonly Py_ssize_t count
    cdef readonly bint is_vxlan, check_sources, has4, has6
    cdef readonly int header_length
    cdef readonly long long vni, mac_a, mac_b
    cdef readonly unsigned long long own4, own4_mask, broadcast4
    cdef readonly unsigned long long own6_high, own6_low, own6_mask_high, own6_mask_low
    cdef readonly long long own_row4, own_row6
    cdef Py_ssize_t _next_vtep
    cdef readonly dict origins
    cdef readonly list endpoints
    cdef readonly int[::1] vtep
    cdef readonly unsigned char[::1] headers
    cdef readonly Py_ssize_t lengths4, lengths6
    cdef readonly unsigned long long[::1] masks4, slots4, masks6_high, masks6_low, slots6
    cdef readonly long long[::1] bases4, sizes4, bases6, sizes6, used4, used6

    @cython.locals(base=Py_ssize_t, last=Py_ssize_t, slot=Py_ssize_t)
    cdef int _insert4(self, Py_ssize_t length, unsigned long long key, unsigned long long row) except -1

    @cython.locals(base=Py_ssize_t, last=Py_ssize_t, slot=Py_ssize_t, at=Py_ssize_t)
    cdef int _insert6(
        self, Py_ssize_t length, unsigned long long high, unsigned long long low, unsigned long long row
    ) except -1

    @cython.locals(
        length=Py_ssize_t, base=Py_ssize_t, last=Py_ssize_t, slot=Py_ssize_t, key="unsigned long long",
        entry="unsigned long long", row="long long",
    )
    cpdef long long find4(self, unsigned long long address) except? -2

    @cython.locals(
        length=Py_ssize_t, base=Py_ssize_t, last=Py_ssize_t, slot=Py_ssize_t, at=Py_ssize_t,
        key_high="unsigned long long", key_low="unsigned long long", row="long long",
    )
    cpdef long long find6(self, unsigned long long high, unsigned long long low) except? -2

    @cython.locals(other=Table)
    cpdef Table seen_by(self, object identity)
    cdef _share(self, Table base, object identity)
    cdef _share_layout(self, Table base)

    @cython.locals(base=Py_ssize_t, last=Py_ssize_t, slot=Py_ssize_t, following=Py_ssize_t, home=Py_ssize_t)
    cdef _remove4(self, Py_ssize_t length, unsigned long long key)

    @cython.locals(
        base=Py_ssize_t, last=Py_ssize_t, slot=Py_ssize_t, following=Py_ssize_t, home=Py_ssize_t, at=Py_ssize_t,
        other=Py_ssize_t,
    )
    cdef _remove6(self, Py_ssize_t length, unsigned long long high, unsigned long long low)

    @cython.locals(other=Table)
    cpdef Table changed(self, object gone, object new)
    cdef bint _derive(self, Table base, set leaving, dict added) except -1
    cdef _copy_slots(self, Table base)
    cdef bint _has_room_for(self, object subnet) except -1
    cdef _enter(self, object subnet, Py_ssize_t row)
    cdef _forget(self, object subnet)

    @cython.locals(count=Py_ssize_t, tunnel=Py_ssize_t)
    cdef _finish(self, Table base, list routes, dict touched, set leaving)
    cdef _renumber(self, Table base, dict touched, set leaving)

    @cython.locals(row=Py_ssize_t)
    cdef list _rows_behind(self, set vteps)

    @cython.locals(length=Py_ssize_t)
    cdef Py_ssize_t _length_of(self, object subnet) except? -2
    cpdef long long row_of(self, object subnet) except? -2

    @cython.locals(base=Py_ssize_t, last=Py_ssize_t, slot=Py_ssize_t, entry="unsigned long long")
    cdef long long _slot4(self, Py_ssize_t length, unsigned long long key) except? -2

    @cython.locals(base=Py_ssize_t, last=Py_ssize_t, slot=Py_ssize_t, at=Py_ssize_t)
    cdef long long _slot6(self, Py_ssize_t length, unsigned long long high, unsigned long long low) except? -2

    cpdef bint is_own4(self, unsigned long long address) noexcept
    cpdef bint is_own6(self, unsigned long long high, unsigned long long low) noexcept
