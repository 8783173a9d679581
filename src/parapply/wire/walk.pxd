# For compiled twins: rows read where they lie in their frames, without an object per column.
#
# A frame is a whole CopyData payload: 25 bytes of header, the kind, four bytes of relation, a mark, then TupleData: a
# count of two bytes and per column 't' with length and text, 'n' or 'u'. (PostgreSQL manual, "Logical Replication
# Message Formats".) Every offset is compared with the frame's size before it is looked at.

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.string cimport memcmp, memcpy
from parapply.wire.binary cimport binary_bytes, binary_width, write_binary

cdef enum:
    _WALK_KIND = 25
    _WALK_MARK = 30
    _WALK_ROW = 31
    # Bytes in front of the elements of a binary array.
    _ARRAY_HEADER = 20
    # From this size of a value on, copying it leaves the interpreter to other threads.
    _LARGE_VALUE = 1048576


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
# text, NULL or, in an Update, unchanged, and the wanted ones (ascending positions) text; `starts` gets where those begin,
# with their length, `is_partial` becomes true where a value is unchanged.
cdef inline bint is_simple(
    bytes frame, unsigned char kind, Py_ssize_t n_columns, const Py_ssize_t *wanted, Py_ssize_t n_wanted,
    Py_ssize_t *starts, bint *is_partial,
) noexcept:
    cdef const unsigned char *data = <const unsigned char *> PyBytes_AS_STRING(frame)
    cdef Py_ssize_t size = PyBytes_GET_SIZE(frame)
    cdef Py_ssize_t at = _WALK_ROW + 2
    cdef Py_ssize_t column, length
    cdef Py_ssize_t found = 0
    cdef unsigned char mark
    if is_partial != NULL:
        is_partial[0] = False
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
        elif mark == c"u" and kind == c"U":
            is_partial[0] = True
        elif mark != c"n":
            return False
    return at == size and found == n_wanted


# The same for an Insert where no value is wanted.
cdef inline bint is_plain(bytes frame, Py_ssize_t n_columns) noexcept:
    return is_simple(frame, c"I", n_columns, NULL, 0, NULL, NULL)


# Return the value that begins at an offset `is_simple` has given, with its length.
cdef inline bytes value_from(bytes frame, Py_ssize_t start):
    cdef const unsigned char *data = <const unsigned char *> PyBytes_AS_STRING(frame) + start
    cdef Py_ssize_t length = <Py_ssize_t> data[0] << 24 | data[1] << 16 | data[2] << 8 | data[3]
    return PyBytes_FromStringAndSize(<const char *> data, 4 + length)


# The offset after the column at an offset; -1 where it is cut, or nothing that a simple frame has.
cdef inline Py_ssize_t _after(const unsigned char *data, Py_ssize_t at, Py_ssize_t size) noexcept:
    cdef Py_ssize_t end
    if at >= size:
        return -1
    if data[at] != c"t":
        return at + 1 if data[at] == c"n" or data[at] == c"u" else -1
    if at + 5 > size:
        return -1
    end = at + 5 + (<Py_ssize_t> data[at + 1] << 24 | data[at + 2] << 16 | data[at + 3] << 8 | data[at + 4])
    return end if end <= size else -1


