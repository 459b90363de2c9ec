# errors.pxi - from a status of the core to the exception that Python sees.
#
# What a status takes down with it decides the class: request errors are RequestError (or a builtin where one says it),
# peer errors PeerError, device errors DeviceError. Cold code: nothing here runs while things go well.
from hrdma.errors import CollectiveMismatchError, CollectiveTimeoutError, DeviceError, PeerError, RequestError


cdef str text_of(const char *text):
    if text == NULL:
        return ""
    return (<bytes> text).decode("utf-8", "replace")


cdef object status_error(hr_status status, str message, int rank=-1, str operation="", int64_t sequence=-1,
                         str phase="", str transport=""):
    """An exception for ``status``; the caller raises it."""
    if hr_is_peer_error(status):
        return PeerError(message, rank=rank, operation=operation, sequence=sequence, phase=phase, transport=transport)
    if hr_is_device_error(status):
        return DeviceError(message)
    if status == HR_ERR_TIMEOUT:
        return TimeoutError(message)
    if status == HR_ERR_MISMATCH:
        return CollectiveMismatchError(message)
    if status == HR_ERR_INVALID:
        return ValueError(message)
    return RequestError(message)


cdef str with_detail(str message, const char *detail):
    return f"{message}: {text_of(detail)}" if detail != NULL and detail[0] else message


# A child of fork has the engine's memory and none of its threads. Whoever was made before the fork carries an older
# count than this one, and is refused; comparing two integers is all that the hot path pays.
cdef int forks = 0


def _after_fork():
    global forks
    forks += 1


import os as _os

_os.register_at_fork(after_in_child=_after_fork)
