"""What a process does with the objects of its job: put, get, wait, reduce.

A large object's memory comes as a descriptor: writable for a `put`, whose bytes are copied into it once, in the caller's
thread and announced piece by piece so that they leave while the rest is copied; read-only for a `get`, which maps it and
copies nothing. How questions reach the node and answers come back: `connection.py`.
"""

from __future__ import annotations

import functools
import io
import mmap
import operator
import os
import secrets
import threading
import time
import weakref
from collections.abc import Iterable
from typing import Any

from hrdma import _core
from hrdma.objects import kernels
from hrdma.objects.asker import Body
from hrdma.objects.connection import Connection, nothing
from hrdma.objects.ref import INLINE, ObjectRef, check_id, describe, rebuild
from hrdma.objects.request import After, Request, Several, cancel

__all__ = ["Client"]

STEP = 1 << 21  # bytes of a put that are copied between two announcements
SILENT = 1.0  # seconds after which who is asked what is there now counts as silent


class Client(Connection):
    """Objects of a job, as this process sees them. Made by :func:`hrdma.objects.connect`.

    Notes
    -----
    All methods may be called from any thread. Every call takes ``timeout`` in seconds and raises TimeoutError when it has
    passed; the default is that of the connection. After a fork the child connects anew.
    """

    def put(self, value: Any, id: str | None = None, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Makes an object of an array or of bytes.

        Parameters
        ----------
        value : array or bytes-like
            Numbers of any type and shape. It may be changed as soon as the call has returned.
        id : str, optional
            A name that others may use before the object exists. None: a random one.
        timeout : float, optional
            Seconds.
        async_op : bool
            Return a `Request` at once; `value` must then stay as it is until that is done.

        Returns
        -------
        ObjectRef, or Request of one

        Raises
        ------
        ValueError
            The name already has other content, or belongs to a reduction.
        ObjectStoreFull
            The store of this host has no room, and nothing in it may go.

        Notes
        -----
        One copy, into shared memory; up to 64 KiB the object goes into the directory instead. Others can fetch it while it is
        still being copied.
        """
        meta, data = describe(value)
        ref = self._named(id)
        if not async_op:
            return self._put(ref, meta, data, self._seconds(timeout))
        request = Request(f"put {ref.id}", self._seconds(timeout))

        def work() -> None:
            try:
                request.settle(self._put(ref, meta, data, self._seconds(timeout), request))
            except BaseException as error:
                request.settle(error=error)
                error.__traceback__ = None  # which holds on to the value

        threading.Thread(target=work, name="hrdma-put", daemon=True).start()
        return request

    def _put(
        self, ref: ObjectRef, meta: Body, data: memoryview, timeout: float, outer: Request | None = None
    ) -> ObjectRef:
        """`outer`: ends with this, which ends with it."""
        deadline = time.monotonic() + timeout
        body = {"id": ref.id, "meta": meta, "own": self._owner}
        if meta["nbytes"] <= INLINE:
            body["inline"] = bytes(data)
        outer = outer or Request(f"put {ref.id}", timeout)
        request = self._call("put", body, timeout, _granted)
        outer.then(request.cancel)
        try:
            answer, memory = request.wait()
            if "exists" in answer:
                if not self._same(ref, meta, data, deadline):
                    raise ValueError(f"object {ref.id!r} exists already, with other content")
            elif memory is not None:
                self._write(answer["writing"], data, memory.fileno(), outer)
                left = max(0.0, deadline - time.monotonic())
                commit = self._call("commit", {"writing": answer["writing"]}, left, nothing)
                outer.then(commit.cancel)
                commit.wait()
        except BaseException:  # Ctrl-C too: what is half written goes, and the name is free again
            if not request.cancel() and (granted := request.value) is not None:
                self._refuse(granted[0])
            raise
        finally:
            if request.value is not None and request.value[1] is not None:
                request.value[1].close()
        return ref

    def _same(self, ref: ObjectRef, meta: Body, data: memoryview, deadline: float) -> bool:
        # Apart from whoever raises: an error holds on to the variables that it comes by, and they to the view.
        there = describe(self.get(ref, timeout=max(0.0, deadline - time.monotonic())))
        return there == (meta, data)

    def _write(self, writing: int, data: memoryview, descriptor: int, outer: Request) -> None:
        offset = 0
        while offset < data.nbytes:
            outer.check()
            offset += os.pwrite(descriptor, data[offset : offset + STEP], offset)
            if offset < data.nbytes:
                self._say({"verb": "progress", "writing": writing, "progress": offset})
        outer.check()

    def get(
        self,
        ref: ObjectRef | list[ObjectRef] | tuple[ObjectRef, ...],
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """The object, as soon as it exists and is here.

        Parameters
        ----------
        ref : ObjectRef, or list or tuple of ObjectRef
            Several are asked for at once, which takes less time than one after the other.
        timeout : float, optional
            Seconds. 0: what this host's node has now.

        Returns
        -------
        numpy.ndarray (read-only), or bytes-like; or a Request of that; of several references a list

        Raises
        ------
        TimeoutError
            It did not come to be, or did not get here, in time. It may be asked for again.
        ObjectLost
            No copy is left, or it was deleted.
        ObjectStoreFull
            There is no room for it on this host.

        Notes
        -----
        Copies nothing where the host has it: the array lies in shared memory, which stays as long as the array or a view of it
        does, and cannot be evicted meanwhile. A small object that this host's node keeps is copied from there, and nobody asked.
        """
        refs = ref if isinstance(ref, (list, tuple)) else [ref]
        names, seconds = [self._id(each) for each in refs], self._seconds(timeout)
        if async_op:
            found: list[Any] = self._gets(names, seconds, now=not seconds)
        else:
            found = self._got(names, seconds)
        return found if refs is ref else found[0]

    def _got(self, names: list[str], seconds: float) -> list[Any]:
        deadline = time.monotonic() + seconds
        if self._gone is None and names:
            found = self._shelved.take(names)
            if found is not None and not self._hung_up():
                return [rebuild(meta, content) for meta, content in found]
            small = self._shortcuts.ask(names, deadline) if seconds else {}
            if len(small) == len(names):
                return [rebuild(small[name]["meta"], small[name]["inline"]) for name in names]
        requests = self._gets(names, max(0.0, deadline - time.monotonic()), now=not seconds)
        try:
            return [request.wait() for request in requests]
        except BaseException:
            cancel(requests)
            requests.clear()  # the error is one's, and its traceback would hold on to what others have brought
            raise

    def _gets(self, names: list[str], seconds: float, *, now: bool) -> list[Request]:
        more = {"now": True} if now else {}
        questions = [("get", {"id": name, **more}, functools.partial(self._valued, name)) for name in names]
        return self._ask(questions, SILENT if now else seconds)

    def _valued(self, name: str, answer: Body, descriptor: int | None) -> Any:
        if "absent" in answer:
            raise TimeoutError(f"object {name!r} is not on this host now")
        self._shortcuts.noted(name, "inline" in answer)
        return self._value(answer, descriptor)

    def _value(self, answer: Body, descriptor: int | None) -> Any:
        meta = answer["meta"]
        if "inline" in answer:
            return rebuild(meta, answer["inline"])
        assert descriptor is not None
        try:
            view = mmap.mmap(descriptor, meta["nbytes"], mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(descriptor)
        weakref.finalize(view, self._release, answer["pin"]).atexit = False
        return rebuild(meta, view)

    def wait(
        self, refs: Iterable[ObjectRef], count: int = 1, timeout: float | None = None, *, async_op: bool = False
    ) -> Any:
        """Waits until some objects exist; fetches none of them.

        Parameters
        ----------
        refs : iterable of ObjectRef
        count : int
            How many to wait for.
        timeout : float, optional
            Seconds; when they have passed, fewer are returned. 0: those that exist now, which their keepers are asked, and
            have a second to say.

        Returns
        -------
        (list of ObjectRef, list of ObjectRef), or Request of that
            Ready and not, each in the order given. Lost and deleted objects are ready: `get` says so.
        """
        refs = self._several(refs)
        number, seconds = _count(count, len(refs)), self._seconds(timeout)
        now = seconds == 0
        body, seconds = ({"now": True}, SILENT) if now else ({}, seconds)
        questions = [("watch", {"id": ref.id, **body}, lambda answer, _: "absent" not in answer) for ref in refs]

        def sorted_out(there: list[bool]) -> tuple[list[ObjectRef], list[ObjectRef]]:
            return [ref for ref, yes in zip(refs, there) if yes], [ref for ref, yes in zip(refs, there) if not yes]

        requests = self._ask(questions, seconds + 1.0)
        operation, enough = f"wait for {number} of {len(refs)}", len(refs) if now else number
        several = Several(operation, seconds, self._drive, requests, enough, sorted_out)
        return several if async_op else _ended(several)

    def delete(self, ref: ObjectRef, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Frees an object everywhere. Arrays that were got from it stay valid; later gets raise `ObjectLost`.

        Parameters
        ----------
        async_op : bool
            Return a `Request` at once, which nobody has to wait for.
        """
        request = self._call("delete", {"id": self._id(ref)}, self._seconds(timeout), nothing)
        return request if async_op else _ended(request)

    def reduce(
        self, refs: Iterable[ObjectRef], op: str = "sum", *, count: int | None = None, id: str | None = None,
        timeout: float | None = None, async_op: bool = False,
    ) -> Any:  # fmt: skip
        """Begins to reduce objects, element by element; returns at once.

        Parameters
        ----------
        refs : iterable of ObjectRef
            They need not exist yet. All have one dtype, which the core can reduce, and one shape.
        op : str
            sum, prod, min, max, avg, band, bor or bxor.
        count : int, optional
            The first so many that arrive are reduced; None: all.
        id : str, optional
            A name for the result, for others to use. None: a random one.

        Returns
        -------
        ObjectRef, or Request of one
            Of the result: `get` it, here or anywhere, or reduce it further. It grows on this host.

        Raises
        ------
        ValueError
            `count` is larger than the number of references, one is given twice or is the result itself, or the name is taken.

        Notes
        -----
        Waits for nothing but, where there is a name, to hear that it was free. Without one, and where all objects are small and
        kept by this host's node, the calling thread makes it. Each object enters once; it must not be deleted
        before the result is there. Where a node dies, its part is replaced by other objects or by the same from elsewhere;
        the result is exactly the reduction of `contributors`. The order of additions is that of arrival, of objects up to 64 KiB
        that of `refs`. An input that cannot be reduced (another dtype or shape) is an error of `get`, which names it.

        References
        ----------
        Zhuang et al., "Hoplite", SIGCOMM 2021.
        """
        result, (verb, body) = self._reduction(refs, op, count, id)
        if id is None:
            made = {} if self._gone is not None else self._shelved.reduce(body)
            self._shelved.made(result.id, self._tell(verb, {**body, **made}), made)
            request = Request(f"reduce {result.id}", self._seconds(timeout))
            request.settle(result)
        else:
            request = self._call(verb, body, self._seconds(timeout), lambda *_: result)
        return request if async_op else _ended(request)

    def _reduction(
        self, refs: Iterable[ObjectRef], op: str, count: int | None, id: str | None, everywhere: bool = False
    ) -> tuple[ObjectRef, tuple[str, Body]]:
        names = [ref.id for ref in self._several(refs)]
        number = _count(len(names) if count is None else count, len(names))
        if len(set(names)) < len(names):
            twice = next(name for index, name in enumerate(names) if name in names[:index])
            raise ValueError(f"object {twice!r} is given twice")
        kernels.check(op, "uint8" if op.startswith("b") else "float32")
        result = self._named(id)
        if result.id in names:
            raise ValueError(f"object {result.id!r} cannot be reduced into itself: give the result another id")
        # A name means that others may have asked for the same: it is nobody's own.
        body = {"id": result.id, "op": op, "refs": names, "count": number, "own": self._owner and id is None}
        body["everywhere"] = everywhere
        return result, ("reduce", body)

    def contributors(self, ref: ObjectRef, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """The objects that are in the result of a reduction, a list, once it is complete; or a `Request` of that."""

        def parts(answer: Body, _: int | None) -> list[ObjectRef]:
            return [ObjectRef(self.job, name) for name in answer["parts"]]

        request = self._call("contributors", {"id": self._id(ref)}, self._seconds(timeout), parts)
        return request if async_op else _ended(request)

    def allreduce(
        self, refs: Iterable[ObjectRef], op: str = "sum", *, count: int | None = None, id: str,
        timeout: float | None = None, async_op: bool = False,
    ) -> Any:  # fmt: skip
        """Reduces objects and gets the result; every process that gives the same `id` and arguments gets the same one.

        The result is sent on while it is still being made. Where it is large for the links (a share of it takes 50 ms), it is
        made in pieces that end at different hosts, and every host with one of the objects gets all of it: each link carries
        ``2 (n - 1) / n`` of the size. Else it is made on one host and broadcast from there.

        References
        ----------
        Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009.
        """
        result, question = self._reduction(refs, op, count, id, everywhere=True)
        questions = [(*question, nothing), ("get", {"id": result.id}, self._value)]
        seconds = self._seconds(timeout)
        request = After(f"allreduce {id}", seconds, self._drive, *self._ask(questions, seconds))
        return request if async_op else _ended(request)

    def ref(self, id: str | None = None) -> ObjectRef:
        """The reference of an object by its name, whether or not it exists yet; without a name that of a new one.

        What others put under a new one, ``put(value, id=ref.id)``, is kept by this host's node: a small object comes here
        with its put, and a get or reduction of it here needs no network.
        """
        return self._named(id)

    def info(self, *, timeout: float | None = None) -> dict[str, Any]:
        """The node of this host: its store and who holds what, the nodes it knows, what it moved, by which ways, and measured.

        Bytes count as `sent` once they are gone, by RDMA once the other was told where they are: it may have them already.
        """
        request = self._call("info", {}, self._seconds(timeout), lambda answer, _: answer["info"])
        return _ended(request)

    def _named(self, id: str | None) -> ObjectRef:
        """A reference to an object of this name; of a random one, which this host's node keeps."""
        return ObjectRef(self.job, f"{self._home}-{secrets.token_hex(16)}" if id is None else check_id(id))

    def _seconds(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else _core.seconds_of(timeout)

    def _several(self, refs: Iterable[ObjectRef]) -> list[ObjectRef]:
        if isinstance(refs, (ObjectRef, str)):
            raise TypeError(f"expected several references, in a list, not {type(refs).__name__}")
        found = list(refs)
        for ref in found:
            self._id(ref)
        return found

    def _id(self, ref: ObjectRef) -> str:
        if not isinstance(ref, ObjectRef):
            raise TypeError(f"expected an ObjectRef, not {type(ref).__name__}: client.ref(name) makes one from a name")
        if ref.job != self.job:
            raise ValueError(f"{ref} is of another job: this is job {self.job}")
        return ref.id


def _granted(answer: Body, descriptor: int | None) -> tuple[Body, io.FileIO | None]:
    """The answer to a put, and the memory to write into, which is closed with the file."""
    return answer, None if descriptor is None else io.FileIO(descriptor, "w")


def _count(count: int, most: int) -> int:
    """How many of so many references."""
    if most == 0:
        raise ValueError("no references were given: at least one is wanted")
    if not 0 < operator.index(count) <= most:
        raise ValueError(f"count {count} of {most} references: between 1 and {most} work")
    return operator.index(count)


def _ended(request: Request) -> Any:
    """Its result; it is withdrawn where the wait for it is interrupted."""
    try:
        return request.wait()
    except BaseException:
        request.cancel()
        raise
