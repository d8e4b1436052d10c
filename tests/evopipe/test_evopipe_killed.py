"""A writer that is killed, a disk that is full, a filesystem without locks: the cache stays valid and is resumed."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from megafold.errors import InputError
from megafold.evopipe import cache, codec, layout, shards
from megafold.evopipe.cache import StructureCache
from megafold.evopipe.merge import merge, repair, report_path
from megafold.evopipe.report import Finding
from megafold.evopipe.shards import Shard, StorageError, folder_of

# Writes entries for ever, as a build does: shards, and now and then the index.
WRITER = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from random_entry import random_entry
from megafold.evopipe import cache, codec
from megafold.evopipe.merge import merge
from megafold.evopipe.shards import Shard, folder_of
path, start = Path(sys.argv[1]), int(sys.argv[2])
cache.create(path, msa_depth=10)
shard = Shard(folder_of(path), 10)
print("ready", flush=True)
for number in range(start, start + 10**6):
    name = f"{number:05}-assembly1"
    shard.add(random_entry(name, n=20, rows=10, seed=number), codec.checksum(name.encode()).hex(), {})
    shard.seal()
    merge(path)
"""
# The same once and again, each time in a new process, which is killed.
ROUNDS = 15
IMPORTS, BODY = WRITER.split("path, start", 1)
FORKED = f"""{IMPORTS}
for number in range({ROUNDS}):
    child = os.fork()
    if not child:
        print(os.getpid(), flush=True)
        sys.argv[2] = str(1000 * number)
        exec({("path, start" + BODY)!r})
    _, status = os.waitpid(child, 0)
    print("killed" if os.WIFSIGNALED(status) else "ended", flush=True)
"""
HERE = os.path.dirname(__file__)


def test_cache_is_valid_whenever_its_writer_is_killed(tmp_path, make_entry):
    """SIGKILL at any moment; every entry of the index is sound, and nothing that was in it is lost."""
    path, before, rng = tmp_path / "c.h5", set(), np.random.default_rng(0)
    parent = subprocess.Popen([sys.executable, "-c", FORKED, str(path), "0", HERE], stdout=subprocess.PIPE, text=True)
    for number in range(ROUNDS):
        writer = int(parent.stdout.readline())
        assert parent.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 20
        while number % 3 == 0 and StructureCache(path).entries() == sorted(before) and time.monotonic() < deadline:
            time.sleep(0.01)  # some of the writers get as far as the index, however slow the machine is
        time.sleep(float(rng.uniform(0, 0.4)))
        os.kill(writer, signal.SIGKILL)
        assert parent.stdout.readline() == "killed\n"
        with StructureCache(path) as reader:
            names = set(reader.entries())
            assert before <= names and list(reader.verify()) == []
            before = names
    assert parent.wait(timeout=20) == 0
    assert len(before) > 3
    merged = merge(path)  # shards that were finished but not listed
    assert merged.problems == [] and merged.entries >= len(before) and cache.verify(path) == []
    shards.remove_parts(folder_of(path), older_than=0)
    assert not list(folder_of(path).glob(".*"))


def fill(path, make_entry, names, **sizes):
    shard = Shard(folder_of(path), 10)
    for seed, name in enumerate(names):
        shard.add(make_entry(name, rows=10, seed=seed, **sizes), codec.checksum(name.encode()).hex(), {})
    shard.seal()
    return merge(path)


@pytest.fixture
def small(tmp_path, make_entry):
    path = tmp_path / "c.h5"
    cache.create(path, msa_depth=10)
    fill(path, make_entry, ["1abc-assembly1", "2xyz-assembly1"])
    return path


@pytest.mark.parametrize("what", ["a shard", "the index"])
def test_no_space_is_one_clear_line_and_the_cache_is_valid(small, make_entry, what):
    """A limit on the size of files stands for a full disk: the system refuses the write in the same way."""
    shard = Shard(folder_of(small), 10)
    shard.add(make_entry("3new-assembly1", rows=10, seed=3), "0" * 32, {})
    if what == "the index":
        shard.seal()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(StorageError, match=r"cannot be written \(File too large; \d+ bytes") as caught:
            shard.seal() if what == "a shard" else merge(small)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert "\n" not in str(caught.value) and "build again" in str(caught.value)
    assert cache.verify(small) == [] and StructureCache(small).entries() == ["1abc-assembly1", "2xyz-assembly1"]
    assert not list(small.parent.glob("**/.*"))
    merge(small)  # with space again
    assert len(StructureCache(small).entries()) == (2 if what == "a shard" else 3)


