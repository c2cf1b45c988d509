"""Whether a warm process still imports what a cold start would: installed packages changed, or a script's folder
hides one.

Standard library only: runs in the user's interpreter too.
"""

import contextlib
import os
import sys
from collections.abc import Iterable

_SOURCES = (".py", ".so", ".pyc")

Signature = dict[str, int]


def watched_places() -> tuple[str, ...]:
    """What an install, upgrade or removal touches: the folders of packages, their ``.pth`` files, and our own sources.

    An installer makes, renames or removes a ``.dist-info`` folder, which changes its parent: looking into each would
    cost a millisecond of every launch. To be found once: walking ``sys.modules`` touches the memory of every module,
    which a forked process pays for with a page fault each.
    """
    folders = list(dict.fromkeys(path for path in sys.path if path))
    paths = [entry.path for folder in folders if _holds_packages(folder) for entry in _entries(folder, ".pth")]
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "overnight"]
    own = [str(file) for module in modules if (file := getattr(module, "__file__", None))]
    return (*folders, *paths, *own)


def signature(places: Iterable[str]) -> Signature:
    """Modification times (ns) of :func:`watched_places`."""
    found: Signature = {}
    for place in places:
        with contextlib.suppress(OSError):
            found[place] = os.stat(place).st_mtime_ns  # noqa: PTH116 - at each launch, dozens of entries
    return found


def _holds_packages(folder: str) -> bool:
    return os.path.basename(folder) in ("site-packages", "dist-packages")  # noqa: PTH119


def _entries(folder: str, ending: str) -> "list[os.DirEntry[str]]":
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if entry.name.endswith(ending)]
    except OSError:
        return []


def loaded_names() -> frozenset[str]:
    """Top-level names that are loaded and that a file could have provided."""
    names = {name.partition(".")[0] for name in sys.modules}
    return frozenset(names - set(sys.builtin_module_names) - {"__main__"})


def clash(folder: str, loaded: Iterable[str]) -> str | None:
    """A loaded name that a script in this folder would have got from the folder instead; None if there is none."""
    loaded = frozenset(loaded)
    try:
        with os.scandir(folder or ".") as entries:
            for entry in entries:
                name = entry.name.partition(".")[0]
                if name in loaded and _provides(entry):
                    return name
    except OSError:
        pass  # a missing folder is the script's error, said by the rank
    return None


def _provides(entry: "os.DirEntry[str]") -> bool:
    if entry.name.endswith(_SOURCES):
        return True
    # Without __init__.py a folder is a namespace package, which an installed package beats.
    return entry.is_dir() and os.path.exists(os.path.join(entry.path, "__init__.py"))  # noqa: PTH110, PTH118
