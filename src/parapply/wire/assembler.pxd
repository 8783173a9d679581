# Types for the compiled twin of assembler.py.

cimport cython
from parapply.model cimport Transaction

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
    cdef Transaction _commit(self, bytes frame, Transaction current)
    @cython.locals(rest=Transaction)
    cdef Transaction _cut(self, Transaction current, list done)
    cdef object _other(self, bytes frame, Transaction current)
