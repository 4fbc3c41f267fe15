"""Reading videos back, not by the code that is tested."""

from pathlib import Path

import imageio_ffmpeg
import numpy as np


def read_video(path: Path) -> tuple[np.ndarray, float]:
    """All frames [F, H, W, 3] of a video file and its frames per second."""
    frames = imageio_ffmpeg.read_frames(str(path.absolute()), output_params=["-fps_mode", "passthrough"])
    about = next(frames)
    width, height = about["size"]
    return np.stack([np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in frames]), about["fps"]
