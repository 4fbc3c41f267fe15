"""VMonarch: structured attention that makes video diffusion transformers fast.

    pipe = diffusers.WanPipeline.from_pretrained(...)
    pipe.set_attn_processor(vmonarch.VMonarchProcessor())
    vmonarch.restore(pipe)

This folder holds the processors, the attention stacks that `apply` makes of them for a model, plans, residuals, context
parallelism, adapters and other engines. The modules import `kernels` and, for methods by name, `configs`, but nothing
from `pipelines`, `finetune`, `eval` or `cli`. Begin with `options.py` and `processors.py`, then `base.py`, whose
`stack` is built from the elements in `attend.py`; docs/architecture.md follows one call.

Importing this package is cheap: a name loads what it needs on first use. The first name that is about models gives
diffusers' pipelines `set_attn_processor` (`vmonarch.diffusers_hook`).
"""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from typing import TYPE_CHECKING, Any

from vmonarch.requirements import unsupported_versions

# Public names by module. They are resolved on first use, so that `import vmonarch` never loads diffusers.
_OFFERED = {
    "requirements": ("__version__",),
    "grid": ("LatentGrid",),
    "options": ("ExactBlocks", "VMonarchOptions", "FirstOrderOptions", "TwoResolutionOptions"),
    "plan": ("AttentionPlan",),
    "kernels.merge.api": ("merge_partials",),
    "kernels.flash_bias.api": ("flash_bias_attention",),
    "kernels.flash_entropy.api": ("flash_entropy_attention",),
    "kernels.int8.api": ("int8_attention",),
    "kernels.taylor.api": ("taylor_attention",),
    "kernels.window.api": ("window_attention",),
    "kernels.two_resolution.api": ("two_resolution_attention",),
    "kernels.first_order.api": ("first_order_attention",),
    "kernels.monarch.api": ("monarch_attention", "vmonarch_attention"),
    "refresh": ("Refresh",),
    "processors": (
        "VMonarchProcessor", "FlashBiasProcessor", "TwoResolutionProcessor", "FirstOrderProcessor", "presets"),
    "based": ("BasedProcessor",),
    "installation": ("apply", "restore"),
    "reports": ("report",),
    "adapters": ("save_adapter", "load_adapter"),
}  # fmt: skip
_OF_MODELS = ("processors", "based", "installation", "adapters")
_MODULES = {name: module for module, names in _OFFERED.items() for name in names}
_PACKAGES = ("bias", "configs", "eval", "finetune", "pipelines")

__all__ = [*_MODULES]

if TYPE_CHECKING:
    from vmonarch import bias as bias
    from vmonarch import configs as configs
    from vmonarch import eval as eval
    from vmonarch import finetune as finetune
    from vmonarch import pipelines as pipelines
    from vmonarch.adapters import load_adapter as load_adapter
    from vmonarch.adapters import save_adapter as save_adapter
    from vmonarch.based import BasedProcessor as BasedProcessor
    from vmonarch.grid import LatentGrid as LatentGrid
    from vmonarch.installation import apply as apply
    from vmonarch.installation import restore as restore
    from vmonarch.kernels.first_order.api import first_order_attention as first_order_attention
    from vmonarch.kernels.flash_bias.api import flash_bias_attention as flash_bias_attention
    from vmonarch.kernels.flash_entropy.api import flash_entropy_attention as flash_entropy_attention
    from vmonarch.kernels.int8.api import int8_attention as int8_attention
    from vmonarch.kernels.merge.api import merge_partials as merge_partials
    from vmonarch.kernels.monarch.api import monarch_attention as monarch_attention
    from vmonarch.kernels.monarch.api import vmonarch_attention as vmonarch_attention
    from vmonarch.kernels.taylor.api import taylor_attention as taylor_attention
    from vmonarch.kernels.two_resolution.api import two_resolution_attention as two_resolution_attention
    from vmonarch.kernels.window.api import window_attention as window_attention
    from vmonarch.options import ExactBlocks as ExactBlocks
    from vmonarch.options import FirstOrderOptions as FirstOrderOptions
    from vmonarch.options import TwoResolutionOptions as TwoResolutionOptions
    from vmonarch.options import VMonarchOptions as VMonarchOptions
    from vmonarch.plan import AttentionPlan as AttentionPlan
    from vmonarch.processors import FirstOrderProcessor as FirstOrderProcessor
    from vmonarch.processors import FlashBiasProcessor as FlashBiasProcessor
    from vmonarch.processors import TwoResolutionProcessor as TwoResolutionProcessor
    from vmonarch.processors import VMonarchProcessor as VMonarchProcessor
    from vmonarch.processors import presets as presets
    from vmonarch.refresh import Refresh as Refresh
    from vmonarch.reports import report as report
    from vmonarch.requirements import __version__ as __version__


def __getattr__(name: str) -> Any:
    if name not in (offered := {*_MODULES, *_PACKAGES}):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(sorted(offered))}")
    if name != "__version__":
        for sentence in unsupported_versions().values():
            warnings.warn(sentence, stacklevel=2)
    if _MODULES.get(name) in _OF_MODELS:
        importlib.import_module("vmonarch.diffusers_hook")
    place = f"vmonarch.{name}" if name in _PACKAGES else f"vmonarch.{_MODULES[name]}:{name}"
    # Later lookups find it at once.
    value = globals()[name] = pkgutil.resolve_name(place)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_PACKAGES})