# Return an Update without its old row if that is of so many columns, text or NULL, and has the same text as the new one at
# the wanted (ascending) positions, of which there are eight at most; else None. The new row is not looked at further.
cdef inline bytes without_old(bytes frame, Py_ssize_t n_columns, const Py_ssize_t *wanted, Py_ssize_t n_wanted):
    cdef const unsigned char *data = <const unsigned char *> PyBytes_AS_STRING(frame)
    cdef Py_ssize_t size = PyBytes_GET_SIZE(frame)
    cdef Py_ssize_t at = _WALK_ROW + 2
    cdef Py_ssize_t[8] starts
    cdef Py_ssize_t[8] ends
    cdef Py_ssize_t column, end, new_at
    cdef Py_ssize_t found = 0
    cdef bytes new
    if n_wanted < 1 or n_wanted > 8 or size < at or data[_WALK_KIND] != c"U":
        return None
    if data[_WALK_MARK] != c"K" and data[_WALK_MARK] != c"O":
        return None
    if (data[_WALK_ROW] << 8 | data[_WALK_ROW + 1]) != n_columns:
        return None
    for column in range(n_columns):
        end = _after(data, at, size)
        if end < 0 or data[at] == c"u":
            return None
        if found < n_wanted and wanted[found] == column:
            starts[found] = at
            ends[found] = end
            found += 1
        at = end
    if found != n_wanted or at + 3 > size or data[at] != c"N" or (data[at + 1] << 8 | data[at + 2]) != n_columns:
        return None
    new_at = at + 3
    found = 0
    for column in range(wanted[n_wanted - 1] + 1):
        end = _after(data, new_at, size)
        if end < 0:
            return None
        if wanted[found] == column:
            if data[new_at] != c"t" or end - new_at != ends[found] - starts[found]:
                return None
            if memcmp(data + new_at, data + starts[found], end - new_at):
                return None
            found += 1
        new_at = end
    new = PyBytes_FromStringAndSize(NULL, _WALK_MARK + size - at)
    memcpy(PyBytes_AS_STRING(new), data, _WALK_MARK)
    memcpy(PyBytes_AS_STRING(new) + _WALK_MARK, data + at, size - at)
    return new


# Return a simple frame with the values that it lacks taken from an earlier one of as many columns, as far as that has
# them; `is_partial` becomes whether some are still missing. It is the frame itself where nothing is taken.
cdef inline bytes filled_frame(bytes frame, bytes before, Py_ssize_t n_columns, bint *is_partial):
    cdef const unsigned char *data = <const unsigned char *> PyBytes_AS_STRING(frame)
    cdef const unsigned char *was = <const unsigned char *> PyBytes_AS_STRING(before)
    cdef Py_ssize_t size = PyBytes_GET_SIZE(frame)
    cdef Py_ssize_t was_size = PyBytes_GET_SIZE(before)
    cdef Py_ssize_t at = _WALK_ROW + 2
    cdef Py_ssize_t was_at = _WALK_ROW + 2
    cdef Py_ssize_t filled_size = at
    cdef Py_ssize_t column, end, was_end
    cdef bint is_taken = False
    cdef bytes filled
    cdef unsigned char *out
    is_partial[0] = False
    for column in range(n_columns):
        end = _after(data, at, size)
        was_end = _after(was, was_at, was_size)
        if end < 0 or was_end < 0:
            raise ValueError("not a simple row")
        if data[at] != c"u":
            filled_size += end - at
        else:
            filled_size += was_end - was_at
            if was[was_at] == c"u":
                is_partial[0] = True
            else:
                is_taken = True
        at = end
        was_at = was_end
    if not is_taken:
        return frame
    filled = PyBytes_FromStringAndSize(NULL, filled_size)
    out = <unsigned char *> PyBytes_AS_STRING(filled)
    at = was_at = _WALK_ROW + 2
    memcpy(out, data, at)
    out += at
    for column in range(n_columns):
        end = _after(data, at, size)
        was_end = _after(was, was_at, was_size)
        if data[at] != c"u":
            memcpy(out, data + at, end - at)
            out += end - at
        else:
            memcpy(out, was + was_at, was_end - was_at)
            out += was_end - was_at
        at = end
        was_at = was_end
    return filled


