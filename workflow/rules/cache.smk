# The sample set or the user's structures, downloaded where there is a network, and their features, computed once in a job.
DATA = [] if config["data"] == "sample" else [config["data"]]


rule fetch_sample:
    input:
        DATA,
    output:
        touch(f"{ROOT}/cache/fetched"),
    params:
        data=config["data"],
    script:
        "../scripts/fetch_sample.py"


rule build_cache:
    input:
        DATA,
        fetched=rules.fetch_sample.output,
    output:
        PLAN.cache,
    threads: JOB_THREADS
    params:
        data=config["data"],
        msa_depth=config["msa_depth"],
    script:
        "../scripts/build_cache.py"
