"""A queue pair of pyverbs, driven by lines of JSON; runs under the system's Python, which has Debian's pyverbs.

    {"do": "open", "device": "rxe0", "gid_index": 1}   ->  {"value": its address, and where its memory is}

Each request names a method of `Peer` and its arguments; the answer has its value, or an error.
"""

from __future__ import annotations

import json
import socket
import sys
import time

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

SIZE = 1 << 20
PSN = 0xABCDE
ACCESS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_REMOTE_ATOMIC
OPCODES = {"send": e.IBV_WR_SEND, "write": e.IBV_WR_RDMA_WRITE, "read": e.IBV_WR_RDMA_READ}
ATOMICS = {"fetch_add": e.IBV_WR_ATOMIC_FETCH_AND_ADD, "compare_swap": e.IBV_WR_ATOMIC_CMP_AND_SWP}
WITH_IMM = {"send": e.IBV_WR_SEND_WITH_IMM, "write": e.IBV_WR_RDMA_WRITE_WITH_IMM}


class Peer:
    def open(self, device: str, gid_index: int) -> dict[str, object]:
        self.gid_index = gid_index
        self.context = Context(name=device)
        self.pd = PD(self.context)
        self.cq = CQ(self.context, 64, None, None, 0)
        init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=QPCap(max_send_wr=16, max_recv_wr=16))
        self.qp = QP(self.pd, init)
        self.mr = MR(self.pd, SIZE, ACCESS)
        port = self.context.query_port(1)
        return {
            "gid": str(self.context.query_gid(1, gid_index)),
            "lid": port.lid,
            "num": self.qp.qp_num,
            "psn": PSN,
            "mtu": 128 << port.active_mtu,
            "address": self.mr.buf,
            "rkey": self.mr.rkey,
        }

    def close(self) -> None:
        """Another can be opened then."""
        for one in (self.qp, self.mr, self.cq, self.pd, self.context):
            one.close()

    def connect(self, gid: str, lid: int, num: int, psn: int, mtu: int) -> None:
        attr = QPAttr(port_num=1)
        attr.qp_access_flags = ACCESS
        attr.dest_qp_num, attr.rq_psn, attr.sq_psn = num, psn, PSN
        attr.path_mtu = mtu.bit_length() - 8
        attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
        attr.min_rnr_timer, attr.timeout, attr.retry_cnt, attr.rnr_retry = 12, 14, 6, 6
        words = socket.inet_pton(socket.AF_INET6, gid).hex()
        dgid = ":".join(words[at : at + 4] for at in range(0, 32, 4))
        route = GlobalRoute(dgid=GID(dgid), sgid_index=self.gid_index)
        attr.ah_attr = AHAttr(port_num=1, is_global=1, gr=route, dlid=lid)
        self.qp.to_rts(attr)

    def _sge(self, at: int, nbytes: int) -> SGE:
        return SGE(self.mr.buf + at, nbytes, self.mr.lkey)

    def post(
        self, kind: str, at: int, nbytes: int, remote: int = 0, rkey: int = 0, imm: int | None = None, wr_id: int = 0
    ) -> None:
        if kind == "recv":
            self.qp.post_recv(RecvWR(wr_id=wr_id, num_sge=1, sg=[self._sge(at, nbytes)]))
            return
        wr = SendWR(
            wr_id=wr_id,
            opcode=OPCODES[kind] if imm is None else WITH_IMM[kind],
            num_sge=1,
            imm_data=socket.htonl(imm or 0),
            send_flags=e.IBV_SEND_SIGNALED,
            sg=[self._sge(at, nbytes)],
        )
        if kind != "send":
            wr.set_wr_rdma(rkey, remote)
        self.qp.post_send(wr)

    def atomic(self, kind: str, at: int, remote: int, rkey: int, operand: int, swap: int = 0) -> None:
        wr = SendWR(opcode=ATOMICS[kind], num_sge=1, send_flags=e.IBV_SEND_SIGNALED, sg=[self._sge(at, 8)])
        wr.set_wr_atomic(rkey, remote, operand, swap)
        self.qp.post_send(wr)

    def poll(self, seconds: float = 10.0) -> dict[str, int] | None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            n, found = self.cq.poll(1)
            if n:
                (wc,) = found
                return {
                    "wr_id": wc.wr_id,
                    "status": wc.status,
                    "nbytes": wc.byte_len,
                    "imm": socket.ntohl(wc.imm_data & 0xFFFFFFFF),
                }
            time.sleep(0.0002)
        return None

    def fill(self, at: int, data: str) -> None:
        self.mr.write(bytes.fromhex(data), len(data) // 2, at)

    def look(self, at: int, nbytes: int) -> str:
        return self.mr.read(nbytes, at).hex()


def main() -> None:
    peer = Peer()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"value": getattr(peer, request.pop("do"))(**request)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
