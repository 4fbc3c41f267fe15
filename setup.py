"""README.md as indexes of packages show it: its links lead to the repository. All else is in pyproject.toml."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
text = (ROOT / "README.md").read_text(encoding="utf-8")
repository = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"].get("Repository")
if repository is not None:
    text = re.sub(r"(!\[[^]]*\]\()(?!https?:|#)", rf"\1{repository}/raw/HEAD/", text)
    text = re.sub(r"(\]\()(?!https?:|#)", rf"\1{repository}/blob/HEAD/", text)
setup(long_description=text, long_description_content_type="text/markdown")
