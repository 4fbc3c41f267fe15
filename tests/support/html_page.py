"""HTML taken apart, for tests of reports."""

from __future__ import annotations

import re
from html.parser import HTMLParser


class Page(HTMLParser):
    """Elements with their attributes, and texts with the element around them; everything that was opened is closed."""

    VOID = ("meta", "link", "img", "input", "br", "wbr")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def check_whole(text: str) -> Page:
    """The page of a text, which needs no other file and no network."""
    page = Page(text)
    for tag, attributes in page.elements:
        for name in ("src", "href"):
            target = attributes.get(name)
            assert target is None or target.startswith(("data:", "#")), (tag, target)
    # Figures name parts of their own with url(#…).
    assert not re.search(r"url\((?!#)|@import|fetch\(", text)
    return page
