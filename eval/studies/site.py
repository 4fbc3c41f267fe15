"""Build the documentation's site: `python -m vmonarch.eval.studies.site`.

The pages are the repository's own Markdown: README.md is the landing page, docs/ the rest. They are copied to
`build/site`, where links that leave docs/ find a copy of their file, too; the examples and the API reference are
generated. Zensical then builds `build/site/html` by mkdocs.yml, and any broken link or anchor ends it. Serve it with
`python -m http.server -d build/site/html`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import vmonarch

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "site"
# Files outside docs/ that are pages, and what they are called on the site.
OTHER_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "finetune/embedded/README.md": "embedded-model.md",
    "examples": "examples.md",
}
# Page -> (title, names of its entries).
REFERENCE: dict[str, tuple[str, tuple[str, ...]]] = {
    "apply": ("Switching on and off", ("apply", "presets", "restore")),
    "processors": (
        "Processors",
        (
            *("VMonarchProcessor", "FlashBiasProcessor", "TwoResolutionProcessor", "FirstOrderProcessor"),
            *("BasedProcessor", "save_adapter", "load_adapter"),
        ),
    ),
    "options": (
        "Options",
        (
            *("VMonarchOptions", "ExactBlocks", "Refresh", "TwoResolutionOptions", "FirstOrderOptions"),
            *("AttentionPlan", "LatentGrid"),
        ),
    ),
    "ops": (
        "Ops",
        (
            *("vmonarch_attention", "monarch_attention"),
            *("flash_entropy_attention", "two_resolution_attention", "first_order_attention", "merge_partials"),
            *("flash_bias_attention", "taylor_attention", "window_attention"),
        ),
    ),
    "bias": ("Biases", tuple(f"bias.{name}" for name in vmonarch.bias.__all__)),
    "commands": (
        "Recipes and commands",
        (
            *("pipelines.recipes.apply", "configs.stack.Stack"),
            *("pipelines.generation.generate", "eval.compare.compare", "eval.evaluate.evaluate"),
            *("eval.similarity.similarity", "eval.similarity.lpips", "eval.similarity.paper_score"),
        ),
    ),
}
_LINK = re.compile(r"\]\((?![a-z]+:)([^)\s#]+)(#[^)\s]*)?\)")


def pages() -> dict[Path, str]:
    """{a file of the repository: the page that it is}, all but the generated ones."""
    documents = {path: path.relative_to(ROOT / "docs").as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))}
    return {ROOT / name: page for name, page in OTHER_PAGES.items()} | documents


def page_text(source: Path, page: str, known: dict[Path, str]) -> tuple[str, dict[Path, str]]:
    """A document as the site has it, and {file: place on the site} of the files that its links need.

    Raises:
        FileNotFoundError: a link leads nowhere, or to a folder that is no page.
    """
    files = {}

    def moved(match: re.Match[str]) -> str:
        target = (source.parent / match[1]).resolve()
        place = known.get(target)
        if place is None:
            if not target.is_file():
                raise FileNotFoundError(f"{source.relative_to(ROOT)} links to {match[1]}, which is no page and no file")
            inside = target.is_relative_to(ROOT / "docs")
            place = target.relative_to(ROOT / "docs" if inside else ROOT).as_posix()
            place = place if inside else f"files/{place}"
            files[target] = place
        return f"]({os.path.relpath(place, Path(page).parent)}{match[2] or ''})"

    return _LINK.sub(moved, source.read_text(encoding="utf-8")), files


def examples_page() -> str:
    """The scripts of `examples/`, whose docstrings say what they are."""
    parts = ["# Examples\n"]
    for path in sorted((ROOT / "examples").glob("*.py")):
        parts.append(f"## {path.name}\n\n```python\n{path.read_text(encoding='utf-8')}```\n")
    return "\n".join(parts)


def reference_pages() -> Iterator[tuple[str, str]]:
    """(page, text) of the API reference, which mkdocstrings fills from the docstrings.

    Raises:
        ValueError: a public name is on no page.
    """
    missing = set(vmonarch.__all__) - {"__version__"} - {name for _, names in REFERENCE.values() for name in names}
    if missing:
        raise ValueError(f"REFERENCE lacks {', '.join(sorted(missing))}")
    for page, (title, names) in REFERENCE.items():
        yield f"reference/{page}.md", "\n".join([f"# {title}\n", *(f"::: vmonarch.{name}\n" for name in names)])


def stage(folder: Path) -> set[str]:
    """Write all that the site is built from below `folder`; which pages there are.

    Raises:
        FileNotFoundError, ValueError: as `page_text` and `reference_pages`.
    """
    shutil.rmtree(folder, ignore_errors=True)
    known = pages()
    texts = {OTHER_PAGES["examples"]: examples_page(), **dict(reference_pages())}
    files = {ROOT / "docs" / "site.css": "site.css"}
    for source, page in known.items():
        if source.is_file():
            texts[page], needed = page_text(source, page, known)
            files |= needed
    for page, text in texts.items():
        path = folder / "docs" / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for source, place in files.items():
        path = folder / "docs" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, path)
    copy_sources(folder / "python" / "vmonarch")
    return set(texts)


def copy_sources(folder: Path) -> None:
    """The package as the reader of docstrings understands it: no links, and an `__init__.py` everywhere."""
    no_code = lambda _, names: [name for name in names if "." in name and not name.endswith(".py")]
    shutil.copytree(ROOT / "vmonarch", folder, ignore=no_code)
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir():
            (path / "__init__.py").touch()


def check_navigation(config: str, pages: set[str]) -> None:
    """Check that the navigation of mkdocs.yml has every page, and no other.

    Raises:
        ValueError: it differs; the message names the pages.
    """
    named = set(re.findall(r"[\w/-]+\.md$", config.partition("\nnav:\n")[2], re.M))
    if named != pages:
        raise ValueError(
            f"mkdocs.yml: nav lacks {sorted(pages - named) or 'nothing'}"
            f" and names {sorted(named - pages) or 'nothing'} that does not exist"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; exit code 1 if a page, a link or the navigation is wrong."""
    parser = argparse.ArgumentParser(prog="python -m vmonarch.eval.studies.site", description=__doc__)
    parser.parse_args(arguments)
    check_navigation((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), stage(BUILD))
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    environment = os.environ | ({"REPOSITORY": urls["Repository"]} if "Repository" in urls else {})
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
