"""Load causal language models from directories and save them.

Models are deterministic (no dropout, evaluation mode), and every weight comes from the file. Layers can be removed and
a LoRA adapter added. A model that `save_hf` saves gives the same logits when it is loaded again.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Embedding as LoraEmbedding
from peft.tuners.lora import Linear as LoraLinear
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from tutelage.config.schema import LoraSettings, ModelSettings, TextStudentSettings
from tutelage.data.notes import Report
from tutelage.models.attention import NAME, UnsupportedAttention, pack_attention
from tutelage.models.dtype import choose_dtype
from tutelage.models.sources import ModelError, resolve, whole_directory
from tutelage.models.weights import narrow

_PER_LAYER_KEYS = ("layer_types", "mlp_layer_types", "no_rope_layers")
"""Config keys with one value per decoder layer."""


class SavesItself(Protocol):
    """A tokenizer that can be saved."""

    def save_pretrained(self, directory: Path, /) -> Any: ...


def load_causal_lm(
    settings: ModelSettings,
    *,
    device: str = "cpu",
    attention: str | None = None,
    progress: Report | None = None,
    dtype: torch.dtype | None = None,
) -> PreTrainedModel:
    """Load a model in evaluation mode. `attention` is the attn_implementation of transformers; None lets transformers
    choose, because some architectures (gpt_oss) have no "sdpa".

    `dtype` overrides the one that the settings choose for this device. `progress` receives messages about the dtype,
    disabled dropout and removed layers.
    """
    report = progress or (lambda line: None)
    directory = resolve(settings.path, progress)
    if dtype is None:
        dtype, reason = choose_dtype(settings.dtype, device)
        report(f"{settings.path}: {reason}")
    config = load_config(directory)
    for note in _without_dropout(config):
        report(f"{settings.path}: {note}")
    model = _load_weights(directory, config, dtype, attention)
    if isinstance(settings, TextStudentSettings) and settings.drop_layers:
        cut_layers(model, settings.drop_layers)
        report(f"{settings.path}: cut decoder layers {', '.join(map(str, sorted(settings.drop_layers)))}")
    nn.Module.to(model, torch.device(device))
    model.eval()
    return model


def float32_weights(settings: ModelSettings, model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the weights by name, read from the model's files in float32. Empty if casting the loaded weights gives the
    same.

    They initialise the masters of a model that was loaded in a narrower dtype, so that no precision is lost.
    """
    if all(parameter.dtype == torch.float32 for parameter in model.parameters()):
        return {}
    if _stored_dtypes(resolve(settings.path)) <= {"BF16"}:
        return {}
    whole = load_causal_lm(settings, device=str(model.device), dtype=torch.float32)
    return {name: parameter.detach() for name, parameter in whole.named_parameters()}


def _stored_dtypes(directory: Path) -> set[str]:
    """Return the dtypes of the tensors in a model's safetensors files."""
    found: set[str] = set()
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            found |= {opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118  (not a dict)
    return found


def cut_layers(model: PreTrainedModel, indices: Sequence[int]) -> None:
    """Remove decoder layers (counted from 0) from the model and its config, so that the saved model matches."""
    config = model.config.get_text_config()
    depth: int = config.num_hidden_layers
    _check_indices(indices, depth)
    layers = _decoder_layers(model, depth)
    kept = [i for i in range(depth) if i not in indices]
    remaining = [layers[i] for i in kept]
    del layers[len(kept) :]
    for position, layer in enumerate(remaining):
        layers[position] = layer
        for module in layer.modules():
            if "layer_idx" in vars(module):
                vars(module)["layer_idx"] = position
    per_layer = {key: values for key, values in config.to_dict().items() if key in _PER_LAYER_KEYS and values}
    config.update({key: [values[i] for i in kept] for key, values in per_layer.items()})
    config.num_hidden_layers = len(kept)
    _check_rebuildable(model)


def apply_lora(model: PreTrainedModel, settings: LoraSettings, seed: int) -> PeftModel:
    """Add a LoRA adapter to the model in place. Its initial values depend only on `seed`.

    All other weights are frozen. The adapter is float32 regardless of the model's dtype (see `narrow_adapter`). The
    global random state is preserved.
    """
    _check_targets(model, settings.targets)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]
        target_modules=list(settings.targets) or "all-linear",
        lora_dropout=0.0,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        task_type="CAUSAL_LM",
    )
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        try:
            adapted = get_peft_model(model, config)
        except ValueError as error:
            raise ModelError(f"student.lora: {error}") from error
    if not isinstance(adapted, PeftModel):
        raise TypeError(f"peft gave a {type(adapted).__name__}")
    adapted.eval()
    return adapted


def narrow_adapter(model: PreTrainedModel) -> None:
    """Convert a LoRA adapter to the dtype of its model."""
    narrow(model, model.get_output_embeddings().weight.dtype)


