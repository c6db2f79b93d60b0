"""The `__main__` of processes that multiprocessing spawns from a rank."""

import os

from hopsgpu.packaging.main_module import VARIABLE, restore

# If the variable is missing, somebody has emptied the environment: then `__main__` stays empty, as
# in processes that are spawned from a notebook.
if VARIABLE in os.environ:
    restore(globals())
