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


# The cache is no declared output: Snakemake would delete it before it is resumed, and after an entry failed.
rule build_cache:
    input:
        rules.fetch_sample.output,
    output:
        touch(f"{PLAN.cache}.built"),
    threads: JOB_THREADS
    params:
        msa_depth=config["msa_depth"],
    script:
        "../scripts/build_cache.py"
