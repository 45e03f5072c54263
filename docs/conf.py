"""How Sphinx builds these pages: `scripts/docs`. Nothing is loaded from the network when they are
read.
"""

from dpipe import __version__

project = "dpipe"
author = "the authors of dpipe"
version = release = __version__
copyright = author

extensions = ["myst_parser", "sphinx_copybutton"]
myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3  # [text](page.md#a-heading) is checked
exclude_patterns = ["generated"]  # included by the pages of the reference
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "furo"
html_title = f"dpipe {__version__}"
html_copy_source = False
html_show_sphinx = False
pygments_style = "friendly"
