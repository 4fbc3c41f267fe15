"""What the documents say exists: the sections that code cites, and what documents name."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md")), ROOT / "finetune" / "embedded" / "README.md"]
FOLDERS = ("configs", "eval", "finetune", "kernels", "pipelines", "tests", "vmonarch")
SOURCES = sorted({path.resolve() for name in FOLDERS for path in (ROOT / name).rglob("*.py")})
PAPERS = ("VMonarch", "FlashBias", "Based", "VSA", "DeepSpeed Ulysses", "Train Short, Test Long")


def headings(text: str) -> set[str]:
    return set(re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M))


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
