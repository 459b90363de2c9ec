"""What a benchmark is asked for: one value, checked in one place, that travels to the ranks as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib.util import find_spec

from hrdma.bench.cases import CASES, Case, reductions
from hrdma.types import DTYPES, OPS

__all__ = ["Options"]


@dataclass(frozen=True)
class Options:
    """The options of `hrdma bench`, by the names that its help gives them; sizes in bytes."""

    case: str
    begin: int = 8
    end: int = 256 << 20
    factor: int = 4
    iters: int = 0
    warmup: int = 5
    rounds: int = 5
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0
    place: str = ""
    memory: str = "registered"
    deterministic: bool = False
    check: bool = True
    json: bool = False
    progress: bool = False

    @property
    def pattern(self) -> Case:
        """The case itself."""
        return CASES[self.case]

    @property
    def where(self) -> str:
        """Where the result goes: "in" the memory of the input, or "out" of it."""
        return self.place or self.pattern.places[0]

    def kinds(self) -> list[tuple[str, str]]:
        """Pairs of element type and operator, in the order in which they are measured; "all" stands for every one."""
        if not self.pattern.moves:
            return [("uint8", "none")]
        dtypes = [self.dtype] if self.dtype != "all" else [name for name in DTYPES if name not in self.left_out()]
        if not self.pattern.reduces:
            return [(dtype, "none") for dtype in dtypes]
        ops = OPS if self.op == "all" else (self.op,)
        return [(dtype, op) for dtype in dtypes for op in ops if op in reductions(dtype)]

    def left_out(self) -> list[str]:
        """Element types of "all" that cannot be had here."""
        return ["bfloat16"] if self.dtype == "all" and find_spec("ml_dtypes") is None else []

    def validate(self, ranks: int) -> None:
        """Raises ValueError where these options cannot be had, or not on so many ranks."""
        case = self.pattern
        if self.end < self.begin:
            raise ValueError(f"-e {self.end} is below -b {self.begin}")
        if case.pair and ranks != 2:
            raise ValueError(f"{case.name} is between 2 ranks, not {ranks}: pass -n 2, or start a job of 2")
        if case.rooted and not 0 <= self.root < ranks:
            raise ValueError(f"--root {self.root} is not one of {ranks} ranks: 0 to {ranks - 1}")
        if self.place and self.place not in case.places:
            raise ValueError(f"--place {self.place}: {case.name} has only --place {case.places[0]}")
        if self.dtype == "bfloat16" and find_spec("ml_dtypes") is None:
            raise ValueError("bfloat16 needs the package ml_dtypes: pip install hrdma[bf16]")
        if not self.kinds():
            raise ValueError(
                f"-o {self.op} is not defined for {self.dtype}, which has {', '.join(reductions(self.dtype))}"
            )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Options:
        return cls(**json.loads(text))
