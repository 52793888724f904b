"""Models that nobody here wrote, as the transformers library builds, saves and loads them: tiny, random, seeded.

The library writes safetensors only, since its version 5; `.bin` files are written here as its version 4 wrote them: the
whole state dict with both names of every tie, through `torch.save`, in shards that `huggingface_hub` plans.

What our loader makes of the files is compared with what the library makes of them; each case is a row of a table.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from app.checkpoints import open_checkpoint
from app.progress import Progress
from app.settings import Model, Waive
from app.weights import LoadedModel
from app.weights.install import install
from app.weights.layout import Mode, plan_layout
from app.weights.plan import plan_weights
from app.weights.reading import read_resident
from app.weights.skeleton import build_skeleton, meta_left, named_tensors

Kind = Literal["safetensors", "bin"]
KINDS: tuple[Kind, ...] = ("safetensors", "bin")
MODES: tuple[Mode, ...] = ("map", "read")
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


@dataclass(frozen=True, slots=True)
class Stored:
    """Files of a case as its library wrote them, and the model that it loads from them."""

    case: Case
    kind: Kind
    sharded: bool
    directory: Path
    theirs: nn.Module = field(repr=False)


def store(case: Case, kind: Kind, sharded: bool, directory: Path, row: "Row") -> Stored:
    """Let the library write and read a case; raises ValueError where it does not read what it has written.

    Where that fails, so have the checks of these files.
    """
    try:
        saved = case.save(directory, kind, sharded)
        theirs = case.reload(directory)
        mine, back = saved.state_dict(), theirs.state_dict()
        if mine.keys() != back.keys() or any(_facts(mine[name]) != _facts(back[name]) for name in mine):
            raise ValueError(f"{case.name}: the library reads {kind} files back as another model than it has written")
    except Exception:
        row.begin(*((kind, sharded, mode) for mode in MODES))
        raise
    return Stored(case, kind, sharded, directory, theirs)


def load(factory: str, case: Case, directory: Path, mode: Mode) -> LoadedModel:
    """Load the files of a case with our loader, from the path to the module; raises CheckpointError."""
    waive = Waive(missing=list(case.waive_missing), unexpected=list(case.waive_unexpected))
    model = Model(name="zoo", factory=factory, kwargs={"name": case.name}, checkpoint=directory, waive=waive)
    checkpoint = open_checkpoint(directory)
    try:
        skeleton = build_skeleton(model)
        plan = plan_weights(skeleton.table, checkpoint, model)
        layout = plan_layout(checkpoint, mode, "test", None)
        resident = read_resident(checkpoint, layout, Progress(), 8 << 20, {})
        if bool(resident.memory.maps) != (mode == "map"):
            raise ValueError(f"{case.name}: mode {mode} has mapped {len(resident.memory.maps)} file(s)")
        return install(skeleton, checkpoint, resident.memory, plan)
    finally:
        checkpoint.close()


def differences(ours: nn.Module, theirs: nn.Module, second: Iterable[str] = ()) -> list[str]:
    """Say how a module of ours differs from the library's; `second`: names that it may have besides, as ties."""
    mine, wanted = dict(named_tensors(ours)), dict(named_tensors(theirs))
    shared = mine.keys() & wanted.keys()
    known = {id(mine[name]) for name in shared}
    allowed = {name for name in second if name in mine and id(mine[name]) in known}
    found = [] if type(ours) is type(theirs) else [f"is a {type(ours).__name__}, not a {type(theirs).__name__}"]
    found += [f"{name} is missing" for name in wanted if name not in mine]
    found += [f"{name} is not the library's" for name in mine if name not in wanted and name not in allowed]
    ours_stored, theirs_stored = ours.state_dict().keys(), theirs.state_dict().keys()
    found += [f"{name} is stored in one module only" for name in shared & (ours_stored ^ theirs_stored)]
    for name in sorted(shared):
        if isinstance(mine[name], nn.Parameter) != isinstance(wanted[name], nn.Parameter):
            found.append(f"{name} is a parameter in one module only")
        if (one := _facts(mine[name])) != (other := _facts(wanted[name])):
            found.append(f"{name} is {one[:3]}, not {other[:3]}" if one[:3] != other[:3] else f"{name} has other bits")
    groups = [_groups({name: side[name] for name in shared}) for side in (mine, wanted)]
    if lone := groups[0] ^ groups[1]:
        found.append(f"ties differ: {sorted(sorted(names) for names in lone)}")
    found += [f"{name} is on meta" for name in meta_left(ours)]
    found += [f"{name} requires a gradient" for name, tensor in mine.items() if tensor.requires_grad]
    return found + [f"{name or 'the model'} is in training" for name, part in ours.named_modules() if part.training]


