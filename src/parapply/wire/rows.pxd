# Types for the compiled twin of rows.py.

cimport cython
from parapply.collector cimport untrack
from parapply.wire.walk cimport frame_value, join_columns, split_by_columns

cdef unsigned char _TEXT, _NULL, _UNCHANGED
cdef Py_ssize_t _KIND_AT, _MARK_AT, _ROW_AT
cdef unsigned char _INSERT, _UPDATE, _DELETE, _NEW

@cython.locals(
    count="Py_ssize_t", kind="unsigned char", end="Py_ssize_t", length="Py_ssize_t", size="Py_ssize_t",
    data="const unsigned char *",
)
cdef Py_ssize_t read_row(bytes frame, Py_ssize_t at, bytes unchanged, list row) except -1

@cython.locals(row=list)
cpdef list read_insert(bytes frame, Py_ssize_t n_columns)

@cython.locals(row=list, old=list, middle="Py_ssize_t", end="Py_ssize_t")
cpdef tuple read_update(bytes frame, Py_ssize_t n_columns)

@cython.locals(found=bint)
cpdef bint has_unchanged(list row)

@cython.locals(row=list)
cpdef list read_delete(bytes frame, Py_ssize_t n_columns)

@cython.locals(values=list)
cpdef list values_of(object row)

@cython.locals(texts=list, values=list, value=bytes)
cpdef list texts_of(list rows)

@cython.locals(groups=dict)
cpdef dict by_columns(list rows, Py_ssize_t n_columns)

cpdef object value_at(object row, Py_ssize_t position)

cpdef list columns_of(object rows, tuple positions, tuple type_oids, Py_ssize_t n_columns)
