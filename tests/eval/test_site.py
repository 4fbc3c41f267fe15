"""What `make site` and `make package` refuse, and the numbers of the page on GPU sizes."""

import json
import re
import runpy
import zipfile
from pathlib import Path

import pytest

from vmonarch.eval.record import names_now
from vmonarch.eval.studies import explained, gpu_sizes, package, site

ROOT = Path(__file__).resolve().parents[2]
NAVIGATION = (ROOT / "mkdocs.yml").read_text()


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    return folder, site.stage(folder)


def test_all_links_of_the_site_stay_within_it(staged):
    folder, pages = staged
    found = 0
    for page in pages:
        text = (folder / "docs" / page).read_text()
        for target in re.findall(r"\]\((?![a-z]+:)([^)\s#]+)", text):
            assert (folder / "docs" / page).parent.joinpath(target).is_file(), f"{page} points at {target}"
            found += 1
    assert found > 150


def test_a_page_outside_the_navigation_is_refused(staged):
    site.check_navigation(NAVIGATION, staged[1])
    with pytest.raises(ValueError, match=r"lacks \['new.md'\]"):
        site.check_navigation(NAVIGATION, staged[1] | {"new.md"})
    with pytest.raises(ValueError, match=r"names \['faq.md'\] that do"):
        site.check_navigation(NAVIGATION, staged[1] - {"faq.md"})


def test_a_link_that_leads_nowhere_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(site, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    document = tmp_path / "docs" / "a.md"
    for target in ("gone.md", "../docs"):
        document.write_text(f"[there]({target}#section)")
        with pytest.raises(FileNotFoundError, match=rf"docs/a.md links to {target}"):
            site.page_text(document, "a.md", {document: "a.md"})


def test_the_reference_has_every_public_name(monkeypatch):
    names = set(re.findall(r"^::: vmonarch\.(\w+)$", "".join(text for _, text in site.reference_pages()), re.M))
    assert names == set(site.vmonarch.__all__) - {"__version__"}
    monkeypatch.setattr(site, "REFERENCE", {"apply": ("On", ("apply",))})
    with pytest.raises(ValueError, match="lacks .*VMonarchProcessor"):
        list(site.reference_pages())


def test_sums_of_weights_activations_and_residuals_are_what_was_measured():
    needs = gpu_sizes.needs(names_now(json.loads((ROOT / "docs" / "benchmarks" / "e2e.json").read_text())))
    measured = [need for need in needs if need.measured[1] is not None]
    assert len(measured) == 5 and len(needs) == 9
    for need in measured:
        assert need.weights + need.activations + need.residuals == pytest.approx(need.measured[1], rel=0.02)


def test_a_card_gets_the_most_faithful_setting_that_fits():
    """Weights 30, activations 5 and residuals 40 GB in 40 layers: 35, 75, and 36 with residuals on the host."""
    need = gpu_sizes.Need(gpu_sizes.SETTINGS[0], 1, 30e9, 5e9, 40e9, (None, None), 40)
    rooms = {84: "near-lossless", 83: "residuals on host", 40: "residuals on host", 39: "residuals on host + group"}
    rooms |= {50 / 0.9 - 1: "residuals on host", 5.8 / 0.9: "every step + group", 4.9 / 0.9: "–"}
    assert {card: gpu_sizes.fit(need, card) for card in rooms} == rooms


def test_the_picture_of_the_factors_is_that_of_the_op(monkeypatch):
    explained.draw_factors()
    one_round = explained.factors
    monkeypatch.setattr(explained, "factors", lambda q, k, iterations: one_round(q, k, 1))
    with pytest.raises(ArithmeticError):
        explained.draw_factors()


def test_a_wheel_with_too_little_or_too_much_is_refused(tmp_path, monkeypatch):
    wheel = tmp_path / "vmonarch-1-py3-none-any.whl"

    def write(*names):
        with zipfile.ZipFile(wheel, "w") as file:
            for name in names:
                file.writestr(name, b"0" * 100)

    write(*package.NEEDED, "vmonarch-1.dist-info/RECORD")
    package.check_wheel(wheel)
    for name in ("vmonarch/eval/studies/mqar.py", "tests/test_a.py", "vmonarch/docs/a.md", "kernels/monarch/api.py"):
        write(*package.NEEDED, name)
        with pytest.raises(ValueError, match=f"has {name}"):
            package.check_wheel(wheel)
    write(*package.NEEDED[1:])
    with pytest.raises(ValueError, match=f"lacks {package.NEEDED[0]}"):
        package.check_wheel(wheel)
    write(*package.NEEDED)
    monkeypatch.setattr(package, "LARGEST", wheel.stat().st_size)
    package.check_wheel(wheel)
    monkeypatch.setattr(package, "LARGEST", wheel.stat().st_size - 1)
    with pytest.raises(ValueError, match="more than"):
        package.check_wheel(wheel)


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
