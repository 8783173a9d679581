# Types for the compiled twin of batch.py.

cimport cython
from parapply.model cimport Transaction
from parapply.plan.table_changes cimport NetSegment
from parapply.wire.walk cimport tag_of

cdef unsigned char _INSERT, _DELETE
cdef Py_ssize_t _MAX_KNOWN

cpdef bint has_few_changes(Py_ssize_t n_changes, Py_ssize_t n_tables)

cdef class Limits:
    cdef public Py_ssize_t transactions
    cdef public Py_ssize_t changes
    cdef public Py_ssize_t size_bytes
    cdef public Py_ssize_t most_transactions
    cdef public Py_ssize_t most_changes
    cdef public Py_ssize_t most_bytes
    cdef public Py_ssize_t places
    cdef public Py_ssize_t most_places

cdef class Batch:
    cdef public object seq
    cdef public list transactions
    cdef public list steps
    cdef public list table_changes
    cdef public bint has_foreign_keys
    cdef public bint is_barrier
    cdef public bint is_fence
    cdef public bint is_serial
    cdef public bint is_suspect
    cdef public bint has_truncate
    cdef public list truncates
    cdef public Py_ssize_t n_changes
    cdef public Py_ssize_t n_places
    cdef public Py_ssize_t size_bytes
    cdef public unsigned long long first_lsn
    cdef public unsigned long long end_lsn
    cdef public long long first_commit_time_us
    cdef public long long commit_time_us
    cdef Py_ssize_t _first
    cdef object _rows
    cdef object _after
    cdef set _emptied
    cdef dict _by_relation
    cdef dict _takers
    cdef list _known
    cdef unsigned long long[8] _known_tags
    cdef Py_ssize_t _n_known

    @cython.locals(has_relations=bint, takers=dict, frame=bytes)
    cpdef add(self, Transaction transaction, object plans)
    @cython.locals(count="Py_ssize_t", transaction=Transaction)
    cpdef Py_ssize_t add_run(self, list transactions, Py_ssize_t at, object plans, Limits limits) except -1
    @cython.locals(n_transactions="Py_ssize_t")
    cpdef bint is_full(self, Limits limits)
    @cython.locals(tag="unsigned long long", index="Py_ssize_t", segment=NetSegment)
    cdef bint _take_known(self, bytes frame) except -1
    cdef object _note_known(self, bytes frame, object table)
    cdef object _forget_takers(self)
    cdef _count(self, Transaction transaction)
