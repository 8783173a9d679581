# Types for the compiled twin of assembler.py.

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.string cimport memcpy
from parapply.model cimport Transaction

cdef unsigned char _BEGIN, _COMMIT, _TRUNCATE
cdef Py_ssize_t _KIND_AT, _RELATION_AT, _BEHIND_OID, _OVERHEAD_BYTES, _SEND_TIME_AT
cdef Py_ssize_t _BEGIN_LSN_AT, _BEGIN_TIME_AT, _BEGIN_XID_AT, _BEGIN_BYTES
cdef Py_ssize_t _XID_AT, _BEHIND_XID
cdef Py_ssize_t _COMMIT_FLAGS_AT, _COMMIT_LSN_AT, _COMMIT_END_AT, _COMMIT_BYTES

@cython.locals(value="unsigned long long", index="Py_ssize_t")
cdef unsigned long long _unsigned(bytes frame, Py_ssize_t at, Py_ssize_t n_bytes) except? 0
cdef long long _signed(bytes frame, Py_ssize_t at) except? -1

# Return a frame without the bytes from `at` to `behind`, copied once; `at` <= `behind` <= its size.
cdef inline bytes without(bytes frame, Py_ssize_t at, Py_ssize_t behind):
    cdef Py_ssize_t rest = PyBytes_GET_SIZE(frame) - behind
    cdef bytes bare = PyBytes_FromStringAndSize(NULL, at + rest)
    cdef char *data = PyBytes_AS_STRING(bare)
    memcpy(data, PyBytes_AS_STRING(frame), at)
    memcpy(data + at, PyBytes_AS_STRING(frame) + behind, rest)
    return bare


cdef class Assembler:
    cdef Py_ssize_t _piece_bytes
    cdef Transaction _open
    cdef bint _streaming_parallel
    cdef unsigned long long _start_lsn
    cdef frozenset _prepared_lsns
    cdef list _loose_relations
    cdef object _partitions
    cdef bint _has_met
    cdef Transaction _chunk
    cdef list _runs
    cdef object _begin_prepare
    cdef bint _is_late
    cdef object _late_stream
    cdef readonly object queue
    cdef unsigned long long _queue_oid

    @cython.locals(
        done=list, current=Transaction, piece_bytes="Py_ssize_t", size_bytes="Py_ssize_t", frame=bytes,
        kind="unsigned char", queue_oid="unsigned long long",
    )
    cpdef list push(self, object frames)
    cdef object _settle(self)
    @cython.locals(begun=Transaction)
    cdef Transaction _begin(self, bytes frame, Transaction current)
    @cython.locals(commit_lsn="unsigned long long", end_lsn="unsigned long long")
    cdef Transaction _commit(self, bytes frame, Transaction current)
    @cython.locals(rest=Transaction)
    cdef Transaction _cut(self, Transaction current, list done)
    @cython.locals(rest=Transaction)
    cdef Transaction _cut_late(self, Transaction current, list done)
    @cython.locals(chunk=Transaction, bare=bytes)
    cdef object _streamed_change(self, bytes frame, list done)
    cdef object _note_xid(self, Transaction chunk, unsigned int xid)
    cdef Transaction _cut_chunk(self, Transaction chunk, list done)
    cdef Transaction _begun(self, Transaction begun)
    cdef Transaction _other(self, bytes frame, Transaction current, list done)
    @cython.locals(bare=bytes)
    cdef object _truncate(self, bytes frame, Transaction current)
    cdef bytes _truncated(self, bytes frame)
    cdef object _relation(self, object message, Transaction current)
    cdef object _announce(self, Transaction transaction, object relation)
    cdef object _streamed(self, object message, bytes frame, list done)
    cdef Transaction _two_phase(self, object message, bytes frame, Transaction current, list done)
    cdef bint _is_from_before(self, unsigned long long prepare_end_lsn) except? 0
    @cython.locals(begun=object)
    cdef Transaction _prepared(self, object message, bytes frame, Transaction current, list done)
    cdef object _committed_late(self, object message, bytes frame, Transaction current, list done)
    cdef object _committed_late_stream(self, object message, bytes frame, list done)
    cdef object _end_late(self, object message, bytes frame, list done)
