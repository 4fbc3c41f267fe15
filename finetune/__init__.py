"""Finetuning of video diffusion transformers to an attention: `vmonarch preprocess`, `finetune` and `export`.

data/ makes rows of parquet of videos (preprocess.py; decode.py) and batches of rows (parquet.py,
loader.py). trainer.py is the loop: config.py its settings, models.py what is trained, objective.py the loss,
checkpoints.py what is resumed; export.py makes of a checkpoint what others load; scenes.py draws coloured shapes.
proxy.py trains a transformer on these. Nothing here imports `eval`. Begin with `trainer.Trainer.run`.
"""
