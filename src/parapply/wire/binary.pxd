# For compiled twins: the binary form of a value from its text, for array elements that the target need not parse.
#
# Only the one spelling that PostgreSQL itself prints (ISO dates, UTC) is read; whatever else its input functions take is
# refused here, and the caller sends text. So no value can come out that the type's input function would not have made.
# (PostgreSQL sources: the send functions int8send, uuid_send, timestamptz_send, date_send, float8send, boolsend.)

from cpython.object cimport PyObject
from libc.string cimport memcpy

cdef extern from "Python.h":
    double PyOS_string_to_double(const char *, char **, PyObject *) except? -1.0

cdef enum:
    _BOOL = 16
    _BYTEA = 17
    _INT8 = 20
    _INT2 = 21
    _INT4 = 23
    _FLOAT8 = 701
    _DATE = 1082
    _TIMESTAMP = 1114
    _TIMESTAMPTZ = 1184
    _UUID = 2950
    # Longest text of a float8 that is read: 17 digits, sign, point and exponent take 24.
    _FLOAT_TEXT = 32
    # From year 1 to 2000-01-01.
    _DAYS_TO_2000 = 730119


# Bytes of the binary form of a type's values; 0 for types that are sent as text, -1 where it depends on the value.
cdef inline Py_ssize_t binary_width(unsigned int type_oid) noexcept:
    if type_oid == _INT8 or type_oid == _TIMESTAMPTZ or type_oid == _TIMESTAMP or type_oid == _FLOAT8:
        return 8
    if type_oid == _INT4 or type_oid == _DATE:
        return 4
    if type_oid == _INT2:
        return 2
    if type_oid == _BOOL:
        return 1
    if type_oid == _UUID:
        return 16
    if type_oid == _BYTEA:
        return -1
    return 0


# Bytes that a text of so many becomes, where it is spelled as PostgreSQL prints it.
cdef inline Py_ssize_t binary_bytes(Py_ssize_t width, Py_ssize_t size) noexcept:
    if width == 0:
        return size
    if width > 0:
        return width
    return (size - 2) // 2 if size > 2 else 0


cdef inline void _big_endian(unsigned long long value, Py_ssize_t width, unsigned char *out) noexcept:
    cdef Py_ssize_t index
    for index in range(width):
        out[index] = <unsigned char> (value >> (8 * (width - 1 - index)))


# So many digits from a place on as a number; -1 if one of them is none.
cdef inline long long _digits(const unsigned char *text, Py_ssize_t count) noexcept:
    cdef long long value = 0
    cdef Py_ssize_t index
    for index in range(count):
        if text[index] < c"0" or text[index] > c"9":
            return -1
        value = value * 10 + (text[index] - c"0")
    return value


cdef inline bint _integer(const unsigned char *text, Py_ssize_t size, Py_ssize_t width, unsigned char *out) noexcept:
    cdef unsigned long long value = 0
    cdef unsigned long long limit = (<unsigned long long> 1 << (8 * width - 1)) - 1
    cdef bint is_negative = size > 0 and text[0] == c"-"
    cdef Py_ssize_t index
    # 19 digits fit into 64 bits whatever they are.
    if size - is_negative < 1 or size - is_negative > 19:
        return False
    for index in range(is_negative, size):
        if text[index] < c"0" or text[index] > c"9":
            return False
        value = value * 10 + (text[index] - c"0")
    if value > limit + is_negative:
        return False
    _big_endian(0 - value if is_negative else value, width, out)
    return True


# Days since 2000-01-01 of YYYY-MM-DD; False for what is no date of the years 1 to 9999.
cdef inline bint _days(const unsigned char *text, long long *days) noexcept:
    cdef long long year = _digits(text, 4)
    cdef long long month = _digits(text + 5, 2)
    cdef long long day = _digits(text + 8, 2)
    cdef bint is_leap = (year % 4 == 0 and year % 100 != 0) or year % 400 == 0
    cdef long long last = 31
    cdef long long years
    if year < 1 or month < 1 or month > 12 or day < 1 or text[4] != c"-" or text[7] != c"-":
        return False
    if month == 2:
        last = 29 if is_leap else 28
    elif month == 4 or month == 6 or month == 9 or month == 11:
        last = 30
    if day > last:
        return False
    # A year from March on, so that the leap day is its last; 306 days are from March to the end of December.
    if month < 3:
        year -= 1
        month += 12
    years = year * 365 + year // 4 - year // 100 + year // 400
    days[0] = years + (153 * (month - 3) + 2) // 5 + day - 1 - 306 - _DAYS_TO_2000
    return True


