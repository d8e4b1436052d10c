"""Run a command line as a job of a site and wait for it: `python -m cluster.launcher --site NAME ... -- COMMAND`.

Exactly one job runs for a folder, whatever happens to the driver: the folder's job.json says what was submitted, the
next driver attaches to it, and a job whose id never reached the file is found by its unique name.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from cluster.driver import Cancelled, Driver
from cluster.executors import Request
from cluster.outcome import Outcome
from cluster.site import Site, load_site, minutes
from megafold.errors import EXIT_BAD_INPUT, InputError


def launch(
    site: Site,
    name: str,
    folder: Path,
    command: Sequence[str],
    *,
    nodes: int = 1,
    tasks: int = 1,
    time_limit: float | None = None,
    note: Callable[[str], None] | None = None,
) -> Outcome:
    """Run `command` as one job and wait until it ended.

    Args:
        name: tells the job from others; the scheduler sees it with a digest of the folder, which makes it unique.
        folder: for job.json and the logs; its parent holds what the drivers of a site share.
        time_limit: minutes; the site's by default.
        note: gets one line whenever something changes (stderr by default).

    Returns:
        the Outcome, also written to <folder>/job.json.

    Raises:
        InputError: before anything is submitted, for a site that is not filled in or a command that does not exist.
        Cancelled: after SIGINT or SIGTERM, when the job has been cancelled.
    """
    site.check_complete()
    check_command(command)
    check_importable()
    folder = Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:8]
    unique = f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}-{digest}"
    request = Request(name, unique, folder, tuple(command), nodes, tasks, time_limit or site.time_limit)
    return Driver(site, request, note or _say).run()


def check_command(command: Sequence[str]) -> None:
    """InputError where the program, or the interpreter that its first line names, does not exist on this machine."""
    program = shutil.which(command[0]) if command else None
    if program is None:
        raise InputError("command", command[0] if command else "", "no such program, so nothing was submitted")
    with open(program, "rb") as stream:
        head = stream.readline(512)
    if head.startswith(b"#!"):
        interpreter = head[2:].decode(errors="replace").split()[0]
        if not os.access(interpreter, os.X_OK):
            problem = f"its interpreter {interpreter} does not exist, so nothing was submitted"
            raise InputError("command", command[0], problem)


def check_importable() -> None:
    """InputError where a job, which starts elsewhere, could not import this package."""
    done = subprocess.run(
        [sys.executable, "-c", "import submitit, cluster.payload"], cwd="/", capture_output=True, text=True
    )
    if done.returncode:
        problem = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "import failed"
        problem = f"jobs cannot import the launcher ({problem}); install the checkout: pip install -e ."
        raise InputError(sys.executable, "", problem)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; the exit code is the job's (see cluster.outcome), 2 for bad input, 130 or 143 after a signal."""
    parser = argparse.ArgumentParser(prog="python -m cluster.launcher", description=__doc__.splitlines()[0])
    parser.add_argument("--site", required=True, help="a folder of cluster/")
    parser.add_argument("--name", required=True, help="tells the job from others")
    parser.add_argument("--folder", required=True, type=Path, help="for job.json and the logs")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--tasks", type=int, default=1, help="processes, over all nodes")
    parser.add_argument("--time", metavar="HH:MM:SS", help="time limit (the site's by default)")
    parser.add_argument("command", nargs="+", metavar="-- COMMAND", help="program and arguments")
    given = parser.parse_args(arguments)
    try:
        limit = minutes("--time", "", given.time) if given.time else None
        site = load_site(given.site)
        outcome = launch(
            site, given.name, given.folder, given.command, nodes=given.nodes, tasks=given.tasks, time_limit=limit
        )
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except Cancelled as cancelled:
        return 128 + cancelled.number
    return outcome.code


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
