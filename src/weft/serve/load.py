"""What `weft serve` is told to serve: a file or a module, read into models, and read again for a reload."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from ..batching.batcher import Batcher
from ..errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from .models import Model, Recipe, check_name, model

_numbers = itertools.count(1)


class Target:
    """One argument of the command line: `[NAME=]FILE.py[:OBJECT]` or `[NAME=]MODULE:OBJECT`.

    Without OBJECT all models of the file are served, or else all its batchers. `factory` says that OBJECT is a function that
    returns the function to serve.
    """

    def __init__(self, text: str, factory: bool = False, options: dict[str, Any] | None = None) -> None:
        self.name, _, rest = text.rpartition("=")
        self.place, _, self.object = rest.partition(":")
        self.factory, self.options = factory, dict(options or {})
        if self.name:
            check_name(self.name)
        if factory and not self.object:
            raise InvalidArgumentError(
                f"--factory needs the name of a function, FILE.py:NAME or MODULE:NAME, got {text!r}"
            )
        self._module: str | None = None

    def models(self) -> list[Model]:
        """Return the models; a reload of one of them reads the file or the module again."""
        found = self._read()
        for served in found:
            served.source = lambda name=served.name: self._again(name)
        return found

    def _again(self, name: str) -> Recipe:
        for served in self._read():
            if served.name == name:
                return served.recipe
        raise NotFoundError(f"{self.place} no longer has a model {name}")

    def _read(self) -> list[Model]:
        module = self._import()
        if self.object:
            value: Any = module
            for part in self.object.split("."):
                if not hasattr(value, part):
                    raise NotFoundError(f"{self.place} has no {self.object}")
                value = getattr(value, part)
            return [self._model(value)]
        values = list(vars(module).values())
        chosen: list[Any] = [value for value in values if isinstance(value, Model)]
        chosen = chosen or [value for value in values if isinstance(value, Batcher)]
        if not chosen:
            raise NotFoundError(
                f"{self.place} has no model: make one with weft.serve.model or weft.batched, or name a function"
            )
        if self.name and len(chosen) > 1:
            raise InvalidArgumentError(
                f"{self.place} has {len(chosen)} models: name one, {self.name}={self.place}:OBJECT"
            )
        return [self._model(value) for value in chosen]

    def _model(self, value: Any) -> Model:
        if isinstance(value, Model):
            name, recipe = value.given_name, value.recipe
            options = dict(self.options)
            arrays = {name: options.pop(name) for name in ("library", "device") if name in options}
            recipe = replace(recipe, options={**recipe.options, **options}, **arrays)
            return Model(self.name or name or _fallback(value.name, self.place), recipe)
        if not callable(value):
            raise InvalidArgumentError(
                f"{self.place}:{self.object} must be a model, a batcher or a function, got {value!r:.80}"
            )
        name = self.name or _fallback(getattr(getattr(value, "__wrapped__", value), "__name__", ""), self.place)
        if self.factory:
            return model(factory=value, name=name, **self.options)
        return model(value, name=name, **self.options)

    def _import(self) -> ModuleType:
        """Run the file or module in a module object of its own, so that the one before stays as it is."""
        if self.place.endswith(".py"):
            path = Path(self.place).resolve()
            if not path.is_file():
                raise NotFoundError(f"there is no file {self.place}")
            folder = str(path.parent)
            if folder not in sys.path:
                sys.path.insert(0, folder)
            spec = importlib.util.spec_from_file_location(f"_weft_served_{next(_numbers)}_{path.stem}", path)
        else:
            if "" not in sys.path:
                sys.path.insert(0, "")
            try:
                spec = importlib.util.find_spec(self.place)
            except (ImportError, ValueError) as error:
                raise NotFoundError(
                    f"there is no module {self.place!r}: {error}; the name of a file ends with .py"
                ) from None
        if spec is None or spec.loader is None:
            raise NotFoundError(f"there is no module {self.place!r}; the name of a file ends with .py")
        module = importlib.util.module_from_spec(spec)
        before = sys.modules.get(spec.name)
        sys.modules[spec.name] = module  # dataclasses look themselves up here
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            if before is None:
                sys.modules.pop(spec.name, None)
            else:
                sys.modules[spec.name] = before
            if isinstance(error, ImportError):
                raise FailedPreconditionError(f"{self.place} needs a package that is not installed: {error}") from error
            raise
        if self._module is not None and self._module != spec.name:
            sys.modules.pop(self._module, None)
        self._module = spec.name
        return module


def _fallback(name: str, place: str) -> str:
    """Return a name that fits into a path: the function's, else the file's or module's."""
    try:
        return check_name(name)
    except InvalidArgumentError:
        return Path(place).stem if place.endswith(".py") else place.rpartition(".")[2]
