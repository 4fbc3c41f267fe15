"""Procedural captioned video: coloured shapes that move over patterned backgrounds.

Every clip is a pure function of a seed. Attributes (shape, colour, direction, size, …) are drawn first; positions and
other continuous values follow; the renderer turns them into antialiased pixels, on any device; the caption writer turns
the same attributes into English. Some (shape, colour, direction) combinations never occur in training:
`held_out_prompts` is built from them.

Shapes in comments: N = 2 objects, F frames, Y height, X width (pixels).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch

HEIGHT, WIDTH, NUM_FRAMES = 96, 160, 61

# What pixels have, and words for it beside the name, which is three times as frequent as each of these.
_PALETTE: dict[str, tuple[tuple[float, float, float], tuple[str, ...]]] = {
    "red": ((0.88, 0.10, 0.12), ("bright red", "scarlet", "crimson")),
    "orange": ((1.00, 0.52, 0.04), ("bright orange", "tangerine")),
    "yellow": ((0.98, 0.90, 0.10), ("bright yellow", "lemon yellow")),
    "green": ((0.10, 0.70, 0.22), ("bright green", "emerald")),
    "cyan": ((0.08, 0.83, 0.86), ("turquoise", "aqua", "bright cyan")),
    "blue": ((0.12, 0.26, 0.92), ("bright blue", "royal blue")),
    "purple": ((0.52, 0.14, 0.80), ("violet", "bright purple")),
    "pink": ((0.98, 0.26, 0.68), ("magenta", "hot pink", "bright pink")),
}
COLOURS = {name: rgb for name, (rgb, _) in _PALETTE.items()}
COLOUR_WORDS = {name: (name,) * 3 + others for name, (_, others) in _PALETTE.items()}
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
_GROUNDS: dict[str, tuple[tuple[float, float, float], tuple[str, ...]]] = {
    "grey": ((0.50, 0.50, 0.50), ("grey", "gray")),
    "white": ((0.90, 0.90, 0.90), ("white",)),
    "black": ((0.10, 0.10, 0.10), ("black",)),
    "beige": ((0.78, 0.73, 0.64), ("beige", "cream")),
    "slate": ((0.36, 0.41, 0.48), ("slate", "slate grey")),
    "olive": ((0.42, 0.43, 0.33), ("olive",)),
    "navy": ((0.14, 0.17, 0.27), ("navy", "dark navy")),
    "mauve": ((0.57, 0.49, 0.57), ("mauve",)),
    "sage": ((0.57, 0.64, 0.56), ("sage", "pale sage")),
    "brown": ((0.37, 0.30, 0.25), ("brown", "dark brown")),
}
BACKGROUNDS = {name: rgb for name, (rgb, _) in _GROUNDS.items()}
PATTERNS: tuple[str, ...] = ("plain", "striped", "checkered", "gradient", "dotted")
PANNABLE = ("striped", "checkered", "dotted")
"""Patterns on which a camera pan is visible."""
PANS = {"none": (0.0, 0.0)} | {name: (-x, -y) for name, (x, y) in DIRECTIONS.items() if "-" not in name}
"""Motion of the scene for each pan of the camera: the opposite direction."""
SHAPE_EXTENT = 1.35
"""No shape reaches further than this many radii from its centre."""


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


class Scene(NamedTuple):
    """A clip: what a caption can say about it and, float32 and in pixels, what it cannot.

    Args:
        shown: one object or two.
        radius: [N]. start, motion: (x, y), [N, 2]. rgb: [N, 3]. All of two objects, also where one is shown.
        background_rgb: dark and light, [2, 3].
        stripe: 0 for vertical stripes, 1 for horizontal, 2 and 3 for diagonal ones.
        period: []. phase, pan_shift: (x, y), [2].
    """

    shown: SceneAttributes
    radius: torch.Tensor
    start: torch.Tensor
    motion: torch.Tensor
    rgb: torch.Tensor
    background_rgb: torch.Tensor
    stripe: int
    period: torch.Tensor
    phase: torch.Tensor
    pan_shift: torch.Tensor


def held_out_triples() -> list[tuple[str, str, str]]:
    """The 64 combinations of shape, colour and direction that training never shows; it shows every pair in them."""
    shapes, colours, directions = len(SHAPES), tuple(COLOURS), tuple(DIRECTIONS)
    once = [(s, c, (2 * s + 3 * c) % 8) for c in range(8) for s in range(shapes)]
    twice = [(s, c, (2 * s + 3 * c + 4) % 8) for c in range(8) for s in (c % shapes, (c + 3) % shapes)]
    return [(SHAPES[s], colours[c], directions[d]) for s, c, d in once + twice]


def training_triples() -> list[tuple[str, str, str]]:
    """All that training may show."""
    held_out = set(held_out_triples())
    return [triple for triple in product(SHAPES, COLOURS, DIRECTIONS) if triple not in held_out]


def sample_scene(seed: int) -> Scene:
    """Draw a clip, whose objects are of the training triples.

    A quarter of the clips has two objects, of different colours; in a fifth the camera pans.
    """
    generator = torch.Generator().manual_seed(seed)
    uniform = lambda: torch.rand((), generator=generator).item()
    draw = lambda table, count: [tuple(table)[n] for n in torch.randint(len(table), (count,), generator=generator)]

    two = uniform() < 0.25
    first, *others = draw(training_triples(), 66)
    second = next(other for other in others if other[1] != first[1])
    sizes, speeds = draw(SIZES, 2), draw(SPEEDS, 2)
    objects = [ObjectAttributes(*each) for each in zip(*zip(first, second, strict=True), sizes, speeds, strict=True)]
    [background], [pattern] = draw(BACKGROUNDS, 1), draw(PATTERNS, 1)
    pans = uniform() < 0.2 * len(PATTERNS) / len(PANNABLE) and pattern in PANNABLE
    [pan] = draw(tuple(PANS)[1:], 1)
    shown = SceneAttributes(tuple(objects[: 1 + two]), background, pattern, pan if pans else "none")
    return place(shown, objects, generator)


def place(shown: SceneAttributes, objects: Sequence[ObjectAttributes], generator: torch.Generator) -> Scene:
    """Draw radii, start points, colours and pattern phases; every object stays in the frame for the whole clip.

    `objects` are two, of which `shown` has one or both.
    """
    uniform = lambda *shape: torch.rand(shape, generator=generator)
    named = lambda table, name: torch.tensor([table[getattr(item, name)] for item in objects])
    between = lambda low, high: low + uniform(len(objects)) * (high - low)
    radius = between(*named(SIZES, "size").unbind(-1))  # [N]
    motion = named(DIRECTIONS, "direction") * between(*named(SPEEDS, "speed").unbind(-1))[:, None]  # [N, 2]
    extent = SHAPE_EXTENT * radius[:, None]
    low = extent + (-motion).clamp(min=0)
    high = torch.tensor([float(WIDTH), float(HEIGHT)]) - extent - motion.clamp(min=0)
    # One of 48 random pairs of start points whose objects do not touch, if there is one.
    starts = low + uniform(48, len(objects), 2) * (high - low).clamp(min=0)  # [48, N, 2]
    times = torch.linspace(0, 1, 9)[:, None]
    gaps = ((starts[:, 1] - starts[:, 0])[:, None] + times * (motion[1] - motion[0])).norm(dim=-1).amin(-1)  # [48]
    clearance = (gaps - SHAPE_EXTENT * radius.sum()).clamp(max=2.0)
    start = starts[(clearance + 1e-3 * uniform(48)).argmax()]  # [N, 2]

    rgb = (named(COLOURS, "colour") + 0.03 * (2 * uniform(len(objects), 3) - 1)).clamp(0, 1)
    base = torch.tensor(BACKGROUNDS[shown.background]) + 0.02 * (2 * uniform(1) - 1)
    contrast = 0.06 + 0.03 * uniform(1)
    background_rgb = torch.stack((base - contrast, base + contrast)).clamp(0, 1)
    stripe = int(4 * uniform(1))
    if shown.pan != "none":
        # Stripes run across the pan, or else it would not be seen.
        stripe = int(shown.pan in ("up", "down"))
    pan_shift = torch.tensor(PANS[shown.pan]) * (24.0 + 16.0 * uniform(1))
    period, phase = 18.0 + 10.0 * uniform(), 64.0 * uniform(2)
    return Scene(shown, radius, start, motion, rgb, background_rgb, stripe, period, phase, pan_shift)


def shape_distance(shape: str, x: torch.Tensor, y: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    """Signed distance (pixels, negative inside) of points to one of `SHAPES` around the origin; y grows downwards.

    `x`, `y` and `radius` broadcast to the shape of the result. A shape's area is about that of a disc of this radius.
    """
    if shape == "square":
        return torch.maximum(x.abs(), y.abs()) - 0.88 * radius
    if shape == "triangle":
        return torch.maximum(y, 0.8660254 * x.abs() - 0.5 * y) - 0.6745 * radius
    if shape == "cross":
        wide, narrow = torch.maximum(x.abs(), y.abs()), torch.minimum(x.abs(), y.abs())
        return torch.maximum(wide - 1.12 * radius, narrow - 0.40 * radius)
    distance = torch.sqrt(x * x + y * y + 1e-12)
    if shape == "circle":
        return distance - radius
    if shape == "ring":
        return (distance - 0.86 * radius).abs() - 0.27 * radius
    assert shape == "star", shape
    # One of five equal sectors, folded in half, holds one edge from the outer to the inner corner.
    sector, outer, inner = 2 * math.pi / 5, 1.34, 0.62
    folded = (torch.remainder(torch.atan2(x, -y) + sector / 2, sector) - sector / 2).abs()
    edge_x, edge_y = inner * math.sin(sector / 2), inner * math.cos(sector / 2) - outer
    length = math.hypot(edge_x, edge_y)
    normal_x, normal_y = -edge_y / length, edge_x / length
    return distance * (folded.sin() * normal_x + folded.cos() * normal_y) - outer * normal_y * radius


def render(
    scene: Scene, device: torch.device | str = "cpu", frames: Sequence[int] = range(NUM_FRAMES), *, scale: int = 1
) -> torch.Tensor:
    """Render frames of a clip: [3, F, 96·scale, 160·scale], float32 in [-1, 1], as a video VAE takes them.

    `scale` draws the same scene with more pixels.
    """
    moved: list[Any] = [part.to(device) if isinstance(part, torch.Tensor) else part for part in scene]
    scene = Scene(*moved)
    time = torch.tensor(list(frames), device=device, dtype=torch.float32)[:, None, None] / (NUM_FRAMES - 1)  # [F, 1, 1]
    ys = (torch.arange(HEIGHT * scale, device=device)[:, None] + 0.5) / scale  # [Y, 1]
    xs = (torch.arange(WIDTH * scale, device=device) + 0.5) / scale  # [X]

    dark, light = scene.background_rgb[..., None, None, None]  # [3, 1, 1, 1]
    image = dark + (light - dark) * _pattern_level(scene, time, xs, ys, scale)  # [3, F, Y, X]
    for n, item in enumerate(scene.shown.objects):
        x, y = (at - (scene.start[n, i] + scene.motion[n, i] * time) for i, at in enumerate((xs, ys)))
        alpha = (0.5 - scale * shape_distance(item.shape, x, y, scene.radius[n])).clamp(0, 1)  # [F, Y, X]
        image = image + (scene.rgb[n, :, None, None, None] - image) * alpha
    return image.clamp(0, 1) * 2 - 1


def _pattern_level(scene: Scene, time: torch.Tensor, xs: torch.Tensor, ys: torch.Tensor, scale: int) -> torch.Tensor:
    """Brightness level of the background in [0, 1], for [F, Y, X]."""
    pattern, period, stripe = scene.shown.pattern, scene.period, scene.stripe
    x, y = (at - scene.phase[i] - scene.pan_shift[i] * time for i, at in enumerate((xs, ys)))
    step = lambda u: (0.5 + scale * u).clamp(0, 1)
    # A triangle wave of unit slope, clamped: a square wave with one pixel of antialiasing.
    wave = lambda u: step((torch.remainder(u, period) - period / 2).abs() - period / 4)
    if pattern == "striped":
        return wave((x, y, x + y, x - y)[stripe])
    if pattern == "checkered":
        a, b = wave(x), wave(y)
        return a + b - 2 * a * b
    if pattern == "gradient":
        ramp = ys / HEIGHT if stripe % 2 else xs / WIDTH
        # It spans three times the contrast of the other patterns.
        return ((ramp if stripe < 2 else 1 - ramp) - 0.5) * 3 + 0.5
    if pattern == "dotted":
        cell = lambda u: torch.remainder(u, period) - period / 2
        return step(0.26 * period - torch.sqrt(cell(x) ** 2 + cell(y) ** 2 + 1e-6))
    assert pattern == "plain", pattern
    return torch.full_like(time, 0.5)


# A word that is listed twice is twice as frequent.
SHAPE_WORDS: dict[str, tuple[str, ...]] = {
    "circle": ("circle", "circle", "circle", "ball", "disc", "disk", "dot"),
    "square": ("square", "square", "square", "box", "block"),
    "triangle": ("triangle", "triangle", "triangle", "pyramid"),
    "star": ("star", "star", "star", "five-pointed star"),
    "cross": ("cross", "cross", "cross", "plus sign", "plus"),
    "ring": ("ring", "ring", "ring", "donut", "hoop"),
}
_SIDEWAYS = ("{0}", "{0}", "to the {0}", "to the {0}", "{0}wards", "{0}ward", "towards the {0}", "from {1} to {0}",
             "to the {0} side", "toward the {0} edge")  # fmt: skip
_UPRIGHT = ("{0}", "{0}", "{0}wards", "{0}ward", "to the {1}", "towards the {1}", "from {2} to {1}", "straight {0}")
_DIAGONAL = ("{0} and to the {2}", "{0} and {2}", "to the {1}er {2}", "diagonally {0} and to the {2}", "{0}-{2}",
             "towards the {3} {2} corner", "to the {3} {2}")  # fmt: skip
_filled = lambda forms, *words: tuple(form.format(*words) for form in forms)
DIRECTION_WORDS: dict[str, tuple[str, ...]] = {
    "left": _filled(_SIDEWAYS, "left", "right"),
    "right": _filled(_SIDEWAYS, "right", "left"),
    "up": _filled(_UPRIGHT, "up", "top", "bottom"),
    "down": _filled(_UPRIGHT, "down", "bottom", "top"),
} | {
    f"{up}-{side}": _filled(_DIAGONAL, up, upp, side, top)
    for (up, upp, top), side in product((("up", "upp", "top"), ("down", "low", "bottom")), ("left", "right"))
}
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
PREPOSITIONS = ("over", "on", "against", "across", "in front of", "over", "on")


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
    noun, finite, gerund = parts[0]
    if len(parts) == 1:
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
        noun_2, finite_2, gerund_2 = parts[1]
        joint = rng.choice([" and ", " while ", ", and ", ", "])
        if opener or style < 0.35:
            text = f"{opener}{noun} {gerund}{rng.choice([' and ', ', and '])}{noun_2} {gerund_2}{with_ground}"
        elif style < 0.75 or not ground:
            text = f"{noun} {finite}{joint}{noun_2} {finite_2}{with_ground}"
        elif style < 0.9:
            text = f"{ground}, {noun} {finite} and {noun_2} {finite_2}"
        else:
            text = f"two shapes{with_ground}: {noun} {gerund} and {noun_2} {gerund_2}"
    text = " ".join((text + pan).split()).replace(" ,", ",").replace(" :", ":")
    if rng.random() < 0.5:
        text = text[:1].upper() + text[1:]
    return text + ("." if rng.random() < 0.4 else "")


def _object_phrases(item: ObjectAttributes, rng: random.Random, complete: bool) -> tuple[str, str, str]:
    """Noun phrase, finite verb phrase and participle phrase of one object."""
    colour, shape = rng.choice(COLOUR_WORDS[item.colour]), rng.choice(SHAPE_WORDS[item.shape])
    size = rng.choice(SIZE_WORDS[item.size]) if rng.random() < 0.45 else ""
    style = rng.random()
    orders = f"{size} {colour} {shape}", f"{size} {shape} in {colour}", f"{colour} {size} {shape}"
    noun = " ".join(orders[(style >= 0.9) + (style >= 0.95)].split())
    if rng.random() >= 0.05:
        noun = f"{_article(noun)} {noun}"
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


def _article(words: str) -> str:
    return "an" if words[0] in "aeiou" else "a"


def _ground_phrase(scene: SceneAttributes, rng: random.Random) -> str:
    if rng.random() < 0.25:
        return ""
    colour, pattern = rng.choice(_GROUNDS[scene.background][1]), rng.choice(PATTERN_WORDS[scene.pattern])
    if pattern and rng.random() < 0.1:
        colour = ""
    elif rng.random() < 0.1:
        pattern = ""
    words = f"{pattern} {colour}" if rng.random() < 0.7 else f"{colour} {pattern}"
    words, preposition = words.strip(), rng.choice(PREPOSITIONS)
    return f"{preposition} {_article(words)} {words} {rng.choice(['background'] * 3 + ['backdrop'])}"


def _pan_phrase(scene: SceneAttributes, rng: random.Random) -> str:
    if scene.pan == "none" or rng.random() < 0.15:
        return ""
    longer = f"to the {scene.pan}" if scene.pan in ("left", "right") else f"{scene.pan}wards"
    direction = rng.choice((scene.pan, longer))
    camera = (" while the camera pans", " as the camera pans", " with the camera panning", ", camera panning",
              ", the camera pans")  # fmt: skip
    return f"{rng.choice(camera)} {direction}"


def held_out_prompts() -> dict[str, SceneAttributes]:
    """What the video of each of 64 prompts must show; 52 have one object, 12 two, and in some the camera pans.

    The first object is a combination that training never showed. They are the same on every machine.
    """
    rng = random.Random(20260)

    def attributes(triple: tuple[str, str, str]) -> ObjectAttributes:
        return ObjectAttributes(*triple, rng.choice(tuple(SIZES)), rng.choice(tuple(SPEEDS)))

    prompts = {}
    for number, triple in enumerate(held_out_triples()):
        objects = [attributes(triple)]
        if number % 16 in (3, 8, 14):
            objects.append(attributes(rng.choice([other for other in training_triples() if other[1] != triple[1]])))
        pattern = rng.choice(PATTERNS)
        pans = pattern in PANNABLE and rng.random() < 0.3
        background, pan = rng.choice(tuple(BACKGROUNDS)), rng.choice(tuple(PANS)[1:]) if pans else "none"
        scene = SceneAttributes(tuple(objects), background, pattern, pan)
        prompts[caption(scene, rng, complete=True)] = scene
    return prompts
