"""The scripts that make the documents' pictures, on small inputs."""

import json

import numpy as np
import pytest
from PIL import Image

from vmonarch.eval.studies import animation
from vmonarch.pipelines.video_io import encode_video


@pytest.fixture
def comparison(tmp_path):
    """A folder as `vmonarch compare --save-videos` leaves it: what the animation reads of it."""
    files = {"full": "0001-full.mp4", "vmonarch": "0001-vmonarch.mp4"}
    for shade, name in enumerate(files.values()):
        video = np.full((5, 32, 48, 3), 60 + 100 * shade, dtype=np.uint8)
        video += np.arange(5, dtype=np.uint8)[:, None, None, None] * 15
        encode_video(tmp_path / name, video, 15)
    record = {"videos": [{"files": {"videos": files}}]}
    (tmp_path / "comparison.json").write_text(json.dumps(record))
    return tmp_path


@pytest.mark.parametrize("suffix", ["webp", "gif"])
def test_an_animation_has_all_frames_of_all_methods_side_by_side(comparison, suffix, capsys):
    output = comparison / f"all.{suffix}"
    assert animation.main([str(comparison), "--output", str(output), "--width", "300"]) == 0
    with Image.open(output) as picture:
        assert picture.n_frames == 5 and picture.width == 300 and picture.info["loop"] == 0
        picture.seek(4)
        last = np.asarray(picture.convert("RGB"))
    left, right = last[last.shape[0] * 3 // 4, [75, 225], 0]
    assert abs(int(left) - 120) < 10 and abs(int(right) - 220) < 10


def test_a_folder_without_single_videos_is_refused(comparison, capsys):
    (comparison / "comparison.json").write_text(json.dumps({"videos": [{"files": {"strips": "0001-strips.png"}}]}))
    assert animation.main([str(comparison), "--output", str(comparison / "all.webp")]) == 2
    assert "--save-videos" in capsys.readouterr().err
    assert animation.main([str(comparison / "nowhere"), "--output", str(comparison / "all.webp")]) == 2
    assert not (comparison / "all.webp").exists()
