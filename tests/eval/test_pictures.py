"""The script that makes the README's picture, on a small input."""

import json

import numpy as np
import pytest
from PIL import Image

from vmonarch.eval.studies import animation
from vmonarch.pipelines.video_io import encode_video


@pytest.mark.parametrize("suffix", ["webp", "gif"])
def test_an_animation_has_all_frames_of_all_methods_side_by_side(tmp_path, suffix, capsys):
    files, output = {"full": "0001-full.mp4", "vmonarch": "0001-vmonarch.mp4"}, tmp_path / f"all.{suffix}"
    for shade, name in enumerate(files.values()):
        video = np.full((5, 32, 48, 3), 60 + 100 * shade, dtype=np.uint8)
        encode_video(tmp_path / name, video + np.arange(5, dtype=np.uint8)[:, None, None, None] * 15, 15)
    results = [{"method": method, "video": name} for method, name in files.items()]
    record = tmp_path / "evaluation.json"
    record.write_text(json.dumps({"items": [{"folder": ".", "results": results}]}))
    assert animation.main([str(tmp_path), "--output", str(output), "--width", "300"]) == 0
    with Image.open(output) as picture:
        assert picture.n_frames == 5 and picture.width == 300 and picture.info["loop"] == 0
        picture.seek(4)
        last = np.asarray(picture.convert("RGB"))
    left, right = last[last.shape[0] * 3 // 4, [75, 225], 0]
    assert abs(int(left) - 120) < 10 and abs(int(right) - 220) < 10
    record.unlink()
    with pytest.raises(SystemExit):
        animation.main([str(tmp_path), "--output", str(output)])
    assert "no finished comparison" in capsys.readouterr().err
