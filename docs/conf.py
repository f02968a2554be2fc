"""Sphinx configuration: Markdown pages, docstrings for the reference."""

import microclip

project = "microclip"
author = "The microclip maintainers"
release = microclip.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "microclip"
exclude_patterns = ["_build"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_default_options = {"members": True}
default_role = "code"
