"""The site: `sphinx-build -W docs OUT`; `_ext` writes the pages that come from code."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import litgrpo

project = "litgrpo"
author = copyright = "the litgrpo authors"
version = release = litgrpo.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "litgrpo_site",
]
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "off"
suppress_warnings = ["mystnb.unknown_mime_type"]

smartquotes = False  # --KEY stays --KEY
autodoc_typehints = "description"
autodoc_inherit_docstrings = False  # of Lightning's hooks
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
default_role = "as_written"  # of litgrpo_site

html_theme = "furo"
html_math_renderer = "mathml"  # of litgrpo_site; works without a network
copybutton_prompt_text = ">>> "
html_title = f"litgrpo {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
pygments_style, pygments_dark_style = "a11y-high-contrast-light", "a11y-high-contrast-dark"
