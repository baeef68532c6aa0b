"""Kernels of users: a Python function named by its place, `path/to/file.py:function` or `package.module:function`."""

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from dsv4.kernels.errors import KernelNotLoaded

FORM = "expected path/to/file.py:function or package.module:function"
OURS = "ours"  # the implementation of the backend that the model runs on
NAMES = (OURS, "reference")  # stand in a spec's place for an implementation that dsv4 has
_HELPERS: dict[str, Path] = {}  # modules that a kernel's file imported from its own folder → that folder


@dataclass(frozen=True)
class KernelSpec:
    """Where a user's kernel is, as text: `path/to/file.py:function` or `package.module:function`; or one of NAMES."""

    text: str

    @property
    def place(self) -> str:
        """The file or module."""
        return self.text.rpartition(":")[0]

    @property
    def function(self) -> str:
        return self.text.rpartition(":")[2]

    @property
    def file(self) -> Path | None:
        """The file, None where the place is a module."""
        named = self.place.endswith(".py") or "/" in self.place or os.sep in self.place
        return Path(self.place).expanduser() if named else None

    @property
    def backend(self) -> str | None:
        """Which of NAMES it is, None for a function of the user's."""
        return self.text if self.text in NAMES else None

    @property
    def shown(self) -> str:
        """The text with only the last part of a path: reports name no machine."""
        return self.text if self.file is None else f"{self.file.name}:{self.function}"

    @property
    def portable(self) -> str:
        """The text with the whole path: for a process that runs elsewhere."""
        return self.text if self.file is None else f"{self.file.resolve()}:{self.function}"


def parse_binding(text: str) -> tuple[str, KernelSpec]:
    """'sparse_attention=file.py:f' → ('sparse_attention', KernelSpec('file.py:f')). Raises KernelNotLoaded."""
    operation, equals, spec = (part.strip() for part in text.partition("="))
    if not equals or not operation.isidentifier():
        raise KernelNotLoaded(f"kernel {text!r} names no operation; expected OPERATION=SPEC, such as linear=mine.py:f")
    return operation, checked(spec)


def checked(spec: str) -> KernelSpec:
    """The spec of that text. Raises KernelNotLoaded where it is none."""
    found = KernelSpec(spec)
    if found.backend is None and not (found.place and found.function.isidentifier()):
        raise KernelNotLoaded(f"kernel {spec!r} is no place of a function; {FORM}, or one of {', '.join(NAMES)}")
    return found


def load_kernel(spec: str) -> Callable:
    """The function at `path/to/file.py:function` or `package.module:function`.

    The folder of a file can be imported from while the file is, and not afterwards. A file that was loaded before and
    has not changed is not run again. Raises KernelNotLoaded, one line: no such file or module; it does not compile, or
    raises while it is imported, with the place; it has no such function, with those that it has; that is no function
    that can be called.
    """
    wanted = checked(spec)
    if wanted.backend is not None:
        raise KernelNotLoaded(f"kernel {spec!r} is an implementation of dsv4's, not a function's place; {FORM}")
    module = _module(wanted.place) if wanted.file is None else _file(wanted.file)
    if not hasattr(module, wanted.function):
        there = sorted(name for name, value in vars(module).items() if _defines(module, name, value))
        has = f"it has {', '.join(there)}" if there else "it defines no function"
        raise KernelNotLoaded(f"kernel {spec!r}: there is no {wanted.function} in {wanted.place}; {has}")
    function = getattr(module, wanted.function)
    if not callable(function):
        raise KernelNotLoaded(
            f"kernel {spec!r}: {wanted.function} is a {type(function).__name__}; expected a function that can be called"
        )
    if _needs_a_grid(function):
        raise KernelNotLoaded(
            f"kernel {spec!r}: {wanted.function} is a triton kernel, which needs a grid; name the function that "
            "launches it"
        )
    return function


def source_sha256(function: Callable) -> str | None:
    """sha256 of the file that defines the function; None for one without a file."""
    file = getattr(sys.modules.get(getattr(function, "__module__", "")), "__file__", None)
    try:
        return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return None


def place_of(error: BaseException, file: str | None) -> str:
    """' at file.py:12': the last line of the traceback in that file (None: in any); '' if there is none."""
    lines = [f for f in traceback.extract_tb(error.__traceback__) if file is None or f.filename == file]
    return f" at {Path(lines[-1].filename).name}:{lines[-1].lineno}" if lines else ""


def _defines(module: ModuleType, name: str, value: object) -> bool:
    """Whether the module itself defines a function of that name that may be meant."""
    return callable(value) and not name.startswith("_") and getattr(value, "__module__", None) == module.__name__


def _needs_a_grid(function: Callable) -> bool:
    return any(c.__name__ == "KernelInterface" and c.__module__.startswith("triton") for c in type(function).__mro__)


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise KernelNotLoaded(f"kernel module {name!r} was not found: there is no {error.name}; {FORM}") from None
        raise KernelNotLoaded(_raised(name, error, None)) from error
    except SyntaxError as error:
        raise KernelNotLoaded(_malformed(error)) from None
    except (Exception, SystemExit) as error:
        raise KernelNotLoaded(_raised(name, error, None)) from error


def _file(file: Path) -> ModuleType:
    """The module of a file, under a name that its path and contents alone have."""
    try:
        path, source = file.resolve(), file.read_bytes()
    except OSError as error:
        raise KernelNotLoaded(f"kernel file {file} cannot be read ({error.strerror}); {FORM}") from None
    digest = hashlib.sha256(str(path).encode("utf-8", "surrogateescape") + b"\0" + source).hexdigest()
    name = f"dsv4_user_kernel_{digest[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise KernelNotLoaded(f"kernel file {file} is no Python source; expected a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: decorators and inspect.getsource look for it there
    try:
        with _importable(path.parent):  # compiled here: a cache of byte code could be that of an earlier text
            exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, SyntaxError):
            raise KernelNotLoaded(_malformed(error)) from None
        if isinstance(error, (Exception, SystemExit)):
            raise KernelNotLoaded(_raised(file.name, error, str(path))) from error
        raise
    return module


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """While it is entered, modules of `folder` can be imported; what was imported from another kernel's folder under
    the same name is forgotten first."""
    for name, home in list(_HELPERS.items()):
        if home != folder and ((folder / f"{name}.py").is_file() or (folder / name).is_dir()):
            for held in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
                del sys.modules[held]
            del _HELPERS[name]
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in {m.partition(".")[0] for m in set(sys.modules) - before}:
            at = getattr(sys.modules.get(name), "__file__", None)
            if at is not None and folder in Path(at).parents:
                _HELPERS[name] = folder


def _malformed(error: SyntaxError) -> str:
    return f"kernel file {Path(error.filename or '?').name}, line {error.lineno}: {error.msg}; correct it"


def _raised(what: str, error: BaseException, file: str | None) -> str:
    said = " ".join(str(error).split()) or "it says nothing"
    return f"importing {what} raised {type(error).__name__}: {said}{place_of(error, file)}"
