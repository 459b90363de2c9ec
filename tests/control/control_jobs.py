"""Real ranks for the control plane's tests: processes that obey commands, with a bound on every wait."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
from pathlib import Path

MAIN = Path(__file__).with_name("rank_main.py")
WAIT = 15.0


def until_connected(port: int, count: int) -> None:
    """Waits until so many ranks have a connection to the port, and a moment for what they say on it."""
    wanted, end = f":{port:04X}", time.monotonic() + WAIT
    while time.monotonic() < end:
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        if sum(row[1].endswith(wanted) and row[3] == "01" for row in rows) >= count:
            time.sleep(0.15)
            return
        time.sleep(0.01)
    raise AssertionError(f"fewer than {count} connections to port {port}")


class Rank:
    """A process and everything that it has said."""

    def __init__(self, argv: list[str], env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.said: list[dict] = []
        self.errors = ""
        self._news = threading.Condition()
        self._count = 0
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read, self._read_errors)]
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            with self._news:
                self.said.append(json.loads(line))
                self._news.notify_all()

    def _read_errors(self) -> None:
        for line in self.process.stderr:
            self.errors += line

    def until(self, wanted, what: str, seconds: float = WAIT) -> dict:
        """The first thing said for which `wanted` holds."""
        end = time.monotonic() + seconds
        with self._news:
            while True:
                found = next((message for message in self.said if wanted(message)), None)
                if found is not None:
                    return found
                left = end - time.monotonic()
                if left <= 0:
                    raise AssertionError(f"no {what} within {seconds} s; said {self.said}; stderr {self.errors}")
                self._news.wait(left)

    def event(self, name: str, seconds: float = WAIT, **fields) -> dict:
        def wanted(message: dict) -> bool:
            return message.get("event") == name and all(message.get(key) == value for key, value in fields.items())

        return self.until(wanted, f"{name} {fields}", seconds)

    def events(self, name: str) -> list[dict]:
        with self._news:
            return [message for message in self.said if message.get("event") == name]

    def ask(self, do: str, **arguments) -> int:
        """Sends a command; returns its number for `answer`."""
        self._count += 1
        self.process.stdin.write(json.dumps({"do": do, "id": self._count, **arguments}) + "\n")
        self.process.stdin.flush()
        return self._count

    def answer(self, number: int, seconds: float = WAIT):
        found = self.until(lambda message: message.get("id") == number, f"answer {number}", seconds)
        return found if "error" in found else found["result"]

    def do(self, do: str, **arguments):
        return self.answer(self.ask(do, **arguments))

    def signal(self, number: int) -> float:
        os.kill(self.process.pid, number)
        return time.monotonic()

    def wait(self, seconds: float = WAIT) -> int:
        code = self.process.wait(seconds)
        for reader in self._readers:
            reader.join(1.0)
        return code

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(5)
        for reader in self._readers:
            reader.join(1.0)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            with contextlib.suppress(OSError):
                stream.close()


class Ranks(list):
    """The ranks of a job."""

    def joined(self, seconds: float = WAIT) -> Ranks:
        for rank in self:
            rank.event("joined", seconds)
        return self

    def do(self, do: str, **arguments) -> list:
        numbers = [rank.ask(do, **arguments) for rank in self]
        return [rank.answer(number) for rank, number in zip(self, numbers, strict=True)]
