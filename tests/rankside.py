"""What functions of tests use inside a rank: saying what happens, hearing what to do, and dying on cue."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT = 4000  # bytes of a message; below PIPE_BUF, so that messages of several ranks never mix
JOB_SECONDS = 15.0  # deadline of a job's calls, init among them, where nothing else is said
HOWS = ("kill", "stop", "exit0", "exit3")


class Me:
    """This rank, as its test knows it."""

    def __init__(self, news: int, who: int) -> None:
        self._news = news
        self._who = who
        self._inbox = os.fdopen(0, closefd=False)
        self.rank = int(os.environ["RANK"])
        self.size = int(os.environ["WORLD_SIZE"])

    def tell(self, event: str, **fields: Any) -> float:
        """Says to the test what happens now; returns the time."""
        now = time.monotonic()
        text = json.dumps({"who": self._who, "event": event, **fields, "time": now, "waited": waited()}).encode()
        assert len(text) < LIMIT, text
        os.write(self._news, text + b"\n")
        return now

    def hear(self) -> Any:
        """What the test says next (`Rank.say`)."""
        return json.loads(self._inbox.readline())

    def fall(self, how: str) -> None:
        """Dies, stops or exits now; returns after SIGCONT when it was stopped."""
        self.tell("falls", how=how)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "leave":
            sys.exit(0)
        else:
            os._exit(int(how.removeprefix("exit")))

    def fall_later(self, how: str, seconds: float) -> None:
        """The same, whatever the main thread is doing then."""
        threading.Timer(seconds, self.fall, [how]).start()

    def fall_at(self, how: str, owner: Any, name: str, call: int, after: bool) -> None:
        """The same at the so-many-th call of a method, before it or after it."""
        original, count = getattr(owner, name), 0

        def struck(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == call and not after:
                self.fall(how)
            found = original(*arguments, **options)
            if count == call and after:
                self.fall(how)
            return found

        setattr(owner, name, struck)


def waited() -> float:
    """Seconds, in all, that threads of this process were ready to run and had no processor: read where a test was too slow."""
    total = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            total += int(path.read_text().split()[1])
    return round(total / 1e9, 3)


def describe_error(error: BaseException) -> dict[str, Any]:
    """An exception in JSON: class, text, and what a PeerError says."""
    names = ("rank", "operation", "sequence", "phase", "transport")
    found = {name: getattr(error, name) for name in names if hasattr(error, name)}
    return {"error": type(error).__name__, "text": str(error)[:2000], **found}


def attempt(me: Me, call: Callable[[], Any]) -> dict[str, Any] | None:
    """Calls, and describes the exception with the time at which it came; None when there was none."""
    try:
        call()
    except Exception as error:
        return {**describe_error(error), "at": time.monotonic()}
    return None


def load(path: str, name: str) -> Callable[..., Any]:
    """A function that stands at the top of a test module, which finds its neighbours."""
    sys.path.insert(0, os.path.dirname(path))
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)
