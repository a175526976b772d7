"""Hooks of mkdocs: the README is the home page, links between both keep working, and formulas become MathML."""

import html
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page


_FROM_README = re.compile(r"(\]\(|srcset=\"|src=\")docs/")
# Links to files outside of docs/, in the README and in a page.
_OTHER_FILES_OF_README = re.compile(r"\[([^]]+)\]\((?!docs/|https?://|#)[^)]+\)")
_OTHER_FILES = re.compile(r"\[([^]]+)\]\(\.\./[^)]+\)")
# As pymdownx.arithmatex marks them.
_FORMULA = re.compile(r"<(?:span|div) class=\"arithmatex\">\\([(\[])(.*?)\\[)\]]</(?:span|div)>", re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README as the home page."""
    readme = Path(config.config_file_path).with_name("README.md").read_text(encoding="utf-8")
    content = _FROM_README.sub(r"\1", _OTHER_FILES_OF_README.sub(r"\1", readme))
    files.append(File.generated(config, "index.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to the README to the home page, and drop links to files that are not pages."""
    return _OTHER_FILES.sub(r"\1", markdown.replace("](../README.md", "](index.md"))


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn formulas into MathML, which browsers show without a script."""

    def formula(match: re.Match) -> str:
        return convert(html.unescape(match[2]), display="block" if match[1] == "[" else "inline")

    return _FORMULA.sub(formula, content)
