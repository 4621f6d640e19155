"""The modules of a model. transformers builds them on the meta device, without weights."""

import gc
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any

from ..compatibility.moe_model import TEXT_CONFIGS
from .tensors import Tensor

COMPILER = ("torch._dynamo", "torch._inductor")
"""Packages that transformers imports only for decorators. Their import takes 1.2 s of CPU time."""
IMAGES = "torchvision"
"""The package that transformers imports for image processors, if it is installed. Its import takes 0.3 s."""


def list_modules(config: Mapping[str, Any], changes: Mapping[str, Any]) -> tuple[list[Tensor], Mapping[str, Any]]:
    """Return the tensors of a model, and the configuration of its language model.

    The configuration contains the defaults of transformers. `config` is the content of config.json, and `changes` come
    from --json-model-override-args. Raises ValueError, with a message of one line, if transformers cannot build the
    model. Raises ModuleNotFoundError if transformers or torch is not installed.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    class Positions(TorchFunctionMode):
        """A mode that creates positions on the CPU. On the meta device `arange` imports sympy, which takes 0.4 s."""

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}) | ({"device": "cpu"} if function is torch.arange else {}))

    import transformers

    kind, keys, changes = _find_class(transformers, config, changes)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # it would warn about missing kernels, but no kernel runs here
    try:
        parsed = kind.config_class.from_dict(dict(keys))
        for name, value in changes.items():  # like SGLang's get_config (utils/hf_transformers/config.py)
            current = getattr(parsed, name, None)
            if isinstance(value, dict) and current is not None and hasattr(current, "to_dict"):
                current.update(value)
            else:
                setattr(parsed, name, value)
        _fill_head_dim(parsed.get_text_config())
        try:
            model = _build(kind, parsed, Positions())
        except RuntimeError:  # some models, such as Gemma 4, concatenate positions with meta tensors
            model = _build(kind, parsed, nullcontext())
    except ModuleNotFoundError:
        raise
    except Exception as error:  # the model's code may raise any error for an unexpected configuration
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"transformers {transformers.__version__} cannot build {kind.__name__}: {reason}") from None
    finally:
        transformers.logging.set_verbosity(verbosity)
    tensors = [Tensor(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    return tensors, parsed.get_text_config().to_dict()


def _build(kind: Any, parsed: Any, mode: AbstractContextManager[Any]) -> Any:
    """Build a model on the meta device. Its weights are not initialized, because that would import sympy."""
    import torch
    from transformers.initialization import no_init_weights

    with no_init_weights(), torch.device("meta"), mode:
        model = kind(parsed)
        model.tie_weights()
    return model


def _find_class(
    transformers: ModuleType, config: Mapping[str, Any], changes: Mapping[str, Any]
) -> tuple[Any, Mapping[str, Any], Mapping[str, Any]]:
    """Return the class of a model, the part of the configuration that describes it, and the changes to this part.

    If transformers does not have the class of the whole model, return the class of its language model. For example,
    remote code may wrap a language model that transformers has.
    """
    auto = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    nested = ((part, changes.get(name) or {}) for name in TEXT_CONFIGS if isinstance(part := config.get(name), dict))
    for keys, changed in [(config, changes), *nested]:
        known = auto.get(keys.get("model_type"))
        for name in keys.get("architectures") or [None] * (keys is not config):
            # A checkpoint may spell transformers' ExaoneMoeForCausalLM as ExaoneMoEForCausalLM.
            if isinstance(known, str) and (name is None or known.lower() == name.lower()):
                return getattr(transformers, known), keys, changed
            if name is not None and getattr(transformers, name, None) is not None:
                return getattr(transformers, name), keys, changed
    raise ValueError(
        f"transformers {transformers.__version__} does not have {(config.get('architectures') or [''])[0]}"
    )


def _fill_head_dim(text: Any) -> None:
    """Set `head_dim` if config.json has null for it, because transformers needs a number.

    HunYuan has this number in the key `attention_head_dim`.
    """
    if getattr(text, "head_dim", 0) is None:
        heads = getattr(text, "num_attention_heads", 0)
        text.head_dim = getattr(text, "attention_head_dim", None) or (text.hidden_size // heads if heads else None)


class _Placeholder(ModuleType):
    """A module that replaces a module of PyTorch's compiler. Each name in it is a decorator without effect."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _keep


def _keep(function: Any = None, *arguments: Any, **options: Any) -> Any:
    """Return the decorated function unchanged. The decorator may have options."""
    return function if callable(function) else _keep


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        is_compiler = name in COMPILER or name.startswith(tuple(f"{package}." for package in COMPILER))
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_compiler else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Placeholder(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def import_lightly() -> Iterator[None]:
    """Import transformers in 1.1 s of CPU time instead of 2.7 s.

    The import skips PyTorch's compiler, image processors and garbage collection. At the end of the context transformers
    is removed from the imported modules, so a later import loads all of it. If the process has already imported one of
    these packages, the context does nothing.
    """
    if any(name in sys.modules for name in ("transformers", *COMPILER, IMAGES)):
        yield
        return
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    sys.modules[IMAGES] = None  # type: ignore[assignment]  # importlib treats None as not installed
    gc.disable()
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        del sys.modules[IMAGES]
        for name, module in list(sys.modules.items()):
            if isinstance(module, _Placeholder) or name.partition(".")[0] == "transformers":
                del sys.modules[name]
                parent, _, child = name.rpartition(".")
                if vars(sys.modules.get(parent, module)).get(child) is module:
                    delattr(sys.modules[parent], child)
        gc.enable()
        gc.freeze()  # otherwise garbage collection takes 0.5 s when the process ends
