# One rule a sweep, one job a batch of comparisons. No time is taken before the kernels are verified on the same device.
def comparisons_of(sweep):
    return lambda wildcards: PLAN.batches[sweep][wildcards.batch]


# verify.json is no declared output: what failed must stay readable.
rule verify_kernels:
    output:
        touch(f"{ROOT}/verified"),
    threads: JOB_THREADS
    script:
        "../scripts/verify_kernels.py"


for sweep in PLAN.batches:

    rule:
        name:
            f"measure_{sweep}"
        input:
            verified=rules.verify_kernels.output,
            cached=rules.build_cache.output if sweep in PLAN.cached else [],
        output:
            f"{ROOT}/batches/{sweep}/{{batch}}.json",
        threads: JOB_THREADS
        params:
            sweep=sweep,
            comparisons=comparisons_of(sweep),
            cache=PLAN.cache if sweep in PLAN.cached else "",
        script:
            "../scripts/measure_batch.py"

    rule:
        name:
            sweep
        input:
            f"{ROOT}/tables/{sweep}.csv",
            f"{ROOT}/figures/{sweep}.txt",


rule measure:
    input:
        [manifest for sweep in PLAN.batches for manifest in PLAN.manifests(sweep)],
