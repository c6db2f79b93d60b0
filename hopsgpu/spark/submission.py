"""Print the arguments that spark-submit needs for gangs, after packing the files to ship."""

from __future__ import annotations

import sys

from hopsgpu.backends.spark.submit_arguments import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