def _facts(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...], bytes]:
    # Bytes, not values: a NaN is the same as itself, and zero is not minus zero.
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), data


def _groups(tensors: Tensors) -> set[frozenset[str]]:
    """Return the sets of names that are one object; most have one name."""
    names: dict[int, set[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), set()).add(name)
    return {frozenset(group) for group in names.values()}


Check = tuple[Kind, bool, Mode]
CHECKS: tuple[Check, ...] = tuple(
    (kind, sharded, mode) for kind in KINDS for sharded in (False, True) for mode in MODES
)
COLUMNS = (
    "model", "class", "tensors", "ties", "rebuilt",
    "safetensors, one file", "safetensors, shards", "bin, one file", "bin, shards", "outputs equal", "both modes",
)  # fmt: skip


@dataclass(slots=True)
class Row:
    """What was found of one case; a check that was begun and not passed has failed.

    `tensors`, `ties`, `rebuilt`: how many the factory's module has, names that are one object counted once; groups of
    such names; and those that no file holds.
    """

    title: str
    model: str = "?"
    tensors: int = 0
    ties: int = 0
    rebuilt: int = 0
    weights: dict[Check, bool] = field(default_factory=dict)
    outputs: dict[Check, bool] = field(default_factory=dict)

    def begin(self, *checks: Check) -> None:
        """Count checks as failed until they have passed."""
        self.weights.update(dict.fromkeys(checks, False))
        self.outputs.update(dict.fromkeys(checks, False))

    def cells(self) -> tuple[str, ...]:
        """Return the row's texts, in the order of COLUMNS."""
        files = [[c for c in CHECKS if c[:2] == (kind, sharded)] for kind in KINDS for sharded in (False, True)]
        return (
            self.title,
            f"`{self.model}`",
            *(str(number) for number in (self.tensors, self.ties, self.rebuilt)),
            *(_word(self.weights.get(check) for check in checks) for checks in files),
            _word(self.outputs.get(check) for check in CHECKS),
            _word(held.get(check) for held in (self.weights, self.outputs) for check in CHECKS),
        )


def _word(results: Iterable[bool | None]) -> str:
    held = tuple(results)
    return "failed" if False in held else "not run" if None in held else "yes"


def table(rows: Iterable[Row]) -> str:
    """Return the rows as a table in Markdown."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *(row.cells() for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def row_names(cases: Mapping[str, Case] | None = None) -> tuple[str, ...]:
    """Return the titles of the table's rows, in order; without an argument those of the transformers library."""
    return tuple(case.family for case in (CASES if cases is None else cases).values())


def prove(factory: str, stored: Stored, mode: Mode, row: Row) -> list[str]:
    """Load stored files with our loader and say how the model differs from the library's, in its bits or its answers.

    What has passed is noted in the row.
    """
    check: Check = (stored.kind, stored.sharded, mode)
    row.begin(check)
    loaded = load(factory, stored.case, stored.directory, mode)
    if loaded.module is None:
        return ["there is no module"]
    row.model = type(loaded.module).__name__
    row.tensors, row.ties = len({id(one) for _, one in named_tensors(loaded.module)}), len(loaded.table.ties)
    row.rebuilt = len(loaded.plan.rebuilt)
    second = loaded.plan.sources.values() if stored.case.renamed else ()
    if found := differences(loaded.module, stored.theirs, second):
        return found
    row.weights[check] = True
    # torch takes another convolution where gradients could be asked for; on some processors its last bit differs.
    stored.theirs.requires_grad_(False)
    mine, wanted = (answers(module, stored.case.inputs()) for module in (loaded.module, stored.theirs))
    if mine.keys() != wanted.keys():
        return [f"the outputs are {', '.join(mine)}, not {', '.join(wanted)}"]
    found = [f"output {name} differs" for name in wanted if not torch.equal(mine[name], wanted[name])]
    row.outputs[check] = bool(wanted) and not found
    return found if wanted else ["there are no outputs"]


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
