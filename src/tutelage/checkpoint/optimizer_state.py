"""Convert the optimizer and the random generators to named tensors and JSON state for a checkpoint, and back."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from tutelage.checkpoint.store import CheckpointError


def pack_optimizer(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Parameter]]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the optimizer as named tensors, which are not copied, and JSON state."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    groups = []
    for i, (group, members) in enumerate(_named_groups(optimizer, named_parameters)):
        settings = {key: value for key, value in group.items() if key != "params"}
        groups.append({"parameters": list(members), "settings": _split(settings, f"group {i}", tensors)})
        for name, parameter in members.items():
            if parameter in optimizer.state:
                values[name] = _split(optimizer.state[parameter], name, tensors)
    return tensors, {"optimizer": type(optimizer).__name__, "groups": groups, "values": values}


def unpack_optimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Parameter]],
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
) -> None:
    """Load the settings and state of a packed optimizer into a new one of the same kind and parameters.

    Unlike `load_state_dict`, this never narrows a dtype: fp32 moments of bf16 weights stay fp32. Moments that are
    narrower than their parameter, such as the bf16 ones of checkpoints without masters, are widened.
    """
    groups = _named_groups(optimizer, named_parameters)
    _require_same_optimizer(type(optimizer).__name__, [list(members) for _, members in groups], state)
    settings = [_join(group["settings"], f"group {i}", tensors) for i, group in enumerate(state["groups"])]
    values = {name: _join(packed, name, tensors) for name, packed in state["values"].items()}
    optimizer.state.clear()
    for (group, members), saved in zip(groups, settings, strict=True):
        group.update({key: tuple(value) if isinstance(value, list) else value for key, value in saved.items()})
        step_on_device = bool(group.get("fused") or group.get("capturable"))
        for name in members.keys() & values.keys():
            optimizer.state[members[name]] = {
                key: _placed(value, members[name], on_cpu=key == "step" and not step_on_device)
                for key, value in values[name].items()
            }


def _named_groups(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Parameter]]
) -> list[tuple[dict[str, Any], dict[str, Parameter]]]:
    """Return each parameter group with its parameters by name."""
    names = {id(parameter): name for name, parameter in named_parameters}
    nameless = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
    if nameless:
        raise ValueError(f"{len(nameless)} parameters of the optimizer are not among the named ones")
    return [(group, {names[id(p)]: p for p in group["params"]}) for group in optimizer.param_groups]


def _split(values: Mapping[str, Any], prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Move tensors among `values` to `tensors`, leaving {"tensor": name} in their place."""
    split = {}
    for key, value in values.items():
        split[key] = {"tensor": f"{prefix}/{key}"} if isinstance(value, Tensor) else value
        if isinstance(value, Tensor):
            tensors[f"{prefix}/{key}"] = value
    return split


def _join(values: Mapping[str, Any], prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The reverse of `_split`."""
    missing = [
        value["tensor"] for value in values.values() if isinstance(value, dict) and value["tensor"] not in tensors
    ]
    if missing:
        raise CheckpointError(f"the checkpoint's optimizer lacks the tensors {', '.join(missing)} of {prefix}")
    return {key: tensors[value["tensor"]] if isinstance(value, dict) else value for key, value in values.items()}


def _placed(value: Any, parameter: Parameter, *, on_cpu: bool) -> Any:
    """Copy a tensor to the device that the optimizer expects, with the parameter's strides, as fused kernels need."""
    if not isinstance(value, Tensor):
        return value
    if value.shape == parameter.shape and not on_cpu:
        dtype = torch.promote_types(value.dtype, parameter.dtype) if value.is_floating_point() else value.dtype
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False).copy_(value)
    return value.to("cpu" if on_cpu else parameter.device, copy=True)


def _require_same_optimizer(kind: str, here: list[list[str]], state: Mapping[str, Any]) -> None:
    problems = []
    if kind != state["optimizer"]:
        problems.append(f"it belongs to {state['optimizer']}, the run uses {kind}: set optimizer.name back")
    there = [group["parameters"] for group in state["groups"]]
    have, want = {name for group in here for name in group}, {name for group in there for name in group}
    for names, what in (
        (want - have, "has parameters that the model lacks"),
        (have - want, "lacks parameters of the model"),
    ):
        if names:
            problems.append(f"it {what}: {', '.join(sorted(names)[:5])} ({len(names)} in all)")
    if have == want and here != there:
        problems.append("its parameters are grouped differently")
    if problems:
        raise CheckpointError("the checkpoint's optimizer does not fit:\n" + "\n".join(f"  {p}" for p in problems))


def seed_rng(seed: int) -> None:
    """Seed all global random generators with the seed of the run, which may be any integer."""
    random.seed(seed)
    np.random.seed(random.getrandbits(32))
    torch.manual_seed(random.getrandbits(63))


def pack_rng() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state of all global random generators (torch on CPU and CUDA, Python, NumPy) as tensors and JSON."""
    version, internal, gauss = random.getstate()
    legacy: dict[str, Any] = np.random.get_state(legacy=False)
    if legacy["bit_generator"] != "MT19937":
        raise ValueError(f"NumPy's global generator is {legacy['bit_generator']}, only MT19937 can be saved")
    tensors = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(internal, dtype=torch.int64),
        "numpy": torch.from_numpy(legacy["state"]["key"].astype(np.int64)),
    }
    if torch.cuda.is_available():
        tensors |= {f"cuda-{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    numpy_state = {"pos": legacy["state"]["pos"], "has_gauss": legacy["has_gauss"], "gauss": legacy["gauss"]}
    return tensors, {"python": {"version": version, "gauss": gauss}, "numpy": numpy_state}


def unpack_rng(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Restore all global random generators. States of CUDA devices that do not exist here are skipped."""
    python, numpy_state = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(tensors["python"].tolist()), python["gauss"]))
    key = tensors["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, numpy_state["pos"], numpy_state["has_gauss"], numpy_state["gauss"]))
    torch.set_rng_state(tensors["torch"].cpu())
    for i in range(torch.cuda.device_count()):
        if f"cuda-{i}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda-{i}"].cpu(), i)
