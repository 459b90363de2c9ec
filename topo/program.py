"""The core's instruction set as Python sees it: a mirror of hr/program.h, and the program of one rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = [
    "ASIDE_WITHIN", "BORROW", "BUF_BORROWED", "BUF_IN", "BUF_OUT", "BUF_TMP", "CHANGED", "COPY", "INSTR", "MESSAGE", "NOP", "NT", "RECV", "RECV_REDUCE",
    "REDUCE", "REDUCE_MAX_SRC", "REF", "RETURNS", "SCALE", "SEND", "STAGED", "SWAP", "ProgramSpec", "accesses",
    "aside", "stage",
]  # fmt: skip

BUF_IN, BUF_OUT, BUF_TMP, BUF_BORROWED = range(4)
SEND, RECV, RECV_REDUCE, BORROW, REDUCE, COPY, NOP = range(7)
SCALE, NT, SWAP, STAGED, CHANGED, RETURNS = 1, 2, 4, 8, 16, 32
REDUCE_MAX_SRC = 64

INSTR = np.dtype(
    {
        "names": ["op", "lane", "flags", "peer", "tag", "after", "unlock", "nunlock", "ref", "nref", "len", "dst_buf",
                  "src_buf", "dst_off", "src_off"],
        "formats": ["u1", "u1", "u2", "i4", "u4", "u4", "u4", "u4", "u4", "u4", "u8", "u1", "u1", "u8", "u8"],
        "offsets": [0, 1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 41, 48, 56],
        "itemsize": 64,
    }
)  # fmt: skip
REF = np.dtype({"names": ["buf", "off"], "formats": ["u4", "u8"], "offsets": [0, 8], "itemsize": 16})

_NAMES = ("SEND", "RECV", "RECV_REDUCE", "BORROW", "REDUCE", "COPY", "NOP")
_FLAGS = ((SCALE, "scale"), (NT, "nt"), (SWAP, "swap"), (STAGED, "staged"), (CHANGED, "changed"))
_BUFS = ("in", "out", "tmp", "borrowed")


@dataclass(frozen=True, eq=False)
class ProgramSpec:
    """What hr_program_new takes: one rank's instructions of one schedule. Offsets and lengths are bytes.

    Attributes
    ----------
    instrs : ndarray of INSTR
    unlocks : ndarray of uint32
    refs : ndarray of REF
    in_bytes, out_bytes, tmp_bytes : int
    size, rank : int
    alias : int or None
        In place: byte 0 of IN is this byte of OUT (negative: OUT begins inside IN). None: they are apart.
    """

    instrs: np.ndarray
    unlocks: np.ndarray
    refs: np.ndarray
    in_bytes: int
    out_bytes: int
    tmp_bytes: int
    size: int
    rank: int
    alias: int | None = None

    def waits(self) -> list[list[int]]:
        """By instruction: those that it waits for, in their order."""
        found: list[list[int]] = [[] for _ in self.instrs]
        unlocks = self.unlocks.tolist()
        for index, (begin, n) in enumerate(zip(self.instrs["unlock"].tolist(), self.instrs["nunlock"].tolist())):
            for other in unlocks[begin : begin + n]:
                found[other].append(index)
        return found

    def __str__(self) -> str:
        """The instructions, one a line: index, what, where, and which ones it waits for."""
        waits = self.waits()
        sizes = f"in {self.in_bytes} out {self.out_bytes} tmp {self.tmp_bytes} bytes"
        lines = [f"rank {self.rank} of {self.size}: {len(self.instrs)} instructions, {sizes}"]
        for index, i in enumerate(self.instrs):
            op = int(i["op"])
            text = f"{index:5} {_NAMES[op]:11}"
            if op in (RECV, RECV_REDUCE, BORROW, REDUCE, COPY):
                text += f" {_BUFS[i['dst_buf']]}+{i['dst_off']}"
            if op in (SEND, COPY):
                text += f" {'<- ' if op == COPY else ''}{_BUFS[i['src_buf']]}+{i['src_off']}"
            if op == REDUCE:
                refs = self.refs[i["ref"] : i["ref"] + i["nref"]].tolist()
                text += " <- " + ", ".join(
                    f"{_BUFS[buf]}+{off}" if buf != BUF_BORROWED else f"#{off}" for buf, off in refs
                )
            if op != NOP:
                text += f" len {i['len']}"
            if i["peer"] >= 0:
                text += f" {'to' if op == SEND else 'from'} {i['peer']} tag {i['tag']}"
            flags = [name for bit, name in _FLAGS if i["flags"] & bit]
            text += f" [{' '.join(flags)}]" if flags else ""
            text += f" answers #{i['ref']}" if i["flags"] & RETURNS else ""
            text += f" after {waits[index]}" if waits[index] else ""
            lines.append(text)
        return "\n".join(lines)


def accesses(spec: ProgramSpec, instrs: list[tuple]) -> list[list[tuple[int, int, int, bool]]]:
    """Per memory (IN, OUT, TMP; in place IN's are OUT's): (from, to, instruction, writes), of `spec.instrs.tolist()`."""
    found: list[list[tuple[int, int, int, bool]]] = [[], [], []]
    refs = spec.refs.tolist()

    def add(index: int, buf: int, off: int, length: int, writes: bool) -> None:
        if length:
            if buf == BUF_IN and spec.alias is not None:
                buf, off = BUF_OUT, off + spec.alias
            found[buf].append((off, off + length, index, writes))

    for index, i in enumerate(instrs):
        op, length = i[0], i[10]
        if op in (SEND, COPY):
            add(index, i[12], i[14], length, False)
        if op not in (SEND, NOP):
            add(index, i[11], i[13], length, True)
        if op == REDUCE:
            for buf, off in refs[i[8] : i[8] + i[9]]:
                if buf == BUF_BORROWED:
                    add(index, instrs[off][11], instrs[off][13], length, False)
                else:
                    add(index, buf, off, length, False)
    return found


def stage(spec: ProgramSpec, most: int) -> None:
    """Marks the sends whose memory the program changes, before or after. Those of up to so many bytes go in messages.

    To change a line that another core has read in place can take longer than to copy it. Where chunks are borrowed in place
    they need not: there reading where they lie saves a pass.
    """
    instrs = spec.instrs
    ops, lens = instrs["op"], instrs["len"]
    if spec.alias is not None and (ops == BORROW).any():
        most = 0
    for buf in (BUF_OUT, BUF_TMP):
        sent = np.flatnonzero((ops == SEND) & (instrs["src_buf"] == buf) & (lens > 0))
        written = np.isin(ops, (RECV, RECV_REDUCE, REDUCE, COPY)) & (instrs["dst_buf"] == buf)
        starts = instrs["dst_off"][written]
        order = np.argsort(starts)
        ends = np.maximum.accumulate((starts + lens[written])[order])
        begin = instrs["src_off"][sent]
        before = np.searchsorted(starts[order], begin + lens[sent])  # how many begin before the end of what is sent
        changed = before > 0
        changed[changed] = ends[before[changed] - 1] > begin[changed]
        instrs["flags"][sent[changed]] |= CHANGED
        instrs["flags"][sent[changed & (lens[sent] <= most)]] |= STAGED


# Of ranks that share cores, in bytes. Two copies of plain memory cost less than system calls for it from so many on, of a
# message (32 KiB go unasked) or of a whole vector; below so many, from which on numpy's arrays are in huge pages; and
# while a cache has most of what all ranks' buffers and copies are.
MESSAGE = (32 << 10) + 1
ASIDE_WITHIN = 4  # the program works on a copy in scratch, to which peers may write
_ASIDE_VECTOR = {"allreduce": 16 << 10, "reduce": MESSAGE, "broadcast": MESSAGE}
_ASIDE_LONG = 4 << 20
_ASIDE_TOGETHER = 48 << 20


def aside(spec: ProgramSpec, collective: str, nbytes: int, root: int) -> int:
    """What of plain buffers is sent, and so better copied to where peers can map it, by ranks that share cores.

    Parameters
    ----------
    spec : ProgramSpec
    collective : str
    nbytes : int
        Of the vector, or of all blocks together.
    root : int

    Returns
    -------
    int
        1 the input, 2 the output, 3 both, 0 neither: `aside` of `_core.Program`. Ranks may differ in it.
    """
    sends = spec.instrs[(spec.instrs["op"] == SEND) & (spec.instrs["src_buf"] != BUF_TMP)]
    back = collective != "allreduce" or spec.alias is not None  # results are written to copies
    whole = collective in _ASIDE_VECTOR and back and nbytes >= _ASIDE_VECTOR[collective]
    if not len(sends) or not (whole or (sends["len"] >= MESSAGE).any()):
        return 0
    if spec.alias is None:
        what = (1 if (sends["src_buf"] == BUF_IN).any() else 0) | (2 if (sends["src_buf"] == BUF_OUT).any() else 0)
        copied = [spec.in_bytes if what & 1 else 0, spec.out_bytes if what & 2 else 0]
        own = spec.in_bytes + spec.out_bytes
    else:
        what = 3 if collective != "broadcast" else 1 if spec.rank == root else 2
        copied = [own := max(spec.in_bytes, spec.out_bytes)]
    together = spec.size * own + sum(copied) * (1 if collective == "broadcast" else spec.size)
    return what if max(copied) < _ASIDE_LONG and together <= _ASIDE_TOGETHER else 0
