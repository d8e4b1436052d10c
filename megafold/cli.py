"""The command line. Everything heavy is imported inside the commands, so that --help answers at once.

Exit codes: 0 done; 1 a measurement or check failed; 2 bad input (one line names the file and the field); 75 training
was asked to stop and can be resumed.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from megafold.errors import EXIT_BAD_INPUT, InputError

EXIT_STOPPED = 75  # asked to stop before the last step: run again

app = typer.Typer(help="MegaFold: train AlphaFold3-class models faster, and measure it.", no_args_is_help=True)
cache = typer.Typer(help="The EvoPipe cache: deterministic features, computed once.", no_args_is_help=True)
records = typer.Typer(help="Records of measurements.", no_args_is_help=True)
app.add_typer(cache, name="cache")
app.add_typer(records, name="records")

Size = Annotated[str, typer.Option(help="full, or a size that the sweep names, such as demo")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override; may be repeated")]
CacheFile = Annotated[Path | None, typer.Option("--cache", help="EvoPipe cache (HDF5)")]


@cache.command("build")
def cache_build(
    out: Annotated[Path, typer.Option(help="cache to write (HDF5); finished entries in it are kept")],
    data: Annotated[Path | None, typer.Option(help="YAML with a `data:` section; without it the sample set")] = None,
    workers: Annotated[int, typer.Option(min=1, help="processes")] = 1,
    msa_depth: Annotated[int, typer.Option(min=1, help="alignment rows kept for each entry")] = 16384,
    timeout: Annotated[float, typer.Option(min=1, help="seconds for one structure, with several processes")] = 600.0,
    shard: Annotated[str | None, typer.Option(metavar="I/N", help="make one of N parts, or `task`; then merge")] = None,
) -> None:
    """Featurise structures into a cache; what cannot be featurised is listed with its reason."""
    from experiments.spec import read_yaml
    from megafold.evopipe.build import build_cache
    from megafold.evopipe.parts import parse_part
    from megafold.evopipe.source_file import write_source
    from megafold.evopipe.sources import load_data_section

    section = {"sample": True} if data is None else read_yaml(data).get("data")
    source = load_data_section(section, data or Path("sample.yaml"))
    out.parent.mkdir(parents=True, exist_ok=True)
    part = None if shard is None else parse_part(shard)
    report = build_cache(source, out, workers=workers, msa_depth=msa_depth, timeout=timeout, part=part)
    typer.echo(str(report))
    if report.failed and not report.built and not report.skipped:
        raise typer.Exit(1)
    write_source(out, source)


@cache.command("merge")
def cache_merge(path: Path) -> None:
    """Write the index of all finished shards: the last step after `build --shard` on several machines."""
    from megafold.evopipe.merge import merge, report_path

    report = merge(path)
    typer.echo(f"{report}\nreport: {report_path(path)}")
    raise typer.Exit(bool(report.problems))


@cache.command("repair")
def cache_repair(path: Path) -> None:
    """Keep what is sound, drop what is damaged (the next build makes it anew), pack small shards, write the index."""
    from megafold.evopipe.merge import repair

    typer.echo(str(repair(path, typer.echo)))


@cache.command("measure")
def cache_measure(
    path: Path,
    crop_size: Annotated[int, typer.Option(min=1, help="tokens of a crop")] = 384,
    msa_depth: Annotated[int, typer.Option(min=1, help="alignment rows of a crop")] = 1024,
) -> None:
    """Measure shapes and compression of blocks on the entries of a cache: bytes, and time to write and to read."""
    from megafold.evopipe.measure_layout import measure_layout

    typer.echo(measure_layout(path, crop_size=crop_size, msa_depth=msa_depth))


@cache.command("measure-examples")
def cache_measure_examples(
    path: Path,
    crop_size: Annotated[int, typer.Option(min=1, help="tokens of a crop")] = 384,
    msa_depth: Annotated[int, typer.Option(min=1, help="alignment rows of a crop")] = 1024,
    templates: Annotated[int, typer.Option(min=0, help="give every entry so many, of its own coordinates")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="times that each example is made; the least counts")] = 80,
) -> None:
    """Measure processor time of the examples of a cache, beside reading and inflating the same blocks alone."""
    from megafold.evopipe.measure_examples import measure_examples

    options = {"crop_size": crop_size, "msa_depth": msa_depth, "templates": templates, "repeats": repeats}
    typer.echo(measure_examples(path, **options))


@cache.command("simulate")
def cache_simulate(
    folder: Annotated[Path, typer.Argument(help="folder for the generated caches")],
    entries: Annotated[list[int], typer.Option(min=1, help="size of a cache; may be repeated")],
) -> None:
    """Generate caches of many small entries; measure time and memory to open one and to find entries in it."""
    from megafold.evopipe.simulate import simulate

    typer.echo(simulate(folder, entries))


@cache.command("inspect")
def cache_inspect(path: Path) -> None:
    """Say what is in a cache: entries, tokens, atoms, alignment depth, bytes, versions."""
    from megafold.evopipe.cache import describe

    typer.echo(describe(path))


@cache.command("verify")
def cache_verify(path: Path) -> None:
    """Check every dataset against its checksum; exit 1 and name the entries that are damaged."""
    from megafold.evopipe.cache import verify

    problems = verify(path)
    for problem in problems:
        typer.echo(problem, err=True)
    typer.echo(f"{path}: {len(problems)} damaged" if problems else f"{path}: intact")
    raise typer.Exit(bool(problems))


@app.command()
def train(config: Path) -> None:
    """Train on cached structures as CONFIG (YAML) says; resumes from the last checkpoint."""
    from megafold.stock import load_stock
    from megafold.train.config import load_config

    settings = load_config(config)
    load_stock()
    from megafold.train.loop import train as run

    report = run(settings)
    if report.leads:
        typer.echo(f"step {report.step}, loss {report.loss}, log {report.log}, checkpoint {report.checkpoint}")
    if report.stopped_by:
        if report.leads:
            typer.echo(f"stopped by {report.stopped_by}; the same command resumes", err=True)
        raise typer.Exit(EXIT_STOPPED)


@app.command()
def verify(
    out: Annotated[Path | None, typer.Option(help="JSON file for the result")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
) -> None:
    """Check kernels and the replaced model against float64 and the stock model on this device."""
    from megafold.stock import load_stock
    from megafold.train.ranks import device_of
    from megafold.verify import verify_device

    device_of(None, device)  # refuses what is not there before the stock model takes its time to load
    load_stock()
    results = verify_device(device, out=out)
    for result in results:
        typer.echo(f"{'ok  ' if result.ok else 'FAIL'} {result.name}: {result.detail}")
    raise typer.Exit(not all(result.ok for result in results))


@app.command()
def tune(
    out: Annotated[
        Path | None,
        typer.Option(help="folder for the tables; MEGAFOLD_TABLES names it later (default: rewrite the shipped ones)"),
    ] = None,
) -> None:
    """Measure launch configurations on this device and rewrite its tables."""
    from megafold.evoflash3d.tune import tune as tune_evoflash3d
    from megafold.evofusion.tune import tune as tune_evofusion

    try:
        for run in (tune_evoflash3d, tune_evofusion):
            typer.echo(run(out))
    except RuntimeError as error:  # no device that the kernels run on
        raise InputError("megafold tune", "", str(error)) from error


@app.command()
def measure(
    comparisons: Annotated[list[Path], typer.Argument(help="COMPARISON.json files")],
    records: Annotated[Path, typer.Option(help="folder for the records")],
    cache: CacheFile = None,
    logs: Annotated[Path | None, typer.Option(help="folder for the workers' logs")] = None,
    force: Annotated[bool, typer.Option(help="measure again what has a result")] = False,
) -> None:
    """Measure comparisons on this machine: all contenders of each, alternating, one record a contender."""
    from experiments.record import read_json
    from experiments.run import measure as run
    from experiments.spec import comparison_from_dict

    parsed = [comparison_from_dict(read_json(path), path) for path in comparisons]
    results = run(parsed, records, cache=cache, logs=logs or records.parent / "logs", command=_command(), force=force)
    _finish(results)


@app.command()
def sweep(
    name: Annotated[str, typer.Argument(help="a shipped sweep, or a YAML file")],
    out: Annotated[Path, typer.Option(help="folder for records and tables")],
    size: Size = "full",
    settings: Settings = None,
    cache: CacheFile = None,
    force: Annotated[bool, typer.Option(help="measure again what has a result")] = False,
) -> None:
    """Run one sweep on this machine, without Snakemake, and print its table."""
    from analysis.tables import print_table, write_tables
    from experiments.run import measure as run
    from experiments.spec import load_sweep

    resolved = load_sweep(name, size=size, settings=settings or ())
    if cache is None and resolved.needs_cache:
        cache = out / "cache" / "sample.h5"
        if not cache.exists():
            cache_build(out=cache)
    results = run(
        resolved.comparisons, out / "records", cache=cache, logs=out / "logs", command=_command(), force=force
    )
    if not results:  # a rank that another one speaks for
        return
    write_tables(results, resolved.name, out / "tables")
    typer.echo(print_table(results))
    _finish(results)


@app.command()
def plan(
    name: Annotated[str, typer.Argument(help="a shipped sweep, or a YAML file")],
    site: Annotated[str, typer.Option(help="a folder under cluster/")] = "local",
    size: Size = "full",
    settings: Settings = None,
) -> None:
    """Show what a sweep would measure at a site, and in how many jobs; submits nothing."""
    from cluster.batch import plan_batches
    from cluster.site import load_site
    from experiments.spec import load_sweep

    resolved, place = load_sweep(name, size=size, settings=settings or ()), load_site(site)
    for comparison in resolved.comparisons:
        typer.echo(f"{comparison.id}: {', '.join(contender.name for contender in comparison.contenders)}")
    jobs = len(plan_batches(place, resolved.comparisons))
    typer.echo(f"{len(resolved.comparisons)} comparisons in {jobs} jobs at {place.name}")


@records.command("import")
def records_import(
    source: Annotated[Path, typer.Argument(help="folder with records of another site")],
    site: Annotated[str, typer.Option(help="name under which they are kept")],
    results: Annotated[Path, typer.Option(help="folder of all results")] = Path("results"),
) -> None:
    """Copy validated records of another machine into results/SITE/records; a better record is never replaced."""
    from experiments.record import read_records, write_record

    found = read_records(source)
    for record in found:
        write_record(record, results / site / "records")
    typer.echo(f"{len(found)} records in {results / site / 'records'}")


@app.command()
def figures(
    source: Annotated[Path, typer.Argument(help="folder with records")],
    out: Annotated[Path, typer.Option(help="folder for the figures and tables")],
) -> None:
    """Draw figures (PNG, SVG) and write tables (CSV, Markdown) of every sweep in a folder of records."""
    from analysis.figures import write_figures
    from analysis.tables import of_sweep, write_tables
    from experiments.record import read_records

    found = read_records(source)
    if not found:
        raise InputError(source, "", "holds no record")
    for name in sorted({record.point.setting.sweep for record in found}):
        chosen = of_sweep(found, name)
        for path in [*write_tables(chosen, name, out), *write_figures(chosen, name, out)]:
            typer.echo(str(path))


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="folder with records")],
    second: Annotated[Path, typer.Argument(help="folder with records")],
) -> None:
    """Set the same points of two sites or two commits side by side."""
    from analysis.compare import compare_records
    from experiments.record import read_records

    typer.echo(compare_records(read_records(first), read_records(second), names=(str(first), str(second))))


@app.command()
def doctor(
    site: Annotated[str | None, typer.Option(help="also check this site's settings")] = None,
    memory: Annotated[int | None, typer.Option(min=1, help="predict the peak memory at this many tokens")] = None,
) -> None:
    """Say which versions and devices are here, and what would run where."""
    from megafold.doctor import diagnose

    typer.echo(diagnose(memory))
    if site is not None:
        from cluster.site import load_site

        typer.echo(f"site {load_site(site).name}: settings are valid")


def _command() -> str:
    return shlex.join(["megafold", *sys.argv[1:]])


def _finish(results) -> None:
    failed = [record for record in results if record.status == "error"]
    for record in failed:
        typer.echo(f"error: {record.point.id}: {record.reason}", err=True)
    raise typer.Exit(bool(failed))


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except InputError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(EXIT_BAD_INPUT)
