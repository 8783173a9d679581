# Types for the compiled twin of table_changes.py.

cimport cython
from parapply.collector cimport untrack
from parapply.plan.order cimport split_by_effect
from parapply.wire.rows cimport has_unchanged, read_delete, read_insert, read_update, values_of
from parapply.wire.walk cimport filled_frame, is_plain, is_simple, value_from, without_old

cdef unsigned char _INSERT, _UPDATE, _DELETE

cdef class NetSegment:
    cdef public object plan
    cdef public dict net
    cdef public bint has_unchanged
    cdef public list counts
    cdef public list old_rows
    cdef public list written_over
    cdef object _key_of
    cdef tuple _plain
    cdef object _order
    cdef Py_ssize_t _n_columns
    # Key columns in wire order, and where in it each component of the key is found.
    cdef Py_ssize_t[8] _wanted
    cdef Py_ssize_t[8] _found_at
    cdef Py_ssize_t _n_plain
    # The frame that was read last, and whether it lacks values.
    cdef bytes _row
    cdef bint _is_partial

    @cython.locals(change=tuple, before=tuple)
    cpdef bint insert(self, bytes frame) except -1
    @cython.locals(row=list, old=list, change=tuple, before=tuple, is_partial=bint)
    cpdef bint update(self, bytes frame) except -1
    @cython.locals(before=tuple)
    cpdef bint delete(self, bytes frame) except -1
    @cython.locals(starts="Py_ssize_t[8]", index="Py_ssize_t")
    cdef object _simple_key(self, bytes frame, unsigned char kind)
    cdef object _simple_update(self, bytes frame)
    @cython.locals(is_partial=bint)
    cdef object _filled(self, object row, object before)
    cdef object _key(self, list row)

cdef class InsertSegment:
    cdef public object plan
    cdef public list rows
    cdef Py_ssize_t _n_columns

    cpdef bint insert(self, bytes frame) except -1

cdef class RowSegment:
    cdef public object plan
    cdef public list frames
    cdef public list moves
    cdef public list counts

    cpdef bint add(self, bytes frame) except -1
