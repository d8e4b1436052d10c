"""Sweeps, points and records: what is measured, by whom, and what came out."""
