"""How Sphinx builds these pages: `make docs`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the API reference imports the package, and needs no accelerator
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import xsake

project = "XSAKE"
author = copyright = "the authors of XSAKE"
version = release = xsake.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["attrs_inline", "colon_fence"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = "XSAKE"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_theme_options = {"navigation_with_keys": True}

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

# Docstrings write names as `name`: a link where the page of that name is here, code where it is not.
default_role = "py:obj"
# Every other reference must lead somewhere, except for types of other projects and of the package's inner modules.
nitpick_ignore_regex = [("py:class", r"(?!xsake\.).*"), ("py:class", r"xsake\.\w+(\.\w+){2,}")]


def setup(app: Any) -> None:
    app.connect("missing-reference", _plain_code)


def _plain_code(app: Any, env: Any, node: Any, content: Any) -> Any:
    return content if node["reftype"] == "obj" else None
