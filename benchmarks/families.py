"""The engines on models that nobody here wrote: which one is taken, what it costs, and how far its answers are off.

`python -m benchmarks.families [NAME…]`, or `make families`. Models are the transformers library's, small and random;
each is started twice through `serve`, on an empty store and again.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_model
from torch import Tensor, nn

from benchmarks.process import Sidecar

WIDTH, LAYERS, HEADS, VOCABULARY = 128, 3, 4, 1000
Sizes = Mapping[str, list[int]]


class Named(nn.Module):
    """A library's model that takes its inputs by position and answers with one tensor."""

    def __init__(self, model: nn.Module, names: Sequence[str], answer: str, **fixed: Any) -> None:
        super().__init__()
        self.model, self.names, self.answer, self.fixed = model, tuple(names), answer, fixed

    def forward(self, *tensors: Tensor) -> Tensor:
        """Call the model by name; shapes are those of the configuration."""
        found: Tensor = self.model(**dict(zip(self.names, tensors, strict=True)), **self.fixed)[self.answer]
        return found


@dataclass(frozen=True)
class Family:
    """One model and its configuration: `dimensions` → the sizes that are warmed, `ids` and `masks` by shape."""

    what: str
    build: Callable[[], nn.Module]
    inputs: Sequence[Mapping[str, Any]]
    output: Sequence[Any]
    answer: str
    dimensions: Sizes
    fixed: Mapping[str, Any]


def family(name: str) -> nn.Module:
    """Build one; the factory that the configuration names."""
    one = FAMILIES[name]
    return Named(one.build(), [row["name"] for row in one.inputs], one.answer, **one.fixed)


def _ids(name: str, *shape: str) -> dict[str, Any]:
    return {"name": name, "datatype": "INT64", "shape": list(shape), "pad": 0, "low": 1, "high": VOCABULARY}


def _mask(name: str, *shape: str) -> dict[str, Any]:
    return {"name": name, "datatype": "INT64", "shape": list(shape), "pad": 0, "low": 1, "high": 2}


IMAGE = {"name": "pixel_values", "datatype": "FP32", "shape": ["batch", 3, 64, 64], "pad": 0}
TEXT = {"batch": [1, 4], "sequence": [16, 64]}
PICTURES = {"batch": [1, 4]}
COMMON = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 512}

FAMILIES: dict[str, Family] = {
    "bert": Family(
        "encoder",
        lambda: transformers.BertModel(transformers.BertConfig(vocab_size=VOCABULARY, **COMMON)),
        [_ids("input_ids", "batch", "sequence"), _mask("attention_mask", "batch", "sequence")],
        ["batch", "sequence", WIDTH],
        "last_hidden_state",
        TEXT,
        {},
    ),
    "llama": Family(
        "decoder without cache",
        lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCABULARY, **COMMON)),
        [_ids("input_ids", "batch", "sequence")],
        ["batch", "sequence", VOCABULARY],
        "logits",
        TEXT,
        {"use_cache": False},
    ),
    "gpt2": Family(
        "decoder without cache, tied head",
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=128)
        ),
        [_ids("input_ids", "batch", "sequence")],
        ["batch", "sequence", VOCABULARY],
        "logits",
        TEXT,
        {"use_cache": False},
    ),
    "vit": Family(
        "vision transformer",
        lambda: transformers.ViTModel(transformers.ViTConfig(image_size=64, patch_size=8, **COMMON)),
        [IMAGE],
        ["batch", 65, WIDTH],
        "last_hidden_state",
        PICTURES,
        {},
    ),
    "resnet": Family(
        "convolution net",
        lambda: transformers.ResNetModel(
            transformers.ResNetConfig(embedding_size=16, hidden_sizes=[32, 64, 128], depths=[2, 2, 2])
        ),
        [IMAGE],
        ["batch", 128, 1, 1],
        "pooler_output",
        PICTURES,
        {},
    ),
    "t5": Family(
        "encoder–decoder step",
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=VOCABULARY, d_model=WIDTH, d_kv=32, d_ff=512, num_layers=LAYERS, num_heads=HEADS
            )
        ),
        [
            _ids("input_ids", "batch", "source"),
            _mask("attention_mask", "batch", "source"),
            _ids("decoder_input_ids", "batch", "target"),
        ],
        ["batch", "target", VOCABULARY],
        "logits",
        {"batch": [1, 4], "source": [32], "target": [8]},
        {"use_cache": False},
    ),
    "mamba": Family(
        "loops over the sequence: cannot be exported for every length",
        lambda: transformers.MambaForCausalLM(
            transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, state_size=8)
        ),
        [_ids("input_ids", "batch", "sequence")],
        ["batch", "sequence", VOCABULARY],
        "logits",
        {"batch": [1], "sequence": [8, 16]},
        {"use_cache": False},
    ),
}


def measure(name: str, directory: Path) -> list[str]:
    """Start a family twice and return its row."""
    torch.manual_seed(7)
    save_model(family(name).eval(), str(directory / "model.safetensors"))
    config = directory / "config.json"
    config.write_text(json.dumps(configuration(name, directory)))
    reports = []
    for _ in range(2):
        with Sidecar(directory / "store", config=config) as sidecar:
            sidecar.wait()
            reports.append(sidecar.status())
    cold, warm = reports
    outcomes = [report["artifacts"]["outcome"] for report in reports]
    took = {one["name"]: (one["end_s"] or 0) - (one["start_s"] or 0) for one in cold["stages"]}
    again = {one["name"]: (one["end_s"] or 0) - (one["start_s"] or 0) for one in warm["stages"]}
    return [
        name,
        FAMILIES[name].what,
        cold["artifacts"]["engine"],
        " → ".join(outcomes),
        f"{took['build-artifact']:.1f} s",
        f"{(again['find-artifact'] + again['bind-engine']) * 1e3:.0f} ms",
        f"{max(bucket['max_error'] for bucket in cold['buckets']):.2g}",
        "" if cold["artifacts"]["engine"] == "aot" else cold["artifacts"]["why"],
    ]


def configuration(name: str, directory: Path) -> dict[str, Any]:
    """Return the configuration of a family."""
    one = FAMILIES[name]
    return {
        "model": {
            "name": name,
            "factory": "benchmarks.families:family",
            "kwargs": {"name": name},
            "checkpoint": str(directory / "model.safetensors"),
        },
        "inputs": list(one.inputs),
        "outputs": [{"name": "answer", "datatype": "FP32", "shape": list(one.output)}],
        "dimensions": {
            name: {"min": 1 if name == "batch" else 2, "max": 2 * max(sizes), "buckets": sizes}
            for name, sizes in one.dimensions.items()
        },
        "http": {"host": "127.0.0.1", "drain_delay_s": 0},
    }


def main() -> None:
    """Print the table."""
    table = Table("model", "family", "engine", "outcomes", "build", "look-up and restore", "largest error", "why")
    for name in sys.argv[1:] or FAMILIES:
        directory = Path(tempfile.mkdtemp(prefix="warmgate-families-"))
        table.add_row(*measure(name, directory))
        shutil.rmtree(directory, ignore_errors=True)
    Console(width=180).print(table)


if __name__ == "__main__":
    main()
