"""Scripts that a person runs: ``python -m experiments.NAME --help``. They use jsvgd and never the reverse."""
