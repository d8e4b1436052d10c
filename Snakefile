# MegaFold's results, measured on this machine or cluster: snakemake --profile cluster/<site> [sweep ...]
from snakemake.utils import min_version

min_version("9.27")


include: "workflow/rules/common.smk"
include: "workflow/rules/cache.smk"
include: "workflow/rules/measure.smk"
include: "workflow/rules/report.smk"


rule all:
    default_target: True
    input:
        f"{ROOT}/report.html",
        NOTEBOOKS,


onstart:
    with telling():
        PLAN.site.check_complete()


# What could be measured is shown even where a rule failed.
onerror:
    write_partial_report()
