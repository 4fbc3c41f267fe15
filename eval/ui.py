"""The web page of `vmonarch ui`: prompts to videos, beside those of full attention, with the numbers.

Every video is made by `generate`, so that it lies in the output folder with its record. One video is made at a time,
and the model stays in memory. gradio's own ways to files are closed (`_NEEDED`): what the server reads for a browser
lies in the output folder or is part of gradio.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import html
import ipaddress
import math
import re
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr
import torch
import uvicorn
from fastapi import FastAPI
from starlette.responses import PlainTextResponse
from starlette.staticfiles import StaticFiles

from vmonarch.configs import InputError
from vmonarch.eval.attention_flops import recorded_call, relative_flops, transformers_by_step
from vmonarch.eval.methods import warm_up
from vmonarch.eval.settings import MethodsConfig
from vmonarch.eval.similarity import similarity
from vmonarch.installation import find_transformers
from vmonarch.pipelines import recipes
from vmonarch.pipelines.config import GenerateConfig, SamplingConfig, complete, recommended_settings
from vmonarch.pipelines.devices import choose_device
from vmonarch.pipelines.environment import seconds
from vmonarch.pipelines.generation import generate
from vmonarch.pipelines.loading import LoadedModel, check_loaded, load_model
from vmonarch.pipelines.model_folder import ModelError, ModelFolder, find_model
from vmonarch.pipelines.outputs import GeneratedVideo, GenerationError, prepare_output_dir
from vmonarch.preset import presets
from vmonarch.steps import denoising_step

METHODS = {
    **presets(),
    "full": "exact and slow",
    "stack-near-lossless": "recipe, near-lossless in float8, compiled",
    "stack-fast": "recipe, also skips steps",
    "stock": "recipe, exact and compiled",
}
EXAMPLES = (
    "a red circle moving to the right over a dark grey background",
    "a blue square moving down over a light background",
)
# What the components of the page set in `GenerateConfig`, in their order, and what they are called.
LABELS = {
    "prompts": "Prompt",
    "model": "Model",
    "attention": "Attention",
    "seeds": "Seed",
    "steps": "Steps",
    "guidance": "Guidance",
    "width": "Width",
    "height": "Height",
    "num_frames": "Frames",
    "negative_prompt": "Negative prompt",
}
FIELDS = tuple(LABELS)
_NUMBERS = {"seeds", "steps", "guidance", "width", "height", "num_frames"}
# All that a browser asks for: the page, its parts, and its events.
_NEEDED = re.compile(
    r"/|/(config|theme\.css|favicon\.ico|manifest\.json|pwa_icon)|/(assets|static|svelte|outputs)/.*"
    r"|/gradio_api/(startup-events|queue/(join|data)|run/predict|cancel|reset|heartbeat/\w+)/?"
)
# What the first video does, the others do.
_LEAD = """
for (const other of this.closest('.vm-videos').querySelectorAll('video:not([controls])')) {
    if (Math.abs(other.currentTime - this.currentTime) > .1) other.currentTime = this.currentTime;
    if (this.paused) other.pause(); else other.play();
}"""
_CSS = """
.gradio-container { max-width: 1400px !important; overflow: clip !important; }
[data-testid="status-tracker"]:has(> .validation-error), [data-testid="status-tracker"] > .validation-error {
    position: static !important;
}
.vm-side { position: sticky; top: 1rem; align-self: flex-start; }
.vm-videos { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(18rem, 100%), 1fr)); gap: 1rem; }
.vm-videos figure { margin: 0; }
.vm-videos video { width: 100%; border-radius: 8px; background: #000; }
.vm-videos a { margin-right: .5rem; }
.vm-table { overflow-x: auto; margin-top: 1rem; }
.vm-table table { width: 100%; border: 0 !important; border-collapse: collapse; font-variant-numeric: tabular-nums; }
.vm-table :is(th, td) { border: 0 !important; padding: .4rem !important; white-space: nowrap; }
.vm-table :is(th, td):not(:first-child) { text-align: right !important; }
.vm-table tr { border: solid var(--border-color-primary) !important; border-width: 0 0 1px !important; }
.vm-note { color: var(--body-text-color-subdued); }
.vm-error { color: var(--error-text-color); border-left: 3px solid var(--error-border-color); padding-left: .6rem; }
"""


@dataclass(frozen=True)
class PageConfig:
    """What the page offers, and where.

    Args:
        models: as `SamplingConfig.model` takes them, the first being chosen at the start.
        output_dir: of the videos; all files in it can be seen by those who can open the page.
        dtype, device, offload: as in `SamplingConfig`.
        host: address to listen on; other machines reach none but their own by the default.
        port: to listen on; 0 for a free one.

    Raises:
        InputError: no model, or a port that there is not.
    """

    models: tuple[str, ...] = ("embedded",)
    output_dir: str = "outputs/ui"
    dtype: str = "auto"
    device: str = "auto"
    offload: str = "none"
    host: str = "127.0.0.1"
    port: int = 7860

    def __post_init__(self) -> None:
        if not self.models:
            raise InputError("models", "must name at least one model")
        if not 0 <= self.port <= 65535:
            raise InputError("port", f"must lie between 0 and 65535, got {self.port}")

    @property
    def local(self) -> bool:
        """Whether only this machine can reach the page."""
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return self.host == "localhost"


class Cancelled(Exception):
    """Someone has asked to stop the video in work."""


class Studio:
    """The model in memory, and the video in work.

    Raises:
        InputError, ModelError: a model cannot be found or loaded, or the output folder cannot be used.
    """

    def __init__(self, config: PageConfig) -> None:
        self.config = config
        self.output = prepare_output_dir(config.output_dir).resolve()
        self.folders = {name: find_model(name) for name in config.models}
        private = [Path.cwd(), Path.home(), Path(__file__), *(folder.path for folder in self.folders.values())]
        for path in private:
            if path.resolve().is_relative_to(self.output):
                raise InputError("output_dir", f"must not hold {path}: the page shows what is in it")
        self.loaded: LoadedModel | None = None
        self.warm: set[tuple[Any, ...]] = set()
        # gradio lets the next visitor begin while a cancelled thread has yet to notice.
        self.alone = threading.Lock()
        self.stops: dict[str | None, threading.Event] = {}
        self.load(self.complete(dict(zip(FIELDS, (EXAMPLES[0], config.models[0]), strict=False))))

    def folder(self, name: str) -> ModelFolder:
        """A model that the page was started with or, if only this machine can reach it, in a folder."""
        name = name.strip()
        if name in self.folders:
            return self.folders[name]
        if not self.config.local or not Path(name).expanduser().is_dir():
            more = ", or a folder with a pipeline; there is none" if self.config.local else ", got"
            raise InputError("model", f"must be one of {', '.join(self.folders)}{more} {name!r}")
        return find_model(name)

    def complete(self, given: dict[str, Any]) -> GenerateConfig:
        """The completed config of a request; None and empty texts are left to the model.

        Raises:
            InputError, ModelError: a value that cannot be used.
        """
        values = {key: value for key, value in given.items() if value not in (None, "")}
        folder = self.folder(values.get("model", ""))
        for name in _NUMBERS & values.keys():
            try:
                values[name] = float(values[name]) if name == "guidance" else int(values[name])
            except ValueError as error:
                kind = "a number" if name == "guidance" else "an integer"
                raise InputError(name, f"must be {kind}, got {values[name]!r}") from error
        values |= {"prompts": (given["prompts"],), "seeds": (values.get("seeds", 0),), "output_dir": str(self.output)}
        config = GenerateConfig(
            **values, dtype=self.config.dtype, device=self.config.device, offload=self.config.offload
        )
        config = complete(config, folder)
        if config.stack.linears:
            recipes.check_linears(config.stack.linears, choose_device(config.device))
        loaded = self.loaded
        if loaded is not None and loaded.config.model == config.model:
            check_loaded(config, loaded)
        return config

    def load(self, config: GenerateConfig) -> LoadedModel:
        """The pipeline of a completed config, in place of another one."""
        if self.loaded is None or self.loaded.config.model != config.model:
            self.loaded = None
            self.warm.clear()
            gc.collect()
            torch.cuda.empty_cache()
            # For any method: with a recipe the weights would be quantised for good.
            self.loaded = load_model(dataclasses.replace(config, attention="full"), self.folder(config.model))
        return self.loaded

    def check(self, *values: Any) -> list[dict[str, Any]]:
        """For every field, whether its value can be used, and if not, why; a problem of no field shows in the run."""
        where, problem = self._problem(values)
        said = problem[:1].upper() + problem[1:]
        return [gr.validate(name != where, said) for name in (*FIELDS, "compare")]

    def refuse(self, *values: Any) -> str:
        """What `check` says, for those who do not see the field."""
        where, problem = self._problem(values)
        return _error(f"{LABELS[where]} {problem}") if where in LABELS else ""

    def _problem(self, values: Sequence[Any]) -> tuple[str, str]:
        try:
            self.complete(dict(zip(FIELDS, values, strict=False)))
        except InputError as error:
            # An image-to-video model needs an image, which the page does not take.
            fields = {"image": "model", "linears": "attention"}
            return fields.get(error.argument, error.argument), error.problem
        except ModelError as error:
            return "model", str(error)
        return "", ""

    def defaults(self, model: str) -> list[Any]:
        """Updates of the fields that a model has recommendations for."""
        found: dict[str, Any] = {}
        with contextlib.suppress(InputError, ModelError):
            found = recommended_settings(self.folder(model))
        return [gr.update(placeholder=str(found.get(name) or "none") if found else "") for name in FIELDS[4:]]

    def cancel(self, request: gr.Request) -> str:
        """Stop the video of the request's session before its next layer."""
        if request.session_hash in self.stops:
            self.stops[request.session_hash].set()
        return _note("Cancelled. What was finished before is in the output folder.")

    def leave(self, request: gr.Request) -> None:
        """`cancel`, for who closes the page."""
        self.cancel(request)

    def run(self, request: gr.Request, progress: Any = gr.Progress(), *values: Any) -> Iterator[tuple[str, str]]:  # noqa: B008
        """Make the video of a request and then, if it is to be compared, that of full attention; both as HTML."""
        shown, stop = "", threading.Event()
        self.stops[request.session_hash] = stop
        yield shown, ""
        try:
            config = self.complete(dict(zip(FIELDS, values, strict=False)))
            for shown in self._videos(config, values[-1], progress, stop):
                yield shown, ""
        except Cancelled:
            yield shown, self.cancel(request)
        except InputError as error:
            yield shown, _error(f"{error.argument} {error.problem}")
        except (ModelError, GenerationError, OSError) as error:
            yield shown, _error(str(error))
        except Exception as error:
            traceback.print_exc()
            yield shown, _error(f"{type(error).__name__}: {error}")

    def _videos(
        self, config: GenerateConfig, compared: bool, progress: Callable[..., object], stop: threading.Event
    ) -> Iterator[str]:
        with self.alone:
            progress(0, desc="Loading the model")
            model = self.load(config)
            with _watched(model.pipe, progress, stop) as watch, recorded_call(model.pipe) as call:
                configs = [config]
                if compared and config.attention.label != "full":
                    configs.append(dataclasses.replace(config, attention="full"))
                    self._warm_up(config, model, watch)
                videos: list[GeneratedVideo] = []
                for one in configs:
                    watch(f"{one.attention.label} attention")
                    # Not over a `yield`: gradio goes on in another thread, and the limit is a thread's.
                    with recipes.room_for_versions([one.attention]):
                        videos += generate(one, model=model, keep_frames=True)
                    if len(videos) < len(configs):
                        yield _figures(videos)
            assert config.steps is not None
            methods = [one.attention for one in configs]
            shares = relative_flops(call, methods, transformers_by_step(model.pipe, config.steps))
            yield _figures(videos) + _table(videos, shares, model.device)

    def _warm_up(self, config: GenerateConfig, model: LoadedModel, watch: Callable[[str], None]) -> None:
        """One step of both methods where the size is new, so that neither is charged for what a first call costs.

        Not of what compiles, for which it would have to be all steps.
        """
        size = (config.attention, config.height, config.width, config.num_frames)
        if size in self.warm or config.stack.compile:
            return
        watch("Warming up")
        shared = {field.name: getattr(config, field.name) for field in dataclasses.fields(SamplingConfig)}
        methods = MethodsConfig(**shared, methods=(config.attention,))
        warm_up(model, methods, methods.batches()[0], progress=False)
        self.warm.add(size)


@contextlib.contextmanager
def _watched(pipe: Any, progress: Callable[..., object], stop: threading.Event) -> Iterator[Callable[[str], None]]:
    """While the block runs, every call of a layer tells the progress, or raises Cancelled once `stop` is set.

    Yields a function that is told what is computed from then on.
    """
    title, begun, last = "", 0.0, -1

    def begin(what: str) -> None:
        nonlocal title, last
        title, last = what, -1
        progress(0, desc=what)

    def call(module: torch.nn.Module, *_: Any) -> None:
        nonlocal begun, last
        if stop.is_set():
            raise Cancelled
        if module not in transformers:
            return
        step, steps, *_ = denoising_step(module, "the progress", "wait")
        if step == last:
            return
        now = time.perf_counter()
        begun, last = now if step == 0 else begun, step
        left = f", {seconds((now - begun) / step * (steps - step))} left" if step else ""
        progress((step, steps), desc=f"{title}: step {step + 1} of {steps}{left}", unit="steps")

    transformers = set(find_transformers(pipe).values())
    parts = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    hooks = [module.register_forward_pre_hook(call) for part in parts for module in part.modules()]
    try:
        yield begin
    finally:
        for hook in hooks:
            hook.remove()


def _note(text: str) -> str:
    return f'<p class="vm-note">{html.escape(text)}</p>'


def _error(text: str) -> str:
    return f'<p class="vm-error" role="alert">{html.escape(text)}</p>'


def _figures(videos: list[GeneratedVideo]) -> str:
    """Players beside each other, in step with the first, with their files."""
    figures = ""
    lead = "controls " + " ".join(f'on{event}="{_LEAD}"' for event in ("play", "pause", "seeked", "timeupdate"))
    for video in videos:
        files = {"video": video.video, "contact sheet": video.contact_sheet, "record": video.record_path}
        links = "".join(
            f'<a href="outputs/{path.name}" download>{name}</a>' for name, path in files.items() if path is not None
        )
        figures += (
            f'<figure><video src="outputs/{video.video.name}" {lead} loop muted autoplay playsinline></video>'
            f"<figcaption><b>{html.escape(_label(video))}</b><br>{links}</figcaption></figure>"
        )
        lead = ""
    return f'<div class="vm-videos">{figures}</div>'


def _label(video: GeneratedVideo) -> str:
    return str(video.record["config"]["attention"]["label"])


def _table(videos: list[GeneratedVideo], shares: dict[str, float | None], device: torch.device) -> str:
    """Seconds and attention FLOPs of each video, and how close the first is to the second."""
    rows = ""
    for video in videos:
        share = shares[_label(video)]
        cells = [_label(video), seconds(video.record["seconds"]["total"]), "–" if share is None else f"{share:.0%}"]
        if len(videos) > 1:
            near = ["–", "–"]
            if video is videos[0]:
                assert video.frames is not None and videos[1].frames is not None
                found = similarity(video.frames.to(device), videos[1].frames.to(device))
                near = [f"{found.psnr:.1f} dB" if math.isfinite(found.psnr) else "identical", f"{found.ssim:.4f}"]
            cells += near
        rows += f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"
    heads = ["attention", "time", "attn. FLOPs", "PSNR", "SSIM"][: 5 if len(videos) > 1 else 3]
    return f'<div class="vm-table"><table><tr>{"".join(f"<th>{head}</th>" for head in heads)}</tr>{rows}</table></div>'


def build_page(studio: Studio) -> gr.Blocks:
    """The components of the page, and what they do."""
    with gr.Blocks(title="vmonarch", analytics_enabled=False) as page:
        gr.Markdown("# vmonarch\nVideos from prompts by fast attention, beside the same videos by full attention.")
        with gr.Row():
            with gr.Column(scale=2, min_width=320):
                prompt = gr.Textbox(label="Prompt", lines=3, placeholder="What the video shows")
                gr.Examples([[text] for text in EXAMPLES], [prompt], label="Examples")
                model = gr.Dropdown(
                    list(studio.folders),
                    label="Model",
                    info="or the path of a folder with a diffusers pipeline" if studio.config.local else None,
                    allow_custom_value=studio.config.local,
                )
                choices = [(f"{name}: {text}", name) for name, text in METHODS.items()]
                attention = gr.Dropdown(choices, label="Attention")
                seed = gr.Textbox("0", label="Seed", info="the same seed is the same noise")
                compare = gr.Checkbox(True, label="Compare with full attention", info="makes the video a second time")
                with gr.Accordion("Advanced", open=False):
                    gr.Markdown("Empty fields take what the model recommends, shown in grey.")
                    with gr.Row():
                        steps = gr.Textbox(label="Steps", min_width=100)
                        guidance = gr.Textbox(label="Guidance", min_width=100)
                    with gr.Row():
                        width = gr.Textbox(label="Width", min_width=100)
                        height = gr.Textbox(label="Height", min_width=100)
                        frames = gr.Textbox(label="Frames", min_width=100)
                    negative = gr.Textbox(label="Negative prompt", lines=2)
                with gr.Row():
                    start = gr.Button("Generate", variant="primary", min_width=120)
                    stop = gr.Button("Cancel", min_width=120)
            with gr.Column(scale=3, min_width=320, elem_classes="vm-side"):
                status = gr.HTML()
                result = gr.HTML(_note("The video appears here."), min_height=320)
        fields = [prompt, model, attention, seed, steps, guidance, width, height, frames, negative]
        # Before the other listener: after one that is refused, the page calls none.
        start.click(studio.refuse, fields, status, queue=False, show_progress="hidden", api_visibility="private")
        running = start.click(
            studio.run,
            [*fields, compare],
            [result, status],
            validator=studio.check,
            show_progress_on=result,
            scroll_to_output=True,
            api_visibility="private",
        )
        # Two listeners: the second waits until the first has let the running thread end.
        stop.click(studio.cancel, None, status, queue=False, show_progress="hidden", api_visibility="private")
        stop.click(None, cancels=running)
        gr.on(
            [model.change, page.load], studio.defaults, model, fields[4:], show_progress="hidden", queue=False,
            api_visibility="private",
        )  # fmt: skip
        page.unload(studio.leave)
    # One video at a time; who comes next sees the place in the queue.
    return page.queue(default_concurrency_limit=1, api_open=False)


def build_app(studio: Studio) -> Any:
    """The page as an ASGI application that answers to nothing but `_NEEDED`, and to no other site's pages."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.mount("/outputs", StaticFiles(directory=studio.output))
    # System fonts, for which no server has to be asked.
    theme = gr.themes.Default(
        primary_hue="blue", font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
    )
    gr.mount_gradio_app(
        app,
        build_page(studio),
        "/",
        theme=theme,
        css=_CSS,
        footer_links=[],
        run_history=False,
        ssr_mode=False,
        mcp_server=False,
        pwa=False,
        enable_monitoring=False,
    )

    hosts = {"localhost", "127.0.0.1", "::1", studio.config.host}

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        answer: Any = app
        if scope["type"] == "http":
            headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
            host, origin = headers.get(b"host", ""), headers.get(b"origin")
            # Another site's name that is made to point here would make its pages ours.
            if studio.config.local and re.sub(r":\d+$", "", host).strip("[]") not in hosts:
                answer = PlainTextResponse("Invalid host header", 400)
            # Files and sandboxed frames have the origin "null".
            elif not _NEEDED.fullmatch(scope["path"]) or origin not in (None, f"http://{host}", f"https://{host}"):
                answer = PlainTextResponse("Not found", 404)
        await answer(scope, receive, send)

    return guarded


class PageServer(uvicorn.Server):
    """The page, listening: `with` its socket, `run()` blocks until Ctrl-C.

    Raises:
        InputError: the address cannot be listened on.
    """

    def __init__(self, config: PageConfig) -> None:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        try:
            self.socket = socket.create_server((config.host, config.port), family=family)
        except OSError as error:
            raise InputError("port", f"{config.port} of {config.host} cannot be had: {error.strerror}") from error
        self.studio = Studio(config)
        # A browser keeps its connection open as long as it shows the page.
        super().__init__(uvicorn.Config(build_app(self.studio), log_level="warning", timeout_graceful_shutdown=1))

    @property
    def url(self) -> str:
        """Where the page is."""
        host, port = self.socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def serve_forever(self) -> None:
        """Answer until the process is told to end."""
        self.run(sockets=[self.socket])

    def handle_exit(self, sig: int, frame: Any) -> None:
        """As uvicorn's; it would wait for a video in work."""
        for stop in list(self.studio.stops.values()):
            stop.set()
        super().handle_exit(sig, frame)
