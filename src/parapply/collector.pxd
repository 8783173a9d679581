# For compiled twins: containers that the garbage collector need not visit.

cdef extern from "Python.h":
    void PyObject_GC_UnTrack(void *)


# Take a container that can never refer to itself off the collector's lists. It is freed by its count as before. With
# millions of rows alive, visiting them costs more than making them.
cdef inline object untrack(object container):
    PyObject_GC_UnTrack(<void *> container)
