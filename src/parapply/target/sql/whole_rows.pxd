# Types for the compiled twin of whole_rows.py.

cimport cython
from parapply.wire.rows cimport has_unchanged, read_delete, read_insert, read_update

cdef class _Change:
    cdef readonly Py_ssize_t number
    cdef readonly tuple key
    cdef readonly list old
    cdef readonly list new
    cdef readonly Py_ssize_t twin

@cython.locals(changes=list, made=dict, inserts=list, groups=dict, group=list)
cpdef object net_rows(object segment)

@cython.locals(groups=dict, change=_Change, old=list, new=list, group=list, nulls=tuple, present=tuple)
cdef dict _groups(list changes, tuple everything)

@cython.locals(
    changes=list, made=dict, frame=bytes, kind="unsigned char", row=list, old=list, new=list, after=list, was=list,
    key=tuple, change=_Change, continued=_Change,
)
cdef object _net(object frames, Py_ssize_t n_columns)

@cython.locals(before=_Change)
cdef int _put_in(_Change change, tuple row, dict made) except -1
