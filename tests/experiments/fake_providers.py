"""Contenders that load nothing: well-behaved, slow, and broken in every way that a measurement has to survive.

A test names this module in MEGAFOLD_PROVIDERS, so that the worker processes have them too. FAKE_TRACE names a file to
which each visit adds a line.
"""

from __future__ import annotations

import os
import signal
import time

from experiments.providers import Unsupported, provider
from experiments.record import Metric


class FakeSession:
    """Counts steps; `misbehave` is called at every step with the number of the visit."""

    def __init__(self, context, misbehave=None) -> None:
        self._name, self._misbehave, self._visit = context.point.contender.name, misbehave, 0
        trace(f"open {self._name} {os.getpid()}")

    def resume(self) -> None:
        self._visit += 1
        trace(f"visit {self._name} {os.getpid()}")

    def step(self) -> dict[str, float]:
        if self._misbehave is not None:
            self._misbehave(self._visit)
        return {"visit": float(self._visit)}

    def suspend(self) -> None:
        trace(f"suspend {self._name} {os.getpid()}")

    def finish(self, samples) -> dict[str, Metric]:
        values = samples["visit"]
        return {"visits": Metric(sum(values) / len(values), "1", min(values), max(values), len(values))}


def trace(line: str) -> None:
    if "FAKE_TRACE" in os.environ:
        with open(os.environ["FAKE_TRACE"], "a") as stream:
            stream.write(line + "\n")


def crash(visit: int) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def leave(visit: int) -> None:
    os.write(2, b"the last words\n")
    os._exit(7)


def hang(visit: int) -> None:
    time.sleep(600)


def run_out(visit: int) -> None:
    raise MemoryError("no room for 1 TiB")


def wrapped_run_out(visit: int) -> None:
    try:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 TiB")
    except RuntimeError as error:
        raise ValueError("the compiler gave up") from error


def be_killed(visit: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def refuse(visit: int) -> None:
    raise Unsupported("has no device")


def fail(visit: int) -> None:
    raise ZeroDivisionError("divided\nby nothing")


def fail_late(visit: int) -> None:
    if visit == 2:
        raise ZeroDivisionError("late")


def dawdle(visit: int) -> None:
    time.sleep(0.4)


BEHAVIOUR = {
    "good": None,
    "better": None,
    "crash": crash,
    "leave": leave,
    "hang": hang,
    "run_out": run_out,
    "wrapped_run_out": wrapped_run_out,
    "be_killed": be_killed,
    "refuse": refuse,
    "fail": fail,
    "fail_late": fail_late,
    "dawdle": dawdle,
}


def register(name: str, behaviour) -> None:
    @provider("kernel", f"fake_{name}", preload=())
    def open_fake(context):
        return FakeSession(context, behaviour)


for _name, _behaviour in BEHAVIOUR.items():
    register(_name, _behaviour)


@provider("kernel", "fake_no_import", preload=("there_is_no_such_module",))
def open_no_import(context):
    raise AssertionError("its import fails before")


def register_waiting(name: str) -> None:
    @provider("kernel", f"fake_{name}", preload=())
    def open_waiting(context):
        """Opens when another contender is being opened, too."""
        session, deadline = FakeSession(context), time.monotonic() + 20
        with open(os.environ["FAKE_TRACE"]) as stream:
            while sum(line.startswith("open") for line in stream.readlines()) < 2:
                if time.monotonic() > deadline:
                    raise TimeoutError("nobody else was opened")
                time.sleep(0.02)
                stream.seek(0)
        return session


for _name in ("waits_for_two", "waits_for_two_too"):
    register_waiting(_name)


class RoomySession(FakeSession):
    """Tells what memory it takes (GiB: peak, held) of a device of 100, and can stay there."""

    def __init__(self, context, peak: int, held: int) -> None:
        super().__init__(context)
        self._memory = {"peak": peak << 30, "held": held << 30, "device": 100 << 30}

    def stay(self) -> None:
        trace(f"stay {self._name} {os.getpid()}")

    def memory(self) -> dict[str, int]:
        return self._memory


def register_roomy(name: str, peak: int, held: int) -> None:
    @provider("kernel", f"fake_{name}", preload=())
    def open_roomy(context):
        return RoomySession(context, peak, held)


for _name, _peak, _held in (("small", 20, 5), ("medium", 70, 8), ("large", 80, 8)):
    register_roomy(_name, _peak, _held)


@provider("kernel", "fake_does_not_open", preload=())
def open_nothing(context):
    raise Unsupported("does not open")


@provider("kernel", "fake_settled", preload=("fake_import",), environment=(("FAKE_SETTING", "of-the-contender"),))
def open_settled(context):
    import fake_import

    trace(f"setting {fake_import.SETTING}")
    return FakeSession(context)
