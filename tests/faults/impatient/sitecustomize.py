"""Lost standby stages are replaced at once, in every process of a server.

The product leaves the machine in peace for half a minute first, which says nothing about what is
tested here and would be waited for. Python imports a module of this name at start.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from typing import Any


class Impatient(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "app.engine_client.standby":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            assert module._LOST_AGAIN_S > 0.0
            module._LOST_AGAIN_S = 0.5

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Impatient())
