# Types for the compiled twin of batch.py.

cimport cython
from parapply.model cimport Transaction

cdef class Batch:
    cdef public object seq
    cdef public list transactions
    cdef public list steps
    cdef public list table_changes
    cdef public bint is_barrier
    cdef public bint is_large
    cdef public bint is_suspect
    cdef public bint has_truncate
    cdef public list truncates
    cdef public Py_ssize_t n_changes
    cdef public Py_ssize_t size_bytes
    cdef public object first_lsn
    cdef public object end_lsn
    cdef public object first_commit_time_us
    cdef public object commit_time_us
    cdef dict _by_relation
    cdef dict _takers

    @cython.locals(has_relations=bint, takers=dict, frame=bytes)
    cpdef add(self, Transaction transaction, object plans)
    cdef _count(self, Transaction transaction)
