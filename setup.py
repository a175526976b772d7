"""Everything is in pyproject.toml, except the text for PyPI, which shows the README without the repository's files."""

import re
from pathlib import Path

from setuptools import setup


REPOSITORY = "scalelong-diffusers/scalelong-diffusers"
IMAGES = f"https://raw.githubusercontent.com/{REPOSITORY}/main/"
PAGES = f"https://github.com/{REPOSITORY}/blob/main/"

readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
readme = re.sub(r'(src|srcset)="(?!https:)', rf'\1="{IMAGES}', readme)
readme = re.sub(r"\]\((?!https:|#)", f"]({PAGES}", readme)
setup(long_description=readme, long_description_content_type="text/markdown")
