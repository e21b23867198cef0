"""Modules that wait until they are used: a start of the command line imports less than half.

transformers imports at once what few models and no plain decoding use: torch's compiler, tensors
that are spread over devices, scipy. `install` makes the modules of LATE wait. A late module imports
itself as soon as anything of it is read but a name that is listed, and is then what it would have
been. Only the command line does this, before anything is imported: Python code that imports
drafthead gets all modules as they are.
"""

import hashlib
import marshal
import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any

from drafthead.core.storage.disk_cache import cache_folder, read_cached, write_cached

# Decorators that tell torch's compiler what to do with a function, and are no use without it.
DECORATORS = {"allow_in_graph", "assume_constant_result", "disable"}
# Functions of sizes that torch's compiler may not know yet, and what they return for known ones.
OF_NUMBERS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(
        (
            *("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious"),
            *("guarding_hint_or_throw", "statically_known_true"),
        ),
        lambda number: number,
    ),
    "has_guarding_hint": lambda number: True,
    "is_nested_int": lambda number: False,
    "sym_eq": lambda one, other: one == other,
    "sym_and": lambda *truths: all(truths),
    "sym_or": lambda *truths: any(truths),
}
# Late modules, with the functions and classes that others import from them without using them.
# Anything else that is read of a module imports it.
LATE = {
    "accelerate": {"PartialState", "dispatch_model", "infer_auto_device_map"},
    "accelerate.hooks": {"AlignDevicesHook", "add_hook_to_module"},
    "accelerate.utils": {
        "extract_model_from_parallel",
        "get_balanced_memory",
        "get_max_memory",
        "infer_auto_device_map",
        "reduce",
    },
    "accelerate.utils.modeling": {"clean_device_map", "get_max_layer_size"},
    "drafthead.heads.families": set(),
    "drafthead.heads.families.head_drafter": {"HeadDrafter", "drafter_for"},
    "drafthead.heads.families.late_reader": {"Unread"},
    "drafthead.heads.families.recurrent": set(),
    "drafthead.heads.families.recurrent.eagle3": {"Eagle3Head", "Eagle3Layer"},
    "drafthead.heads.formats": {"load_head", "recognised"},
    "drafthead.heads.formats.checkpoint": {"local_copy", "may_be_hub_id"},
    "drafthead.heads.formats.files": {"read_json"},
    "scipy.optimize": {"linear_sum_assignment"},
    "sympy": {"Basic"},
    "torch._dynamo": DECORATORS,
    "torch._dynamo._trace_wrapped_higher_order_op": {"TransformGetItemToIndex"},
    "torch.distributed._composable.fsdp": {"fully_shard"},
    "torch.distributed.checkpoint": set(),
    "torch.distributed.checkpoint.hf_storage": {
        "HuggingFaceStorageReader",
        "HuggingFaceStorageWriter",
    },
    "torch.distributed.fsdp": {"CPUOffloadPolicy", "MixedPrecisionPolicy"},
    "torch.distributed.tensor": {"DTensor", "Partial", "Replicate", "Shard", "distribute_tensor"},
    "torch.distributed.tensor._utils": {"compute_local_shape_and_global_offset"},
    "torch.distributed.tensor.placement_types": {"Shard", "_StridedShard"},
    "torch.fx.experimental.symbolic_shapes": {*OF_NUMBERS},
    "transformers.distributed.expert_parallel": {"apply_expert_parallelism"},
    "transformers.distributed.tensor_parallel": {
        "apply_tensor_parallelism",
        "gather_state_dict_for_save",
        "get_kv_heads_per_rank",
        "verify_tp_plan",
    },
}
SCANS = "transformers.utils.import_utils"


class LateModule(ModuleType):
    """A module of LATE, before it is imported and after that."""

    _late_lock = RLock()  # one for all, as each may import others
    _late_waits = True
    _late_names: dict[str, "LateName"]

    def _late_import(self) -> None:
        """Import the module, after those that it is part of, unless that is done or being done."""
        with self._late_lock:
            if self._late_waits:
                import_late(self.__name__.rpartition(".")[0])  # which may import this one too
            if not self._late_waits:
                return
            self._late_waits = False
            try:
                assert self.__spec__ is not None and self.__spec__.loader is not None
                self.__spec__.loader.exec_module(self)
            except BaseException:
                self._late_waits = True
                raise
            for name in self._late_names.values():
                name._late_replace()

    def __getattr__(self, name: str) -> Any:
        with self._late_lock:  # waits for another thread that imports it
            if self._late_waits:
                if name in LATE[self.__name__]:
                    kind = LateDecorator if name in DECORATORS else LateName
                    found = self._late_names.setdefault(name, kind(self, name))
                    return found._late_for(sys._getframe(1).f_globals)
                if name != "__path__":  # asked of each module that something is imported from
                    self._late_import()
        return super().__getattribute__(name)


