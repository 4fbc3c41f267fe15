"""Scenes of the procedural clips with attributes of one's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vmonarch.finetune import scenes


def scenes_from_attributes(described: Sequence[scenes.SceneAttributes], seed: int) -> scenes.SceneBatch:
    """Clips with the given attributes, of one or two objects each; positions and so on are drawn from `seed`."""
    drawn = {"count": torch.tensor([len(scene.objects) for scene in described])}
    for name, table in scenes.OBJECT_TABLES.items():
        rows = [[table.index(getattr(item, name)) for item in scene.objects] for scene in described]
        drawn[name] = torch.tensor([(row + [0])[: scenes.MAX_OBJECTS] for row in rows])
    for name, table in scenes.SCENE_TABLES.items():
        drawn[name] = torch.tensor([table.index(getattr(scene, name)) for scene in described])
    return scenes.place(drawn, torch.Generator().manual_seed(seed))
