"""How Sphinx builds the site of the documentation: `make docs`."""

import rayloader

project = "rayloader"
release = rayloader.__version__
html_title = f"rayloader {release}"
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_theme_options = {"top_of_page_buttons": []}

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3  # links to headings are spelled as in the repository

default_role = "code"  # docstrings set names in single back-ticks
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signature has them
maximum_signature_line_length = 80
napoleon_use_ivar = True
napoleon_custom_sections = [("Arguments of rayloader alone", "params_style")]
python_use_unqualified_type_names = True
