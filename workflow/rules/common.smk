# Configuration, site and sweeps, validated before the DAG is built. Loads neither torch nor the model.
import sys
from pathlib import Path

sys.path.insert(0, workflow.basedir)

from cluster.plan import plan_workflow, telling

with telling():
    PLAN = plan_workflow(config, sys.argv)
config.update(PLAN.config)

ROOT = PLAN.root
LOCAL = PLAN.site.executor == "local"
# A measurement on this machine has it to itself; on a cluster the rule only waits for its job.
JOB_THREADS = workflow.cores if LOCAL else 1


wildcard_constraints:
    sweep="|".join(PLAN.batches),
    batch="[^/]+",