def check_head_is_plain(model: PreTrainedModel, settings: LoraSettings) -> None:
    """Refuse an adapter on the output head, which engines, losses and payloads use without the rest of the model."""
    for name, module in model.named_modules():
        named = [target for target in settings.targets if name == target or name.endswith(f".{target}")]
        if named and module is model.get_output_embeddings():
            raise ModelError(
                f"student.lora.targets: {named[0]} is the output head of {type(model).__name__}, which cannot carry an "
                "adapter here: leave it out"
            )


def save_hf(
    model: PreTrainedModel | PeftModel,
    tokenizer: SavesItself,
    out: Path,
    keep_adapter: bool = False,
    base: str | None = None,
) -> None:
    """Write a Hugging Face directory, whole or not at all; the model in memory stays as it is.

    A LoRA adapter is merged into the weights, or kept apart (`keep_adapter`): then the directory holds the adapter,
    and below it `base/`, if the path the base was loaded from does not give the same model (layers were cut). The
    adapter names its base by `base`, or by the absolute path of its directory.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{out} already exists and is not an empty directory: choose another place or remove it")
    if keep_adapter and not isinstance(model, PeftModel):
        raise ModelError("there is no adapter to keep: the model was trained without student.lora")
    with _no_progress_bar(), whole_directory(out) as directory:
        if not isinstance(model, PeftModel):
            model.save_pretrained(directory)
        elif keep_adapter:
            _save_adapter(model, tokenizer, directory, out, base)
        else:
            _plain_copy(model, merged=True).save_pretrained(directory)
        tokenizer.save_pretrained(directory)


def describe(model: PreTrainedModel, directory: str) -> None:
    """Write the config.json of a model, which may have fewer layers than its files say."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)


