"""A node as a process of its own: how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys


def test_signals_that_come_together_end_a_node():
    command = [sys.executable, "-m", "hrdma.objects"]
    nodes = [
        subprocess.Popen([*command, f"--node=signals.{os.getpid()}.{i}"], stdout=subprocess.PIPE, text=True)
        for i in range(6)
    ]
    try:
        for node in nodes:
            assert "up" in node.stdout.readline()
            for _ in range(3):  # while it goes from saying so to waiting, too
                node.send_signal(signal.SIGINT)
                node.send_signal(signal.SIGTERM)
        assert [node.wait(20) for node in nodes] == [0] * len(nodes)
    finally:
        for node in nodes:
            node.kill()
            node.wait()
            node.stdout.close()
