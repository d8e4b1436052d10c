# Tables, figures, notebooks and one self-contained page from the records.
NOTEBOOKS = [
    f"{ROOT}/notebooks/{name}.ipynb"
    for name in ("iteration", "kernels")
    if name in PLAN.batches
]


def manifests_of(wildcards):
    return PLAN.manifests(wildcards.sweep)


rule make_tables:
    input:
        manifests_of,
    output:
        f"{ROOT}/tables/{{sweep}}.csv",
        f"{ROOT}/tables/{{sweep}}.md",
    script:
        "../scripts/make_tables.py"


rule draw_figures:
    input:
        manifests_of,
    output:
        f"{ROOT}/figures/{{sweep}}.txt",
    script:
        "../scripts/draw_figures.py"


rule execute_notebook:
    input:
        manifests_of,
    output:
        f"{ROOT}/notebooks/{{sweep}}.ipynb",
    script:
        "../scripts/execute_notebook.py"


rule write_report:
    input:
        rules.verify_kernels.output,
        expand(rules.make_tables.output, sweep=PLAN.batches),
        expand(rules.draw_figures.output, sweep=PLAN.batches),
    output:
        f"{ROOT}/report.html",
    script:
        "../scripts/write_report.py"


def write_partial_report():
    if any(Path(ROOT, "records").rglob("*.json")):
        from analysis.report import write_report

        with telling():
            page = write_report(Path(ROOT), Path(ROOT, "report_partial.html"))
            print(f"What has been measured so far: {page}", file=sys.stderr)
