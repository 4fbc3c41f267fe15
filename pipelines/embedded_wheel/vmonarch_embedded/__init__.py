"""A tiny Wan text-to-video model in `model/`, and its adapter for Based; `vmonarch.pipelines.embedded` finds them."""
