"""The pins, the conda environment and the package metadata agree, and nothing of this machine leaked in."""

from __future__ import annotations

import re
import subprocess
import tomllib

import yaml


def _pins(text: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, version in re.findall(r"^\s*-?\s*([A-Za-z0-9_.-]+)==([^\s;]+)", text, flags=re.MULTILINE):
        found.setdefault(name.lower(), set()).add(version)
    return found


def test_environment_yml_pins_equal_constraints(repository):
    """conda and pip users get the same versions."""
    constraints = _pins((repository / "constraints.txt").read_text())
    conda = yaml.safe_load((repository / "environment.yml").read_text())["dependencies"]
    pip = next(entry["pip"] for entry in conda if isinstance(entry, dict))
    environment = _pins("\n".join(pip))
    assert environment
    for name, versions in environment.items():
        assert versions == constraints.get(name), name


def test_environment_yml_names_every_dependency(repository):
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    wanted = {re.match(r"[A-Za-z0-9_.-]+", entry)[0].lower() for entry in project["dependencies"]}
    environment = _pins((repository / "environment.yml").read_text())
    assert wanted == set(environment)


def test_constraints_pin_every_requirement_exactly(repository):
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    extras = [entry for group in project["optional-dependencies"].values() for entry in group]
    names = {re.match(r"[A-Za-z0-9_.-]+", entry)[0].lower() for entry in project["dependencies"] + extras}
    lines = [line for line in (repository / "constraints.txt").read_text().splitlines() if line.strip()]
    assert all(re.match(r"[A-Za-z0-9_.-]+==\S+", line) for line in lines)
    assert names <= set(_pins("\n".join(lines)))


def test_no_file_depends_on_the_place_it_was_written_in(repository):
    """No absolute path of a development machine and no local package index in a tracked file."""
    listed = subprocess.run(["git", "ls-files"], cwd=repository, capture_output=True, text=True, check=True).stdout
    # Written in two parts, so that this file does not hold what it looks for.
    parts = [("/", "work/"), ("/", "root/"), ("/", "opt/pypi"), ("find", "-links"), ("extra-index", "-url")]
    forbidden = re.compile("|".join(first + second for first, second in parts))
    for name in listed.splitlines():
        path = repository / name
        if not path.is_file() or path.suffix in {".png", ".svg"}:
            continue
        match = forbidden.search(path.read_text(errors="replace"))
        assert match is None, f"{name}: {match and match.group()}"


def test_no_python_file_is_longer_than_500_lines(repository):
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=repository, capture_output=True, text=True, check=True)
    lengths = {name: len((repository / name).read_text().splitlines()) for name in listed.stdout.splitlines()}
    assert {name: length for name, length in lengths.items() if length > 500} == {}
