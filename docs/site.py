"""Gathers the pages of the site, and builds it.

    python docs/site.py              # writes the pages to build/pages and the site to site/
    python docs/site.py --pages      # the pages alone

Pages are written for a reader of the repository. Here links between files become links between pages, and a link to a
file that is no page becomes plain text. The site's Markdown needs a blank line before lists and tables, and takes
indented code after a list for text: the first is added, the second fenced.
"""

from __future__ import annotations

import os
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from generated_pages import make_pages

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "build" / "pages"
SINGLE = {  # pages from elsewhere than docs/
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "results/README.md": "results/index.md",
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
LIST = re.compile(r"\s*([-*]|\d+\.) |\|")


def list_sources() -> dict[str, str]:
    """Return the address of every page below the site's root, by its path in the repository."""
    docs = sorted((ROOT / "docs").rglob("*.md"))
    places = {str(path.relative_to(ROOT)): str(path.relative_to(ROOT / "docs")) for path in docs}
    results = {f"results/{path.name}": f"results/{path.name}" for path in sorted((ROOT / "results").glob("*.md"))}
    pictures = sorted((ROOT / "docs" / "images").glob("*"))
    shown = {str(path.relative_to(ROOT)): str(path.relative_to(ROOT / "docs")) for path in pictures}
    return results | places | shown | SINGLE


def move_links(text: str, source: str, places: dict[str, str]) -> str:
    """Return a page's text with links that lead between pages of the site.

    Args:
        text: Markdown, as it stands in the repository.
        source: path of the file in the repository.
        places: address of every page, by its path in the repository.
    """
    here = places[source]

    def move(match: re.Match[str]) -> str:
        mark, label, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        path, hash_, anchor = target.partition("#")
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if file not in places:
            return label
        return f"{mark}[{label}]({posixpath.relpath(places[file], posixpath.dirname(here) or '.')}{hash_}{anchor})"

    return "".join(part if code else LINK.sub(move, part) for code, part in split_code(text))


def split_code(text: str) -> Iterator[tuple[bool, str]]:
    """Yield the parts of a page: True with a block or a span of code, False with other text."""
    for part in re.split(r"(?ms)(^```.*?^```$|`[^`\n]+`)", text):
        yield part.startswith("`"), part


def space_lists(text: str) -> str:
    """Return the text with a blank line before lists and tables that follow a line of prose."""
    lines, fenced = [""], False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        before = lines[-1]
        if not fenced and LIST.match(line) and before.strip() and not LIST.match(before) and not before.startswith(" "):
            lines.append("")
        lines.append(line)
    return "\n".join(lines[1:]) + "\n"


def fence_code(text: str) -> str:
    """Return the text with indented blocks of code between fences."""
    lines, fenced, inside = [""], False, False
    for line in [*text.splitlines(), ""]:
        fenced ^= line.startswith("```")
        begins = not (fenced or inside or lines[-1].strip()) and line.startswith("    ")
        ends = inside and not line.startswith("    ")
        if begins or ends:
            lines.append("```")
            inside = begins
        lines.append(line[4:] if inside else line)
    return "\n".join(lines[1:])


def write_pages(folder: Path = PAGES) -> None:
    """Write all pages of the site to a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    places = list_sources()
    generated = {f"docs/{place}": (place, text) for place, text in make_pages()}
    places |= {source: place for source, (place, _) in generated.items()}
    for source, place in places.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        if not source.endswith(".md"):
            shutil.copyfile(ROOT / source, folder / place)
            continue
        text = generated[source][1] if source in generated else (ROOT / source).read_text(encoding="utf-8")
        text = move_links(text, source, places).replace("```mermaid", "```text")
        (folder / place).write_text(space_lists(fence_code(text)), encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Write the pages and build the site."""
    write_pages()
    if "--pages" in arguments:
        return 0
    tool = shutil.which("zensical", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if tool is None:
        print(
            "zensical: is not installed; install it with: pip install -c constraints.txt -e '.[site]'", file=sys.stderr
        )
        return 2
    return subprocess.run([tool, "build", "--strict", "--clean"], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
