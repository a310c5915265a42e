"""An import hook that checks arrays against their jaxtyping annotations at run time.

`jaxtyping.install_import_hook` wraps every function and checks every type. This hook wraps only
functions whose annotations name arrays, and checks only their shapes and dtypes: it keeps the tests
quick and leaves all other types to mypy.
"""

import ast
import functools
import importlib.abc
import importlib.machinery
import inspect
import sys
import types
import typing

import beartype
import jax
import jaxtyping
import numpy as np

_DECORATOR = "__import__('sys').modules['shape_checks'].checked"


def install(*packages: str) -> None:
    """Checks the functions of these packages from their first import on."""
    loaded = [name for name in sys.modules if name.split(".")[0] in packages]
    assert not loaded, f"imported before their checks were installed: {loaded}"
    sys.meta_path.insert(0, _Finder(packages))


def checked(function):
    """The function, its annotated arrays checked at every call (while tracing, under jit)."""
    hints = {name: _resolve(hint, function) for name, hint in function.__annotations__.items()}
    function.__annotations__ = {
        name: _of_any_kind(hint) if _names_arrays(hint) else typing.Any
        for name, hint in hints.items()
    }
    strict = jaxtyping.jaxtyped(function, typechecker=beartype.beartype)

    @functools.wraps(function)
    def call(*args, **kwargs):
        try:
            return strict(*args, **kwargs)
        except jaxtyping.TypeCheckError:
            function(*args, **kwargs)  # which may refuse it by itself, as some tests want to see
            raise

    return call


def _of_any_kind(hint):
    """The annotation, met by NumPy's arrays where it says JAX's, and by lists and Python numbers.

    Those are converted by what they are given to; an array must have the shape and dtype.
    """
    if inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray):
        if hint.array_type is jax.Array:
            array = hint.dtype[jax.Array | np.ndarray | np.generic, hint.dim_str]
            return typing.Union[array, list, int, float]  # noqa: UP007
        return hint
    parts = tuple(_of_any_kind(part) for part in typing.get_args(hint))
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return typing.Union[parts]  # noqa: UP007
    if origin is tuple:
        return tuple[parts]
    return hint


def _resolve(hint, function):
    """What an annotation that is a string stands for; a class that is not yet made names none."""
    if not isinstance(hint, str):
        return hint
    try:
        return eval(hint, function.__globals__)
    except NameError:
        return typing.Any


def _names_arrays(hint) -> bool:
    if inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(_names_arrays(part) for part in typing.get_args(hint))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, packages):
        self._packages = packages

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in self._packages:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                if isinstance(spec.loader, importlib.machinery.SourceFileLoader):
                    spec.loader = _Loader(spec.loader.name, spec.loader.path)
                return spec
        return None


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):
        # Neither reads nor writes bytecode files, which everybody else uses.
        tree = ast.parse(self.get_data(self.path), self.path)
        arrays = _array_names(tree)
        for node in ast.walk(tree) if arrays else ():
            if isinstance(node, ast.FunctionDef) and _mentions(node, arrays):
                decorator = ast.parse(_DECORATOR, mode="eval").body
                for part in ast.walk(decorator):
                    ast.copy_location(part, node)
                node.decorator_list.append(decorator)
        return compile(tree, self.path, "exec", dont_inherit=True)


def _array_names(tree: ast.Module) -> set[str]:
    """What a module imports from jaxtyping, and its own names for such annotations."""
    names = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module == "jaxtyping"
        for alias in node.names
    }
    for node in tree.body:
        if isinstance(node, ast.Assign) and _holds(node.value, names):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def _holds(expression: ast.AST, names: set[str]) -> bool:
    return any(isinstance(x, ast.Name) and x.id in names for x in ast.walk(expression))


def _mentions(node: ast.FunctionDef, names: set[str]) -> bool:
    """Whether an annotation of the function holds one of the names."""
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every += [arguments.vararg, arguments.kwarg]
    hints = [argument.annotation for argument in every if argument] + [node.returns]
    return any(_holds(hint, names) for hint in hints if hint is not None)