# Group rows, simple frames or lists of values, by the columns that have a value: a byte for each, 1 where it has.
cdef inline dict split_by_columns(list rows, Py_ssize_t n_columns):
    cdef dict groups = {}
    cdef list group = None
    cdef bytes columns = None
    cdef unsigned char *found = <unsigned char *> PyMem_Malloc(n_columns + 1)
    cdef const unsigned char *data
    cdef Py_ssize_t column, at, size
    if found == NULL:
        raise MemoryError
    try:
        for row in rows:
            if isinstance(row, bytes):
                data = <const unsigned char *> PyBytes_AS_STRING(<bytes> row)
                size = PyBytes_GET_SIZE(<bytes> row)
                at = _WALK_ROW + 2
                for column in range(n_columns):
                    found[column] = at < size and data[at] != c"u"
                    at = _after(data, at, size)
                    if at < 0:
                        raise ValueError("not a simple row")
            else:
                for column in range(n_columns):
                    found[column] = (<list> row)[column] is not None
            # Neighbours are mostly alike.
            if columns is None or memcmp(found, PyBytes_AS_STRING(columns), n_columns):
                columns = PyBytes_FromStringAndSize(<const char *> found, n_columns)
                group = groups.setdefault(columns, [])
            group.append(row)
    finally:
        PyMem_Free(found)
    return groups


# Return the value at a position of a simple frame: text with its length, or NULL as an array's element has it; None if it
# is unchanged.
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
        elif at < size and (data[at] == c"n" or data[at] == c"u"):
            if column == position:
                return b"\xff\xff\xff\xff" if data[at] == c"n" else None
            at += 1
        else:
            break
    raise IndexError(position)


# What becomes of the columns of a set: each position's output, and where the next value goes.
cdef struct Output:
    unsigned int type_oid
    Py_ssize_t width  # as `binary_width`
    Py_ssize_t size
    unsigned char *next  # NULL once a value was met that must be sent as text


# Return, for each position, a binary array of the values that rows have there, of the type given; None where a value of
# another type than text is not spelled as PostgreSQL prints it. A row is a simple frame or a list of values.
cdef inline list join_columns(list rows, tuple positions, tuple type_oids, Py_ssize_t n_columns):
    cdef Py_ssize_t n_positions = len(positions)
    cdef Py_ssize_t n_rows = len(rows)
    cdef Py_ssize_t *output_of = <Py_ssize_t *> PyMem_Malloc((n_columns + 1) * sizeof(Py_ssize_t))
    cdef Output *outputs = <Output *> PyMem_Malloc((n_positions + 1) * sizeof(Output))
    cdef list joined = []
    cdef bytes one
    cdef Py_ssize_t index, position
    try:
        if output_of == NULL or outputs == NULL:
            raise MemoryError
        for index in range(n_columns):
            output_of[index] = -1
        for index in range(n_positions):
            position = positions[index]
            if position < 0 or position >= n_columns:
                raise IndexError(position)
            output_of[position] = index
            outputs[index].type_oid = type_oids[index]
            outputs[index].width = binary_width(outputs[index].type_oid)
            outputs[index].size = _ARRAY_HEADER
        for row in rows:
            if isinstance(row, bytes):
                _add_sizes(<bytes> row, n_columns, output_of, outputs)
            else:
                for index in range(n_positions):
                    one = (<list> row)[positions[index]]
                    if one is None:
                        raise TypeError("a value was not sent")
                    _add_size(&outputs[index], _length_of(<const unsigned char *> PyBytes_AS_STRING(one)))
        for index in range(n_positions):
            one = PyBytes_FromStringAndSize(NULL, outputs[index].size)
            joined.append(one)
            outputs[index].next = _write_header(<unsigned char *> PyBytes_AS_STRING(one), outputs[index].type_oid, n_rows)
        for row in rows:
            if isinstance(row, bytes):
                _copy_values(<bytes> row, n_columns, output_of, outputs)
            else:
                for index in range(n_positions):
                    one = (<list> row)[positions[index]]
                    _copy_value(&outputs[index], <const unsigned char *> PyBytes_AS_STRING(one))
        for index in range(n_positions):
            if outputs[index].next == NULL:
                joined[index] = None
    finally:
        PyMem_Free(output_of)
        PyMem_Free(outputs)
    return joined


