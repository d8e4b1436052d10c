"""Which files a cache was built from: kept beside it, as `<cache>.source.json`, for whoever reads them again."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path

from megafold.errors import InputError
from megafold.evopipe.sources import DataSource, load_data_section

PATHS = ("mmcif", "msa", "templates", "components", "kalign")


def write_source(cache: Path, source: DataSource) -> Path:
    """Write down the source of `cache`, with absolute paths."""
    content = asdict(source)
    for key in PATHS:
        content[key] = str(Path(content[key]).resolve()) if content[key] else None
    path = _beside(cache)
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def read_source(cache: Path) -> DataSource:
    """The source of `cache`; the sample set in its usual folder where nothing is written down.

    Raises:
        InputError: the file is no JSON object with the fields of a DataSource.
    """
    path = _beside(cache)
    if not path.is_file():
        return load_data_section({"sample": True}, cache)
    try:
        content = json.loads(path.read_text())
        content = {"max_chains": DataSource.max_chains, **content}
        known = {key: content[key] for key in (field.name for field in fields(DataSource))}
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(path, "", f"does not name the source of a cache ({error!r}); build the cache again") from error
    for key in PATHS:
        known[key] = Path(known[key]) if known[key] else None
    return DataSource(**{**known, "pdb_ids": tuple(known["pdb_ids"])})


def _beside(cache: Path) -> Path:
    return Path(cache).with_name(f"{Path(cache).name}.source.json")
