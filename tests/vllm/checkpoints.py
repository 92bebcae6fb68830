"""Tiny checkpoints of Qwen3-VL and Qwen2.5-VL with random weights, which transformers and vLLM both load.

Their weights are large, so that the best logit of a prompt leads by much more than two engines differ by rounding: a
greedy token is then the same of any engine that computes the same thing.

`checkpoints.py FAMILY FOLDER` writes a checkpoint, two images and `answers.json`: transformers' answers to `PROMPT`
behind none, one and two of the images, the least lead of a best logit, and the images' grids. A process of its own,
because transformers warns.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip
FAMILIES = ("qwen3_vl", "qwen2_5_vl")
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"  #: of one image in a prompt
HIDDEN = 128
PROMPT = "What is this?"
MAX_TOKENS = 24


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token for each byte, and the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({token: number for number, token in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    return transformers.Qwen2TokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=4096
    )


def config(family: str, ids: dict[str, int]) -> Any:
    text = {
        "vocab_size": 320,
        "hidden_size": HIDDEN,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    tokens = {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }
    if family == "qwen3_vl":
        text["rope_scaling"] = {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True}
        vision = {
            "depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "patch_size": 16,
            "out_hidden_size": HIDDEN, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "initializer_range": 0.2,
        }  # fmt: skip
        return transformers.Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **tokens)
    del text["head_dim"]
    text["rope_scaling"] = {"rope_type": "default", "mrope_section": [6, 5, 5]}
    vision = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "patch_size": 14,
        "out_hidden_size": HIDDEN, "window_size": 56, "fullatt_block_indexes": [1], "spatial_merge_size": 2,
        "temporal_patch_size": 2, "initializer_range": 0.2,
    }  # fmt: skip
    return transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **tokens)


def make(family: str, folder: Path, seed: int = 1) -> Path:
    """Write a checkpoint into a new folder, which is returned."""
    tokens = tokenizer()
    ids = {token: tokens.convert_tokens_to_ids(token) for token in SPECIAL}
    torch.manual_seed(seed)
    kind = {
        "qwen3_vl": transformers.Qwen3VLForConditionalGeneration,
        "qwen2_5_vl": transformers.Qwen2_5_VLForConditionalGeneration,
    }[family]
    model = kind(config(family, ids)).eval().float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, 1.6 / weight[0].numel() ** 0.5 if "embed" not in name else 1.0)
        model.lm_head.weight.mul_(4.0)
    model.generation_config = transformers.GenerationConfig(do_sample=False, eos_token_id=ids["<|im_end|>"])
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)
    patch = 16 if family == "qwen3_vl" else 14
    pixels = {"shortest_edge": (2 * patch) ** 2, "longest_edge": 64 * (2 * patch) ** 2}
    images = transformers.Qwen2VLImageProcessor(
        patch_size=patch, merge_size=2, temporal_patch_size=2, size=pixels, min_pixels=None, max_pixels=None
    )
    videos = {"qwen3_vl": transformers.Qwen3VLVideoProcessor, "qwen2_5_vl": transformers.Qwen2VLVideoProcessor}[family](
        patch_size=patch, merge_size=2, temporal_patch_size=2
    )
    processor = {"qwen3_vl": transformers.Qwen3VLProcessor, "qwen2_5_vl": transformers.Qwen2_5_VLProcessor}[family]
    processor(images, tokens, videos).save_pretrained(folder)
    return folder


def answer(folder: Path, prompt: str, images: list[Any], max_tokens: int) -> tuple[list[int], float]:
    """transformers' greedy tokens, and by how much the best logit led at least."""
    processor = transformers.AutoProcessor.from_pretrained(folder)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = processor(text=[prompt], images=images or None, return_tensors="pt")
    made = model.generate(
        **inputs, max_new_tokens=max_tokens, do_sample=False, return_dict_in_generate=True, output_scores=True
    )
    best = [score.topk(2).values[0] for score in made.scores]
    tokens = made.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return tokens, min(float(pair[0] - pair[1]) for pair in best)


def main(family: str, folder: Path) -> None:
    make(family, folder)
    images = [Image.radial_gradient("L").resize((160, 128)).convert("RGB"), Image.effect_noise((128, 96), 90.0)]
    images[1] = Image.merge("RGB", [images[1].rotate(90 * turn) for turn in range(3)])
    for number, image in enumerate(images):
        image.save(folder / f"{number}.png")
    answers = [answer(folder, PLACE * number + PROMPT, images[:number], MAX_TOKENS) for number in range(3)]
    found = {"tokens": [tokens for tokens, _ in answers], "lead": min(lead for _, lead in answers)}
    found["grids"] = [grid(folder, image) for image in images]
    (folder / "answers.json").write_text(json.dumps(found))


def grid(folder: Path, image: Any) -> list[int]:
    """The patches of an image along time, height and width."""
    processor = transformers.AutoProcessor.from_pretrained(folder)
    found: list[int] = processor.image_processor(images=[image], return_tensors="pt")["image_grid_thw"][0].tolist()
    return found


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