def whole_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return all weights by the names that a saved model has, with LoRA adapters merged; tied weights by all their
    names. Unchanged tensors are shared."""
    return _plain_state(model, merged=True)


def read_config(settings: ModelSettings) -> PretrainedConfig:
    """Return the config of a model, and refuse one whose attention does not support packs."""
    directory = resolve(settings.path)
    config = load_config(directory)
    _pack_attention(directory, config)
    return config


def load_config(directory: Path) -> PretrainedConfig:
    """Load the config.json of a model that transformers implements. Code in the directory is never run."""
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{directory / 'config.json'} describes no model that transformers knows: {error}") from error
    assert isinstance(config, PretrainedConfig)
    return config


def _without_dropout(config: PretrainedConfig) -> Iterator[str]:
    """Disable randomness in the forward pass, so that engine and learner compute the same probabilities.

    `router_jitter_noise` is kept: it is not random in evaluation mode, and phimoe uses it to select experts.
    """
    text = config.get_text_config()
    for key, value in text.to_dict().items():
        random = any(word in key for word in ("dropout", "pdrop", "layerdrop"))
        if random and isinstance(value, float) and value > 0:
            text.update({key: 0.0})
            yield f"{key} set from {value} to 0"


def _load_weights(
    directory: Path, config: PretrainedConfig, dtype: torch.dtype, attention: str | None
) -> PreTrainedModel:
    options: dict[str, Any] = {"local_files_only": True, "use_safetensors": True}
    if attention == NAME:
        attention = _pack_attention(directory, config)
    options |= {"config": config, "dtype": dtype, "attn_implementation": attention, "output_loading_info": True}
    try:
        with _no_progress_bar():
            loaded: Any = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=False, **options)
    except (
        OSError,
        ValueError,
        RuntimeError,
        KeyError,
        TypeError,
        AttributeError,
        ImportError,
        SafetensorError,
    ) as error:
        raise ModelError(f"{directory} cannot be loaded as a causal language model: {error}") from error
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"the weights in {directory} lack {len(missing)} tensors that config.json asks for, e.g. {missing[0]}: "
            "they would start at random; config and weights do not belong together"
        )
    assert isinstance(model, PreTrainedModel)
    return model


def _pack_attention(directory: Path, config: PretrainedConfig) -> str:
    """Return the attn_implementation for packs, and refuse an architecture whose attention cannot be replaced."""
    known: Any = AutoModelForCausalLM._model_mapping
    if type(config) not in known:
        raise ModelError(
            f"{directory / 'config.json'}: transformers has no causal language model of model_type "
            f"{config.model_type!r}: this architecture is not supported, choose another model"
        )
    try:
        return pack_attention(known[type(config)])
    except UnsupportedAttention as error:
        raise ModelError(f"{directory / 'config.json'}: {error}") from error


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Disable the progress bar of transformers, which would break the display of the run."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _check_indices(indices: Sequence[int], depth: int) -> None:
    problems = [f"{i} is out of range" for i in indices if not 0 <= i < depth]
    problems += [f"{i} is there {indices.count(i)} times" for i in sorted(set(indices)) if indices.count(i) > 1]
    if not problems and len(indices) >= depth:
        problems.append("no layer would be left")
    if problems:
        raise ModelError(f"drop_layers: {'; '.join(problems)} (the model has decoder layers 0 to {depth - 1})")


def _decoder_layers(model: PreTrainedModel, depth: int) -> nn.ModuleList:
    lists = [
        (name, module)
        for name, module in model.base_model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == depth
    ]
    if len(lists) != 1:
        found = ", ".join(name for name, _ in lists) or "none"
        raise ModelError(
            f"drop_layers: {type(model).__name__} should have one list of {depth} decoder layers, found: {found}"
        )
    return lists[0][1]


def _check_rebuildable(model: PreTrainedModel) -> None:
    """Refuse architectures that derive the kind of a layer from its index, as a model without some layers would change
    when it is loaded again."""
    with torch.device("meta"):
        fresh = type(model)(copy.deepcopy(model.config))
    expected = {name: _settings_of(module) for name, module in fresh.named_modules()}
    for name, module in model.named_modules():
        settings = _settings_of(module)
        if settings != expected.get(name):
            changed = dict(set(settings.items()) ^ set(expected.get(name, {}).items()))
            raise ModelError(
                f"drop_layers: {type(model).__name__} cannot be rebuilt from its config without these layers "
                f"({name} differs in {', '.join(sorted(changed)) or 'existence'})"
            )


def _settings_of(module: nn.Module) -> dict[str, object]:
    """Return the plain attributes and parameter shapes that define what a module computes, without private ones."""
    values = {key: value for key, value in vars(module).items() if not key.startswith("_") and key != "training"}
    plain = {key: value for key, value in values.items() if isinstance(value, bool | int | float | str)}
    shapes = {key: tuple(tensor.shape) for key, tensor in module.named_parameters(recurse=False)}
    return {"class": type(module).__qualname__, **plain, **shapes}


def _check_targets(model: PreTrainedModel, targets: Sequence[str]) -> None:
    names = dict(model.named_modules())
    unknown = [t for t in targets if not any(name == t or name.endswith(f".{t}") for name in names)]
    if unknown:
        linear = sorted({n.rsplit(".", 1)[-1] for n, m in names.items() if isinstance(m, nn.Linear | Conv1D)})
        raise ModelError(
            f"student.lora.targets: no module is called {', '.join(unknown)}; linear layers here: {', '.join(linear)}"
        )
    tied = model.config.get_text_config().tie_word_embeddings
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    for target in targets:
        hit = [m for name, m in names.items() if name == target or name.endswith(f".{target}")]
        if tied and any(module is end for module in hit for end in ends):
            raise ModelError(
                f"student.lora.targets: {target} shares its weights with the other end of the model (tied embeddings), "
                "so an adapter on one end could not be merged: leave it out"
            )


def _plain_copy(model: PeftModel, *, merged: bool) -> PreTrainedModel:
    """Return the base model without peft's wrappers, with the adapter merged or left out. Unchanged tensors are
    shared."""
    base = model.get_base_model()
    assert isinstance(base, PreTrainedModel)
    state = _plain_state(base, merged=merged)
    with torch.device("meta"):
        plain = type(base)(copy.deepcopy(base.config))
    plain.load_state_dict(state, assign=True)
    plain.tie_weights()
    plain.generation_config = copy.deepcopy(base.generation_config)
    return plain


@torch.no_grad()
def _plain_state(base: PreTrainedModel, *, merged: bool) -> dict[str, Tensor]:
    state = {
        name.replace(".base_layer.", "."): tensor.detach()
        for name, tensor in base.state_dict().items()
        if ".lora_" not in name
    }
    if not merged:
        return state
    for name, module in base.named_modules():
        if isinstance(module, LoraLinear | LoraEmbedding):
            for adapter in module.active_adapters:
                weight = state[f"{name}.weight"]
                state[f"{name}.weight"] = (weight.float() + module.get_delta_weight(adapter).float()).to(weight.dtype)
    return state


def _save_adapter(model: PeftModel, tokenizer: SavesItself, directory: Path, out: Path, name: str | None) -> None:
    """The adapter, and its base beside it where the base's own path would give another model."""
    model.save_pretrained(str(directory), save_embedding_layers=False)
    base = model.get_base_model()
    assert isinstance(base, PreTrainedModel)
    if _comes_back(base):
        name = name or str(Path(str(base.config.name_or_path)).absolute())
    else:
        _plain_copy(model, merged=False).save_pretrained(directory / "base")
        tokenizer.save_pretrained(directory / "base")
        name = str(out.absolute() / "base")
    file = directory / "adapter_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    settings["base_model_name_or_path"] = name
    file.write_text(json.dumps(settings, indent=2, sort_keys=True), encoding="utf-8")


def _comes_back(base: PreTrainedModel) -> bool:
    """Whether the original path of the model contains a model of the same depth."""
    path = base.config.name_or_path
    if not path or not Path(path).is_dir():
        return False
    depth = load_config(Path(path)).get_text_config().num_hidden_layers
    return bool(depth == base.config.get_text_config().num_hidden_layers)
