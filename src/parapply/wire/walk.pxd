# For compiled twins: rows read where they lie in their frames, without an object per column.
#
# A frame is a whole CopyData payload: 25 bytes of header, the kind, four bytes of relation, a mark, then TupleData: a
# count of two bytes and per column 't' with length and text, 'n' or 'u'. (PostgreSQL manual, "Logical Replication
# Message Formats".) Every offset is compared with the frame's size before it is looked at.

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.string cimport memcpy

cdef enum:
    _WALK_KIND = 25
    _WALK_MARK = 30
    _WALK_ROW = 31


# Return a frame's kind and relation as one number; 0, which is no kind, for one too short to have them.
cdef inline unsigned long long tag_of(bytes frame) noexcept:
    cdef const unsigned char *data = <const unsigned char *> PyBytes_AS_STRING(frame)
    if PyBytes_GET_SIZE(frame) < _WALK_MARK:
        return 0
    return (
        <unsigned long long> data[_WALK_KIND] << 32 | <unsigned long long> data[_WALK_KIND + 1] << 24
        | <unsigned long long> data[_WALK_KIND + 2] << 16 | <unsigned long long> data[_WALK_KIND + 3] << 8
        | data[_WALK_KIND + 4]
    )


# Tell whether a frame is nothing but one row of so many columns, new for Insert and Update, old for Delete, all of them
# text or NULL, and the wanted ones (ascending positions) text; `starts` gets where those begin, with their length.
cdef inline bint is_simple(
    bytes frame, unsigned char kind, Py_ssize_t n_columns, const Py_ssize_t *wanted, Py_ssize_t n_wanted,
    Py_ssize_t *starts,
) noexcept:
    cdef const unsigned char *data = <const unsigned char *> PyBytes_AS_STRING(frame)
    cdef Py_ssize_t size = PyBytes_GET_SIZE(frame)
    cdef Py_ssize_t at = _WALK_ROW + 2
    cdef Py_ssize_t column, length
    cdef Py_ssize_t found = 0
    cdef unsigned char mark
    if size < at or data[_WALK_KIND] != kind:
        return False
    mark = data[_WALK_MARK]
    if kind == c"D":
        if mark != c"K" and mark != c"O":
            return False
    elif mark != c"N":
        return False
    if (data[_WALK_ROW] << 8 | data[_WALK_ROW + 1]) != n_columns:
        return False
    for column in range(n_columns):
        if at >= size:
            return False
        mark = data[at]
        at += 1
        if mark == c"t":
            if at + 4 > size:
                return False
            if found < n_wanted and wanted[found] == column:
                starts[found] = at
                found += 1
            length = <Py_ssize_t> data[at] << 24 | data[at + 1] << 16 | data[at + 2] << 8 | data[at + 3]
            at += 4 + length
            if at > size:
                return False
        elif mark != c"n":
            return False
    return at == size and found == n_wanted


# The same where no value is wanted.
cdef inline bint is_plain(bytes frame, unsigned char kind, Py_ssize_t n_columns) noexcept:
    return is_simple(frame, kind, n_columns, NULL, 0, NULL)


# Return the value that begins at an offset `is_simple` has given, with its length.
cdef inline bytes value_from(bytes frame, Py_ssize_t start):
    cdef const unsigned char *data = <const unsigned char *> PyBytes_AS_STRING(frame) + start
    cdef Py_ssize_t length = <Py_ssize_t> data[0] << 24 | data[1] << 16 | data[2] << 8 | data[3]
    return PyBytes_FromStringAndSize(<const char *> data, 4 + length)


# Return the value at a position of a simple frame: text with its length, or NULL as an array's element has it.
cdef inline bytes frame_value(bytes frame, Py_ssize_t position):
    cdef const unsigned char *data = <const unsigned char *> PyBytes_AS_STRING(frame)
    cdef Py_ssize_t size = PyBytes_GET_SIZE(frame)
    cdef Py_ssize_t at = _WALK_ROW + 2
    cdef Py_ssize_t column, length
    for column in range(position + 1):
        if at < size and data[at] == c"t" and at + 5 <= size:
            length = <Py_ssize_t> data[at + 1] << 24 | data[at + 2] << 16 | data[at + 3] << 8 | data[at + 4]
            if column == position:
                return frame[at + 1 : at + 5 + length]
            at += 5 + length
        elif at < size and data[at] == c"n":
            if column == position:
                return b"\xff\xff\xff\xff"
            at += 1
        else:
            break
    raise IndexError(position)


