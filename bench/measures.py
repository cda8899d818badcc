"""One figure that somebody asked for, beside what it should be.

Rule: what is demanded stands here and nowhere else. A figure without a goal is shown, with nothing demanded.
"""

from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Measure:
    name: str
    value: float
    unit: str
    part: str
    """By which `--only` measures it again."""
    detail: str = ""

    def as_json(self) -> dict[str, Any]:
        goal = GOALS.get(self.name)
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "part": self.part,
            "detail": self.detail,
            "goal": goal.text if goal else None,
            "met": goal.is_met(self.value) if goal else None,
        }


@dataclass(frozen=True, slots=True)
class Goal:
    at_least: float | None = None
    at_most: float | None = None

    @property
    def text(self) -> str:
        return f"≥ {self.at_least:g}" if self.at_least is not None else f"≤ {self.at_most:g}"

    def is_met(self, value: float) -> bool:
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)


GOALS: Final = {
    "reverse ÷ nginx": Goal(at_least=0.7),
    "reverse, POST ÷ nginx": Goal(at_least=0.7),
    "forward TLS ÷ nginx, TLS": Goal(at_least=0.62),
    "reverse ÷ mitmproxy": Goal(at_least=50),
    "forward TLS ÷ mitmproxy": Goal(at_least=45),
    "reverse ÷ Envoy": Goal(at_least=2),
    "p50 of one connection ÷ nginx": Goal(at_most=1.2),
    "p50 added to an event beyond nginx's": Goal(at_most=60),
    "CPU of a download that is not searched ÷ nginx": Goal(at_most=1.1),
    "CPU of a download that is searched ÷ nginx": Goal(at_most=2.2),
    "memory of an idle connection, clear": Goal(at_most=4),
    "memory of an idle connection, TLS": Goal(at_most=55),
    "memory of an idle connection, TLS inside CONNECT": Goal(at_most=55),
    "requests a CPU second, two workers ÷ one": Goal(at_least=0.9),
    "the busier of two workers": Goal(at_most=60),
}
