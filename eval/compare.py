"""An evaluation with pictures, in a folder of its own: the library behind `vmonarch compare`.

from vmonarch.eval.compare import CompareConfig, compare

comparison = compare(CompareConfig(prompts=("a red circle moving right",), methods=("vmonarch", "vmonarch-t1")))
print(comparison.table())
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vmonarch.eval.evaluate import Evaluation, Item, check_measures, run_items
from vmonarch.eval.settings import CompareConfig
from vmonarch.files import AtomicFiles, short_hash
from vmonarch.pipelines.config import complete
from vmonarch.pipelines.loading import LoadedModel
from vmonarch.pipelines.model_folder import find_model
from vmonarch.pipelines.outputs import prepare_output_dir, reserve_number

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray


def compare(
    config: CompareConfig, *, progress: bool = False, model: LoadedModel | None = None, command: str = ""
) -> Evaluation:
    """Sample every prompt and seed with every method, measure them, and write what `evaluate` writes, and pictures.

    In a new folder of `config.output_dir`: as `evaluate`, and for each prompt and seed `0001-side-by-side.mp4` and
    `0001-strips.png`.

    Args:
        progress: show progress bars.
        model: a pipeline loaded before with the same model settings, to save loading it again.
        command: how it was called, for the report.

    Raises:
        InputError, ModelError, GenerationError: see `vmonarch.eval.evaluate.evaluate`.
    """
    check_measures(config)
    folder = model.folder if model else find_model(config.model, config.revision)
    config = complete(config, folder)
    output = prepare_output_dir(config.output_dir)
    with reserve_number(output, 1 if config.overwrite else None) as number:
        target = output / f"{number}-{short_hash(config.to_dict())}"
        new = not target.exists()
        target.mkdir(exist_ok=config.overwrite)
        for record in (target / "flops.json", *target.glob("items/*/item.json")):
            record.unlink(missing_ok=True)
        try:
            made = run_items(config, folder, target, progress=progress, model=model, command=command)
            # The record has what is in it.
            (target / "flops.json").unlink()
            return made
        finally:
            if new and not any(target.glob("items/*/item.json")):
                shutil.rmtree(target)


def write_pictures(
    config: CompareConfig,
    target: Path,
    files: AtomicFiles,
    item: Item,
    pictures: Mapping[str, NDArray[np.uint8]],
    rows: Sequence[Mapping[str, Any]],
) -> None:
    """Write the methods' videos of an item, [F, H, W, 3] by label, side by side, as mp4 and as strips."""
    from vmonarch.pipelines.video_io import encode_video, side_by_side, strips, verify_video

    assert config.fps is not None
    notes = {}
    for row in rows:
        close = "reference" if row["psnr"] is None else f"PSNR {float(row['psnr']):.1f} dB · SSIM {row['ssim']:.3f}"
        notes[row["method"]] = f"{close} · {row['seconds']:.1f} s"
    video = side_by_side(pictures, notes=notes)
    path = files.stage(target / f"{item.number:04d}-side-by-side.mp4")
    encode_video(path, video, config.fps)
    verify_video(path, video)
    picture = strips(pictures, notes=notes, title=f"{item.prompt} · seed {item.seed}", count=config.strip_frames)
    picture.save(files.stage(target / f"{item.number:04d}-strips.png"))
