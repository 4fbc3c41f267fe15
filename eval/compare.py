"""An evaluation with pictures, in a folder of its own: the library behind `vmonarch compare`.

from vmonarch.eval.compare import CompareConfig, compare

comparison = compare(CompareConfig(prompts=("a red circle moving right",), methods=("vmonarch", "vmonarch-t1")))
print(comparison.table())
"""

from __future__ import annotations

import shutil

from vmonarch.eval.evaluate import Evaluation, check_measures, run_items
from vmonarch.eval.settings import CompareConfig
from vmonarch.files import short_hash
from vmonarch.pipelines.config import complete
from vmonarch.pipelines.loading import LoadedModel
from vmonarch.pipelines.model_folder import find_model
from vmonarch.pipelines.outputs import next_number, prepare_output_dir


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
    target = output / f"{next_number(output)}-{short_hash(config.to_dict())}"
    target.mkdir()
    try:
        made = run_items(config, folder, target, progress=progress, model=model, command=command)
        # The record has what is in it.
        (target / "flops.json").unlink()
        return made
    finally:
        if not any(target.glob("items/*/item.json")):
            shutil.rmtree(target)
