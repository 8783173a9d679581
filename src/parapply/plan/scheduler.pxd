# Types for the compiled twin of scheduler.py, and the table of counts of the keys in flight.

from cpython.bytearray cimport PyByteArray_AS_STRING

cdef enum:
    _SLOTS = 1 << 20
    # A slot that was full once stays full: what it stands for is looked at every time, and nothing is missed.
    _FULL = 255


cdef inline unsigned long long _slot(object key, unsigned long long salt) except? 0:
    cdef unsigned long long mixed = (<unsigned long long> hash(key)) ^ salt
    return (mixed ^ mixed >> 32) & (_SLOTS - 1)


cdef inline int note_hashes(bytearray slots, unsigned long long tree_oid, dict keys, set found) except -1:
    cdef unsigned char *counts = <unsigned char *> PyByteArray_AS_STRING(slots)
    cdef unsigned long long salt = tree_oid * <unsigned long long> 0x9E3779B97F4A7C15
    cdef unsigned long long at
    for key in keys:
        at = _slot(key, salt)
        if counts[at]:
            found.add(key)
        if counts[at] != _FULL:
            counts[at] += 1
    return 0


cdef inline int forget_hashes(bytearray slots, unsigned long long tree_oid, dict keys) except -1:
    cdef unsigned char *counts = <unsigned char *> PyByteArray_AS_STRING(slots)
    cdef unsigned long long salt = tree_oid * <unsigned long long> 0x9E3779B97F4A7C15
    cdef unsigned long long at
    for key in keys:
        at = _slot(key, salt)
        if counts[at] != _FULL:
            counts[at] -= 1
    return 0


cdef class KeysInFlight:
    cdef bytearray _slots

    cpdef set add(self, object changes)
    cpdef object remove(self, object changes)
    cdef object _note(self, object tree_oid, dict keys, set found)
    cdef object _forget(self, object tree_oid, dict keys)
