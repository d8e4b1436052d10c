# The sample set or the user's structures, downloaded where there is a network, and their features, computed once in a job.
rule fetch_sample:
    input:
        [] if config["data"] == "sample" else [config["data"]],
    output:
        PLAN.cache.replace(".h5", ".yaml"),
    params:
        data=config["data"],
    script:
        "../scripts/fetch_sample.py"


TASKS = config["cache_tasks"]


# One of several jobs that share the work: it writes shards of its own, and nobody's index.
rule build_cache_part:
    input:
        rules.fetch_sample.output,
    output:
        touch(f"{PLAN.cache}.parts/{{part}}-of-{TASKS}"),
    wildcard_constraints:
        part=r"\d+",
    threads: JOB_THREADS
    params:
        cache=PLAN.cache,
        msa_depth=config["msa_depth"],
        part=lambda wildcards: f"{wildcards.part}/{TASKS}",
    script:
        "../scripts/build_cache.py"


# The cache is no declared output: Snakemake would delete it before it is resumed, and after an entry failed.
rule build_cache:
    input:
        rules.fetch_sample.output,
        [f"{PLAN.cache}.parts/{part}-of-{TASKS}" for part in range(1, TASKS + 1)]
        if TASKS > 1
        else [],
    output:
        touch(f"{PLAN.cache}.built"),
    threads: JOB_THREADS
    params:
        cache=PLAN.cache,
        msa_depth=config["msa_depth"],
        part="merge" if TASKS > 1 else "",
    script:
        "../scripts/build_cache.py"
