"""Emulated float8: what is rounded and by how much, and that nothing else differs from the reference."""

import json

import pytest
import torch

from vmonarch.eval.studies import float8
from vmonarch.eval.studies.float8 import BLOCK, PRECISIONS, Precision, float8_table, r_step, to_float8
from vmonarch.kernels.monarch import reference


def test_every_block_of_rows_is_rounded_to_its_own_scale():
    x = torch.randn(2, 3, BLOCK + 5, 16, dtype=torch.float64)
    x[..., BLOCK:, :] *= 1e-3
    found = to_float8(x)
    assert found.shape == x.shape and found.dtype == x.dtype
    for block in (slice(0, BLOCK), slice(BLOCK, None)):
        largest = x[..., block, :].abs().amax((-2, -1), keepdim=True)
        torch.testing.assert_close(found[..., block, :].abs().amax((-2, -1), keepdim=True), largest)
        # Three bits after the leading one; 2⁻⁹ is the least number of E4M3, 448 the largest.
        bound = torch.maximum(x[..., block, :].abs() / 16, largest * 2**-10 / 448)
        assert ((found - x)[..., block, :].abs() <= bound * (1 + 1e-9)).all()
    assert (found - x).norm() / x.norm() > 0.01
    assert to_float8(torch.zeros(1, 4, 2)).abs().max() == 0


def test_without_rounding_it_is_the_reference(monkeypatch):
    monkeypatch.setattr(float8, "to_bfloat16", lambda x: x)
    z, key = (torch.randn(1, 2, 3, 10, 8, dtype=torch.float64) for _ in range(2))
    value = torch.randn(1, 2, 3, 10, 5, dtype=torch.float64)
    found = r_step(Precision())(z, key + 3, None, value, True)
    torch.testing.assert_close(found, reference.r_step(z, key + 3, None, value, True))
    before_last = r_step(Precision())(z, key + 3, None, None, True)
    assert before_last[2] is None
    torch.testing.assert_close(before_last[:2], found[:2])


def test_only_what_is_asked_for_is_in_float8():
    z, key, value = (torch.randn(1, 1, 2, 70, 16) for _ in range(3))

    def error(precision, value):
        exact = reference.r_step(*(x.double() for x in (z, key)), None, None if value is None else value.double(), True)
        return float((r_step(precision)(z, key, None, value, True)[0] - exact[0]).norm() / exact[0].norm())

    errors = {name: (error(precision, None), error(precision, value)) for name, precision in PRECISIONS.items()}
    bfloat16 = errors["bfloat16"]
    for name, found in errors.items():
        in_float8 = [pair > 3 * base for pair, base in zip(found, bfloat16, strict=True)]
        assert in_float8 == [name != "bfloat16", name != "bfloat16" and "last" not in name], name


def test_the_command_measures_all_cases(tmp_path, capsys):
    assert float8.main(["--quick", "--output", str(tmp_path / "float8.json")]) == 0
    results = json.loads((tmp_path / "float8.json").read_text())
    assert [len(case["rows"]) for case in results["cases"]] == [len(PRECISIONS)] * 3
    for case in results["cases"]:
        factors = {row["precision"]: row["factor"] for row in case["rows"]}
        assert factors["bfloat16"] == 1 and factors["float8"] > float8.ALLOWED
        assert 1e-4 < case["rows"][0]["error"] < 1e-2 < case["monarch_error"] < 1
    assert float8_table(results) in capsys.readouterr().out
    assert str(tmp_path) not in results["command"]


def test_a_folder_is_no_output(tmp_path, capsys):
    with pytest.raises(SystemExit):
        float8.main(["--quick", "--output", str(tmp_path)])
    assert "output must be a file" in capsys.readouterr().err
