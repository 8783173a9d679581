# Types for the compiled twin of model.py.

cimport cython
from parapply.collector cimport untrack

# It refers to lists of bytes and of Relations, never to itself: the collector need not look at it.
@cython.no_gc
cdef class Transaction:
    cdef public unsigned int xid
    cdef public unsigned long long commit_lsn
    cdef public unsigned long long end_lsn
    cdef public long long commit_time_us
    cdef public long long send_time_us
    cdef public list changes
    cdef public Py_ssize_t size_bytes
    cdef public list relations
    cdef public object event
    cdef public bint has_truncate
    cdef public bint has_ddl
    cdef public bint is_first
    cdef public bint is_last
