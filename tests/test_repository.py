"""Numbers in documents are those of results files, which say where they come from; the site has every page."""

import json
import re
import runpy
from pathlib import Path

import pytest

import vmonarch
from vmonarch.eval.render import tables

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "docs" / "benchmarks"
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
COMMIT = "1" * 40
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


def test_tables_come_with_their_titles_and_captions(tmp_path):
    one = {"title": "Above:", "header": ["", "ms"], "rows": [["a", "1.0"]]}
    two = {"name": "two", "header": ["b"], "rows": [], "caption": "Own.\n\n- more"}
    (tmp_path / "x.json").write_text(json.dumps({"commit": COMMIT, "tables": [one, two], "caption": "By a GPU."}))
    text = "a\n<!-- table: x -->\nold\n<!-- end -->\nb\n<!-- table: x#two -->\n<!-- end -->\n"
    first = "Above:\n\n|  | ms |\n| --- | ---: |\n| a | 1.0 |\n\nBy a GPU.\n"
    second = "| b |\n| --- |\n\nOwn.\n\n- more\n"
    expected = f"a\n<!-- table: x -->\n{first}<!-- end -->\nb\n<!-- table: x#two -->\n{second}<!-- end -->\n"
    assert tables.render(text, tmp_path) == tables.render(expected, tmp_path) == expected
    with pytest.raises(KeyError, match="three"):
        tables.render("<!-- table: x#three -->\n<!-- end -->", tmp_path)


@pytest.mark.parametrize("results, said", [
    ({"environment": {"git_commit": COMMIT}}, ""),
    ({"runs": [{"versions": {"git_commit": COMMIT}}, {"versions": {"git_commit": f"{COMMIT}-dirty"}}]},
     " The tree had changes on top of 1111111."),
    ({"commit": "unknown", "environment": {"git_commit": COMMIT}}, " The commit is unknown."),
    ({"environment": {"git_commit": None}}, " The commit is unknown."),
], ids=["clean", "dirty", "of no history", "none"])  # fmt: skip
def test_a_caption_says_what_no_commit_repeats(results, said):
    assert tables.mark(results) == said
    results |= {"tables": [{"header": ["a"], "rows": []}], "caption": "Made.\nMore."}
    assert tables.table_text(results).endswith(f"\nMade.{said}\nMore.\n")


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
