"""Objects that tasks make and others use, by reference: put, get, reduce. See README.md for what holds.

>>> import hrdma.objects
>>> with hrdma.objects.connect() as client:
...     parts = [client.put(np.full(1 << 20, i, "float32")) for i in range(4)]
...     total = client.get(client.reduce(parts), timeout=30)
"""

from __future__ import annotations

from hrdma.errors import ObjectLost, ObjectStoreFull
from hrdma.objects.client import Client
from hrdma.objects.connecting import connect
from hrdma.objects.ref import ObjectRef
from hrdma.objects.request import Request

__all__ = ["Client", "ObjectLost", "ObjectRef", "ObjectStoreFull", "Request", "connect"]
