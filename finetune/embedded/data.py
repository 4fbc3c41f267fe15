"""Procedural captioned video: coloured shapes that move over patterned backgrounds.

Every clip is a pure function of a seed. Attributes (shape, colour, direction, size, speed, background, camera pan) are
drawn first, as index tensors; positions and other continuous values follow; the renderer turns them into pixels with
antialiased signed distance functions, on any device; the caption writer turns the same attributes into English.

Some (shape, colour, direction) combinations never occur in training: `held_out_prompts` is built from them.

Shapes in comments: B clips, N = 2 object slots, F frames, Y height, X width (pixels).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

HEIGHT, WIDTH, NUM_FRAMES = 96, 160, 61
MAX_OBJECTS = 2

COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.88, 0.10, 0.12),
    "orange": (1.00, 0.52, 0.04),
    "yellow": (0.98, 0.90, 0.10),
    "green": (0.10, 0.70, 0.22),
    "cyan": (0.08, 0.83, 0.86),
    "blue": (0.12, 0.26, 0.92),
    "purple": (0.52, 0.14, 0.80),
    "pink": (0.98, 0.26, 0.68),
}
SHAPES: tuple[str, ...] = ("circle", "square", "triangle", "star", "cross", "ring")
DIRECTIONS: dict[str, tuple[float, float]] = {
    "left": (-1.0, 0.0),
    "right": (1.0, 0.0),
    "up": (0.0, -1.0),
    "down": (0.0, 1.0),
    "up-left": (-math.sqrt(0.5), -math.sqrt(0.5)),
    "up-right": (math.sqrt(0.5), -math.sqrt(0.5)),
    "down-left": (-math.sqrt(0.5), math.sqrt(0.5)),
    "down-right": (math.sqrt(0.5), math.sqrt(0.5)),
}
SIZES: dict[str, tuple[float, float]] = {"small": (9.0, 10.0), "medium": (11.5, 12.5), "large": (14.0, 15.0)}
"""Radius range in pixels; a shape's area is about that of a disc of this radius."""
SPEEDS: dict[str, tuple[float, float]] = {"slow": (20.0, 24.0), "medium": (32.0, 38.0), "fast": (46.0, 52.0)}
"""Displacement range in pixels over the clip."""
BACKGROUNDS: dict[str, tuple[float, float, float]] = {
    "grey": (0.50, 0.50, 0.50),
    "white": (0.90, 0.90, 0.90),
    "black": (0.10, 0.10, 0.10),
    "beige": (0.78, 0.73, 0.64),
    "slate": (0.36, 0.41, 0.48),
    "olive": (0.42, 0.43, 0.33),
    "navy": (0.14, 0.17, 0.27),
    "mauve": (0.57, 0.49, 0.57),
    "sage": (0.57, 0.64, 0.56),
    "brown": (0.37, 0.30, 0.25),
}
PATTERNS: tuple[str, ...] = ("plain", "striped", "checkered", "gradient", "dotted")
PANS: tuple[str, ...] = ("none", "left", "right", "up", "down")
PANNABLE = (1, 2, 4)
"""Indices of the patterns on which a camera pan is visible."""

COLOUR_NAMES, DIRECTION_NAMES, SIZE_NAMES, SPEED_NAMES, BACKGROUND_NAMES = (
    tuple(table) for table in (COLOURS, DIRECTIONS, SIZES, SPEEDS, BACKGROUNDS)
)
# What an object's and a scene's attributes are called, by their index.
OBJECT_TABLES = {"shape": SHAPES, "colour": COLOUR_NAMES, "direction": DIRECTION_NAMES, "size": SIZE_NAMES,
                 "speed": SPEED_NAMES}  # fmt: skip
SCENE_TABLES = {"background": BACKGROUND_NAMES, "pattern": PATTERNS, "pan": PANS}
SHAPE_EXTENT = 1.35
"""No shape reaches further than this many radii from its centre."""


