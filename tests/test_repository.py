"""Numbers in documents are those of results files, which say where they come from; the site has every page.

The tests by which a table says what has been tried with which transformer are there.
"""

import json
import re
import runpy
from pathlib import Path

import pytest
import support_matrix

import vmonarch
from vmonarch.eval.render import tables

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "docs" / "benchmarks"
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
# What a results file says of itself, and the keys that say it, wherever in the file they are.
PROVENANCE = {
    "date": ("date", "created"),
    "command": ("command",),
    "hardware": ("hardware", "device_name"),
    "versions": ("versions", "packages"),
}


def values(results, keys):
    if isinstance(results, dict):
        for key, value in results.items():
            if key in keys and value:
                yield value
            yield from values(value, keys)
    elif isinstance(results, list):
        for value in results:
            yield from values(value, keys)


def test_the_tables_of_the_documents_are_those_of_the_results(capsys):
    assert tables.main(["--check", "--root", str(ROOT)]) == 0, f"{capsys.readouterr().out}: run {tables.__name__}"


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.json")), ids=lambda path: path.stem)
def test_a_results_file_says_where_it_comes_from(path):
    results = json.loads(path.read_text())
    if str(results.get("format")).startswith("vmonarch-plan-"):
        return
    missing = [name for name, keys in PROVENANCE.items() if not list(values(results, keys))]
    assert not missing and list(tables.commits(results)), f"{path.name} lacks {missing or 'a commit'}"
    for part in results.get("tables", ()):
        assert part.keys() <= {"name", "title", "header", "rows", "caption"}
        assert all(len(row) == len(part["header"]) for row in part["rows"])
        assert tables.table_text(results, part.get("name", ""))


def test_the_navigation_has_every_page_and_the_reference_every_name():
    named = re.findall(r"[\w/.-]+\.md$", (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2], re.M)
    # A page of a few lines leads on to another.
    pages = {path.relative_to(ROOT).as_posix() for path in PAGES if len(path.read_text().splitlines()) > 5}
    assert set(named) >= pages and all((ROOT / page).is_file() for page in named)
    reference = set(re.findall(r"^::: vmonarch\.(\w+)$", (ROOT / "docs" / "reference.md").read_text(), re.M))
    assert reference == set(vmonarch.__all__) - {"__version__"}


@pytest.mark.parametrize("repository", [None, "https://example.org/a/vmonarch"])
def test_links_of_the_readme_lead_to_the_repository_where_it_is_known(tmp_path, monkeypatch, repository):
    given = {}
    monkeypatch.setattr("setuptools.setup", lambda **arguments: given.update(arguments))
    urls = "[project.urls]\n" + (f'Repository = "{repository}"\n' if repository else "")
    (tmp_path / "pyproject.toml").write_text(urls)
    (tmp_path / "README.md").write_text("![a](docs/a.webp) [b](docs/b.md#c) [`d`](d) [e](https://e.org) [f](#f)")
    (tmp_path / "setup.py").write_text((ROOT / "setup.py").read_text())
    runpy.run_path(str(tmp_path / "setup.py"))
    links = re.findall(r"\]\(([^)]+)\)", given["long_description"])
    file, raw = (f"{repository}/blob/HEAD/", f"{repository}/raw/HEAD/") if repository else ("", "")
    assert links == [f"{raw}docs/a.webp", f"{file}docs/b.md#c", f"{file}d", "https://e.org", "#f"]


def test_the_tests_that_show_a_feature_are_there():
    source = "".join(path.read_text() for path in Path(__file__).parent.glob("**/test_*.py"))
    named = {test for _, tests in support_matrix.FEATURES.values() for test in tests}
    assert named <= set(re.findall(r"def (test_\w+)\(", source))
