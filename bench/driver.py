"""Runs the generators, each as a process of its own on the load's core, and reads what they measured."""

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from typing import Any

from bench.contestants import pin_to_load_core
from bench.load import Measured, Plan
from bench.stream import Delays

RUN_SECONDS = 120.0


class FailedRunError(Exception):
    """A run that is not to be counted; says which, and what came back."""


def drive(plan: Plan, *, name: str, connections: int, seconds: float, warm_up_seconds: float = 0.4) -> Measured:
    """A closed loop on each connection. Raises `FailedRunError`."""
    told = replace(plan, connections=connections, seconds=seconds, warm_up_seconds=warm_up_seconds)
    return Measured(**_run(["bench.load"], told, name=name))


def read_events(plan: Plan, *, name: str) -> Delays:
    """One stream to its end. Raises `FailedRunError`."""
    return Delays(**_run(["bench.stream", "read"], plan, name=name))


def drive_by_wrk(plan: Plan, *, name: str, connections: int, seconds: float) -> dict[str, float]:
    """The same request driven by wrk: requests a second and microseconds. Raises `FailedRunError`."""
    first, *lines = plan.request.split("\r\n")
    headers = [part for line in lines if line for part in ("-H", line)]
    url = f"http://{plan.host}:{plan.port}{first.split(' ')[1]}"
    run = subprocess.run(
        ["wrk", "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--latency", *headers, url],
        capture_output=True, text=True, timeout=RUN_SECONDS, preexec_fn=lambda: pin_to_load_core(os.getpid()),
    )  # fmt: skip
    rate = re.search(r"Requests/sec:\s+([\d.]+)", run.stdout)
    if rate is None or "Non-2xx" in run.stdout or "Socket errors" in run.stdout or run.returncode:
        raise FailedRunError(f"{name}, by wrk: {run.stdout}{run.stderr}")
    return {"requests_per_second": float(rate[1])} | {
        f"p{percent}_microseconds": _microseconds(run.stdout, percent) for percent in (50, 99)
    }


def _run(module: list[str], plan: Plan, *, name: str) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-m", *module], input=json.dumps(asdict(plan)), capture_output=True, text=True,
        timeout=RUN_SECONDS, preexec_fn=lambda: pin_to_load_core(os.getpid()),
    )  # fmt: skip
    if run.returncode:
        raise FailedRunError(f"{name}: {run.stderr.strip().splitlines()[-1]}")
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def _microseconds(text: str, percent: int) -> float:
    found = re.search(rf"{percent}%\s+([\d.]+)(us|ms|s)", text)
    assert found is not None
    return float(found[1]) * {"us": 1, "ms": 1e3, "s": 1e6}[found[2]]
