"""Site files: what ships is valid, and a mistake is one line that names the file and the field."""

from __future__ import annotations

import subprocess
import sys

import pytest
import yaml

from cluster.plan import profile_names
from cluster.site import FOLDER, load_site, minutes, site_names
from megafold.errors import InputError

GOOD = {
    "name": "here",
    "executor": "slurm",
    "vendor": "amd",
    "gpu": "MI250X GCD",
    "gpus_per_node": 8,
    "cpus_per_task": 7,
    "time_limit": "02:00:00",
    "comparisons_per_job": 4,
}


@pytest.fixture
def write(tmp_path):
    """Writes a site file with changes; returns the folder of sites."""

    def act(drop: str = "", **changes):
        content = {key: value for key, value in {**GOOD, **changes}.items() if key != drop}
        (tmp_path / "here").mkdir(exist_ok=True)
        (tmp_path / "here" / "site.yaml").write_text(yaml.safe_dump(content))
        return tmp_path

    return act


def test_every_site_ships_with_a_profile_of_its_name():
    assert set(site_names()) == set(profile_names()) == {"local", "slurm-test", "frontier", "perlmutter", "delta"}


@pytest.mark.parametrize("name", site_names())
def test_shipped_site_is_valid_and_its_profile_names_it(name):
    site = load_site(name)
    profile = yaml.safe_load((FOLDER / name / "config.yaml").read_text())
    assert profile["config"]["site"] == name
    assert profile["executor"] == "local", "only the launcher may talk to a scheduler"
    assert profile["keep-going"] and profile["rerun-triggers"] == ["mtime", "params", "input"]
    assert site.executor == "local" or profile["jobs"] <= site.max_queued_jobs


@pytest.mark.parametrize("name", ["frontier", "perlmutter", "delta"])
def test_account_must_be_set_for_a_real_run(name, monkeypatch):
    monkeypatch.delenv("SBATCH_ACCOUNT", raising=False)
    site = load_site(name)
    with pytest.raises(InputError, match=rf"{name}/site.yaml: account: is not set; write yours there, or export"):
        site.check_complete()
    monkeypatch.setenv("SBATCH_ACCOUNT", "abc123")
    site.check_complete()


def test_frontier_as_its_user_guide_says():
    site = load_site("frontier")
    assert (site.gpus_per_node, site.cpus_per_task, site.time_limit, site.max_nodes) == (8, 7, 120, 91)
    assert site.max_queued_jobs < 100 and site.comparisons_per_job > 4
    assert site.network["NCCL_SOCKET_IFNAME"] == "hsn0,hsn1,hsn2,hsn3"
    assert set(site.node_local) == {"MIOPEN_USER_DB_PATH", "TRITON_CACHE_DIR"}


def test_units_become_minutes_gigabytes_and_seconds(write):
    site = load_site("here", write(time_limit="1-02:30:00", memory="1.5TB", poll="2min"))
    assert (site.time_limit, site.memory, site.poll) == (1440 + 150, 1500, 120)


@pytest.mark.parametrize(
    ("changes", "field", "problem"),
    [
        ({"gpus": 8}, "gpus", "unknown field; allowed: name, executor"),
        ({"drop": "vendor"}, "vendor", "is missing"),
        ({"executor": "pbs"}, "executor", "is 'pbs'; allowed: local, slurm"),
        ({"vendor": "AMD"}, "vendor", "allowed: nvidia, amd, cpu, auto"),
        ({"time_limit": 7200}, "time_limit", 'wanted: a quoted time "HH:MM:SS"'),
        ({"time_limit": "2h"}, "time_limit", "is '2h'; wanted"),
        ({"time_limit": "00:00:00"}, "time_limit", "is zero"),
        ({"memory": 480}, "memory", "wanted: a number with its unit (MB, GB, TB)"),
        ({"memory": "480GiB"}, "memory", "is '480GiB'; wanted: a number with its unit"),
        ({"poll": "10"}, "poll", "wanted: a number with its unit (s, min)"),
        ({"gpus_per_node": "8"}, "gpus_per_node", "wanted: a whole number of at least 0"),
        ({"gpus_per_node": 0}, "gpus_per_node", "is 0 at a site of vendor amd"),
        ({"cpus_per_task": True}, "cpus_per_task", "is True; wanted: a whole number"),
        ({"comparisons_per_job": 0}, "comparisons_per_job", "at least 1"),
        ({"modules": "rocm"}, "modules", "wanted: a list of text"),
        ({"modules": ["rocm", 6.2]}, "modules[1]", "is 6.2; wanted: text"),
        ({"network": {"FI_CXI_DEFAULT_CQ_SIZE": 131072}}, "network.FI_CXI_DEFAULT_CQ_SIZE", "wanted: text"),
        ({"environment": {"A-B": "1"}}, "environment.A-B", "is no name of an environment variable"),
        ({"name": "there"}, "name", "wanted: the folder's name, 'here'"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else None,
)
def test_mistake_is_one_line_with_file_and_field(write, changes, field, problem):
    with pytest.raises(InputError) as caught:
        load_site("here", write(**changes))
    line = str(caught.value)
    assert line.startswith(f"{write(**changes) / 'here' / 'site.yaml'}: {field}: ")
    assert problem in line and "\n" not in line


def test_broken_yaml_and_unknown_site(write):
    folder = write()
    (folder / "here" / "site.yaml").write_text("name: [")
    with pytest.raises(InputError, match=r"site.yaml: is not valid YAML"):
        load_site("here", folder)
    with pytest.raises(InputError, match=r"site: is 'nowhere'; there are delta, frontier, local"):
        load_site("nowhere")


@pytest.mark.parametrize(("text", "wanted"), [("00:00:30", 0.5), ("48:00:00", 2880), ("2-00:00:00", 2880)])
def test_times(text, wanted):
    assert minutes("f", "k", text) == wanted


def test_too_many_devices_for_the_site():
    with pytest.raises(InputError, match=r"max_nodes: is 91; 1000 devices need 125 nodes"):
        load_site("frontier").nodes_for(1000)
    assert load_site("frontier").nodes_for(9) == 2
    assert load_site("local").nodes_for(4) == 1


def test_cluster_loads_neither_torch_nor_the_model():
    code = "import sys, cluster.plan; print({'torch', 'alphafold3_pytorch', 'pandas'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
