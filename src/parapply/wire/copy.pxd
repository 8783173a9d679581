# Types for the compiled twin of copy.py.

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.string cimport memcmp, memcpy, memmove

cdef unsigned char _COPY_DATA, _XLOG_DATA, _KEEPALIVE, _STREAM_START
cdef Py_ssize_t _SIGNATURE_BYTES, _LSN_AT, _CHANGE_LENGTH_AT, _CHANGE_AT

# Move bytes towards the buffer's start; `to` is not behind `at`, and both ranges are inside the buffer.
cdef inline void move_bytes(unsigned char *data, Py_ssize_t to, Py_ssize_t at, Py_ssize_t n_bytes) noexcept:
    memmove(data + to, data + at, n_bytes)

# Whether bytes are a row of an LSN and a change that begins no transaction in progress: `CopyReader.row` judges others.
cdef inline bint is_plain_row(const unsigned char *data, Py_ssize_t at, Py_ssize_t end) noexcept:
    cdef const unsigned char *row = data + at
    cdef Py_ssize_t length
    if end - at <= 18 or memcmp(row, b"\x00\x02\x00\x00\x00\x08", 6) != 0:
        return False
    length = <Py_ssize_t>row[14] << 24 | <Py_ssize_t>row[15] << 16 | <Py_ssize_t>row[16] << 8 | <Py_ssize_t>row[17]
    return length == end - at - 18 and row[18] != c"S"

# Return the frame of such a row: kind, LSN, LSN, send time, change.
cdef inline bytes frame_of_row(const unsigned char *data, Py_ssize_t at, Py_ssize_t end, bytes sent):
    cdef Py_ssize_t size = end - at - 18
    cdef bytes frame = PyBytes_FromStringAndSize(NULL, 25 + size)
    cdef char *to = PyBytes_AS_STRING(frame)
    to[0] = c"w"
    memcpy(to + 1, data + at + 6, 8)
    memcpy(to + 9, data + at + 6, 8)
    memcpy(to + 17, PyBytes_AS_STRING(sent), 8)
    memcpy(to + 25, data + at + 18, size)
    return frame


cdef class CopyReader:
    cdef bytearray _buffer
    cdef Py_ssize_t _filled
    cdef object _large
    cdef unsigned char _large_type
    cdef Py_ssize_t _missing
    cdef public bytes keepalive
    cdef public list others
    cdef public bytes sent
    cdef public bint has_stream

    cpdef object expect_rows(self, object sent_us)
    cpdef object row(self, bytes contents, list frames)
    @cython.locals(
        size="Py_ssize_t", at="Py_ssize_t", end="Py_ssize_t", length="Py_ssize_t", kind="unsigned char",
        data="const unsigned char *",
    )
    cpdef object received(self, Py_ssize_t n_bytes, list frames)
    @cython.locals(left="Py_ssize_t", length="Py_ssize_t")
    cdef object _keep(self, Py_ssize_t at, Py_ssize_t size)
    @cython.locals(taken="Py_ssize_t", contents=bytes)
    cdef Py_ssize_t _collect(self, Py_ssize_t n_bytes, list frames) except -1


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
