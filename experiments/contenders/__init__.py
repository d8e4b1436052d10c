"""The contenders' sessions, one file for each kind of measurement. They load torch; `experiments.providers` does not."""