@dataclass(frozen=True)
class SceneBatch:
    """Attributes of B clips: index tensors (int64) and continuous values (float32), all on the CPU.

    `shape`, `colour`, `direction`, `size`, `speed` are [B, 2] (second slot unused where `count` is 1); `count`,
    `background`, `pattern`, `pan`, `stripe` are [B]; `radius` and `travel` (pixels) are [B, 2]; `start` and `motion`
    (pixels, x then y) are [B, 2, 2]; `rgb` and `background_rgb` are [B, 2, 3]; `period` (pixels) [B], `phase` and
    `pan_shift` (pixels) [B, 2].
    """

    count: torch.Tensor
    shape: torch.Tensor
    colour: torch.Tensor
    direction: torch.Tensor
    size: torch.Tensor
    speed: torch.Tensor
    background: torch.Tensor
    pattern: torch.Tensor
    pan: torch.Tensor
    stripe: torch.Tensor
    radius: torch.Tensor
    travel: torch.Tensor
    start: torch.Tensor
    motion: torch.Tensor
    rgb: torch.Tensor
    background_rgb: torch.Tensor
    period: torch.Tensor
    phase: torch.Tensor
    pan_shift: torch.Tensor

    def __len__(self) -> int:
        return self.count.shape[0]

    def __getitem__(self, index: slice | torch.Tensor) -> SceneBatch:
        return SceneBatch(**{field.name: getattr(self, field.name)[index] for field in fields(self)})

    def to(self, device: torch.device | str) -> SceneBatch:
        return SceneBatch(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    def scene(self, index: int) -> SceneAttributes:
        """The named attributes of clip `index`."""
        names = lambda tables, place: {name: table[getattr(self, name)[place]] for name, table in tables.items()}
        objects = (ObjectAttributes(**names(OBJECT_TABLES, (index, n))) for n in range(int(self.count[index])))
        return SceneAttributes(tuple(objects), **names(SCENE_TABLES, index))


@dataclass(frozen=True)
class ObjectAttributes:
    """What a caption can say about one object; names from the tables of this module."""

    shape: str
    colour: str
    direction: str
    size: str = "medium"
    speed: str = "medium"


@dataclass(frozen=True)
class SceneAttributes:
    """What a caption can say about one clip."""

    objects: tuple[ObjectAttributes, ...]
    background: str = "grey"
    pattern: str = "plain"
    pan: str = "none"


def held_out_triples() -> list[tuple[int, int, int]]:
    """The 64 (shape, colour, direction) index triples that training never shows; it shows every pair in them."""
    shapes, directions = len(SHAPES), len(DIRECTION_NAMES)
    triples = [(s, c, (2 * s + 3 * c) % directions) for c in range(len(COLOUR_NAMES)) for s in range(shapes)]
    triples += [
        (s % shapes, c, (2 * (s % shapes) + 3 * c + 4) % directions)
        for c in range(len(COLOUR_NAMES))
        for s in (c, c + 3)
    ]
    return triples


def training_triples() -> list[tuple[int, int, int]]:
    """All (shape, colour, direction) index triples that training may show."""
    held_out = set(held_out_triples())
    return [
        (s, c, d)
        for s in range(len(SHAPES))
        for c in range(len(COLOUR_NAMES))
        for d in range(len(DIRECTION_NAMES))
        if (s, c, d) not in held_out
    ]


def sample_scenes(
    batch: int,
    seed: int,
    *,
    triples: Sequence[tuple[int, int, int]] | None = None,
    two_objects: float = 0.25,
    pan: float = 0.2,
) -> SceneBatch:
    """Draw the attributes of `batch` clips.

    Args:
        batch: number of clips, at least 1.
        seed: the same seed gives the same clips.
        triples: (shape, colour, direction) indices to draw objects from; the training triples by default.
        two_objects: share of clips with two objects (of different colours).
        pan: share of clips in which the camera pans, before patterns that show no pan are taken out.

    Raises:
        ValueError: `batch` is below 1, or `triples` is empty.
    """
    if batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}")
    allowed = torch.tensor(list(training_triples() if triples is None else triples))
    if allowed.numel() == 0:
        raise ValueError("triples must not be empty")
    generator = torch.Generator().manual_seed(seed)
    integers = lambda high, *shape: torch.randint(high, shape, generator=generator)
    uniform = lambda *shape: torch.rand(shape, generator=generator)

    count = 1 + (uniform(batch) < two_objects).long()
    object_triples = allowed[integers(len(allowed), batch, MAX_OBJECTS)]  # [B, N, 3]
    for _ in range(64):
        clash = object_triples[:, 0, 1] == object_triples[:, 1, 1]
        redrawn = allowed[integers(len(allowed), batch)]
        object_triples[:, 1] = torch.where(clash[:, None], redrawn, object_triples[:, 1])
    shape, colour, direction = object_triples.unbind(-1)
    # When only one colour is allowed, a second object cannot differ: show one.
    count = torch.where(colour[:, 0] == colour[:, 1], torch.ones_like(count), count)
    size, speed = integers(len(SIZES), batch, MAX_OBJECTS), integers(len(SPEEDS), batch, MAX_OBJECTS)
    background, pattern = integers(len(BACKGROUNDS), batch), integers(len(PATTERNS), batch)
    pans = (uniform(batch) < pan * len(PATTERNS) / len(PANNABLE)) & torch.isin(pattern, torch.tensor(PANNABLE))
    pan_index = torch.where(pans, 1 + integers(len(PANS) - 1, batch), 0)
    drawn = {"count": count, "shape": shape, "colour": colour, "direction": direction, "size": size, "speed": speed,
             "background": background, "pattern": pattern, "pan": pan_index}  # fmt: skip
    return _place(drawn, generator)


