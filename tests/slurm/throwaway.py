"""A throw-away SLURM cluster on this machine: `python tests/slurm/throwaway.py FOLDER [--nodes N]`.

Starts munged, slurmctld and one slurmd a node in the foreground, as children, on loopback and free ports, with
everything (key, sockets, logs, state) in FOLDER. Prints "ready SLURM_CONF=..." and stops when its standard input closes
or a signal arrives, so that it never outlives the test that started it. Needs the Debian packages slurmctld, slurmd,
slurm-client and munge; nothing under /etc is read or written.
"""

from __future__ import annotations

import argparse
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "srun", "scancel", "sinfo")
SYSTEM_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
CONFIG = """\
ClusterName=throwaway
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
ReturnToService=1
KillWait=3
MinJobAge=600
InactiveLimit=0
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
AccountingStorageType=accounting_storage/none
MailProg=/bin/true
{nodes}
PartitionName=batch Nodes=ALL Default=YES MaxTime=01:00:00 DefMemPerCPU=256 State=UP
"""


def missing() -> list[str]:
    """Programs that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name, path=SYSTEM_PATH) is None]


def free_ports(count: int) -> list[int]:
    """Ports of the loopback device that nobody uses now."""
    sockets = [socket.socket() for _ in range(count)]
    for entry in sockets:
        entry.bind(("127.0.0.1", 0))
    ports = [entry.getsockname()[1] for entry in sockets]
    for entry in sockets:
        entry.close()
    return ports


def configure(folder: Path, nodes: int) -> None:
    """Write the key and the configuration."""
    for name in ("state", "munge", *(f"spool-n{index}" for index in range(1, nodes + 1))):
        (folder / name).mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    (folder / "munge").chmod(0o755)
    key = folder / "munge" / "key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    host, ports = socket.gethostname().split(".")[0], free_ports(nodes + 1)
    lines = [
        f"NodeName=n{index} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[index]} CPUs=4 RealMemory=16000"
        for index in range(1, nodes + 1)
    ]
    text = CONFIG.format(host=host, ports=ports, folder=folder, user=getpass.getuser(), nodes="\n".join(lines))
    (folder / "slurm.conf").write_text(text)


def start(folder: Path, nodes: int) -> list[subprocess.Popen]:
    """The daemons, as children."""
    munge = folder / "munge"
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    commands = [["munged", "--foreground", "--force", *(f"--{key}={munge / name}" for key, name in files.items())]]
    commands += [["slurmctld", "-D", "-c", "-L", str(folder / "slurmctld.log")]]
    commands += [["slurmd", "-D", "-N", f"n{i}", "-L", str(folder / f"slurmd-n{i}.log")] for i in range(1, nodes + 1)]
    env = {**os.environ, "PATH": SYSTEM_PATH, "SLURM_CONF": str(folder / "slurm.conf")}
    children = []
    for command in commands:
        log = (folder / f"{command[0]}.out").open("ab")
        children.append(
            subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        )
        while command[0] == "munged" and not (munge / "socket").exists() and children[0].poll() is None:
            time.sleep(0.02)
    return children


def wait_until_idle(folder: Path, nodes: int, patience: float = 30.0) -> bool:
    """Whether all nodes came up in time."""
    env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    end = time.time() + patience
    while time.time() < end:
        shown = subprocess.run(
            ["timeout", "5", "sinfo", "-h", "-N", "-o", "%T"], env=env, capture_output=True, text=True, check=False
        )
        if shown.stdout.split() == ["idle"] * nodes:
            return True
        time.sleep(0.1)
    return False


def stop(folder: Path, children: list[subprocess.Popen]) -> None:
    """End all jobs, then the daemons in reverse order."""
    env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    subprocess.run(
        ["timeout", "5", "scancel", f"--user={getpass.getuser()}"], env=env, capture_output=True, check=False
    )
    time.sleep(0.5)
    for child in reversed(children):
        child.terminate()
        try:
            child.wait(5)
        except subprocess.TimeoutExpired:  # a slurmd that cannot reach its controller ignores the request
            child.kill()


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nodes", type=int, default=2)
    given = parser.parse_args()
    if missing():
        print(f"not installed: {', '.join(missing())}", flush=True)
        return 1
    folder = given.folder.resolve()
    configure(folder, given.nodes)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    children = start(folder, given.nodes)
    try:
        if not wait_until_idle(folder, given.nodes):
            print(f"the nodes did not come up; logs are in {folder}", flush=True)
            return 1
        print(f"ready SLURM_CONF={folder / 'slurm.conf'}", flush=True)
        sys.stdin.read()
    except KeyboardInterrupt:
        pass
    finally:
        stop(folder, children)
    return 0


if __name__ == "__main__":
    sys.exit(main())
