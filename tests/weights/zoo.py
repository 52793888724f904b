"""Models that nobody here wrote, as the transformers library builds, saves and loads them: tiny, random, seeded.

The library writes safetensors only, since its version 5; `.bin` files are written here as its version 4 wrote them: the
whole state dict with both names of every tie, through `torch.save`, in shards that `huggingface_hub` plans.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

Kind = Literal["safetensors", "bin"]
KINDS: tuple[Kind, ...] = ("safetensors", "bin")
Tensors = dict[str, torch.Tensor]
SEED = 20


@dataclass(frozen=True, slots=True)
class Case:
    """One model and how its own library stores it.

    `build`: what a factory returns, on the meta device too; it answers to every name that the files use. `save`: writes
    a model with random values in every stored tensor (the same ones every time) and returns it. `reload`: the library's
    own way back. `inputs`: keyword arguments of the forward. `waive_missing`, `waive_unexpected`: globs that the
    settings need for these files. `renamed`: the library gives the file other names than the module has.
    """

    name: str
    family: str
    build: Callable[[], nn.Module]
    save: Callable[[Path, Kind, bool], nn.Module]
    reload: Callable[[Path], nn.Module]
    inputs: Callable[[], Tensors]
    waive_missing: tuple[str, ...] = ()
    waive_unexpected: tuple[str, ...] = ()
    renamed: bool = False


def build(name: str) -> nn.Module:
    """Build the model of a case; the factory `tests.weights.zoo:build` for settings that name it."""
    return CASES[name].build()


def fill(module: nn.Module) -> nn.Module:
    """Give every stored tensor random values, so that no two are alike; return the module in evaluation mode."""
    generator = torch.Generator().manual_seed(SEED)
    for name, tensor in module.state_dict().items():
        if not tensor.is_floating_point():
            tensor.random_(1, 1000, generator=generator)
        elif name.endswith("running_var"):
            tensor.uniform_(0.5, 1.5, generator=generator)
        else:
            tensor.normal_(0, 0.2, generator=generator)
    return module.eval()


def shard_size(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return a limit that makes at least two shards of these tensors."""
    total: int = sum(tensor.nbytes for tensor in tensors.values())
    return max(1, total // 3)


def save_state(state: Tensors, directory: Path, kind: Kind, sharded: bool) -> None:
    """Write a state dict, with an index where it is sharded, as `huggingface_hub` does for any library."""
    from huggingface_hub import save_torch_state_dict

    limit = shard_size(state) if sharded else "50GB"
    save_torch_state_dict(state, directory, safe_serialization=kind == "safetensors", max_shard_size=limit)


def answers(module: nn.Module, inputs: Tensors) -> Tensors:
    """Run the forward and return the tensors of its output by name."""
    with torch.no_grad():
        output = module(**inputs)
    if isinstance(output, torch.Tensor):
        return {"output": output}
    return {name: value for name, value in output.items() if isinstance(value, torch.Tensor)}


def own_names(model: Any) -> Tensors:
    """Return everything stored in a transformers model under the names that the library's files use."""
    from transformers.core_model_loading import revert_weight_conversion

    # Buffers and parameters as the objects they are, not the detached views of a state dict: ties stay visible.
    stored = model.state_dict().keys()
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return dict(revert_weight_conversion(model, {name: tensor for name, tensor in named if name in stored}))


def with_second_names(model: nn.Module) -> nn.Module:
    """Let a module answer to the names in its library's files too, as ties: what a factory does where names differ.

    Containers for the missing parts of each path are added; the forward never sees them.
    """
    first = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in own_names(model).items():
        if name in first:
            continue
        if not any(tensor is known for known in first.values()):
            raise ValueError(f"{name} is not one parameter under another name: the library computes it")
        owner = model
        *path, last = name.split(".")
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(last, tensor)
    return model


@dataclass(frozen=True, slots=True)
class Recipe:
    """A transformers model: the class and the settings of its configuration.

    `change`: what a factory does to the module that the class builds. `extras`: what old files hold besides.
    """

    model: str
    settings: dict[str, Any]
    dtype: torch.dtype = torch.float32
    change: Callable[[Any], None] = lambda model: None
    extras: Callable[[], Tensors] = dict

    def find(self) -> Any:
        import transformers

        return getattr(transformers, self.model)

    def construct(self) -> nn.Module:
        model = self.find()
        torch.manual_seed(SEED)
        module = model._from_config(model.config_class(**copy.deepcopy(self.settings)), dtype=self.dtype)
        self.change(module)
        return module

    def construct_with_second_names(self) -> nn.Module:
        return with_second_names(self.construct())

    def save(self, directory: Path, kind: Kind, sharded: bool) -> nn.Module:
        model: Any = fill(self.construct())
        if kind == "safetensors":
            state = {**model.state_dict(), **self.extras()}
            limit = shard_size(state) if sharded else "50GB"
            model.save_pretrained(directory, state_dict=state, max_shard_size=limit)
        else:
            model.config.architectures = [self.model]
            model.config.save_pretrained(directory)
            state = {name: tensor.detach() for name, tensor in own_names(model).items()}
            save_state({**state, **self.extras()}, directory, kind, sharded)
        return model

    def reload(self, directory: Path) -> nn.Module:
        return self.find().from_pretrained(directory, local_files_only=True)


def _case(
    name: str,
    family: str,
    recipe: Recipe,
    inputs: Callable[[], Tensors],
    waive_unexpected: tuple[str, ...] = (),
    renamed: bool = False,
) -> Case:
    construct = recipe.construct_with_second_names if renamed else recipe.construct
    return Case(
        name=name,
        family=family,
        build=construct,
        save=recipe.save,
        reload=recipe.reload,
        inputs=inputs,
        waive_unexpected=waive_unexpected,
        renamed=renamed,
    )


VOCABULARY, POSITIONS, IMAGE = 50, 16, 16


def _tokens(*names: str, length: int = 7) -> Tensors:
    generator = torch.Generator().manual_seed(SEED)
    return {name: torch.randint(3, VOCABULARY, (2, length), generator=generator) for name in names or ("input_ids",)}


def _masked() -> Tensors:
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[1, 5:] = 0
    return {**_tokens(), "attention_mask": mask}


def _pictures() -> Tensors:
    return {"pixel_values": torch.rand(2, 3, IMAGE, IMAGE, generator=torch.Generator().manual_seed(SEED))}


def _captioned() -> Tensors:
    return {**_masked(), **_pictures()}


def _sound() -> Tensors:
    features = torch.rand(2, 8, 2 * POSITIONS, generator=torch.Generator().manual_seed(SEED))
    return {"input_features": features, **_tokens("decoder_input_ids")}


def _head_of_its_own(model: Any) -> None:
    # The library ties the head of every T5 and unties it only when it finds two different tensors in the files.
    model.lm_head.weight = nn.Parameter(torch.zeros_like(model.lm_head.weight))


def _position_ids() -> Tensors:
    return {"bert.embeddings.position_ids": torch.arange(POSITIONS).unsqueeze(0)}


def _causal_masks() -> Tensors:
    mask = torch.ones(1, 1, POSITIONS, POSITIONS).tril()
    return {f"transformer.h.{layer}.attn.bias": mask.clone() for layer in range(2)}


ENCODER = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TEXT = {**ENCODER, "vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS}
DECODER = {**TEXT, "num_key_value_heads": 1, "head_dim": 8, "use_cache": False}
VISION = {**ENCODER, "image_size": IMAGE, "patch_size": 8}
GPT2 = {"vocab_size": VOCABULARY, "n_positions": POSITIONS, "n_embd": 16, "n_layer": 2, "n_head": 2, "use_cache": False}
T5 = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
T5_GATED = T5 | {"tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"}
WHISPER = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "num_mel_bins": 8,
    "max_source_positions": POSITIONS,
    "max_target_positions": POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "use_cache": False,
}
SWIN = {"image_size": IMAGE, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic"}
CONVNEXT = {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2, "patch_size": 4, "image_size": IMAGE}
CLIP = {
    "text_config": {**TEXT, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1},
    "vision_config": VISION,
    "projection_dim": 16,
}
MAMBA = {"vocab_size": VOCABULARY, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "use_cache": False}
_PAIR = partial(_tokens, "input_ids", "decoder_input_ids")

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        _case("bert", "BERT, word embeddings and output bias tied", Recipe("BertForMaskedLM", TEXT), _masked),
        _case("bert_bare", "BERT without a head: no prefix in the names", Recipe("BertModel", TEXT), _masked),
        _case(
            "bert_positions",
            "BERT in a file from before version 4.31: with its position numbers",
            Recipe("BertForMaskedLM", TEXT, extras=_position_ids),
            _masked,
            waive_unexpected=("*.position_ids",),
        ),
        _case("gpt2", "GPT-2, head tied", Recipe("GPT2LMHeadModel", GPT2), _tokens),
        _case(
            "gpt2_masks",
            "GPT-2 in a file from before version 4.30: with its causal masks",
            Recipe("GPT2LMHeadModel", GPT2, extras=_causal_masks),
            _tokens,
            waive_unexpected=("*.attn.bias",),
        ),
        _case(
            "llama",
            "Llama, head of its own",
            Recipe("LlamaForCausalLM", DECODER | {"tie_word_embeddings": False}),
            _tokens,
        ),
        _case(
            "llama_tied",
            "Llama, head tied",
            Recipe("LlamaForCausalLM", DECODER | {"tie_word_embeddings": True}),
            _tokens,
        ),
        _case("t5", "T5, four names for one embedding", Recipe("T5ForConditionalGeneration", T5), _PAIR),
        _case(
            "t5_untied",
            "T5 1.1, head of its own, three names for one embedding",
            Recipe("T5ForConditionalGeneration", T5_GATED, change=_head_of_its_own),
            _PAIR,
        ),
        _case(
            "mistral",
            "Mistral in bfloat16, rotary buffers in float32",
            Recipe("MistralForCausalLM", DECODER | {"sliding_window": 4}, dtype=torch.bfloat16),
            _tokens,
        ),
        _case(
            "qwen2", "Qwen 2, head tied", Recipe("Qwen2ForCausalLM", DECODER | {"tie_word_embeddings": True}), _tokens
        ),
        _case(
            "qwen3", "Qwen 3, head tied", Recipe("Qwen3ForCausalLM", DECODER | {"tie_word_embeddings": True}), _tokens
        ),
        _case("whisper", "Whisper, head tied", Recipe("WhisperForConditionalGeneration", WHISPER), _sound),
        _case(
            "vit", "ViT, other names in the file", Recipe("ViTForImageClassification", VISION), _pictures, renamed=True
        ),
        _case(
            "swin",
            "Swin, index buffers, other names in the file",
            Recipe("SwinForImageClassification", SWIN),
            _pictures,
            renamed=True,
        ),
        _case("resnet", "ResNet, batch-norm buffers", Recipe("ResNetForImageClassification", RESNET), _pictures),
        _case("convnext", "ConvNeXt", Recipe("ConvNextForImageClassification", CONVNEXT), _pictures),
        _case("clip", "CLIP, two towers", Recipe("CLIPModel", CLIP), _captioned),
        _case("mamba", "Mamba, head tied", Recipe("MambaForCausalLM", MAMBA), _tokens),
    )
}
