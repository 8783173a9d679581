# Types for the compiled twin of segments.py.

cimport cython
from parapply.collector cimport untrack
from parapply.wire.rows cimport has_unchanged, read_delete, read_insert, read_update

cdef class NetSegment:
    cdef public object plan
    cdef public dict net
    cdef public bint has_unchanged
    cdef public list counts
    cdef public list old_rows
    cdef object _key_of
    cdef Py_ssize_t _plain_at
    cdef Py_ssize_t _n_columns

    @cython.locals(row=list, at="Py_ssize_t", change=tuple, before=tuple)
    cpdef bint insert(self, bytes frame) except -1
    @cython.locals(row=list, old=list, at="Py_ssize_t", change=tuple, before=tuple, earlier=list, is_partial=bint)
    cpdef bint update(self, bytes frame) except -1
    @cython.locals(row=list, before=tuple)
    cpdef bint delete(self, bytes frame) except -1

cdef class InsertSegment:
    cdef public object plan
    cdef public list rows
    cdef Py_ssize_t _n_columns

    cpdef bint insert(self, bytes frame) except -1

cdef class RowSegment:
    cdef public object plan
    cdef public list frames
    cdef public list counts

    cpdef bint add(self, bytes frame) except -1
