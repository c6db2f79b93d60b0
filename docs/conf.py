"""Sphinx: what the pages are built with. `make docs` builds them; every warning is an error."""

from __future__ import annotations

import hopsgpu

project = "hopsgpu"
author = "the authors of hopsgpu"
release = version = hopsgpu.__version__
exclude_patterns = ["_build"]
# Blocks without a language are what programs print, and drawings.
highlight_language = "text"
# `name` in a docstring.
default_role = "code"
# "4g" and --dir are typed as they stand.
smartquotes = False

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click"]

# Anchors of headings as on a forge, where the same pages are read.
myst_heading_anchors = 3

autodoc_member_order = "bysource"
# Defaults as they are written, and `data: Any` rather than a class's full name.
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = "hopsgpu"
html_show_copyright = False
html_show_sourcelink = False
html_copy_source = False
