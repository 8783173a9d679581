# Types for the compiled twin of assembler.py.

cimport cython
from parapply.model cimport Transaction

cdef unsigned char _BEGIN, _COMMIT, _TRUNCATE
cdef Py_ssize_t _KIND_AT, _OVERHEAD_BYTES, _SEND_TIME_AT
cdef Py_ssize_t _BEGIN_LSN_AT, _BEGIN_TIME_AT, _BEGIN_XID_AT, _BEGIN_BYTES
cdef Py_ssize_t _COMMIT_FLAGS_AT, _COMMIT_LSN_AT, _COMMIT_END_AT, _COMMIT_BYTES

@cython.locals(value="unsigned long long", index="Py_ssize_t")
cdef unsigned long long _unsigned(bytes frame, Py_ssize_t at, Py_ssize_t n_bytes) except? 0
cdef long long _signed(bytes frame, Py_ssize_t at) except? -1

cdef class Assembler:
    cdef Py_ssize_t _piece_bytes
    cdef Transaction _open
    cdef list _loose_relations

    @cython.locals(
        done=list, current=Transaction, piece_bytes="Py_ssize_t", size_bytes="Py_ssize_t", frame=bytes,
        kind="unsigned char",
    )
    cpdef list push(self, object frames)
    @cython.locals(begun=Transaction)
    cdef Transaction _begin(self, bytes frame, Transaction current)
    @cython.locals(commit_lsn="unsigned long long", end_lsn="unsigned long long")
    cdef Transaction _commit(self, bytes frame, Transaction current)
    @cython.locals(rest=Transaction)
    cdef Transaction _cut(self, Transaction current, list done)
    cdef object _other(self, bytes frame, Transaction current)