# Return, for each position, a header and the values that rows have there. A row is a simple frame or a list of values.
cdef inline list join_columns(list rows, tuple positions, Py_ssize_t n_columns, bytes header):
    cdef Py_ssize_t n_positions = len(positions)
    cdef Py_ssize_t header_bytes = PyBytes_GET_SIZE(header)
    cdef Py_ssize_t *output_of = <Py_ssize_t *> PyMem_Malloc((n_columns + 1) * sizeof(Py_ssize_t))
    cdef Py_ssize_t *sizes = <Py_ssize_t *> PyMem_Malloc((n_positions + 1) * sizeof(Py_ssize_t))
    cdef char **outputs = <char **> PyMem_Malloc((n_positions + 1) * sizeof(char *))
    cdef list joined = []
    cdef bytes one
    cdef Py_ssize_t index, position
    try:
        if output_of == NULL or sizes == NULL or outputs == NULL:
            raise MemoryError
        for index in range(n_columns):
            output_of[index] = -1
        for index in range(n_positions):
            position = positions[index]
            if position < 0 or position >= n_columns:
                raise IndexError(position)
            output_of[position] = index
            sizes[index] = header_bytes
        for row in rows:
            if isinstance(row, bytes):
                _add_sizes(<bytes> row, n_columns, output_of, sizes)
            else:
                for index in range(n_positions):
                    one = (<list> row)[positions[index]]
                    sizes[index] += len(one)
        for index in range(n_positions):
            one = PyBytes_FromStringAndSize(NULL, sizes[index])
            joined.append(one)
            outputs[index] = PyBytes_AS_STRING(one)
            memcpy(outputs[index], PyBytes_AS_STRING(header), header_bytes)
            outputs[index] += header_bytes
        for row in rows:
            if isinstance(row, bytes):
                _copy_values(<bytes> row, n_columns, output_of, outputs)
            else:
                for index in range(n_positions):
                    one = (<list> row)[positions[index]]
                    memcpy(outputs[index], PyBytes_AS_STRING(one), PyBytes_GET_SIZE(one))
                    outputs[index] += PyBytes_GET_SIZE(one)
    finally:
        PyMem_Free(output_of)
        PyMem_Free(sizes)
        PyMem_Free(outputs)
    return joined


# Add what each value takes. Raises ValueError for a frame that `is_simple` did not see: it would be read beyond its end.
cdef inline int _add_sizes(bytes frame, Py_ssize_t n_columns, const Py_ssize_t *output_of, Py_ssize_t *sizes) except -1:
    cdef const unsigned char *data = <const unsigned char *> PyBytes_AS_STRING(frame)
    cdef Py_ssize_t size = PyBytes_GET_SIZE(frame)
    cdef Py_ssize_t at = _WALK_ROW + 2
    cdef Py_ssize_t column, length
    for column in range(n_columns):
        length = 0
        if at < size and data[at] == c"t" and at + 5 <= size:
            length = <Py_ssize_t> data[at + 1] << 24 | data[at + 2] << 16 | data[at + 3] << 8 | data[at + 4]
            at += 5 + length
        elif at < size and data[at] == c"n":
            at += 1
        else:
            raise ValueError("not a simple row")
        if output_of[column] >= 0:
            sizes[output_of[column]] += 4 + length
    if at != size:
        raise ValueError("not a simple row")
    return 0


# Copy values to where `outputs` point, and move those on. The frame was measured by `_add_sizes` just before.
cdef inline int _copy_values(bytes frame, Py_ssize_t n_columns, const Py_ssize_t *output_of, char **outputs) except -1:
    cdef const unsigned char *data = <const unsigned char *> PyBytes_AS_STRING(frame)
    cdef Py_ssize_t at = _WALK_ROW + 2
    cdef Py_ssize_t column, length, output
    for column in range(n_columns):
        output = output_of[column]
        if data[at] == c"t":
            length = <Py_ssize_t> data[at + 1] << 24 | data[at + 2] << 16 | data[at + 3] << 8 | data[at + 4]
            if output >= 0:
                memcpy(outputs[output], data + at + 1, 4 + length)
                outputs[output] += 4 + length
            at += 5 + length
        else:
            at += 1
            if output >= 0:
                memcpy(outputs[output], b"\xff\xff\xff\xff", 4)
                outputs[output] += 4
    return 0