# YYYY-MM-DD HH:MM:SS with up to six digits behind a point and, with a zone, +00; in microseconds since 2000-01-01.
cdef inline bint _moment(const unsigned char *text, Py_ssize_t size, bint has_zone, unsigned char *out) noexcept:
    cdef long long days, hours, minutes, seconds
    cdef long long micros = 0
    cdef Py_ssize_t places
    if has_zone:
        if size < 22 or text[size - 3] != c"+" or text[size - 2] != c"0" or text[size - 1] != c"0":
            return False
        size -= 3
    if size < 19 or size > 26 or size == 20 or not _days(text, &days):
        return False
    hours = _digits(text + 11, 2)
    minutes = _digits(text + 14, 2)
    seconds = _digits(text + 17, 2)
    if text[10] != c" " or text[13] != c":" or text[16] != c":":
        return False
    if hours < 0 or hours > 23 or minutes < 0 or minutes > 59 or seconds < 0 or seconds > 59:
        return False
    if size > 19:
        places = size - 20
        micros = _digits(text + 20, places)
        if text[19] != c"." or micros < 0:
            return False
        for places in range(places, 6):
            micros *= 10
    micros += ((days * 24 + hours) * 60 + minutes) * 60000000 + seconds * 1000000
    _big_endian(<unsigned long long> micros, 8, out)
    return True


cdef inline bint _date(const unsigned char *text, Py_ssize_t size, unsigned char *out) noexcept:
    cdef long long days
    if size != 10 or not _days(text, &days):
        return False
    _big_endian(<unsigned long long> days, 4, out)
    return True


cdef inline int _hex(unsigned char digit) noexcept:
    if c"0" <= digit <= c"9":
        return digit - c"0"
    if c"a" <= digit <= c"f":
        return digit - c"a" + 10
    return -1


cdef inline bint _uuid(const unsigned char *text, Py_ssize_t size, unsigned char *out) noexcept:
    cdef Py_ssize_t at = 0
    cdef Py_ssize_t index
    cdef int high, low
    if size != 36:
        return False
    for index in range(16):
        if index == 4 or index == 6 or index == 8 or index == 10:
            if text[at] != c"-":
                return False
            at += 1
        high = _hex(text[at])
        low = _hex(text[at + 1])
        if high < 0 or low < 0:
            return False
        out[index] = <unsigned char> (high << 4 | low)
        at += 2
    return True


# The value of a lower-case hexadecimal digit; 16 for anything else.
cdef inline unsigned char _digit(unsigned char character) noexcept nogil:
    cdef unsigned char decimal = <unsigned char> (character - 48)
    cdef unsigned char letter = <unsigned char> (character - 97)
    return decimal if decimal < 10 else <unsigned char> (letter + 10) if letter < 6 else 16


# A bytea as \x and two lower-case digits a byte. Without a branch for each digit: half of them would be mispredicted.
cdef inline bint _hex_bytes(const unsigned char *text, Py_ssize_t size, unsigned char *out) noexcept nogil:
    cdef unsigned char high, low
    cdef unsigned char worst = 0
    cdef Py_ssize_t index
    if size < 2 or size % 2 or text[0] != c"\\" or text[1] != c"x":
        return False
    for index in range(size // 2 - 1):
        high = _digit(text[2 * index + 2])
        low = _digit(text[2 * index + 3])
        worst |= high | low
        out[index] = <unsigned char> (high << 4 | low)
    return worst < 16


# Digits, sign, point and exponent only. A number too large or too small to be told from zero is the target's to refuse.
cdef inline bint _float(const unsigned char *text, Py_ssize_t size, unsigned char *out) except -1:
    cdef char copy[_FLOAT_TEXT]
    cdef char *end
    cdef double value
    cdef unsigned long long bits
    cdef bint is_zero = True
    cdef bint is_mantissa = True
    cdef Py_ssize_t index
    if size < 1 or size >= _FLOAT_TEXT:
        return False
    for index in range(size):
        if c"0" <= text[index] <= c"9":
            if is_mantissa and text[index] != c"0":
                is_zero = False
        elif text[index] == c"e":
            is_mantissa = False
        elif text[index] != c"." and text[index] != c"-" and text[index] != c"+":
            return False
    # What begins otherwise is a spelling PostgreSQL does not print.
    if not (c"0" <= text[0] <= c"9" or (text[0] == c"-" and size > 1 and c"0" <= text[1] <= c"9")):
        return False
    memcpy(copy, text, size)
    copy[size] = 0
    value = PyOS_string_to_double(copy, &end, NULL)
    if end != copy + size or value - value != 0 or (value == 0 and not is_zero):
        return False
    memcpy(&bits, &value, 8)
    _big_endian(bits, 8, out)
    return True


# Write the binary form of a text, `binary_bytes` of them; False if it is not spelled as PostgreSQL prints it.
cdef inline bint write_binary(
    unsigned int type_oid, const unsigned char *text, Py_ssize_t size, unsigned char *out
) except -1:
    if type_oid == _INT8:
        return _integer(text, size, 8, out)
    if type_oid == _INT4:
        return _integer(text, size, 4, out)
    if type_oid == _INT2:
        return _integer(text, size, 2, out)
    if type_oid == _TIMESTAMPTZ:
        return _moment(text, size, True, out)
    if type_oid == _TIMESTAMP:
        return _moment(text, size, False, out)
    if type_oid == _DATE:
        return _date(text, size, out)
    if type_oid == _UUID:
        return _uuid(text, size, out)
    if type_oid == _FLOAT8:
        return _float(text, size, out)
    if type_oid == _BYTEA:
        with nogil:
            return _hex_bytes(text, size, out)
    if type_oid == _BOOL and size == 1 and (text[0] == c"t" or text[0] == c"f"):
        out[0] = text[0] == c"t"
        return True
    return False
