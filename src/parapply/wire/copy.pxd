# Types for the compiled twin of copy.py.

cimport cython
from libc.string cimport memmove

cdef unsigned char _COPY_DATA, _XLOG_DATA, _KEEPALIVE

# Move bytes towards the buffer's start; `to` is not behind `at`, and both ranges are inside the buffer.
cdef inline void move_bytes(unsigned char *data, Py_ssize_t to, Py_ssize_t at, Py_ssize_t n_bytes) noexcept:
    memmove(data + to, data + at, n_bytes)


cdef class CopyReader:
    cdef bytearray _buffer
    cdef Py_ssize_t _buffer_bytes
    cdef Py_ssize_t _filled
    cdef public bytes keepalive
    cdef public list others

    @cython.locals(
        size="Py_ssize_t", at="Py_ssize_t", end="Py_ssize_t", length="Py_ssize_t", kind="unsigned char",
        data="const unsigned char *",
    )
    cpdef object received(self, Py_ssize_t n_bytes, list frames)
    @cython.locals(left="Py_ssize_t", needed="Py_ssize_t", length="Py_ssize_t")
    cdef object _keep(self, Py_ssize_t at, Py_ssize_t size)
    cdef object _replace(self, Py_ssize_t buffer_bytes, Py_ssize_t at, Py_ssize_t left)


cdef class RowReader:
    cdef bytearray _buffer
    cdef Py_ssize_t _filled
    cdef Py_ssize_t _left
    cdef public Py_ssize_t n_rows
    cdef public list others

    @cython.locals(
        size="Py_ssize_t", at="Py_ssize_t", end="Py_ssize_t", length="Py_ssize_t", kept="Py_ssize_t",
        data="unsigned char *",
    )
    cpdef bytes received(self, Py_ssize_t n_bytes)
    @cython.locals(left="Py_ssize_t")
    cdef object _keep(self, Py_ssize_t at, Py_ssize_t size)
