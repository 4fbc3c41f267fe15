"""The web page of `vmonarch ui`, which makes videos from prompts and shows all that were made.

`generate` makes every video, so that it lies in the output folder with its record. One video is made at a time, and the
model stays in memory.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import html
import ipaddress
import json
import re
import shutil
import socket
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import gradio as gr
import torch
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse

from vmonarch.configs import InputError, file_sha256
from vmonarch.files import prepare_output_dir
from vmonarch.installation import find_transformers
from vmonarch.pipelines import recipes
from vmonarch.pipelines.config import GenerateConfig, complete, recommended_settings
from vmonarch.pipelines.environment import choose_device, seconds
from vmonarch.pipelines.generation import generate
from vmonarch.pipelines.loading import LoadedModel, check_loaded, load_model
from vmonarch.pipelines.model_folder import ModelError, find_model
from vmonarch.pipelines.outputs import RECORD_FORMAT, GenerationError

# The choices: each has a recipe, and a method for devices where the recipe cannot run.
PRESETS = {
    "Faithful: hardly to be told from full attention": ("stack-near-lossless", "near-lossless"),
    "Fast: sooner, and a little less faithful": ("stack-fast", "fast"),
    "Full attention: exact and slow": ("stock", "full"),
}
# Fields of `GenerateConfig` (`size` sets height and width) and their labels, in their order on the page.
FIELDS = {
    "prompts": "Prompt",
    "image": "First frame",
    "attention": "Attention",
    "seeds": "Seed",
    "size": "Size",
    "num_frames": "Frames",
    "steps": "Steps",
    "guidance": "Guidance",
    "negative_prompt": "Negative prompt",
}
# All that a browser needs: the page, its parts, its events, and files, which gradio only serves from allowed folders.
_NEEDED = re.compile(
    r"/|/(config|theme\.css|favicon\.ico|manifest\.json|pwa_icon)|/(assets|static|svelte)/.*"
    r"|/gradio_api/(startup-events|queue/(join|data)|run/predict|cancel|reset|heartbeat/\w+|upload|file=/.+)/?"
)
_CSS = """
.gradio-container { max-width: 1280px !important; overflow-x: clip !important; }
.vm-status { min-height: 4rem; }
.vm-videos small { opacity: .75; }
.vm-videos { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(15rem, 100%), 1fr)); gap: 1rem; }
.vm-videos figure { margin: 0; min-width: 0; }
.vm-videos video { width: 100%; border-radius: 8px; background: #000; }
.vm-videos b { display: block; font-weight: 500; overflow-wrap: anywhere; }
.vm-videos a { margin-right: .6rem; }
.vm-error { color: var(--error-text-color); border-left: 3px solid var(--error-border-color); padding-left: .6rem; }
"""


# Also shows diffusers' progress bars.
_PROGRESS = gr.Progress(track_tqdm=True)


class Cancelled(Exception):
    """Someone has asked to stop the video that is being made."""


@dataclass
class Studio:
    """The model in memory, the video that is being made and the videos that were made.

    Args:
        output_dir: folder of the videos; whoever can open the page can see all files in it.
        model, dtype, device, offload: as in `SamplingConfig`.

    Raises:
        InputError, ModelError: the model cannot be found, or the device or the output folder cannot be used.
    """

    model: str = "embedded"
    output_dir: str = "outputs/ui"
    dtype: str = "auto"
    device: str = "auto"
    offload: str = "none"

    def __post_init__(self) -> None:
        self.folder = find_model(self.model)
        self.output = prepare_output_dir(self.output_dir).resolve()
        for path in (Path.cwd(), Path.home(), Path(__file__), self.folder.path):
            if path.resolve().is_relative_to(self.output):
                raise InputError("output_dir", f"must not hold {path}: the page shows what is in it")
        self.loaded: LoadedModel | None = None
        # gradio lets the next visitor begin while a cancelled thread has yet to notice.
        self.alone = threading.Lock()
        self.stops: dict[str | None, threading.Event] = {}
        # The machine's settings are checked before anyone opens the page.
        self.complete(["a prompt", *[None] * (len(FIELDS) - 1)])
        self.presets = offered_presets(choose_device(self.device))

    def complete(self, values: Sequence[Any]) -> GenerateConfig:
        """The completed config from the fields' values; the model's recommendations fill empty fields.

        Raises:
            InputError, ModelError: a value cannot be used; an InputError names its field.
        """
        given = {name: value for name, value in zip(FIELDS, values, strict=True) if value not in (None, "")}
        if size := given.pop("size", None):
            width, _, height = size.replace(" ", "").replace("x", "×").partition("×")
            if not (width.isdecimal() and height.isdecimal()):
                raise InputError("size", f"must be WIDTH×HEIGHT in pixels, got {size!r}")
            given |= {"width": int(width), "height": int(height)}
        given |= {"prompts": (given.get("prompts", ""),), "seeds": (given.get("seeds", 0),)}
        own = {name: getattr(self, name) for name in ("model", "dtype", "device", "offload")}
        try:
            config = complete(GenerateConfig(**given, **own, output_dir=str(self.output)), self.folder)
            if self.loaded is not None and self._serves(config):
                check_loaded(config, self.loaded)
        except InputError as error:
            field = {"width": "size", "height": "size"}.get(error.argument, error.argument)
            raise InputError(field, error.problem) from error
        return config

    def _serves(self, config: GenerateConfig) -> bool:
        """Whether there is a pipeline in memory that takes an image if and only if the config has one."""
        return self.loaded is not None and (self.loaded.config.image is None) == (config.image is None)

    def cancel(self, request: gr.Request) -> str:
        """Stop the video of the request's session before the transformer's next call."""
        if request.session_hash in self.stops:
            self.stops[request.session_hash].set()
        return _said("Cancelled.")

    def leave(self, request: gr.Request) -> None:
        """`cancel`, when the page is closed."""
        self.cancel(request)

    def run(self, request: gr.Request, progress: Any = _PROGRESS, *values: Any) -> Iterator[tuple[str, str]]:
        """Make the video of a request; yield a message about it and the gallery, as HTML."""
        stop = self.stops[request.session_hash] = threading.Event()
        yield "", self.gallery()
        try:
            with self.alone:
                said = _said(f"Made in {seconds(self._make(values, progress, stop))}.")
        except Cancelled:
            said = self.cancel(request)
        except InputError as error:
            said = _said(f"{FIELDS.get(error.argument, error.argument)} {error.problem}", error=True)
        except Exception as error:
            explained = isinstance(error, (ModelError, GenerationError, OSError))
            said = _said(str(error) if explained else f"{type(error).__name__}: {error}", error=True)
            if not explained:
                traceback.print_exc()
        yield said, self.gallery()

    def _make(self, values: Sequence[Any], progress: Callable[..., object], stop: threading.Event) -> float:
        """Make a video and return the seconds that it took; only the model stays in memory."""
        config = self.complete(values)
        if config.image is not None:
            # The record names the image, and gradio deletes its own copy.
            kept = self.output / f"image-{file_sha256(config.image)[:8]}{Path(config.image).suffix}"
            config = replace(config, image=str(shutil.copyfile(config.image, kept)))
        progress(0, desc="Loading the model")
        if not self._serves(config):
            self.loaded = None
            gc.collect()
            # Loaded without a recipe, which could quantise the weights for good, it serves any method.
            self.loaded = load_model(replace(config, attention="full"), self.folder)
        assert self.loaded is not None
        pipe = self.loaded.pipe
        try:
            with _stopping(pipe, stop):
                (video,) = generate(config, model=self.loaded, progress=True)
            return float(video.record["seconds"]["total"])
        finally:
            # Frees residuals and the step cache.
            recipes.apply(pipe, "full")
            gc.collect()
            torch.cuda.empty_cache()

    def gallery(self) -> str:
        """The newest videos in the output folder, including those of earlier servers, as HTML."""
        figures = []
        for path in sorted(self.output.glob("*.json"), key=lambda path: path.stat().st_mtime_ns, reverse=True)[:60]:
            with contextlib.suppress(ValueError, KeyError, TypeError, OSError):
                record = json.loads(path.read_text(encoding="utf-8"))
                if record["format"] == RECORD_FORMAT and (self.output / record["video"]).is_file():
                    figures.append(_figure(path, record))
        return f'<div class="vm-videos">{"".join(figures)}</div>' if figures else _said("Videos will appear here.")


def offered_presets(device: torch.device) -> dict[str, str]:
    """What each of `PRESETS` stands for on a device, by its words: the recipe if it can run there, else the method."""
    try:
        recipes.check_linears("float8", device)
    except InputError:
        return {words: method for words, (_, method) in PRESETS.items()}
    return {words: recipe for words, (recipe, _) in PRESETS.items()}


@contextlib.contextmanager
def _stopping(pipe: Any, stop: threading.Event) -> Iterator[None]:
    """While the block runs, calls of the pipeline's transformers raise Cancelled once `stop` is set."""

    def before(*_: Any) -> None:
        if stop.is_set():
            raise Cancelled

    with contextlib.ExitStack() as hooks:
        for module in find_transformers(pipe).values():
            hooks.enter_context(module.register_forward_pre_hook(before))
        yield


def _said(text: str, *, error: bool = False) -> str:
    return f'<p class="vm-error" role="alert">{html.escape(text)}</p>' if error else f"<p>{html.escape(text)}</p>"


def _figure(path: Path, record: dict[str, Any]) -> str:
    """A player for a record's video, with its prompt, settings and files, as HTML."""
    names = {"video": record["video"], "frames": record["contact_sheet"], "record": path.name}
    files = {word: f"gradio_api/file={quote(str(path.parent / name))}" for word, name in names.items() if name}
    links = "".join(f'<a href="{address}" download>{word}</a>' for word, address in files.items())
    told = f"{record['config']['attention']['label']} · seed {record['seed']} · {seconds(record['seconds']['total'])}"
    if record.get("attention") is not None:
        # The first line names the method, the second says what ran.
        told += f" · {record['attention']['text'].splitlines()[-1]}"
    return (
        f'<figure><video src="{files["video"]}#t=0.01" controls loop muted playsinline preload="metadata"></video>'
        f"<b>{html.escape(record['prompt'])}</b><small>{html.escape(told)}<br>{links}</small></figure>"
    )


def build_page(studio: Studio) -> gr.Blocks:
    """The components of the page, and what they do."""
    quick: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden", "queue": False}
    folder, best = studio.folder, recommended_settings(studio.folder)
    width, height = best["width"], best["height"]
    square = round((width * height) ** 0.5 / folder.multiples[1]) * folder.multiples[1]
    sizes = [f"{width}×{height}", f"{height}×{width}", f"{square}×{square}"]
    with gr.Blocks(title="vmonarch", analytics_enabled=False, delete_cache=(3600, 86400)) as page:
        gr.Markdown("# vmonarch\nVideos from words, by fast attention.")
        with gr.Row():
            with gr.Column(scale=2, min_width=320):
                prompt = gr.Textbox(label=FIELDS["prompts"], lines=3, placeholder="What the video shows")
                image = gr.Image(
                    label=FIELDS["image"], type="filepath", image_mode=None, sources=["upload"], height=200
                )
                image.visible = folder.image_capable
                attention = gr.Radio(list(studio.presets.items()), label=FIELDS["attention"])
                attention.value = next(iter(studio.presets.values()))
                with gr.Row():
                    seed = gr.Number(0, label=FIELDS["seeds"], precision=0, min_width=100)
                    size = gr.Dropdown(
                        sizes, value=sizes[0], label=FIELDS["size"], allow_custom_value=True, min_width=140
                    )
                with gr.Row():
                    frames = gr.Number(best["num_frames"], label=FIELDS["num_frames"], precision=0, min_width=90)
                    steps = gr.Number(best["steps"], label=FIELDS["steps"], precision=0, min_width=90)
                    guidance = gr.Number(best["guidance"], label=FIELDS["guidance"], min_width=90)
                negative = gr.Textbox(best["negative_prompt"], label=FIELDS["negative_prompt"])
                with gr.Row():
                    start = gr.Button("Generate", variant="primary", min_width=120)
                    stop = gr.Button("Cancel", min_width=120)
            with gr.Column(scale=3, min_width=320):
                status = gr.HTML(elem_classes="vm-status")
                made = gr.HTML()
        fields = [prompt, image, attention, seed, size, frames, steps, guidance, negative]
        told: dict[str, Any] = {"show_progress_on": status, "api_visibility": "private"}
        running = start.click(studio.run, fields, [status, made], scroll_to_output=True, **told)
        # Two listeners: the second waits until the first has let the running thread end.
        stop.click(studio.cancel, None, status, **quick)
        stop.click(None, cancels=running)
        page.load(studio.gallery, None, made, **quick)
        page.unload(studio.leave)
    # One video at a time; others see their place in the queue.
    return page.queue(default_concurrency_limit=1, api_open=False)


class Guard:
    """ASGI middleware that serves only what the page needs, and nothing to other sites' pages.

    Args:
        hosts: host names of the page; None for any.
    """

    def __init__(self, app: Any, hosts: set[str] | None) -> None:
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        answer = self.app
        if scope["type"] == "http":
            headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
            host, origin = headers.get(b"host", ""), headers.get(b"origin")
            # DNS rebinding: another site's name that is made to point here would make its pages count as ours.
            if self.hosts is not None and re.sub(r":\d+$", "", host).strip("[]") not in self.hosts:
                answer = PlainTextResponse("Invalid host header", 400)
            # Files and sandboxed frames have the origin "null".
            elif not _NEEDED.fullmatch(scope["path"]) or origin not in (None, f"http://{host}", f"https://{host}"):
                answer = PlainTextResponse("Not found", 404)
        await answer(scope, receive, send)


def is_local(host: str) -> bool:
    """Whether only this machine can reach what listens on an address."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def launch(studio: Studio, host: str = "127.0.0.1", port: int = 7860) -> tuple[gr.Blocks, str]:
    """The page, served in threads of its own until it is closed, and its address.

    Args:
        host: address to listen on; by default other machines cannot reach it.
        port: port to listen on; 0 for a free one.

    Raises:
        InputError: it is not possible to listen on the address and port.
    """
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
            port = free.getsockname()[1]
    except (OSError, OverflowError) as error:
        if getattr(error, "errno", None) in (socket.EAI_NONAME, errno.EADDRNOTAVAIL):
            raise InputError("host", f"must be an address of this machine, got {host!r}") from error
        raise InputError("port", f"{port} of {host} cannot be had: {error}") from error
    hosts = {"localhost", "127.0.0.1", "::1", host} if is_local(host) else None
    page = build_page(studio)
    _, address, _ = page.launch(
        server_name=f"[{host}]" if ":" in host else host,
        server_port=port,
        allowed_paths=[str(studio.output)],
        app_kwargs={"middleware": [Middleware(Guard, hosts=hosts)]},
        # System fonts, because others would be requested from a server.
        theme=gr.themes.Default(primary_hue="blue", font=["system-ui", "sans-serif"], font_mono=["monospace"]),
        css=_CSS,
        footer_links=[],
        prevent_thread_lock=True,
        quiet=True,
        run_history=False,
        ssr_mode=False,
        mcp_server=False,
    )
    return page, address.rstrip("/")