class LateName:
    """Stands for a function or class of a late module, in the modules that have imported it.

    Where it is used the late module is imported, and what it stands for takes its place.
    """

    def __init__(self, module: LateModule, name: str):
        """For a name that the module will have."""
        self._late_module, self._late_name = module, name
        self._late_users: dict[int, dict[str, Any]] = {}  # variables of modules that have it

    def _late_for(self, variables: dict[str, Any]) -> "LateName":
        """The name, for the variables of a module that imports it."""
        self._late_users[id(variables)] = variables
        return self

    def _late_value(self) -> Any:
        self._late_module._late_import()
        return getattr(self._late_module, self._late_name)

    def _late_replace(self) -> None:
        """Put what it stands for in its place."""
        value = self._late_value()
        for variables in self._late_users.values():
            for name in [name for name, each in variables.items() if each is self]:
                variables[name] = value

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self._late_name in OF_NUMBERS and not options and all(map(is_known, args)):
            return OF_NUMBERS[self._late_name](*args)
        return self._late_value()(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._late_value(), name)

    def __instancecheck__(self, value: object) -> bool:  # nothing can be of a class to come
        return not self._late_module._late_waits and isinstance(value, self._late_value())

    def __subclasscheck__(self, kind: type) -> bool:
        return not self._late_module._late_waits and issubclass(kind, self._late_value())

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._late_value(),)

    def __or__(self, other: Any) -> Any:
        return self._late_value() | other

    def __ror__(self, other: Any) -> Any:
        return other | self._late_value()


class LateDecorator(LateName):
    """Stands for one of DECORATORS: functions are compiled only after its module is imported."""

    def __init__(self, module: LateModule, name: str):
        """For a name that the module will have."""
        super().__init__(module, name)
        self._late_noted: list[Any] = []  # functions of which it notes something

    def __call__(self, function: Any = None, *args: Any, **options: Any) -> Any:
        """The function, decorated as soon as that matters."""
        module = self._late_module
        if not module._late_waits:
            return self._late_value()(function, *args, **options)
        if function is None:
            return lambda given: self(given, *args, **options)
        if self._late_name != "disable":
            self._late_noted.append(function)
            return function
        decorated: list[Any] = []

        @wraps(function)
        def run(*given: Any, **named: Any) -> Any:
            if module._late_waits:
                return function(*given, **named)
            if not decorated:
                decorated.append(self._late_value()(function, *args, **options))
            return decorated[0](*given, **named)

        return run

    def _late_replace(self) -> None:
        """As of any name; functions are noted."""
        super()._late_replace()
        for function in self._late_noted:
            self._late_value()(function)


class LateLoader(Loader):
    """Makes late modules."""

    def __init__(self, loader: Loader):
        """For the loader of a module, which imports it later."""
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """A module that waits."""
        module = LateModule(spec.name)
        module._late_names = {}
        vars(module).update(__file__=spec.origin, __cached__=spec.cached)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module to its first use."""
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader


class DoneLoader(Loader):
    """Takes a module that was imported together with the late module that it is part of."""

    def __init__(self, module: ModuleType):
        """For a module that is imported."""
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module."""
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module as it was."""
        module.__spec__ = self.spec


class ScanLoader(Loader):
    """Imports the module with which transformers reads what all its files of models define."""

    def __init__(self, loader: Loader):
        """For the module's own loader."""
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the module's own loader."""
        return self.loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        """Import the module; what is read is kept on disk, see `kept`."""
        self.loader.exec_module(module)
        models = Path(module.__file__).parents[1] / "models"
        module.create_import_structure_from_path = kept(
            module.create_import_structure_from_path, models
        )


def kept(scan: Callable[[Any], Any], folder: Path) -> Callable[[Any], Any]:
    """A function of a folder, whose value for this one is read from the cache of the disk.

    It is computed again where any file of the folder has changed.
    """
    values: list[bytes] = []

    def scanned(path: str | Path) -> Any:
        if Path(path) not in (folder, folder / "__init__.py"):
            return scan(path)
        if not values:
            file = cache_folder("imports") / digest_of_files(folder)
            try:
                value = bytes.fromhex(read_cached(file) or "")
                marshal.loads(value)
            except (ValueError, EOFError, TypeError):
                value = marshal.dumps(scan(path))
                write_cached(file, value.hex())
            values.append(value)
        return marshal.loads(values[0])  # the caller's own

    return scanned


def digest_of_files(folder: Path) -> str:
    """A hash of Python's version and of names, sizes and times of all files within a folder."""
    digest = hashlib.sha256(sys.version.encode())
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(set(folders) - {"__pycache__"})
        for name in sorted(files):
            state = (path := Path(place) / name).stat()
            digest.update(f"{path} {state.st_size} {state.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]


class LateFinder(MetaPathFinder):
    """Finds late modules, and what they consist of."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """How a late module is made; None for what other finders find, and to import it again."""
        if target is not None:
            return None
        kind = LateLoader if name in LATE else ScanLoader if name == SCANS else None
        if kind is not None:
            others = (each.find_spec for each in sys.meta_path if each is not self)
            spec = next(filter(None, (find(name, path, target) for find in others)), None)
            if spec is not None and spec.loader is not None:
                spec.loader = kind(spec.loader)
            return spec
        import_late(name.rpartition(".")[0])
        if (done := sys.modules.get(name)) is None:
            return None
        done.__spec__ = ModuleSpec(name, DoneLoader(done))  # what Python goes on with
        return done.__spec__


def is_known(size: Any) -> bool:
    """Whether a size, or each of a tensor's, is a plain number."""
    return type(size) in (bool, int) or (isinstance(size, tuple) and all(map(is_known, size)))


def import_late(name: str) -> None:
    """Import the late module of this name, if there is one and it waits."""
    if isinstance(module := sys.modules.get(name), LateModule):
        module._late_import()


def install() -> None:
    """Make the modules of LATE wait until they are used, unless they may be in use already."""
    if not sys.modules.keys() & {"torch", "transformers"}:
        sys.meta_path.insert(0, LateFinder())