def test_full_disk_of_a_build_is_one_clear_line(tmp_path, make_entry):
    """A real filesystem of 400 kB, where this user may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "none", folder], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    try:
        path, written = folder / "c.h5", 0
        cache.create(path, msa_depth=10)
        with pytest.raises(StorageError, match="No space left on device"):
            for written in range(100):
                fill(path, make_entry, [f"{written:04}-assembly1"], n=100)
        assert written > 3 and cache.verify(path) == []
        with StructureCache(path) as reader:
            assert len(reader.entries()) >= written
    finally:
        subprocess.run(["umount", folder], check=True)


NO_LOCKS = """
#include <errno.h>
int flock(int fd, int operation) { errno = ENOSYS; return -1; }
"""


@pytest.mark.parametrize("setting", [None, "FALSE", "TRUE"], ids=["unset", "locking off", "locking on"])
def test_cache_needs_no_locks(tmp_path, setting):
    """Locks fail here as on a filesystem without them, whatever HDF5's own switch says."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    (tmp_path / "no_locks.c").write_text(NO_LOCKS)
    library = tmp_path / "no_locks.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "no_locks.c"], check=True)
    code = WRITER.replace("10**6", "6") + "print(cache.verify(path), merge(path).entries)"
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    environment.pop("HDF5_USE_FILE_LOCKING", None)
    environment |= {} if setting is None else {"HDF5_USE_FILE_LOCKING": setting}
    command = [sys.executable, "-c", code, str(tmp_path / "c.h5"), "0", HERE]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    if setting == "TRUE":  # who insists on locks is told that there are none
        assert done.returncode and "lock" in done.stderr.lower()
    else:
        assert done.stdout.split("\n")[-2] == "[] 6", done.stderr


def test_many_writers_need_no_lock(tmp_path):
    """Three processes write shards and the index of one cache at once; whoever ends last has listed everything."""
    path = tmp_path / "c.h5"
    cache.create(path, msa_depth=10)
    code = WRITER.replace("10**6", "4")
    command = [sys.executable, "-c", code, str(path)]
    writers = [subprocess.Popen([*command, str(start), HERE], stdout=subprocess.DEVNULL) for start in (0, 4, 8)]
    assert [writer.wait(timeout=60) for writer in writers] == [0] * 3
    assert StructureCache(path).entries() == [f"{number:05}-assembly1" for number in range(12)]
    assert cache.verify(path) == []


def test_repair_keeps_what_is_sound_and_packs_it(small, make_entry, capsys):
    good = StructureCache(small).read("2xyz-assembly1")
    for number in range(3):
        fill(small, make_entry, [f"{number}small-assembly1"])
    with StructureCache(small) as reader:
        damaged = reader.index.shard_path(reader.row("1abc-assembly1"))
        offset = reader.tables("1abc-assembly1")["msa"].places[0][0]
    with damaged.open("r+b") as stream:
        stream.seek(offset + 5)
        stream.write(b"\xff\xff\xff")
    (folder_of(small) / ".half.h5.1.part").write_bytes(b"half a shard")
    (folder_of(small) / "0000000000000000-aaaaaaaaaaaa.h5").write_bytes(b"no shard at all")
    small.write_bytes(small.read_bytes()[:500])
    with pytest.raises(InputError):
        StructureCache(small).entries()
    report = repair(small)
    text = capsys.readouterr().out
    assert "1abc-assembly1: corrupt entry" in text and "unfinished" in text and "set aside" in text
    assert report.entries == 4 and cache.verify(small) == [] and report.shards == 1
    kept = StructureCache(small).read("2xyz-assembly1")
    assert all(np.array_equal(kept.arrays[key], good.arrays[key]) for key in layout.ARRAYS)
    assert len(list(folder_of(small).glob("*.damaged"))) == 2 and len(list(folder_of(small).glob("*.h5"))) == 1
    assert repair(small).entries == 4  # nothing to do


def test_report_says_what_the_last_build_of_each_entry_said(small):
    shard = Shard(folder_of(small), 10)
    shard.findings.append(Finding("failed", "unusable file", "3bad.cif", "3bad-assembly1", "no atoms", "remove it"))
    shard.seal()
    assert list(merge(small).findings) == ["3bad-assembly1"]
    assert '"entry": "3bad-assembly1"' in report_path(small).read_text()


def test_shard_of_another_depth_or_schema_is_not_taken_in(small, make_entry):
    for depth, schema in ((20, layout.SCHEMA_VERSION), (10, 1)):
        shard = Shard(folder_of(small), depth)
        shard.add(make_entry("9new-assembly1", rows=10), "1" * 32, {})
        path = shard.seal()
        if schema == 1:
            import h5py

            with h5py.File(path, "r+") as file:
                file.attrs["schema"] = 1
    report = merge(small)
    assert report.entries == 2 and len(report.problems) == 2
    assert "was built with 20 rows, the cache with 10" in report.problems[0]
    assert "1 found, this version reads" in report.problems[1]


def test_only_the_leftovers_of_this_cache_are_removed(tmp_path):
    for name in (".c.h5.aa.part", ".other.part", "c.h5.part"):
        (tmp_path / name).touch()
    assert shards.remove_parts(tmp_path, of="c.h5") == 0  # they may be another build's
    assert shards.remove_parts(tmp_path, older_than=0, of="c.h5") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.part", "c.h5.part"]
