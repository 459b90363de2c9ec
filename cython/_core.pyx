# cython: language_level=3
# _core.pyx - the one extension module: the Cython binding over the C core, put together from bind/ in reading order.
"""The compiled part of hrdma: memory, engine, requests and the fast half of the communicator.

Users find everything public in :mod:`hrdma`; what else is here serves :mod:`hrdma.communicator` and the tests.
"""
from hr cimport *

cdef class Channel
cdef class Engine
cdef class Program
cdef class Request

include "bind/errors.pxi"
include "bind/number.pxi"
include "bind/buffer.pxi"
include "bind/memory.pxi"
include "bind/shelf.pxi"
include "bind/engine.pxi"
include "bind/program.pxi"
include "bind/channel.pxi"
include "bind/request.pxi"
include "bind/message.pxi"
include "bind/start.pxi"
include "bind/collective.pxi"
include "bind/endpoint.pxi"
include "bind/verbs_device.pxi"
include "bind/verbs_choose.pxi"
include "bind/verbs_queue.pxi"
include "bind/verbs_srq.pxi"
include "bind/verbs_qp.pxi"

numpy_learn()
