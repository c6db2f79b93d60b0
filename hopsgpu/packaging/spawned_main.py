"""Run by multiprocessing as `__main__` of the processes that it spawns from a rank."""

import os

from hopsgpu.packaging.main_module import VARIABLE, restore

# Without it somebody has emptied the environment: then `__main__` is empty, as in processes that
# are spawned from a notebook.
if VARIABLE in os.environ:
    restore(globals())
