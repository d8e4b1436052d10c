"""Imported by the process from which a build forks its workers: the stock package is loaded there once, quietly."""

import importlib

from megafold.stock import load_stock

load_stock()
importlib.import_module("alphafold3_pytorch.inputs")
importlib.import_module("megafold.evopipe.featurize")
