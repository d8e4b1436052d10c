"""The contenders' sessions, one file for each kind. They load torch; `experiments.providers` does not."""
