# For compiled twins: rows by net effect, in the order of their keys.
#
# Neighbours in the key's index lie on the same pages, so the target's part of a set is cheaper in key order, the more rows
# the more (`python -m bench.micro.forms`). Sixteen bytes of a key decide; the rest would hardly change the page.

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_Next, PyDict_Size
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.object cimport PyObject
from cpython.set cimport PySet_Contains
from libc.stdlib cimport qsort


cdef struct Placed:
    unsigned long long high
    unsigned long long low
    PyObject *change


cdef inline int _compare(const void *one, const void *other) noexcept nogil:
    cdef const Placed *first = <const Placed *> one
    cdef const Placed *second = <const Placed *> other
    if first.high != second.high:
        return -1 if first.high < second.high else 1
    if first.low != second.low:
        return -1 if first.low < second.low else 1
    return 0


# Eight bytes of a text as a number that sorts as they do; of a number's text the length comes first.
cdef inline unsigned long long _eight(const unsigned char *text, Py_ssize_t size, bint is_number) noexcept:
    cdef unsigned long long packed = 0
    cdef Py_ssize_t index
    cdef Py_ssize_t room = 8
    if is_number:
        packed = size & 0xFF
        room = 7
    for index in range(room):
        packed = packed << 8 | (text[index] if index < size else 0)
    return packed


# Where a key of values as on the wire (length and text, or a tuple of those) stands among others.
cdef inline int _place(object key, bint is_number, Placed *placed) except -1:
    cdef bytes value
    cdef const unsigned char *text
    cdef Py_ssize_t size
    cdef Py_ssize_t taken
    if isinstance(key, tuple):
        value = (<tuple> key)[0]
        size = PyBytes_GET_SIZE(value) - 4
        placed.high = _eight(<const unsigned char *> PyBytes_AS_STRING(value) + 4, size, is_number)
        value = (<tuple> key)[1]
        size = PyBytes_GET_SIZE(value) - 4
        placed.low = _eight(<const unsigned char *> PyBytes_AS_STRING(value) + 4, size, is_number)
        return 0
    value = key
    size = PyBytes_GET_SIZE(value) - 4
    text = <const unsigned char *> PyBytes_AS_STRING(value) + 4
    taken = 7 if is_number else 8
    placed.high = _eight(text, size, is_number)
    placed.low = _eight(text + taken, size - taken, False) if size > taken else 0
    return 0


# Sort the rows of net changes into lists by effect, 1 the first: those whose keys are in `late`, or the others.
# `order` 0 keeps the order of the changes, 1 is that of numbers, 2 that of texts.
cdef inline int split_by_effect(dict net, set late, bint is_late, int order, list lists) except -1:
    cdef Py_ssize_t size = PyDict_Size(net)
    cdef Py_ssize_t at = 0
    cdef Py_ssize_t count = 0
    cdef Py_ssize_t index
    cdef PyObject *key
    cdef PyObject *change
    cdef bint is_sorted = True
    cdef bint has_late = len(late) > 0
    cdef bint is_held = False
    cdef Placed *placed = <Placed *> PyMem_Malloc((size + 1) * sizeof(Placed))
    if placed == NULL:
        raise MemoryError
    try:
        while PyDict_Next(net, &at, &key, &change):
            if has_late:
                is_held = PySet_Contains(late, <object> key)
            if is_held != is_late:
                continue
            placed[count].change = change
            if order:
                _place(<object> key, order == 1, &placed[count])
                if count and _compare(&placed[count - 1], &placed[count]) > 0:
                    is_sorted = False
            count += 1
        if not is_sorted:
            qsort(placed, count, sizeof(Placed), _compare)
        for index in range(count):
            (<list> lists[<object> (<tuple> placed[index].change)[0] - 1]).append((<tuple> placed[index].change)[1])
    finally:
        PyMem_Free(placed)
    return 0