def scenes_from_attributes(scenes: Sequence[SceneAttributes], seed: int) -> SceneBatch:
    """Clips with the given attributes; positions and other continuous values are drawn from `seed`.

    Raises:
        ValueError: a scene has no object or more than two, or names an unknown attribute.
    """
    for scene in scenes:
        if not 1 <= len(scene.objects) <= MAX_OBJECTS:
            raise ValueError(f"scenes: a scene must have 1 to {MAX_OBJECTS} objects, got {len(scene.objects)}")
    drawn = {"count": torch.tensor([len(scene.objects) for scene in scenes])}
    for name, table in OBJECT_TABLES.items():
        rows = [[_index(name, getattr(item, name), table) for item in scene.objects] for scene in scenes]
        drawn[name] = torch.tensor([row + [0] * (MAX_OBJECTS - len(row)) for row in rows])
    for name, table in SCENE_TABLES.items():
        drawn[name] = torch.tensor([_index(name, getattr(scene, name), table) for scene in scenes])
    return _place(drawn, torch.Generator().manual_seed(seed))


def _index(name: str, value: str, table: Sequence[str]) -> int:
    if value not in table:
        raise ValueError(f"{name} must be one of {', '.join(table)}; got {value!r}")
    return list(table).index(value)


def _place(drawn: dict[str, torch.Tensor], generator: torch.Generator, candidates: int = 48) -> SceneBatch:
    """Draw radii, start points, colours and pattern phases; every object stays in the frame for the whole clip.

    Args:
        drawn: the attributes of `SceneBatch` from `count` to `pan`.
        candidates: start points that are tried for objects that do not touch.
    """
    batch, pan = len(drawn["count"]), drawn["pan"]
    uniform = lambda *dims: torch.rand(dims, generator=generator)
    between = lambda table, index: (
        torch.tensor(list(table.values()))[index][..., 0]
        + uniform(*index.shape) * torch.tensor([high - low for low, high in table.values()])[index]
    )
    radius, travel = between(SIZES, drawn["size"]), between(SPEEDS, drawn["speed"])  # [B, N]
    motion = torch.tensor(list(DIRECTIONS.values()))[drawn["direction"]] * travel[..., None]  # [B, N, 2]
    extent = SHAPE_EXTENT * radius[..., None]
    low = extent + (-motion).clamp(min=0)
    high = torch.tensor([float(WIDTH), float(HEIGHT)]) - extent - motion.clamp(min=0)
    starts = (
        low[:, None] + uniform(batch, candidates, MAX_OBJECTS, 2) * (high - low).clamp(min=0)[:, None]
    )  # [B, K, N, 2]
    times = torch.linspace(0, 1, 9)[:, None]
    relative = starts[:, :, 1] - starts[:, :, 0]  # [B, K, 2]
    gaps = (relative[:, :, None] + times * (motion[:, 1] - motion[:, 0])[:, None, None]).norm(dim=-1).amin(-1)  # [B, K]
    clearance = (gaps - SHAPE_EXTENT * radius.sum(-1, keepdim=True)).clamp(max=2.0)
    chosen = (clearance + 1e-3 * uniform(batch, candidates)).argmax(-1)
    start = starts[torch.arange(batch), chosen]  # [B, N, 2]

    rgb = torch.tensor(list(COLOURS.values()))[drawn["colour"]]
    rgb = (rgb + 0.03 * (2 * uniform(batch, MAX_OBJECTS, 3) - 1)).clamp(0, 1)
    base = torch.tensor(list(BACKGROUNDS.values()))[drawn["background"]] + 0.02 * (2 * uniform(batch, 1) - 1)  # [B, 3]
    contrast = 0.06 + 0.03 * uniform(batch, 1)
    background_rgb = torch.stack((base - contrast, base + contrast), 1).clamp(0, 1)  # [B, 2, 3]
    # Stripes run across the pan, or else it would not be seen: 0 vertical, 1 horizontal, 2 and 3 diagonal.
    stripe = (4 * uniform(batch)).long()
    stripe = torch.where((pan == 1) | (pan == 2), 0, torch.where(pan > 2, 1, stripe))
    pan_vectors = torch.tensor([(0.0, 0.0), (1.0, 0.0), (-1.0, 0.0), (0.0, 1.0), (0.0, -1.0)])
    # The camera pans one way, what it films moves the other way.
    pan_shift = pan_vectors[pan] * (24.0 + 16.0 * uniform(batch, 1))
    return SceneBatch(
        **drawn, stripe=stripe, radius=radius, travel=travel, start=start, motion=motion, rgb=rgb,
        background_rgb=background_rgb, period=18.0 + 10.0 * uniform(batch), phase=64.0 * uniform(batch, 2),
        pan_shift=pan_shift,
    )  # fmt: skip