# The length in front of a value; -1 for NULL. Without the U the literal is a Python object, made and compared each time.
cdef inline Py_ssize_t _length_of(const unsigned char *value) noexcept:
    cdef unsigned int length = <unsigned int> value[0] << 24 | value[1] << 16 | value[2] << 8 | value[3]
    return -1 if length == 0xFFFFFFFFU else <Py_ssize_t> length


# Dimensions, has-null flag, element type, length and lower bound of the only dimension. (PostgreSQL's array_recv.)
cdef inline unsigned char *_write_header(unsigned char *out, unsigned int type_oid, Py_ssize_t n_rows) noexcept:
    cdef unsigned int[5] fields
    cdef Py_ssize_t index
    fields[0] = fields[1] = fields[4] = 1
    fields[2] = type_oid
    fields[3] = <unsigned int> n_rows
    for index in range(5):
        _put_int(out + 4 * index, fields[index])
    return out + _ARRAY_HEADER


cdef inline void _put_int(unsigned char *out, unsigned int value) noexcept:
    out[0] = value >> 24
    out[1] = (value >> 16) & 0xFF
    out[2] = (value >> 8) & 0xFF
    out[3] = value & 0xFF


cdef inline void _add_size(Output *output, Py_ssize_t length) noexcept:
    output.size += 4
    if length >= 0:
        output.size += binary_bytes(output.width, length)


# Copy one value, its length in front, to where an output goes on; from its text to binary where that is wanted.
cdef inline int _copy_value(Output *output, const unsigned char *value) except -1:
    cdef Py_ssize_t length = _length_of(value)
    if output.next == NULL:
        return 0
    if length < 0:
        _put_int(output.next, 0xFFFFFFFF)
        output.next += 4
    elif not output.width:
        if length < _LARGE_VALUE:
            memcpy(output.next, value, 4 + length)
        else:
            with nogil:
                memcpy(output.next, value, 4 + length)
        output.next += 4 + length
    elif write_binary(output.type_oid, value + 4, length, output.next + 4):
        length = binary_bytes(output.width, length)
        _put_int(output.next, <unsigned int> length)
        output.next += 4 + length
    else:
        output.next = NULL
    return 0


# Add what each value takes. Raises ValueError for a frame that `is_simple` did not see: it would be read beyond its end.
cdef inline int _add_sizes(
    bytes frame, Py_ssize_t n_columns, const Py_ssize_t *output_of, Output *outputs
) except -1:
    cdef const unsigned char *data = <const unsigned char *> PyBytes_AS_STRING(frame)
    cdef Py_ssize_t size = PyBytes_GET_SIZE(frame)
    cdef Py_ssize_t at = _WALK_ROW + 2
    cdef Py_ssize_t column, length
    for column in range(n_columns):
        length = -1
        if at < size and data[at] == c"t" and at + 5 <= size:
            length = _length_of(data + at + 1)
            at += 5 + length
        elif at < size and (data[at] == c"n" or (data[at] == c"u" and output_of[column] < 0)):
            at += 1
        else:
            raise ValueError("not a simple row")
        if output_of[column] >= 0:
            _add_size(&outputs[output_of[column]], length)
    if at != size:
        raise ValueError("not a simple row")
    return 0


# Copy the values of a frame to their outputs. It was measured by `_add_sizes` just before.
cdef inline int _copy_values(
    bytes frame, Py_ssize_t n_columns, const Py_ssize_t *output_of, Output *outputs
) except -1:
    cdef const unsigned char *data = <const unsigned char *> PyBytes_AS_STRING(frame)
    cdef Py_ssize_t at = _WALK_ROW + 2
    cdef Py_ssize_t column
    for column in range(n_columns):
        if data[at] == c"t":
            if output_of[column] >= 0:
                _copy_value(&outputs[output_of[column]], data + at + 1)
            at += 5 + _length_of(data + at + 1)
        else:
            if output_of[column] >= 0:
                _copy_value(&outputs[output_of[column]], <const unsigned char *> b"\xff\xff\xff\xff")
            at += 1
    return 0
