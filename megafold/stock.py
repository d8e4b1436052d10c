"""Importing the stock package, which takes 20 s, without its remarks about itself."""

from __future__ import annotations

import importlib


def load_stock() -> None:
    """Import alphafold3_pytorch quietly.

    While it is imported it builds conformers of its own ions, which RDKit's force field does not know, and says that
    its debugging is off. It leaves RDKit's log off itself; what it logs later is about the user's data and is shown.
    """
    from loguru import logger
    from rdkit import RDLogger

    RDLogger.DisableLog("rdApp.*")
    logger.disable("alphafold3_pytorch")
    try:
        importlib.import_module("alphafold3_pytorch")
    finally:
        logger.enable("alphafold3_pytorch")
