"""From settings to videos: finding and loading models, sampling, recipes, records, the embedded model, ComfyUI's nodes.

Imports `configs` and what lies beside the packages; `finetune`, `eval` and `cli` import it. Begin with `generation.py`:
`config.py` completes the settings with what `traits.py` knows of the pipeline, `loading.py` loads the model of a
`model_folder.py`, `recipes.py` puts attention on it, `sampling.py` runs it, `outputs.py` and `video_io.py` write.
"""
