"""Other users of pyroute2 in the same process, such as a lab, change nothing about the messages here."""

from __future__ import annotations

import subprocess
import sys

CODE = """
from pyroute2.netlink.rtnl.tcmsg import tcmsg

from hrdma.qos.kinds import htb
from hrdma.qos.objects import ROOT, Qdisc
from hrdma.qos.wire import message, rawtc

used = {used}
if used:
    other = tcmsg()
    other["attrs"] = [("TCA_KIND", "tbf")]
    other.encode()
    tcmsg(other.data).decode()
options = htb.encode(htb.HtbQdisc(default=1))
made, _, _ = message("add", Qdisc("v0", "htb", 0x48520000, ROOT, options), 3)
made.encode()
read = rawtc(made.data)
read.decode()
strict, _, _ = message("add", Qdisc("v0", "ets", 0x48520000, ROOT, options), 3)
strict.encode()
print(bytes(strict.data).find(bytes([2, 0x80])) > 0, bytes(made.data).hex(), options.hex() in bytes(made.data).hex(), read.get_attr("TCA_OPTIONS"))
"""


def test_messages_are_the_same_after_tcmsg_itself_was_used():
    alone, beside = (
        subprocess.run([sys.executable, "-c", CODE.format(used=used)], capture_output=True, text=True, timeout=30)
        for used in (False, True)
    )
    assert alone.returncode == 0, alone.stderr
    assert alone.stdout.startswith("True ") and " True " in alone.stdout
    assert beside.stdout == alone.stdout, beside.stderr
