"""Stands in for the program `megafold` where a test is about the workflow: same arguments, made-up records.

The environment variable STAND_IN steers it, words separated by blanks: `sleep=S` before each comparison, `die=N` before
the comparison of N tokens (SIGKILL to itself), `hang=N` there for an hour, `error=N` gives its points the status error.
Every start is noted in $STAND_IN_LOG.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from experiments.record import Metric, Record, read_json, read_record, record_path, write_json, write_record
from experiments.spec import Comparison, comparison_from_dict
from megafold.errors import InputError


def main() -> int:
    steer = dict(word.split("=") for word in os.environ.get("STAND_IN", "").split())
    with open(os.environ["STAND_IN_LOG"], "a") as stream:
        stream.write(f"{' '.join(sys.argv[1:3])}\n")
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("verify").add_argument("--out", type=Path)
    build = commands.add_parser("cache")
    build.add_argument("what")
    build.add_argument("path", nargs="?")
    for name in ("--out", "--download", "--data", "--workers", "--msa-depth", "--shard"):
        build.add_argument(name)
    measure = commands.add_parser("measure")
    measure.add_argument("comparisons", nargs="+", type=Path)
    measure.add_argument("--records", type=Path)
    measure.add_argument("--force", action="store_true")
    for name in ("--logs", "--cache"):
        measure.add_argument(name)
    given = parser.parse_args()
    if given.command == "verify":
        write_json(given.out, {"checks": []})
        return 0
    if given.command == "cache":
        Path(given.path or given.out).write_text("a cache")
        return 0
    failed = False
    for path in given.comparisons:
        failed |= run(comparison_from_dict(read_json(path), path), given, steer)
    return int(failed)


def run(comparison: Comparison, given: argparse.Namespace, steer: dict[str, str]) -> bool:
    size = str(comparison.setting.size("n_tokens"))
    print(f"{comparison.id}: starting", flush=True)
    time.sleep(float(steer.get("sleep", 0)))
    if steer.get("die") == size:
        os.kill(os.getpid(), signal.SIGKILL)
    if steer.get("hang") == size:
        time.sleep(3600)
    status = "error" if steer.get("error") == size else "ok"
    metrics = {"iteration_time": Metric(1.5, "s", 1.4, 1.6, 4)} if status == "ok" else {}
    for point in comparison.points:
        try:
            if read_record(record_path(given.records, point)).status == "ok" and not given.force:
                continue
        except InputError:
            pass
        reason = "" if status == "ok" else "made up"
        write_record(Record(point, comparison.id, status, "cpu", reason=reason, metrics=metrics), given.records)
    return status == "error"


if __name__ == "__main__":
    sys.exit(main())
