"""Checks that the processor, model and engine of a deployment fit together. Plug-ins are not checked."""

from __future__ import annotations

from tensorferry.pipeline.deployment.spec import Deployment
from tensorferry.stages.adapters.registry import embedding_form, patches_taken
from tensorferry.stages.engines.registry import embedding_width
from tensorferry.stages.plugin import bad_config
from tensorferry.stages.processors.registry import patches_made


def check_pairs(deployment: Deployment) -> None:
    """Raise ConfigError that names key, both sides and the remedy if each request with media would fail."""
    model, tokenizer, scheduler = deployment.model, deployment.tokenizer, deployment.scheduler
    made, taken = patches_made(tokenizer.processor, tokenizer.options), patches_taken(model)
    if made is not None and taken is not None and made != taken:
        makes = f"{tokenizer.processor} makes patches of {made.features} numbers"
        takes = f"{model.adapter} takes them of {taken.features}"
        if made.blocks != taken.blocks:
            ways = "row by row", "block by block"
            problem = f"{tokenizer.processor} makes patches {ways[made.blocks]}, and {model.adapter} takes them"
            raise bad_config(
                "tokenizer.processor", f"{problem} {ways[taken.blocks]}; choose the one made for the model"
            )
        if made.features != taken.features:
            raise bad_config("tokenizer.options", f"{makes}, and {takes}; make patch_size and the model's agree")
        problem = f"{tokenizer.processor} merges {made.merge} patches a side, and {model.adapter} merges {taken.merge}"
        raise bad_config("tokenizer.options.merge_size", f"{problem}; make them equal")
    form, width = embedding_form(model), embedding_width(scheduler)
    if form is not None and width is not None and (form.width != width or "float" not in form.dtype):
        problem = f"{scheduler.engine} takes floating-point embeddings of width {width}"
        found = f"{model.adapter} makes {form.dtype} of width {form.width}"
        raise bad_config("scheduler.options", f"{problem}, and {found}; choose a model and an engine of one width")
