"""Prints what spark-submit must be told for gangs, after shipping what these need."""

from __future__ import annotations

import sys

from hopsgpu.backends.spark.submission import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
