"""Where SGLang's source lies in a folder that a person names, and safe reads below it.

Three layouts differ only in where the package stands: a checkout (``python/sglang``), an unpacked
wheel, and site-packages (``sglang``). Nothing below the root may be a link: a patch that follows
one would change a file of somebody else's.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path

from hicache_guard.core.errors import ConfigError


@dataclass(frozen=True)
class Layout:
    """``root`` holds everything that may be written; ``package`` is the ``sglang`` folder in it."""

    kind: str
    root: Path
    package: Path

    def file_of(self, module: str) -> Path:
        """The file of a dotted module. It need not exist; if it does, no link leads to it."""
        file = self.package.joinpath(*module.split(".")[1:]).with_suffix(".py")
        refuse_links(self.root, file)
        return file

    def name(self, file: Path) -> str:
        """How messages and patches call ``file``."""
        return file.relative_to(self.root).as_posix()


def find(path: Path) -> Layout:
    """The layout at ``path``: the root, its ``python`` folder, or the ``sglang`` folder itself."""
    try:
        place = path.expanduser().resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, or no such home
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot read {path}: {reason}") from None
    for package in (place / "python" / "sglang", place / "sglang", place):
        if package.name == "sglang" and (package / "srt").is_dir():
            found = _layout_of(package)
            refuse_links(found.root, package / "srt")
            return found
    raise ConfigError(
        f"{path} holds no SGLang; name a checkout, an unpacked wheel or a site-packages folder"
    )


def _layout_of(package: Path) -> Layout:
    home = package.parent
    if home.name == "python":
        return Layout("checkout", home.parent, package)
    kind = "site-packages" if home.name in ("site-packages", "dist-packages") else "wheel"
    return Layout(kind, home, package)


def refuse_links(root: Path, file: Path) -> None:
    """Raise ConfigError where ``file`` is not below ``root``, or a link lies between them."""
    try:
        steps = file.relative_to(root).parts
    except ValueError:
        raise ConfigError(f"{file} leads out of {root}; it is not touched") from None
    if ".." in steps:
        raise ConfigError(f"{file} leads out of {root}; it is not touched")
    place = root
    for step in steps:
        place /= step
        try:
            if stat.S_ISLNK(place.lstat().st_mode):
                raise ConfigError(f"{place} is a link; nothing behind a link is changed")
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise ConfigError(f"cannot read {place}: {error.strerror}") from None
