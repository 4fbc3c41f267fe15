"""The demonstration of neural factors: the biases are what the paper says, and its record is what was measured."""

import json
import math

import pytest
import torch

from vmonarch.eval.studies import neural_bias


def test_gravity_falls_off_with_the_square_of_the_distance():
    x, y = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 0.0], [0.3, 0.4], [0.6, 0.8]])
    torch.testing.assert_close(neural_bias.gravity(x, y), torch.tensor([[100.0, 1 / 0.26, 1 / 1.01]]))


def test_the_spherical_distance_is_the_angle_between_directions():
    generator = torch.Generator().manual_seed(0)
    points = neural_bias.TASKS["spherical distance"].points(50, generator).double()
    latitude, longitude = points.unbind(-1)
    directions = torch.stack([latitude.cos() * longitude.cos(), latitude.cos() * longitude.sin(), latitude.sin()], -1)
    angle = torch.arccos((directions @ directions.T).clamp(-1, 1))
    torch.testing.assert_close(neural_bias.spherical_distance(points, points), angle, rtol=1e-6, atol=1e-6)
    pole, equator = torch.tensor([[math.pi / 2, 1.0]]), torch.tensor([[0.0, 2.0]])
    assert neural_bias.spherical_distance(pole, equator).item() == pytest.approx(math.pi / 2)


def test_the_record_and_the_picture_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(neural_bias, "POINTS", 32)
    monkeypatch.setattr(neural_bias, "FRESH_POINTS", 40)
    output, picture = tmp_path / "record.json", tmp_path / "picture.png"
    assert neural_bias.main(["--steps", "60", "--output", str(output), "--picture", str(picture)]) == 0
    results = json.loads(output.read_text())
    assert set(results["biases"]) == {"gravity", "spherical distance"} and results["settings"]["rank"] == 32
    for record in results["biases"].values():
        assert 0 < record["relative_error_of_svd"] < record["relative_error"] < 2
        assert record["mean_squared_error_last_steps"] < record["mean_squared_error_first_step"]
    assert picture.stat().st_size > 10_000