def shape_distance(shape: str, x: torch.Tensor, y: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    """Signed distance (pixels, negative inside) of points to a shape whose centroid is the origin; y grows downwards.

    `x`, `y` and `radius` broadcast to the shape of the result. A shape's area is about that of a disc of this radius.

    Raises:
        ValueError: `shape` is not one of `SHAPES`.
    """
    if shape == "circle":
        return torch.sqrt(x * x + y * y + 1e-12) - radius
    if shape == "square":
        return torch.maximum(x.abs(), y.abs()) - 0.88 * radius
    if shape == "triangle":
        return torch.maximum(y, 0.8660254 * x.abs() - 0.5 * y) - 0.6745 * radius
    if shape == "star":
        distance, sector = torch.sqrt(x * x + y * y + 1e-12), 2 * math.pi / 5
        folded = (torch.remainder(torch.atan2(x, -y) + sector / 2, sector) - sector / 2).abs()
        outer, inner = 1.34, 0.62
        edge_x, edge_y = inner * math.sin(sector / 2), inner * math.cos(sector / 2) - outer
        length = math.hypot(edge_x, edge_y)
        normal_x, normal_y = -edge_y / length, edge_x / length
        return distance * (folded.sin() * normal_x + folded.cos() * normal_y) - outer * normal_y * radius
    if shape == "cross":
        wide, narrow = torch.maximum(x.abs(), y.abs()), torch.minimum(x.abs(), y.abs())
        return torch.maximum(wide - 1.12 * radius, narrow - 0.40 * radius)
    if shape == "ring":
        return (torch.sqrt(x * x + y * y + 1e-12) - 0.86 * radius).abs() - 0.27 * radius
    raise ValueError(f"shape must be one of {', '.join(SHAPES)}; got {shape!r}")


def render(
    scenes: SceneBatch, device: torch.device | str = "cpu", frames: Sequence[int] | None = None, *, scale: int = 1
) -> torch.Tensor:
    """Render clips: [B, 3, F, 96·scale, 160·scale], float32 in [-1, 1], as a video VAE takes them.

    `frames` picks frame numbers out of the 61 (all by default); `scale` draws the same scenes with more pixels.

    Raises:
        ValueError: a frame number lies outside 0..60, or `scale` is below 1.
    """
    if scale < 1:
        raise ValueError(f"scale must be at least 1, got {scale}")
    numbers = list(range(NUM_FRAMES) if frames is None else frames)
    if any(not 0 <= number < NUM_FRAMES for number in numbers):
        raise ValueError(f"frames must lie in 0..{NUM_FRAMES - 1}, got {numbers}")
    scenes = scenes.to(device)
    time = torch.tensor(numbers, device=device, dtype=torch.float32) / (NUM_FRAMES - 1)  # [F]
    height, width = HEIGHT * scale, WIDTH * scale
    ys = (torch.arange(height, device=device, dtype=torch.float32)[:, None] + 0.5) / scale
    xs = (torch.arange(width, device=device, dtype=torch.float32)[None, :] + 0.5) / scale

    level = _pattern_level(scenes, time, xs, ys, scale)[:, None]  # [B, 1, F, Y, X]
    dark, light = (scenes.background_rgb[:, n, :, None, None, None] for n in (0, 1))
    image = dark + (light - dark) * level  # [B, 3, F, Y, X]
    for n in range(MAX_OBJECTS):
        centre = scenes.start[:, n, None] + scenes.motion[:, n, None] * time[:, None]  # [B, F, 2]
        x = xs - centre[..., 0, None, None]  # [B, F, 1, X]
        y = ys - centre[..., 1, None, None]  # [B, F, Y, 1]
        radius = scenes.radius[:, n, None, None, None]
        alpha = torch.zeros(len(scenes), len(numbers), height, width, device=device)
        for index, shape in enumerate(SHAPES):
            rows = torch.nonzero((scenes.shape[:, n] == index) & (scenes.count > n))[:, 0]
            if len(rows):
                alpha[rows] = (0.5 - scale * shape_distance(shape, x[rows], y[rows], radius[rows])).clamp(0, 1)
        image = image + (scenes.rgb[:, n, :, None, None, None] - image) * alpha[:, None]
    return image.clamp(0, 1) * 2 - 1


def _pattern_level(
    scenes: SceneBatch, time: torch.Tensor, xs: torch.Tensor, ys: torch.Tensor, scale: int
) -> torch.Tensor:
    """Brightness level of the background in [0, 1]: [B, F, Y, X]."""
    wide = lambda tensor: tensor[:, None, None, None]
    shift = scenes.pan_shift[:, None] * time[:, None]  # [B, F, 2]
    x = xs - scenes.phase[:, 0, None, None, None] - shift[..., 0, None, None]
    y = ys - scenes.phase[:, 1, None, None, None] - shift[..., 1, None, None]
    # A triangle wave of unit slope, clamped: a square wave with one pixel of antialiasing.
    wave = lambda u: (torch.remainder(u, wide(scenes.period)) - wide(scenes.period) / 2).abs() - wide(scenes.period) / 4
    step = lambda u: (0.5 + scale * u).clamp(0, 1)
    stripe = wide(scenes.stripe)
    along = torch.where(
        stripe == 0, x + 0 * y, torch.where(stripe == 1, y + 0 * x, torch.where(stripe == 2, x + y, x - y))
    )
    striped = step(wave(along))
    a, b = step(wave(x)), step(wave(y))
    checkered = a + b - 2 * a * b
    horizontal = wide(scenes.stripe % 2 == 0)
    rising = wide(scenes.stripe < 2)
    ramp = torch.where(horizontal, xs / WIDTH + 0 * ys, ys / HEIGHT + 0 * xs)
    # The gradient spans three times the contrast of the other patterns.
    gradient = (torch.where(rising, ramp, 1 - ramp) - 0.5) * 3 + 0.5 + 0 * x
    half = wide(scenes.period) / 2
    cell = lambda u: torch.remainder(u, wide(scenes.period)) - half
    dotted = step(0.26 * wide(scenes.period) - torch.sqrt(cell(x) ** 2 + cell(y) ** 2 + 1e-6))
    plain = torch.full_like(striped, 0.5)
    levels = torch.stack([level.expand_as(striped) for level in (plain, striped, checkered, gradient, dotted)])
    return levels[scenes.pattern, torch.arange(len(scenes), device=time.device)]


COLOUR_WORDS: dict[str, tuple[str, ...]] = {
    "red": ("red", "red", "red", "bright red", "scarlet", "crimson"),
    "orange": ("orange", "orange", "orange", "bright orange", "tangerine"),
    "yellow": ("yellow", "yellow", "yellow", "bright yellow", "lemon yellow"),
    "green": ("green", "green", "green", "bright green", "emerald"),
    "cyan": ("cyan", "cyan", "cyan", "turquoise", "aqua", "bright cyan"),
    "blue": ("blue", "blue", "blue", "bright blue", "royal blue"),
    "purple": ("purple", "purple", "purple", "violet", "bright purple"),
    "pink": ("pink", "pink", "pink", "magenta", "hot pink", "bright pink"),
}
SHAPE_WORDS: dict[str, tuple[str, ...]] = {
    "circle": ("circle", "circle", "circle", "ball", "disc", "disk", "dot"),
    "square": ("square", "square", "square", "box", "block"),
    "triangle": ("triangle", "triangle", "triangle", "pyramid"),
    "star": ("star", "star", "star", "five-pointed star"),
    "cross": ("cross", "cross", "cross", "plus sign", "plus"),
    "ring": ("ring", "ring", "ring", "donut", "hoop"),
}
DIRECTION_WORDS: dict[str, tuple[str, ...]] = {
    "left": ("left", "left", "to the left", "to the left", "leftwards", "leftward", "towards the left",
             "from right to left", "to the left side", "toward the left edge"),
    "right": ("right", "right", "to the right", "to the right", "rightwards", "rightward", "towards the right",
              "from left to right", "to the right side", "toward the right edge"),
    "up": ("up", "up", "upwards", "upward", "to the top", "towards the top", "from bottom to top", "straight up"),
    "down": ("down", "down", "downwards", "downward", "to the bottom", "towards the bottom", "from top to bottom",
             "straight down"),
    "up-left": ("up and to the left", "up and left", "to the upper left", "diagonally up and to the left", "up-left",
                "towards the top left corner", "to the top left"),
    "up-right": ("up and to the right", "up and right", "to the upper right", "diagonally up and to the right",
                 "up-right", "towards the top right corner", "to the top right"),
    "down-left": ("down and to the left", "down and left", "to the lower left", "diagonally down and to the left",
                  "down-left", "towards the bottom left corner", "to the bottom left"),
    "down-right": ("down and to the right", "down and right", "to the lower right", "diagonally down and to the right",
                   "down-right", "towards the bottom right corner", "to the bottom right"),
}  # fmt: skip
VERBS: tuple[tuple[str, str], ...] = (
    ("moves", "moving"), ("moves", "moving"), ("moves", "moving"), ("slides", "sliding"), ("drifts", "drifting"),
    ("glides", "gliding"), ("travels", "traveling"), ("floats", "floating"), ("flies", "flying"), ("goes", "going"),
    ("rolls", "rolling"), ("shifts", "shifting"), ("heads", "heading"),
)  # fmt: skip
SOLE_VERBS: dict[str, tuple[tuple[str, str], ...]] = {
    "up": (("rises", "rising"), ("ascends", "ascending"), ("climbs", "climbing")),
    "down": (("falls", "falling"), ("descends", "descending"), ("sinks", "sinking"), ("drops", "dropping")),
}
SIZE_WORDS: dict[str, tuple[str, ...]] = {
    "small": ("small", "small", "little", "tiny"),
    "medium": ("medium", "medium-sized", "mid-sized"),
    "large": ("large", "large", "big", "huge"),
}
SPEED_WORDS: dict[str, tuple[str, ...]] = {
    "slow": ("slowly", "slowly", "gently", "at a slow pace"),
    "medium": ("steadily", "at a medium speed", "at a moderate pace"),
    "fast": ("quickly", "fast", "rapidly", "swiftly", "at high speed"),
}
BACKGROUND_WORDS: dict[str, tuple[str, ...]] = {
    "grey": ("grey", "gray"), "white": ("white",), "black": ("black",), "beige": ("beige", "cream"),
    "slate": ("slate", "slate grey"), "olive": ("olive",), "navy": ("navy", "dark navy"), "mauve": ("mauve",),
    "sage": ("sage", "pale sage"), "brown": ("brown", "dark brown"),
}  # fmt: skip
PATTERN_WORDS: dict[str, tuple[str, ...]] = {
    "plain": ("plain", "plain", "solid", "simple", ""),
    "striped": ("striped", "striped", "stripy"),
    "checkered": ("checkered", "checkered", "checkerboard", "checked"),
    "gradient": ("gradient", "shaded"),
    "dotted": ("dotted", "dotted", "polka-dot", "spotted"),
}
OPENERS: tuple[str, ...] = (
    "a video of ", "a clip of ", "an animation of ", "video: ", "a short video showing ", "please show ", "show me ",
    "an animated scene with ", "there is ", "we see ",
)  # fmt: skip


def caption(scene: SceneAttributes, rng: random.Random, *, complete: bool = False) -> str:
    """Write one of many possible English captions of a scene.

    Size, speed, background and, rarely, direction may go unmentioned; shape and colour never do. With `complete`, the
    direction is always mentioned.
    """
    parts = [_object_phrases(item, rng, complete) for item in scene.objects]
    ground, pan = _ground_phrase(scene, rng), _pan_phrase(scene, rng)
    with_ground = f" {ground}" if ground else ""
    opener = rng.choice(OPENERS) if rng.random() < 0.15 else ""
    style = rng.random()
    if len(parts) == 1:
        noun, finite, gerund = parts[0]
        if opener or style < 0.3:
            text = f"{opener}{noun} {gerund}{with_ground}"
        elif style < 0.62:
            text = f"{noun} {finite}{with_ground}"
        elif style < 0.76 and ground:
            text = f"{ground}, {noun} {finite}"
        elif style < 0.84 and gerund:
            text = f"{gerund}{with_ground}{rng.choice([',', ':'])} {noun}"
        else:
            keywords = [noun.removeprefix("a ").removeprefix("an "), gerund, ground.removeprefix("over a ")]
            text = ", ".join(word for word in keywords if word)
    else:
        (noun_1, finite_1, gerund_1), (noun_2, finite_2, gerund_2) = parts
        joint = rng.choice([" and ", " while ", ", and ", ", "])
        if opener or style < 0.35:
            text = f"{opener}{noun_1} {gerund_1}{rng.choice([' and ', ', and '])}{noun_2} {gerund_2}{with_ground}"
        elif style < 0.75 or not ground:
            text = f"{noun_1} {finite_1}{joint}{noun_2} {finite_2}{with_ground}"
        elif style < 0.9:
            text = f"{ground}, {noun_1} {finite_1} and {noun_2} {finite_2}"
        else:
            text = f"two shapes{with_ground}: {noun_1} {gerund_1} and {noun_2} {gerund_2}"
    if pan:
        text += pan
    text = " ".join(text.split()).replace(" ,", ",").replace(" :", ":")
    if rng.random() < 0.5:
        text = text[:1].upper() + text[1:]
    return text + ("." if rng.random() < 0.4 else "")


def _object_phrases(item: ObjectAttributes, rng: random.Random, complete: bool) -> tuple[str, str, str]:
    """Noun phrase, finite verb phrase and participle phrase of one object."""
    colour, shape = rng.choice(COLOUR_WORDS[item.colour]), rng.choice(SHAPE_WORDS[item.shape])
    size = rng.choice(SIZE_WORDS[item.size]) if rng.random() < 0.45 else ""
    style = rng.random()
    if style < 0.9:
        noun = f"{size} {colour} {shape}".strip()
    elif style < 0.95:
        noun = f"{size} {shape} in {colour}".strip()
    else:
        noun = f"{colour} {size} {shape}".replace("  ", " ")
    noun = f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
    if rng.random() < 0.05:
        noun = noun.split(" ", 1)[1]
    if not complete and rng.random() < 0.03:
        return noun, "", ""
    finite, gerund = rng.choice(VERBS)
    direction = rng.choice(DIRECTION_WORDS[item.direction])
    if item.direction in SOLE_VERBS and rng.random() < 0.3:
        finite, gerund = rng.choice(SOLE_VERBS[item.direction])
        direction = direction if rng.random() < 0.3 else ""
    speed = rng.choice(SPEED_WORDS[item.speed]) if rng.random() < 0.45 else ""
    tail = f"{direction} {speed}" if rng.random() < 0.5 or " " in speed else f"{speed} {direction}"
    return noun, f"{finite} {tail}".strip(), f"{gerund} {tail}".strip()


def _ground_phrase(scene: SceneAttributes, rng: random.Random) -> str:
    if rng.random() < 0.25:
        return ""
    colour, pattern = rng.choice(BACKGROUND_WORDS[scene.background]), rng.choice(PATTERN_WORDS[scene.pattern])
    if pattern and rng.random() < 0.1:
        colour = ""
    elif rng.random() < 0.1:
        pattern = ""
    words = f"{pattern} {colour}" if rng.random() < 0.7 else f"{colour} {pattern}"
    words = " ".join(words.split())
    preposition = rng.choice(["over", "on", "against", "across", "in front of", "over", "on"])
    article = "an" if words[0] in "aeiou" else "a"
    return f"{preposition} {article} {words} {rng.choice(['background', 'background', 'background', 'backdrop'])}"


def _pan_phrase(scene: SceneAttributes, rng: random.Random) -> str:
    if scene.pan == "none" or rng.random() < 0.15:
        return ""
    direction = rng.choice({"left": ("left", "to the left"), "right": ("right", "to the right"),
                            "up": ("up", "upwards"), "down": ("down", "downwards")}[scene.pan])  # fmt: skip
    return rng.choice(
        [
            f" while the camera pans {direction}",
            f" as the camera pans {direction}",
            f" with the camera panning {direction}",
            f", camera panning {direction}",
            f", the camera pans {direction}",
        ]
    )


def misspell(text: str, rng: random.Random, rate: float) -> str:
    """Swap, drop or double a letter in a share `rate` of captions, so that the text encoder meets unknown spellings."""
    if rng.random() >= rate or len(text) < 4:
        return text
    at = rng.randrange(len(text) - 2)
    return rng.choice(
        [
            text[:at] + text[at + 1] + text[at] + text[at + 2 :],
            text[:at] + text[at + 1 :],
            text[:at] + text[at] + text[at:],
        ]
    )


@dataclass(frozen=True)
class HeldOutPrompt:
    """A prompt whose first object is a combination that training never showed, and what its video must show."""

    prompt: str
    scene: SceneAttributes


def held_out_prompts() -> list[HeldOutPrompt]:
    """The 64 held-out prompts, the same on every machine: 52 with one object, 12 with two, some with a camera pan."""
    rng = random.Random(20260)
    prompts = []
    seen = training_triples()
    for number, (shape, colour, direction) in enumerate(held_out_triples()):
        first = _attributes((shape, colour, direction), rng)
        objects: tuple[ObjectAttributes, ...] = (first,)
        if number % 16 in (3, 8, 14):
            others = [triple for triple in seen if triple[1] != colour]
            objects = (first, _attributes(rng.choice(others), rng))
        pattern = rng.choice(PATTERNS)
        pans = PATTERNS.index(pattern) in PANNABLE and rng.random() < 0.3
        scene = SceneAttributes(
            objects, rng.choice(BACKGROUND_NAMES), pattern, rng.choice(PANS[1:]) if pans else "none"
        )
        prompts.append(HeldOutPrompt(caption(scene, rng, complete=True), scene))
    return prompts


def _attributes(triple: tuple[int, int, int], rng: random.Random) -> ObjectAttributes:
    shape, colour, direction = triple
    return ObjectAttributes(
        SHAPES[shape], COLOUR_NAMES[colour], DIRECTION_NAMES[direction], rng.choice(SIZE_NAMES), rng.choice(SPEED_NAMES)
    )
