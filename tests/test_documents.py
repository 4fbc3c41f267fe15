"""What the documents say exists: the sections that code cites, and what documents name."""

import ast
import inspect
import re
from pathlib import Path

import pytest

from vmonarch import BasedProcessor, FlashBiasProcessor, VMonarchProcessor, vmonarch_attention

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md")), ROOT / "finetune" / "embedded" / "README.md"]
FOLDERS = ("configs", "eval", "finetune", "kernels", "pipelines", "tests", "vmonarch")
SOURCES = sorted({path.resolve() for name in FOLDERS for path in (ROOT / name).rglob("*.py")})
PAPERS = ("VMonarch", "FlashBias", "Based", "VSA", "DeepSpeed Ulysses", "Train Short, Test Long")


def headings(text: str) -> set[str]:
    return set(re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M))


def rows(document: str) -> list[list[str]]:
    """The cells of all tables."""
    lines = re.findall(r"^\|(.*)\|$", (ROOT / document).read_text(), re.M)
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def test_sections_that_code_cites_exist():
    sections = {path.relative_to(ROOT).as_posix(): headings(path.read_text()) for path in DOCUMENTS}
    cited = 0
    for path in SOURCES:
        if path == Path(__file__):
            continue
        text = path.read_text()
        for document, heading in re.findall(r'(docs/\w+\.md), "([^"]+)"', text):
            assert heading in sections[document], f"{path} cites {document}, {heading}"
            cited += 1
        for line in text.splitlines():
            # Numbers of sections are those of a paper, which the line names.
            assert not re.search(r"§ ?\d", line) or any(paper in line for paper in PAPERS), f"{path}: {line}"
    assert cited > 10


@pytest.mark.parametrize(
    ("document", "takes_options"),
    [
        ("docs/attention.md", vmonarch_attention),
        ("docs/attention.md", VMonarchProcessor),
        ("docs/attention.md", FlashBiasProcessor),
        ("docs/based.md", BasedProcessor),
    ],
)
def test_every_option_is_explained(document, takes_options):
    explained = {name for row in rows(document) for name in re.findall(r"`(\w+)`", row[0])}
    parameters = inspect.signature(takes_options).parameters.values()
    assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} <= explained


def test_defaults_in_the_documents_are_those_of_the_code():
    parameters = {
        **inspect.signature(VMonarchProcessor).parameters,
        **inspect.signature(vmonarch_attention).parameters,
    }
    stated = {}
    for name, default, *_ in rows("docs/attention.md"):
        if name.strip("`") in parameters and default:
            stated[name.strip("`")] = ast.literal_eval(default.strip("`"))
    assert len(stated) > 10
    assert {name: parameters[name].default for name in stated} == stated
